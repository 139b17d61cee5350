"""The blocks of one KV group: which are free, and how many block tables refer to each of the others."""

from __future__ import annotations


class BlockPool:
    """``num_blocks`` physical blocks, numbered from 0.

    A block is *free* (in the free list), *used* (at least one table refers to it) or *cached* (no table does,
    but the prefix cache still knows its content). The pool knows the first two; the third is what remains.
    """

    __slots__ = ("_free", "num_blocks", "references")

    def __init__(self, num_blocks: int, *, first: int = 0) -> None:
        """``first``: the block to be taken first, so that groups differ and a mix-up of theirs shows."""
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free = [(first + i) % num_blocks for i in range(num_blocks - 1, -1, -1)]

    @property
    def num_free(self) -> int:
        """Blocks in the free list."""
        return len(self._free)

    def free_blocks(self) -> list[int]:
        """A copy of the free list, for checks."""
        return list(self._free)

    def take(self) -> int:
        """A free block, now referred to once. The caller has made sure that there is one."""
        block = self._free.pop()
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table refers to ``block``."""
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One table fewer refers to ``block``. It does not become free by that: see :meth:`reclaim`."""
        self.references[block] -= 1

    def reclaim(self, block: int) -> None:
        """Put a block that neither a table nor the prefix cache refers to back into the free list."""
        self._free.append(block)
