"""KVCache: which physical block holds which tokens of which sequence, in every KV group."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Int32
from headrace.engine.kv_group import KVGroup
from headrace.engine.prefix_cache import NO_BLOCK, CachedBlock, PrefixCache, block_key, root_key
from headrace.engine.sequence import Sequence
from headrace.errors import HeadraceError

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
    ) -> None:
        """``windows`` and ``group_blocks``: of each group, both or neither; at least one has no window."""
        self.num_blocks = num_blocks
        self.max_sequences = max_sequences
        self.prefix_cache = PrefixCache()
        self.prefix_caching = prefix_caching
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
        self._num_held = [0] * max_sequences  # logical blocks of each row
        self._cached: list[list[CachedBlock]] = [[] for _ in range(max_sequences)]  # leading ones of each row
        self._sequences: dict[int, Sequence] = {}

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
        del found[self._num_complete(found) :]
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
        row, start = seq.row, len(prefix) * BLOCK_SIZE
        unused = sum(block.users == 0 for block in prefix)
        room = [self.num_free - unused]
        for group in self._windowed:
            idle = sum(block in group.idle for block in prefix[group.first_seen(start) :])
            room.append(group.num_free - idle)
        if own + headroom > min(room):
            return False
        for group in self._windowed:
            group.skip(row, group.first_seen(start))
        for index, block in enumerate(prefix):
            self._attach(row, index, block)
        self._cached[row] = list(prefix)
        self._num_held[row] = len(prefix)
        self._sequences[row] = seq
        self._take(row, own)
        seq.num_computed_tokens = start
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
        full = seq.num_computed_tokens // BLOCK_SIZE
        if self.prefix_caching and full > len(self._cached[seq.row]):
            self._publish(seq, full)
        for group in self._windowed:
            self._pass_by(group, seq)

    def _publish(self, seq: Sequence, full: int) -> None:
        row, cached = seq.row, self._cached[seq.row]
        cache, salt = self.prefix_cache, seq.request.cache_salt
        keys = self._keys(seq, full)
        for index in range(len(cached), full):
            key, tokens = keys[index], _block_tokens(seq, index)
            parent = cached[-1] if cached else None
            cache.withdraw(key, row)
            block = cache.find(key, parent, tokens, salt)
            if block is not None:
                self._replace(row, index, block)
            elif cache.holds(key):
                return  # another content has this hash: this chain ends here, uncached
            else:
                held = [
                    int(group.table[row, index]) if index >= group.first[row] else NO_BLOCK
                    for group in self.groups
                ]
                block = CachedBlock(key, parent, tokens, salt, held)
                cache.insert(block)
            cached.append(block)

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence: its own become free, cached ones stay findable until evicted."""
        row = seq.row
        cached = self._cached[row]
        held = self._num_held[row]
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

    def _num_complete(self, found: list[CachedBlock]) -> int:
        """How many of a chain's blocks a sequence can start behind: every group has what it will see."""
        count = len(found)
        while missing := [
            index
            for group in self._windowed
            for index in range(group.first_seen(count * BLOCK_SIZE), count)
            if found[index].blocks[group.index] == NO_BLOCK
        ]:
            count = min(missing)  # whoever starts behind it, up to here, would see it as well
        return count

    def _take(self, row: int, count: int) -> None:
        held = self._num_held[row]
        for index in range(held, held + count):
            for group in self.groups:
                if group.pool.num_free == 0:
                    if group.window is None:
                        self._evict()
                    else:
                        group.drop_idle()
                group.table[row, index] = group.pool.take()
        self._num_held[row] = held + count

    def _evict(self) -> None:
        block = self.prefix_cache.evict()
        for group in self.groups:
            group.forget(block)

    def _attach(self, row: int, index: int, block: CachedBlock) -> None:
        """A sequence starts with a cached block, of which each group takes what it will see."""
        self.prefix_cache.use(block)
        for group in self.groups:
            if index >= group.first[row]:
                group.share(row, index, block)

    def _replace(self, row: int, index: int, block: CachedBlock) -> None:
        """A sequence takes a cached block for its own of equal content; what that lacks it gets from it."""
        self.prefix_cache.use(block)
        for group in self.groups:
            if index < group.first[row]:
                continue
            if block.blocks[group.index] == NO_BLOCK:
                block.blocks[group.index] = int(group.table[row, index])
            else:
                group.give_back(row, index)
                group.share(row, index, block)

    def _pass_by(self, group: KVGroup, seq: Sequence) -> None:
        """Give back what the group's window shows to no query of ``seq`` any more."""
        row, cached = seq.row, self._cached[seq.row]
        seen = group.first_seen(seq.num_computed_tokens)
        for index in range(group.first[row], seen):
            if index < len(cached):
                group.leave(cached[index])
            else:
                group.give_back(row, index)
            group.table[row, index] = group.empty
        group.first[row] = max(seen, group.first[row])

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
        held = np.array(self._num_held, np.int32)
        _prove(
            set(np.flatnonzero(held).tolist()) <= set(self._sequences),
            "a row without a sequence holds blocks",
        )
        for group in self.groups:
            self._check_group(group, held, blocks)

    def _check_group(self, group: KVGroup, held: Int32, blocks: list[CachedBlock]) -> None:
        where, pool, table = f"KV group {group.index}: ", group.pool, group.table
        index, first = np.arange(table.shape[1]), np.array(group.first)[:, None]
        own = index < held[:, None]
        _prove(not table[~own].any(), where + "a table has stale blocks")
        _prove(bool((table[index < first] == group.empty).all()), where + "a block outlived its window")
        for row, seq in self._sequences.items():
            start = group.first[row]
            _prove(
                start == group.first_seen(seq.num_computed_tokens), where + f"row {row} keeps a wrong window"
            )
            prefix = [block.blocks[group.index] for block in self._cached[row]]
            _prove(
                table[row, start : len(prefix)].tolist() == prefix[start:],
                where + f"row {row} strayed from its prefix",
            )
        references = np.bincount(table[own & (index >= first)], minlength=pool.num_blocks)
        _prove(references.tolist() == pool.references, where + "reference counts differ from the tables'")
        free, used = pool.free_blocks(), set(np.flatnonzero(references).tolist())
        here = [block for block in blocks if block.blocks[group.index] != NO_BLOCK]
        known = [block.blocks[group.index] for block in here]
        cached = set(known) - used
        idle = {block for block in here if block.blocks[group.index] in cached}
        _prove(group.window is None or set(group.idle) == idle, where + "idle blocks are not those unused")
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
