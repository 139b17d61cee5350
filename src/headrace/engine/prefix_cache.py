"""Which computed blocks can be found again, by content: a chain of hashes over full blocks.

A block's key is a hash of its parent's key and its own tokens; the first block's parent is the request's
``cache_salt``. Keys depend on nothing but content, so they mean the same in another process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

KEY_BYTES = 32  # no two texts are ever found that have one key, also not by whoever tries
NO_BLOCK = -1  # of a group whose window has passed it and that needed the room


def root_key(salt: str) -> bytes:
    """The parent key of a first block: texts under different salts never share blocks."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block that holds ``tokens`` (int32, as bytes) and follows the block ``parent``."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


class CachedBlock:
    """One full, computed block of content; ``blocks`` says where each KV group has it."""

    __slots__ = ("blocks", "key", "parent", "salt", "tokens", "users")

    def __init__(
        self, key: bytes, parent: CachedBlock | None, tokens: bytes, salt: str, blocks: list[int]
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.blocks = blocks  # physical block in each group, or NO_BLOCK
        self.users = 1  # sequences whose tables hold it


class PrefixCache:
    """Cached blocks by key, the unused ones in order of eviction, and the keys now being computed.

    Eviction takes the least recently used block, leaves first. One queue gives both: whoever uses a block
    also uses its parents, and sequences drop their blocks last to first, so a child always stands before its
    parent in the queue.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, CachedBlock] = {}
        self._unused: OrderedDict[CachedBlock, None] = OrderedDict()
        self._computing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_unused(self) -> int:
        """Cached blocks without a user: they can be evicted."""
        return len(self._unused)

    def all_blocks(self) -> list[CachedBlock]:
        """Every cached block, for checks."""
        return list(self._by_key.values())

    def unused_blocks(self) -> list[CachedBlock]:
        """Cached blocks without a user, next to be evicted first."""
        return list(self._unused)

    def holds(self, key: bytes) -> bool:
        """Whether some content is cached under ``key``; :meth:`find` says whether it is the right one."""
        return key in self._by_key

    def find(self, key: bytes, parent: CachedBlock | None, tokens: bytes, salt: str) -> CachedBlock | None:
        """The block with this very content, compared by parent, tokens and salt and not by hash alone."""
        found = self._by_key.get(key)
        if found is None or found.parent is not parent or found.tokens != tokens or found.salt != salt:
            return None
        return found

    def insert(self, block: CachedBlock) -> None:
        """Make a computed block findable. Its key is free, its parent cached and used by its sequence."""
        self._by_key[block.key] = block

    def use(self, block: CachedBlock) -> None:
        """One more sequence holds ``block``."""
        if block.users == 0:
            del self._unused[block]
        block.users += 1

    def drop(self, block: CachedBlock) -> None:
        """One sequence fewer holds ``block``. Drop a sequence's blocks last to first."""
        block.users -= 1
        if block.users == 0:
            self._unused[block] = None

    def evict(self) -> CachedBlock:
        """Forget the least recently used leaf and return it. The caller has made sure that there is one."""
        block, _ = self._unused.popitem(last=False)
        del self._by_key[block.key]
        return block

    # Who computes what: so that equal cold prompts are computed once.

    def announce(self, key: bytes, row: int) -> None:
        """The sequence in ``row`` is going to compute this block, unless another said so before."""
        self._computing.setdefault(key, row)

    def withdraw(self, key: bytes, row: int) -> None:
        """The sequence in ``row`` has computed the block, or never will."""
        if self._computing.get(key) == row:
            del self._computing[key]

    def is_computing(self, key: bytes) -> bool:
        """Whether a running sequence is going to compute this block."""
        return key in self._computing

    def announced_rows(self) -> set[int]:
        """Rows with open announcements, for checks."""
        return set(self._computing.values())
