"""KVCache: which physical block holds which tokens of which sequence, in every KV group."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Int32
from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_cache import CachedBlock, PrefixCache, block_key, root_key
from headrace.engine.sequence import Sequence
from headrace.errors import HeadraceError

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // BLOCK_SIZE)


class KVCache:
    """Block tables of the running sequences, and what can be shared between them.

    A running sequence has a row. Its table in each group lists its physical blocks in order; the leading ones
    may be cached blocks that it shares, all behind them are its own. Every group has a pool of its own with
    the same number of blocks. What a block looks like inside is the backend's affair.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_groups: int,
        max_sequences: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_sequences = max_sequences
        self.pools = tuple(BlockPool(num_blocks, first=group) for group in range(num_groups))
        self.prefix_cache = PrefixCache()
        self.prefix_caching = prefix_caching
        shape = (max_sequences, blocks_for(max_model_len))
        self._tables = tuple(np.zeros(shape, np.int32) for _ in range(num_groups))
        self._num_held = [0] * max_sequences  # logical blocks of each row
        self._cached: list[list[CachedBlock]] = [[] for _ in range(max_sequences)]  # leading ones of each row
        self._sequences: dict[int, Sequence] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be taken at once: free, or cached without a user."""
        return min(pool.num_free for pool in self.pools) + self.prefix_cache.num_unused

    # Admission, growth and release of a sequence

    def find_prefix(self, seq: Sequence) -> list[CachedBlock] | None:
        """Cached blocks that ``seq`` can start from, or None when it should wait for another's computation.

        At least its last token stays to be computed: that is where its next token is sampled. Blocks are
        whole, so of a full hit the last block is computed again, into a block of its own.
        """
        if not self.prefix_caching or seq.lacks_prompt_logprobs:  # those come of computing the whole prompt
            return []
        cache = self.prefix_cache
        if seq.waits_for is not None and cache.is_computing(seq.waits_for):
            return None
        seq.waits_for = None
        usable = (seq.num_tokens - 1) // BLOCK_SIZE
        keys = self._keys(seq, usable)
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index in range(usable):
            parent = cache.find(keys[index], parent, _block_tokens(seq, index), seq.request.cache_salt)
            if parent is None:
                break
            found.append(parent)
        for index in range(len(found), usable):
            if not cache.is_computing(keys[index]):
                break
            seq.waits_for = keys[index]
        return None if seq.waits_for is not None else found

    def num_findable(self, seq: Sequence, seen: set[bytes]) -> int:
        """Tokens at the beginning of ``seq`` that are cached, being computed, or in blocks of ``seen``.

        Its blocks are added to ``seen``.
        """
        if not self.prefix_caching or seq.lacks_prompt_logprobs:
            return 0
        cache = self.prefix_cache
        usable = (seq.num_tokens - 1) // BLOCK_SIZE
        keys = self._keys(seq, usable)
        count = 0
        while count < usable and (
            keys[count] in seen or cache.holds(keys[count]) or cache.is_computing(keys[count])
        ):
            count += 1
        seen.update(keys[count:usable])
        return count * BLOCK_SIZE

    def num_lost(self, seq: Sequence) -> int:
        """Computed tokens that were lost if ``seq`` were preempted and all its blocks taken.

        Blocks that other sequences use as well stay.
        """
        shared = sum(block.users > 1 for block in self._cached[seq.row])
        return max(0, seq.num_computed_tokens - shared * BLOCK_SIZE)

    def admit(self, seq: Sequence, prefix: list[CachedBlock], *, headroom: int = 0) -> bool:
        """Give ``seq`` (whose row is set) blocks for all of its tokens, the first of them from ``prefix``.

        False, and nothing changed, unless ``headroom`` blocks would stay available.
        """
        own = blocks_for(seq.num_tokens) - len(prefix)
        unused = sum(block.users == 0 for block in prefix)
        if own + headroom > self.num_available - unused:
            return False
        row = seq.row
        for index, block in enumerate(prefix):
            self._attach(row, index, block)
        self._cached[row] = list(prefix)
        self._num_held[row] = len(prefix)
        self._sequences[row] = seq
        self._take(row, own)
        seq.num_computed_tokens = len(prefix) * BLOCK_SIZE
        if self.prefix_caching:
            keys = self._keys(seq, seq.num_tokens // BLOCK_SIZE)
            for key in keys[len(prefix) :]:
                self.prefix_cache.announce(key, row)
        return True

    def lacks_blocks(self, seq: Sequence) -> bool:
        """Whether the tables do not cover all of the sequence's tokens yet."""
        return blocks_for(seq.num_tokens) > self._num_held[seq.row]

    def grow(self, seq: Sequence) -> bool:
        """Make the tables cover all of the sequence's tokens. False, and nothing changed, without blocks."""
        missing = blocks_for(seq.num_tokens) - self._num_held[seq.row]
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        self._take(seq.row, missing)
        return True

    def commit(self, seq: Sequence) -> None:
        """Make the sequence's computed full blocks findable.

        Where the same content is cached already (two sequences computed it at the same time), the sequence
        takes the cached block and gives its own back.
        """
        row = seq.row
        cached = self._cached[row]
        full = seq.num_computed_tokens // BLOCK_SIZE
        if not self.prefix_caching or full <= len(cached):
            return
        cache, salt = self.prefix_cache, seq.request.cache_salt
        keys = self._keys(seq, full)
        for index in range(len(cached), full):
            key, tokens = keys[index], _block_tokens(seq, index)
            parent = cached[-1] if cached else None
            cache.withdraw(key, row)
            block = cache.find(key, parent, tokens, salt)
            if block is not None:
                self._give_back(row, index)
                self._attach(row, index, block)
            elif cache.holds(key):
                return  # another content has this hash: this chain ends here, uncached
            else:
                held = tuple(int(table[row, index]) for table in self._tables)
                block = CachedBlock(key, parent, tokens, salt, held)
                cache.insert(block)
            cached.append(block)

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence: its own become free, cached ones stay findable until evicted."""
        row = seq.row
        cached = self._cached[row]
        for index in range(self._num_held[row] - 1, len(cached) - 1, -1):
            self._give_back(row, index)
        for block in reversed(cached):
            for pool, physical in zip(self.pools, block.blocks, strict=True):
                pool.release(physical)
            self.prefix_cache.drop(block)
        for key in seq.block_keys[len(cached) :]:
            self.prefix_cache.withdraw(key, row)
        for table in self._tables:
            table[row, : self._num_held[row]] = 0
        self._num_held[row] = 0
        self._cached[row] = []
        del self._sequences[row]

    # What a Batch needs

    def slot_mapping(self, rows: NDArray[np.intp], positions: Int32) -> tuple[Int32, ...]:
        """Per group, the slot of each token, given its sequence's row and its position, both ``[n]``."""
        logical, offset = positions >> _BLOCK_BITS, positions & (BLOCK_SIZE - 1)
        return tuple((table[rows, logical] << _BLOCK_BITS) + offset for table in self._tables)

    def block_tables(self, rows: NDArray[np.intp]) -> tuple[Int32, ...]:
        """Per group, a copy of the tables of ``rows``: ``[r, widest]``, 0 beyond a sequence's own blocks."""
        widest = max(self._num_held[row] for row in rows.tolist())
        return tuple(table[rows, :widest] for table in self._tables)

    # Inside

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        keys = seq.block_keys
        if len(keys) < count:
            parent = keys[-1] if keys else root_key(seq.request.cache_salt)
            for index in range(len(keys), count):
                parent = block_key(parent, _block_tokens(seq, index))
                keys.append(parent)
        return keys

    def _take(self, row: int, count: int) -> None:
        held = self._num_held[row]
        for index in range(held, held + count):
            for pool, table in zip(self.pools, self._tables, strict=True):
                if pool.num_free == 0:
                    self._evict()
                table[row, index] = pool.take()
        self._num_held[row] = held + count

    def _evict(self) -> None:
        block = self.prefix_cache.evict()
        for pool, physical in zip(self.pools, block.blocks, strict=True):
            pool.reclaim(physical)

    def _attach(self, row: int, index: int, block: CachedBlock) -> None:
        self.prefix_cache.use(block)
        for pool, table, physical in zip(self.pools, self._tables, block.blocks, strict=True):
            pool.share(physical)
            table[row, index] = physical

    def _give_back(self, row: int, index: int) -> None:
        for pool, table in zip(self.pools, self._tables, strict=True):
            physical = int(table[row, index])
            pool.release(physical)
            if pool.references[physical] == 0:
                pool.reclaim(physical)

    # Proof

    def check(self) -> None:
        """Prove that nothing leaked: raises HeadraceError naming the first inconsistency.

        In every group ``free + cached + used == total``, each block's references are the tables' own, and
        what can be evicted, announced or found is exactly what should be.
        """
        cache = self.prefix_cache
        blocks = cache.all_blocks()
        unused = cache.unused_blocks()
        _prove(
            set(unused) == {b for b in blocks if b.users == 0}, "the eviction queue is not the unused blocks"
        )
        users = Counter(block for row in self._sequences for block in self._cached[row])
        _prove(all(b.users == users[b] for b in blocks), "a cached block's users are not its sequences")
        _prove(set(users) <= set(blocks), "a sequence uses a block that the cache has forgotten")
        place = {block: index for index, block in enumerate(unused)}
        for block in blocks:
            parent = block.parent
            _prove(parent is None or cache.holds(parent.key), "a cached block has lost its parent")
            if parent in place:
                _prove(block in place and place[block] < place[parent], "a parent would go before its child")
        _prove(cache.announced_rows() <= set(self._sequences), "a block is announced by nobody")
        held = np.array(self._num_held)
        _prove(
            set(np.flatnonzero(held).tolist()) <= set(self._sequences),
            "a row without a sequence holds blocks",
        )
        for group, (pool, table) in enumerate(zip(self.pools, self._tables, strict=True)):
            where = f"KV group {group}: "
            own = np.arange(table.shape[1]) < held[:, None]
            _prove(not table[~own].any(), where + "a table has stale blocks")
            for row in self._sequences:
                prefix = [block.blocks[group] for block in self._cached[row]]
                _prove(
                    table[row, : len(prefix)].tolist() == prefix, where + f"row {row} strayed from its prefix"
                )
            references = np.bincount(table[own], minlength=pool.num_blocks)
            _prove(references.tolist() == pool.references, where + "reference counts differ from the tables'")
            free, used = pool.free_blocks(), set(np.flatnonzero(references).tolist())
            known = [block.blocks[group] for block in blocks]
            cached = set(known) - used
            _prove(len(set(free)) == len(free), where + "a block is free twice")
            _prove(len(set(known)) == len(known), where + "a block is cached twice")
            _prove(not set(free) & (used | cached), where + "a block is free and in use")
            _prove(
                len(free) + len(cached) + len(used) == pool.num_blocks,
                where + f"{len(free)} free + {len(cached)} cached + {len(used)} used != {pool.num_blocks}",
            )


def _block_tokens(seq: Sequence, index: int) -> bytes:
    return seq.tokens(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE).tobytes()


def _prove(holds: bool, what: str) -> None:
    if not holds:
        raise HeadraceError(f"The KV cache is inconsistent: {what}.")
