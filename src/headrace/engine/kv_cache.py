"""KVCache: which physical block holds which tokens of which sequence, in every KV group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Int32
from headrace.engine.kv_check import check_kv_cache
from headrace.engine.kv_group import KVGroup, num_complete
from headrace.engine.kv_tier import KVTier
from headrace.engine.kv_tier_loads import TierLoads
from headrace.engine.prefix_cache import NO_BLOCK, CachedBlock, PrefixCache, block_key, root_key
from headrace.engine.sequence import Sequence

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // BLOCK_SIZE)


class KVCache:
    """Block tables of the running sequences, and what can be shared between them.

    A running sequence has a row. Its table in each group lists its physical blocks in order; the leading ones
    may be cached blocks that it shares, all behind them are its own. What a block looks like inside is the
    backend's affair.

    Groups without a window hold whole sequences, and their pools have ``num_blocks`` each. Where
    ``group_blocks`` are given, groups with a window keep only what it still shows (:class:`KVGroup`); a
    prefix is found as far as they have the end of it.

    With a second tier (:class:`KVTier`), what must give way goes there, and a sequence that enters gets from
    there what follows its prefix: it has its blocks at once, and is to compute nothing until they are filled.
    Without prefix caching that holds for sequences that were preempted only.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_groups: int,
        max_sequences: int,
        max_model_len: int,
        prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (),
        group_blocks: tuple[int, ...] = (),
        tier: KVTier | None = None,
    ) -> None:
        """``windows`` and ``group_blocks``: of each group, both or neither; at least one has no window."""
        self.num_blocks = num_blocks
        self.max_sequences = max_sequences
        self.prefix_cache = PrefixCache()
        self.prefix_caching = prefix_caching
        self.tier = tier
        shape = (max_sequences, blocks_for(max_model_len))
        if not group_blocks:
            windows, group_blocks = (None,) * num_groups, (num_blocks,) * num_groups
        self.groups = tuple(
            KVGroup(index, blocks, shape, window)
            for index, (blocks, window) in enumerate(zip(group_blocks, windows, strict=True))
        )
        self._windowed = tuple(group for group in self.groups if group.window is not None)
        self._whole = tuple(group for group in self.groups if group.window is None)
        self.pools = tuple(group.pool for group in self.groups)
        self._tables = tuple(group.table for group in self.groups)
        self.num_rewrites = 0  # how often tables have changed, other than by growing at their end
        self._cached: list[list[CachedBlock]] = [[] for _ in range(max_sequences)]  # leading ones of each row
        self._sequences: dict[int, Sequence] = {}
        self._loads = None if tier is None else TierLoads(tier, self.groups)

    @property
    def num_free(self) -> int:
        """Blocks of the groups without a window that are free, or cached without a user."""
        return self._whole[0].pool.num_free + self.prefix_cache.num_unused

    @property
    def num_available(self) -> int:
        """Blocks that can be taken at once in every group."""
        return min([self.num_free, *(group.num_free for group in self._windowed)])

    @property
    def usage(self) -> float:
        """Share, from 0 to 1, of blocks that are in use, in the group where it is highest."""
        shares = [group.num_free / group.pool.num_blocks for group in self._windowed]
        return 1.0 - min([self.num_free / self.num_blocks, *shares])

    # Admission, growth and release of a sequence

    def find_prefix(self, seq: Sequence) -> list[CachedBlock] | None:
        """Cached blocks that ``seq`` can start from, or None when it should wait for another's computation.

        At least its last token stays to be computed: that is where its next token is sampled. Blocks are
        whole, so of a full hit the last block is computed again, into a block of its own.
        """
        if not self._may_find(seq):
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
            parent = cache.find(keys[index], parent, seq.block_tokens(index), seq.request.cache_salt)
            if parent is None:
                break
            found.append(parent)

        def lacks(index: int, group: int) -> bool:
            return found[index].blocks[group] == NO_BLOCK

        del found[num_complete(self._windowed, len(found), lacks) :]
        for index in range(len(found), usable):
            if not cache.is_computing(keys[index]):
                break
            seq.waits_for = keys[index]
        return None if seq.waits_for is not None else found

    def num_findable(self, seq: Sequence, seen: set[bytes]) -> int:
        """Tokens at the beginning of ``seq`` that are cached, being computed, or in blocks of ``seen``.

        Its blocks are added to ``seen``.
        """
        if not self._may_find(seq):
            return 0
        cache, tier = self.prefix_cache, self.tier
        usable = (seq.num_tokens - 1) // BLOCK_SIZE
        keys = self._keys(seq, usable)
        count = 0
        while count < usable and (
            keys[count] in seen
            or cache.holds(keys[count])
            or cache.is_computing(keys[count])
            or (tier is not None and tier.holds(keys[count]))
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

        False, and nothing changed, unless ``headroom`` blocks would stay available. Of the rest, what the
        second tier has begins to be read: ``num_loading`` tokens, until :meth:`take_in` has put them there.
        """
        row, start, count = seq.row, len(prefix), blocks_for(seq.num_tokens)
        coming = []
        if self._loads is not None and self._may_find(seq):
            usable = (seq.num_tokens - 1) // BLOCK_SIZE
            coming = self._loads.find(seq, self._keys(seq, usable)[:usable], start)
        ready = (start + len(coming)) * BLOCK_SIZE
        unused = sum(block.users == 0 for block in prefix)
        if count - start + headroom > self.num_free - unused:
            return False
        for group in self._windowed:
            first = group.first_seen(ready)
            idle = sum(block in group.idle for block in prefix[first:])
            if count - max(start, first) + headroom > group.num_free - idle:
                return False
        seq.num_loading = seq.num_loaded = 0
        if self._loads is not None and coming:  # before others take its place there
            self._loads.begin(seq, start, coming)
        for group in self._windowed:
            group.skip(row, group.first_seen(ready))
        for index, block in enumerate(prefix):
            self._attach(row, index, block)
        self._cached[row] = list(prefix)
        seq.num_slots = start * BLOCK_SIZE
        seq.commit_at = 0
        self.num_rewrites += 1
        self._sequences[row] = seq
        self._take(seq, count - start)
        seq.num_computed_tokens = start * BLOCK_SIZE
        if self.prefix_caching:
            keys = self._keys(seq, seq.num_tokens // BLOCK_SIZE)
            for key in keys[start:]:
                self.prefix_cache.announce(key, row)
        if coming:
            self._take_in(seq)
        return True

    def take_in(self) -> list[Sequence]:
        """Put what the second tier has read into blocks; returns the sequences for which nothing more comes.

        One that still has ``num_loading`` then was promised what could not be read: release it.
        """
        if self.tier is None or self._loads is None:
            return []
        self.tier.poll()
        return [seq for seq, _, _ in list(self._loads.by_row.values()) if self._take_in(seq)]

    def grow(self, seq: Sequence) -> bool:
        """Make the tables cover all of the sequence's tokens. False, and nothing changed, without blocks."""
        missing = blocks_for(seq.num_tokens - seq.num_slots)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        self._take(seq, missing)
        return True

    def commit(self, seq: Sequence) -> None:
        """Make the sequence's computed full blocks findable.

        Where the same content is cached already (two sequences computed it at the same time), the sequence
        takes the cached block and gives its own back.
        """
        full = seq.num_computed_tokens // BLOCK_SIZE
        if (self.prefix_caching or self.tier is not None) and full > len(self._cached[seq.row]):
            self._publish(seq, full)
        seq.commit_at = (full + 1) * BLOCK_SIZE
        for group in self._windowed:
            self._pass_by(group, seq)
            seq.commit_at = min(seq.commit_at, group.passes_at(seq.row))

    def _publish(self, seq: Sequence, full: int) -> None:
        row, cached = seq.row, self._cached[seq.row]
        cache, salt = self.prefix_cache, seq.request.cache_salt
        keys = self._keys(seq, full)
        for index in range(len(cached), full):
            key, tokens = keys[index], seq.block_tokens(index)
            parent = cached[-1] if cached else None
            cache.withdraw(key, row)
            block = cache.find(key, parent, tokens, salt)
            if block is not None:
                self._replace(row, index, block)
            elif cache.holds(key):
                return  # another content has this hash: this chain ends here, uncached
            else:
                held = [
                    group.cells[row, index] if index >= group.first[row] else NO_BLOCK
                    for group in self.groups
                ]
                block = CachedBlock(key, parent, tokens, salt, held)
                cache.insert(block)
            cached.append(block)

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence: its own become free, cached ones stay findable until evicted."""
        row = seq.row
        cached = self._cached[row]
        held = seq.num_slots // BLOCK_SIZE
        if self._loads is not None and row in self._loads.by_row:
            self._loads.end(row)
        seq.num_loading = 0
        for group in self.groups:
            for index in range(held - 1, max(len(cached), group.first[row]) - 1, -1):
                group.give_back(row, index)
            for block in reversed(cached[group.first[row] :]):
                group.leave(block)
            group.clear(row, held)
        for block in reversed(cached):
            self.prefix_cache.drop(block)
        for key in seq.block_keys[len(cached) :]:
            self.prefix_cache.withdraw(key, row)
        seq.num_slots = 0
        self.num_rewrites += 1
        self._cached[row] = []
        del self._sequences[row]

    def save(self) -> None:
        """Put all that is cached into the second tier as well, if that is kept for the next process."""
        if self.tier is None or not self.tier.is_kept or not self.prefix_caching:
            return
        cache = self.prefix_cache
        used = [block for block in cache.all_blocks() if block.users > 0]
        blocks = [*cache.unused_blocks(), *reversed(used)]  # children before their parents, as they would go
        for block in blocks[-self.tier.num_blocks :]:
            self.tier.spill(block, patient=True)

    # What a Batch needs

    def slot_mapping(self, rows: NDArray[np.intp], positions: Int32) -> tuple[Int32, ...]:
        """Per group, the slot of each token, given its sequence's row and its position, both ``[n]``."""
        logical, offset = positions >> _BLOCK_BITS, positions & (BLOCK_SIZE - 1)
        return tuple((table[rows, logical] << _BLOCK_BITS) + offset for table in self._tables)

    def block_tables(self, rows: NDArray[np.intp], width: int) -> tuple[Int32, ...]:
        """Per group, a copy of the tables of ``rows``: ``[r, width]``, 0 beyond a sequence's own blocks.

        They are narrower than ``width`` where the longest context there can be has fewer blocks.
        """
        return tuple(table[rows, :width] for table in self._tables)

    # Inside

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        keys = seq.block_keys
        if len(keys) < count:
            parent = keys[-1] if keys else root_key(seq.request.cache_salt)
            for index in range(len(keys), count):
                parent = block_key(parent, seq.block_tokens(index))
                keys.append(parent)
        return keys

    def _may_find(self, seq: Sequence) -> bool:
        """Whether it can start from what others, or itself before it was preempted, have computed."""
        if seq.lacks_prompt_logprobs:  # those come of computing the whole prompt
            return False
        return self.prefix_caching or (self.tier is not None and not seq.is_new)

    def _take_in(self, seq: Sequence) -> bool:
        """Whether nothing more comes from the second tier for ``seq``."""
        assert self._loads is not None
        while self._loads.fill(seq.row):
            self.commit(seq)
        if not self._loads.is_over(seq.row):
            return False
        self._loads.end(seq.row)
        return True

    def _take(self, seq: Sequence, count: int) -> None:
        row, held = seq.row, seq.num_slots // BLOCK_SIZE
        for index in range(held, held + count):
            for group in self.groups:
                if index < group.first[row]:
                    continue
                if group.pool.num_free == 0:
                    if group.window is None:
                        self._evict()
                    else:
                        self._drop_idle(group)
                group.cells[row, index] = group.pool.take()
        seq.num_slots = (held + count) * BLOCK_SIZE

    def _evict(self) -> None:
        block = self.prefix_cache.evict()
        if self.tier is not None:
            self.tier.spill(block)
        for group in self.groups:
            group.forget(block)

    def _drop_idle(self, group: KVGroup) -> None:
        if self.tier is not None:
            self.tier.spill(next(iter(group.idle)))
        group.drop_idle()

    def _attach(self, row: int, index: int, block: CachedBlock) -> None:
        """A sequence starts with a cached block, of which each group takes what it will see."""
        self.prefix_cache.use(block)
        for group in self.groups:
            if index >= group.first[row]:
                group.share(row, index, block)

    def _replace(self, row: int, index: int, block: CachedBlock) -> None:
        """A sequence takes a cached block for its own of equal content; what that lacks it gets from it."""
        self.prefix_cache.use(block)
        self.num_rewrites += 1
        for group in self.groups:
            if index < group.first[row]:
                continue
            if block.blocks[group.index] == NO_BLOCK:
                block.blocks[group.index] = group.cells[row, index]
            else:
                group.give_back(row, index)
                group.share(row, index, block)

    def _pass_by(self, group: KVGroup, seq: Sequence) -> None:
        """Give back what the group's window shows to no query of ``seq`` any more."""
        row, cached = seq.row, self._cached[seq.row]
        seen = group.first_seen(seq.num_computed_tokens)
        if seen <= group.first[row]:
            return
        self.num_rewrites += 1
        for index in range(group.first[row], seen):
            if index < len(cached):
                group.leave(cached[index])
            else:
                group.give_back(row, index)
            group.cells[row, index] = group.empty
        group.first[row] = seen

    def check(self) -> None:
        """Prove that nothing leaked: raises HeadraceError naming the first inconsistency.

        In every group ``free + cached + used == total``, each block's references are the tables' own, and
        what can be evicted, announced or found is exactly what should be; the second tier's slots likewise.
        """
        check_kv_cache(self)
