"""TierLoads: which sequence gets what from the second tier, and the blocks of the first that it goes to."""

from __future__ import annotations

from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.kv_group import KVGroup, num_complete
from headrace.engine.kv_tier import KVTier, Loading
from headrace.engine.kv_tier_store import TierBlock
from headrace.engine.prefix_cache import root_key
from headrace.engine.sequence import Sequence


class TierLoads:
    """Blocks on their way from ``tier`` into the rows of ``groups``.

    Coming back is another way of being computed: a row has its blocks already, and its sequence's
    ``num_computed_tokens`` grow as they are filled, in order; ``num_loading`` is what is still to come.
    """

    def __init__(self, tier: KVTier, groups: tuple[KVGroup, ...]) -> None:
        self._tier = tier
        self._groups = groups
        self.by_row: dict[int, tuple[Sequence, int, Loading]] = {}  # with the index of the first block

    def find(self, seq: Sequence, keys: list[bytes], start: int) -> list[TierBlock]:
        """What of ``seq`` behind its first ``start`` blocks is to come; ``keys``: of all blocks of use to it.

        Behind the last of them it can go on: every group has what it will see. Nothing, where computing is
        estimated to be sooner done.
        """
        root = root_key(seq.request.cache_salt)
        found: list[TierBlock] = []
        for index in range(start, len(keys)):
            parent = keys[index - 1] if index else root
            block = self._tier.find(keys[index], parent, root, seq.block_tokens(index))
            if block is None or any(
                group.window is None and group.index not in block.groups for group in self._groups
            ):
                break
            found.append(block)

        def lacks(index: int, group: int) -> bool:
            return index >= start and group not in found[index - start].groups

        del found[num_complete(self._groups, start + len(found), lacks) - start :]
        return found if found and self._tier.coming_back_pays(len(found)) else []

    def begin(self, seq: Sequence, start: int, blocks: list[TierBlock]) -> None:
        """Have ``blocks`` read for ``seq``, which has ``start`` before them and a row."""
        ready = (start + len(blocks)) * BLOCK_SIZE
        seen = [(group.index, group.first_seen(ready)) for group in self._groups]
        wanted = [
            frozenset(group for group, first in seen if index >= first)
            for index in range(start, start + len(blocks))
        ]
        self.by_row[seq.row] = seq, start, self._tier.load(blocks, wanted)
        seq.num_loading = len(blocks) * BLOCK_SIZE

    def fill(self, row: int) -> bool:
        """Fill those of a row's blocks that have been read. False: none, for now or for good."""
        seq, start, loading = self.by_row[row]

        def physical(index: int) -> list[int]:
            return [group.cells[row, start + index] for group in self._groups]

        tokens = self._tier.restore(loading, physical) * BLOCK_SIZE
        self._tier.poll()
        seq.num_computed_tokens += tokens
        seq.num_loading -= tokens
        seq.num_loaded += tokens
        return tokens > 0

    def is_over(self, row: int) -> bool:
        """Whether nothing more comes for a row: all is there, or the next block cannot be read."""
        return self.by_row[row][2].is_over

    def end(self, row: int) -> None:
        """Nothing more is to come."""
        _, _, loading = self.by_row.pop(row)
        self._tier.end(loading)
