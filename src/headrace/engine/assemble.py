"""From the sequences of a step to the Batch that a runner takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.backend.batch import BLOCK_SIZE, Batch, Int32
from headrace.engine.kv_cache import KVCache, blocks_for
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Sequence

_SPARE_BLOCKS = 4  # columns of block tables that are there before a sequence needs them


class Assembler:
    """Makes the Batch of each step.

    Most steps are like the one before: the same sequences, each a token further. Then the same Batch goes out
    again with other numbers in it. They are written one by one, because a call of numpy takes as long as
    writing dozens: a step's weights have pushed the code of both out of the caches.
    """

    def __init__(self, kv_cache: KVCache, sampling: SamplingRows) -> None:
        self._kv = kv_cache
        self._sampling = sampling
        self._last: _Decodes | None = None  # the last batch, if it can be the next

    def batch(self, scheduled: list[Sequence]) -> Batch:
        """The work of one step; each sequence says how many of its tokens and logit rows are in it.

        Its arrays hold until the next call.
        """
        one_each = {(seq.num_scheduled, seq.num_logit_rows) for seq in scheduled} == {(1, 1)}
        last = self._last
        if one_each and last is not None and last.sequences == scheduled and last.advance():
            return last.batch
        spare = _SPARE_BLOCKS if one_each else 0
        width = blocks_for(max([seq.num_slots for seq in scheduled])) + spare
        batch = _assemble(scheduled, one_each, self._kv, width, self._sampling)
        self._last = _Decodes(scheduled, batch, self._kv, self._sampling) if one_each else None
        return batch


class _Decodes:
    """A Batch that has one token of each sequence."""

    def __init__(
        self, sequences: list[Sequence], batch: Batch, kv_cache: KVCache, sampling: SamplingRows
    ) -> None:
        self.sequences = sequences
        self.batch = batch
        self._kv = kv_cache
        self._num_rewrites = kv_cache.num_rewrites
        self._sampling = None if all(seq.is_plain for seq in sequences) else sampling
        self._tokens = batch.token_ids.data
        self._positions = batch.positions.data
        self._ends = batch.context_len.data
        self._groups = [
            (slots.data, table.data, group.cells)
            for slots, table, group in zip(
                batch.slot_mapping, batch.block_tables, kv_cache.groups, strict=True
            )
        ]
        self._width = batch.block_tables[0].shape[1]
        if self._sampling is None:  # nothing changes but the position, which is where the context ends
            batch.sampling = replace(batch.sampling, position=batch.context_len.view(np.uint32))

    def advance(self) -> bool:
        """Write down what each sequence lacks now, one token. False: a new batch has to be made."""
        if self._num_rewrites != self._kv.num_rewrites:
            return False
        tokens, positions, ends, groups = self._tokens, self._positions, self._ends, self._groups
        for at, seq in enumerate(self.sequences):
            position = seq.num_computed_tokens
            index, offset = divmod(position, BLOCK_SIZE)
            if offset == 0 and index >= self._width:
                return False
            tokens[at] = seq.ids[position]
            positions[at] = position
            ends[at] = position + 1
            for slots, table, cells in groups:
                block = cells[seq.row, index]
                slots[at] = block * BLOCK_SIZE + offset
                if offset == 0:
                    table[at, index] = block
        if self._sampling is not None:
            self.batch.sampling = self._sampling.table(
                [(seq, seq.num_computed_tokens + 1) for seq in self.sequences]
            )
        return True


def _assemble(
    scheduled: list[Sequence], one_each: bool, kv_cache: KVCache, width: int, sampling: SamplingRows
) -> Batch:
    """``one_each``: of each sequence one token and one logit row. ``width``: of the block tables."""
    rows = np.array([seq.row for seq in scheduled], np.intp)
    starts = np.array([seq.num_computed_tokens for seq in scheduled], np.int32)
    if one_each:
        query_start = np.arange(len(scheduled) + 1, dtype=np.int32)
        ends = starts + 1
        positions, owners, logit_rows = starts, rows, query_start[:-1]
        sampled = list(zip(scheduled, ends.tolist(), strict=True))
    else:
        counts = np.array([seq.num_scheduled for seq in scheduled], np.int32)
        query_start = np.zeros(len(scheduled) + 1, np.int32)
        counts.cumsum(out=query_start[1:])
        ends = starts + counts
        num_tokens = int(query_start[-1])
        positions = (starts - query_start[:-1]).repeat(counts)
        positions += np.arange(num_tokens, dtype=np.int32)
        owners = rows.repeat(counts)
        logit_rows = _logit_rows(scheduled, query_start)
        sampled = [
            (seq, end - back)
            for seq, end in zip(scheduled, ends.tolist(), strict=True)
            for back in range(seq.num_logit_rows - 1, -1, -1)
        ]
    return Batch(
        token_ids=np.concatenate(
            [
                seq.tokens(seq.num_computed_tokens, end)
                for seq, end in zip(scheduled, ends.tolist(), strict=True)
            ]
        ),
        positions=positions,
        query_start=query_start,
        context_len=ends,
        slot_mapping=kv_cache.slot_mapping(owners, positions),
        block_tables=kv_cache.block_tables(rows, width),
        logit_rows=logit_rows,
        sampling=sampling.table(sampled),
    )


def _logit_rows(scheduled: list[Sequence], query_start: Int32) -> Int32:
    """The last ``num_logit_rows`` tokens of each sequence, one after the other."""
    wanted = np.array([seq.num_logit_rows for seq in scheduled], np.int32)
    before = wanted.cumsum(dtype=np.int32)
    rows = np.arange(before[-1], dtype=np.int32)
    before -= wanted
    rows += (query_start[1:] - wanted - before).repeat(wanted)
    return rows
