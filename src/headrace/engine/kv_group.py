"""KVGroup: the blocks and block tables of one KV group, whose layers may see a window only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from headrace.backend.batch import BLOCK_SIZE, Int32
from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_cache import NO_BLOCK, CachedBlock


class KVGroup:
    """One table row for each running sequence: its physical blocks in order, 0 behind them.

    With a ``window`` the leading blocks that no query will see any more are given back, and the row has the
    empty block in their place: the last one of the memory, which is never written, so that whoever reads
    beyond the window reads zeros. Cached blocks that no table refers to here are *idle*: they stay findable
    until their room is needed, oldest first.
    """

    def __init__(self, index: int, num_blocks: int, shape: tuple[int, int], window: int | None) -> None:
        """``num_blocks``: that the backend has, the empty one included. ``shape``: rows, blocks of each."""
        self.window = window
        self.index = index
        self.empty = num_blocks - 1 if window is not None else 0
        usable = num_blocks - 1 if window is not None else num_blocks
        self.pool = BlockPool(usable, first=index)
        self.table: Int32 = np.zeros(shape, np.int32)
        self.cells = self.table.data  # the same, entry by entry
        self.first = [0] * shape[0]  # blocks of each row that have been given back
        self.idle: OrderedDict[CachedBlock, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that are free, or cached and idle; of a group with a window."""
        return self.pool.num_free + len(self.idle)

    def first_seen(self, position: int) -> int:
        """The first block that a query at ``position``, and so any later one, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // BLOCK_SIZE

    def passes_at(self, row: int) -> int:
        """The position from which on no query of a row's sequence sees the first block that it has here."""
        assert self.window is not None
        return (self.first[row] + 1) * BLOCK_SIZE + self.window - 1

    def skip(self, row: int, count: int) -> None:
        """A sequence begins behind its first ``count`` blocks, which it has never held here."""
        self.table[row, :count] = self.empty
        self.first[row] = count

    def share(self, row: int, index: int, block: CachedBlock) -> None:
        """A row refers to a cached block that is here."""
        physical = block.blocks[self.index]
        if self.pool.references[physical] == 0:
            self.idle.pop(block, None)
        self.pool.share(physical)
        self.cells[row, index] = physical

    def leave(self, block: CachedBlock) -> None:
        """One row fewer refers to a cached block that is here."""
        physical = block.blocks[self.index]
        self.pool.release(physical)
        if self.window is not None and self.pool.references[physical] == 0:
            self.idle[block] = None

    def give_back(self, row: int, index: int) -> None:
        """A row loses a block of its own."""
        physical = self.cells[row, index]
        self.pool.release(physical)
        if self.pool.references[physical] == 0:
            self.pool.reclaim(physical)

    def drop_idle(self) -> None:
        """Make the oldest idle block's room free. The caller has made sure that there is one."""
        block, _ = self.idle.popitem(last=False)
        self.pool.reclaim(block.blocks[self.index])
        block.blocks[self.index] = NO_BLOCK

    def forget(self, block: CachedBlock) -> None:
        """The prefix cache has forgotten ``block``, which no table refers to: its room here is free."""
        if block.blocks[self.index] != NO_BLOCK:
            self.idle.pop(block, None)
            self.pool.reclaim(block.blocks[self.index])

    def clear(self, row: int, held: int) -> None:
        """The row's sequence is gone."""
        self.table[row, :held] = 0
        self.first[row] = 0


def num_complete(groups: Iterable[KVGroup], count: int, lacks: Callable[[int, int], bool]) -> int:
    """How many of a chain's ``count`` blocks a sequence can start behind: every group has what it will see.

    ``lacks``: whether a block, by its index, is missing in a group, by its index. Groups without a window
    lack nothing.
    """
    windowed = [group for group in groups if group.window is not None]
    while missing := [
        index
        for group in windowed
        for index in range(group.first_seen(count * BLOCK_SIZE), count)
        if lacks(index, group.index)
    ]:
        count = min(missing)  # whoever starts behind it, up to here, would see it as well
    return count
