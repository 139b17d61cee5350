"""KVTier: blocks that the KV cache gives up, kept where there is more room, and how they come back."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace.backend.runner import Runner
from headrace.engine.kv_tier_cost import TierCost
from headrace.engine.kv_tier_store import Inline, Parts, TierBlock, TierStore, Worker
from headrace.engine.prefix_cache import NO_BLOCK, CachedBlock, root_key
from headrace.engine.step_cost import StepCost
from headrace.errors import HeadraceError

_log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 2**20  # on the way in, and as many on the way out: more than a disk takes in a step
_PATIENCE_S = 0.1  # between two looks at whether the store is done


@dataclass(slots=True)
class TierCounts:
    """Since the start; blocks, but for the bytes."""

    hits: int = 0  # came back
    spills: int = 0  # were written
    failures: int = 0  # could not be read, or were damaged
    read_bytes: int = 0
    written_bytes: int = 0


class Loading:
    """Blocks on their way back, for one sequence, in its order."""

    __slots__ = ("_parts", "blocks", "failed_at", "num_taken", "wanted")

    def __init__(self, blocks: list[TierBlock], wanted: list[frozenset[int]]) -> None:
        self.blocks = blocks
        self.wanted = wanted  # groups of each
        self.num_taken = 0
        self.failed_at = len(blocks)  # the first that will not come
        self._parts: dict[int, Parts] = {}  # that are read and not taken yet

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.num_taken == self.failed_at

    @property
    def num_left(self) -> int:
        """Blocks that have not been taken yet."""
        return len(self.blocks) - self.num_taken

    @property
    def num_read(self) -> int:
        """Blocks that have been read and not taken yet."""
        return len(self._parts)

    def put(self, index: int, parts: Parts | None) -> None:
        """What was read of a block; None: nothing that could be used."""
        if parts is None:
            self.failed_at = min(self.failed_at, index)
        else:
            self._parts[index] = parts

    def take(self) -> Parts | None:
        """The next block, if it is there."""
        parts = None if self.is_over else self._parts.pop(self.num_taken, None)
        self.num_taken += parts is not None
        return parts


class KVTier:
    """The second tier: blocks by key in slots of a store, the least recently used one giving way.

    A block is copied out of the first tier on the engine's thread, between steps, and what a store takes
    time for is its worker's affair: a block that is being written is there already, and one that comes back
    is waited for by its own sequence only. Where more is given up than the store takes, the rest is lost,
    as it is without a tier. What takes longer to bring back than to compute is neither kept nor brought back.
    """

    def __init__(
        self,
        runner: Runner,
        store: TierStore,
        worker: Worker | None = None,
        *,
        cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``worker``: who calls the store; None: each caller itself. ``cost``: of the engine's own steps."""
        self.step_cost = cost or StepCost()
        self.counts = TierCounts()
        self._runner = runner
        self._store = store
        self._worker = worker or Inline()
        self._clock = clock
        self._cost = TierCost(self.step_cost)
        self._blocks: OrderedDict[bytes, TierBlock] = OrderedDict()  # least recently used first
        self._most = max(1, _MOST_BYTES // store.slot_bytes)
        self._writing: set[TierBlock] = set()
        self._loadings: set[Loading] = set()
        self._to_read: deque[tuple[Loading, int]] = deque()
        self._num_coming = 0  # blocks that are being read, or have been and are not taken
        self._forgotten: set[TierBlock] = set()  # that have not given up their slots yet
        self._done: deque[Callable[[], None]] = deque()  # by the worker; append and popleft are atomic
        self._is_writable = True
        for block in store.blocks():
            self._blocks[block.key] = block
        taken = {block.slot for block in self._blocks.values()}
        self._num_touched = max(taken, default=-1) + 1  # slots behind these have never had a block
        self._free = [slot for slot in range(self._num_touched) if slot not in taken]

    @property
    def num_blocks(self) -> int:
        """Blocks that there is room for."""
        return self._store.num_slots

    @property
    def num_used(self) -> int:
        """Blocks that are there."""
        return len(self._blocks)

    @property
    def is_kept(self) -> bool:
        """Whether the next process finds what is here."""
        return self._store.is_kept

    def holds(self, key: bytes) -> bool:
        """Whether some content is here under ``key``; :meth:`find` says whether it is the right one."""
        return key in self._blocks

    def find(self, key: bytes, parent: bytes, root: bytes, tokens: bytes) -> TierBlock | None:
        """The block with this very content, compared by all that is known of it and not by ``key`` alone."""
        found = self._blocks.get(key)
        if found is None or (found.parent, found.root, found.tokens) != (parent, root, tokens):
            return None
        return found

    # Out of the first tier

    def spill(self, cached: CachedBlock, *, patient: bool = False) -> None:
        """Keep a block that the first tier is about to give up, or a part of it; no step is under way.

        ``patient``: whatever it costs, and however long the store has to be waited for.
        """
        groups = frozenset(group for group, block in enumerate(cached.blocks) if block != NO_BLOCK)
        root = root_key(cached.salt)
        parent = root if cached.parent is None else cached.parent.key
        known = self._blocks.get(cached.key)
        if known is not None:
            if self.find(cached.key, parent, root, cached.tokens) is None:
                return  # another content has this hash
            if known.pins or groups <= known.groups:
                self._blocks.move_to_end(cached.key)
                return
        while patient and len(self._writing) >= self._most:
            self._worker.wait(_PATIENCE_S)
            self.poll()
        if not self._is_writable or len(self._writing) >= self._most:
            return
        if not patient and not self._cost.keeping_pays():
            return
        if known is not None:
            self._forget(known)
        slot = self._take_slot()
        if slot is None:
            return
        start = self._clock()
        parts = {group: self._runner.read_blocks(group, [cached.blocks[group]])[0] for group in groups}
        self._cost.out.note(self._clock() - start)
        block = TierBlock(cached.key, parent, root, cached.tokens, groups, slot)
        block.parts = parts
        block.pins = 1
        self._blocks[block.key] = block
        self._writing.add(block)
        self._worker.submit(partial(self._write, block, parts), urgent=False)
        self.poll()

    # Back into the first tier

    def coming_back_pays(self, count: int) -> bool:
        """Whether ``count`` blocks are sooner read than computed, all that are to be read before included."""
        return self._cost.loading_pays(count, len(self._to_read) + self._num_coming)

    def load(self, blocks: list[TierBlock], wanted: list[frozenset[int]]) -> Loading:
        """Begin to read blocks, of each the ``wanted`` groups. End it with :meth:`end`."""
        loading = Loading(blocks, wanted)
        self._loadings.add(loading)
        for block in reversed(blocks):  # so that a parent is younger than its children
            block.pins += 1
            self._blocks.move_to_end(block.key)
        self._to_read.extend((loading, index) for index in range(len(blocks)))
        self.poll()
        return loading

    def restore(self, loading: Loading, physical: Callable[[int], list[int]]) -> int:
        """Put what has been read into the first tier; returns how many blocks that were.

        ``physical``: by a block's place in ``loading``, the block of each group. No step is under way.
        """
        first = loading.num_taken
        while True:
            index = loading.num_taken
            parts = loading.take()
            if parts is None:
                break
            start = self._clock()
            blocks = physical(index)
            for group, part in parts.items():
                self._runner.write_blocks(group, [blocks[group]], part[None])
            self._cost.back.note(self._clock() - start)
            self._unpin(loading.blocks[index])
            self._num_coming -= 1
            self.counts.hits += 1
            self.counts.read_bytes += sum(part.nbytes for part in parts.values())
        return loading.num_taken - first

    def end(self, loading: Loading) -> None:
        """Nothing more is wanted of it."""
        self._loadings.remove(loading)
        self._num_coming -= loading.num_read
        for block in loading.blocks[loading.num_taken :]:
            self._unpin(block)

    def poll(self) -> None:
        """Take in what the worker has done, and give it more to do."""
        while self._done:
            self._done.popleft()()
        while self._to_read and self._num_coming < self._most:
            loading, index = self._to_read.popleft()
            if loading not in self._loadings or index >= loading.failed_at:
                continue
            block, groups = loading.blocks[index], loading.wanted[index]
            if block in self._forgotten:  # it was lost meanwhile
                loading.put(index, None)
                continue
            self._num_coming += 1
            if block.parts is not None:
                loading.put(index, {group: block.parts[group] for group in groups})
                continue
            self._worker.submit(partial(self._read, loading, index), urgent=True)
            while self._done:
                self._done.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Until something may have been read, or so long; not at all while nothing is being read."""
        if self._num_coming and not self._done:
            self._worker.wait(timeout_s)

    def close(self) -> None:
        """Write what is still to be written. Closing twice is fine."""
        self._worker.close()
        self.poll()
        self._store.close()

    # On the worker's thread

    def _write(self, block: TierBlock, parts: Parts) -> None:
        error: Exception | None = None
        try:
            self._store.write(block, parts)
        except Exception as caught:  # whatever it is, the engine must hear of the end of it
            error = caught
        self._done.append(partial(self._settle_write, block, error))

    def _read(self, loading: Loading, index: int) -> None:
        start = self._clock()
        try:
            parts, why = self._store.read(loading.blocks[index], loading.wanted[index]), "it is damaged"
        except Exception as error:
            parts, why = None, str(error)
        self._done.append(partial(self._settle_read, loading, index, parts, why, self._clock() - start))

    # What the worker has done, on the engine's thread again

    def _settle_write(self, block: TierBlock, error: Exception | None) -> None:
        self._writing.remove(block)
        if error is None:
            assert block.parts is not None
            self.counts.spills += 1
            self.counts.written_bytes += sum(part.nbytes for part in block.parts.values())
        else:
            self._forget(block)
            if self._is_writable:
                _log.warning("Nothing is written to the second tier of KV blocks any more: %s", error)
            self._is_writable = False
        block.parts = None
        self._unpin(block)

    def _settle_read(
        self, loading: Loading, index: int, parts: Parts | None, why: str, seconds: float
    ) -> None:
        if parts is None:
            if self.counts.failures == 0:
                _log.warning("A block of the second tier cannot be read, and is computed again: %s", why)
            self.counts.failures += 1
            self._forget(loading.blocks[index])
        else:
            self._cost.read.note(seconds)
        if loading not in self._loadings:
            self._num_coming -= 1
            return
        loading.put(index, parts)
        self._num_coming -= parts is None

    # Slots

    def _take_slot(self) -> int | None:
        if not self._free and self._num_touched < self.num_blocks:
            self._num_touched += 1
            return self._num_touched - 1
        if not self._free:
            oldest = next((block for block in self._blocks.values() if not block.pins), None)
            if oldest is None:
                return None
            self._forget(oldest)
        return self._free.pop()

    def _forget(self, block: TierBlock) -> None:
        """Nobody finds it any more. Whoever is reading it may go on."""
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            if block.pins:
                self._forgotten.add(block)
            else:
                self._free.append(block.slot)

    def _unpin(self, block: TierBlock) -> None:
        block.pins -= 1
        if block.pins == 0 and block in self._forgotten:
            self._forgotten.remove(block)
            self._free.append(block.slot)

    # Proof

    def check(self) -> None:
        """Prove that nothing leaked: raises HeadraceError naming the first inconsistency."""
        blocks = [*self._blocks.values(), *self._forgotten]
        slots = [block.slot for block in blocks]
        pins = Counter(block for loading in self._loadings for block in loading.blocks[loading.num_taken :])
        pins.update(self._writing)
        reading = sum(loading.num_left for loading in self._loadings)
        for holds, what in (
            (
                sorted(slots + self._free) == list(range(self._num_touched)),
                "free + used slots are not all that were touched",
            ),
            (self._num_touched <= self.num_blocks, "there are more slots than there is room for"),
            (all(block.key == key for key, block in self._blocks.items()), "a block is under another's key"),
            (
                all(block.pins == pins[block] for block in blocks),
                "a block's pins are not its reads and writes",
            ),
            (pins.keys() <= set(blocks), "a slot was given up while it is read or written"),
            (
                all((block.parts is not None) == (block in self._writing) for block in blocks),
                "bytes are kept",
            ),
            (self._num_coming >= 0 and len(self._writing) <= self._most, "there is too much under way"),
            (reading or not any(loading.num_read for loading in self._loadings), "read for nobody"),
        ):
            if not holds:
                raise HeadraceError(f"The second tier of KV blocks is inconsistent: {what}.")
