"""From the sequences of a step to the Batch that a runner takes."""

from __future__ import annotations

import numpy as np

from headrace.backend.batch import Batch, Int32
from headrace.engine.kv_cache import KVCache
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Sequence


def assemble(scheduled: list[Sequence], kv_cache: KVCache, sampling: SamplingRows) -> Batch:
    """The work of one step; each sequence says how many of its tokens and logit rows are in it."""
    rows = np.array([seq.row for seq in scheduled], np.intp)
    starts = np.array([seq.num_computed_tokens for seq in scheduled], np.int32)
    # One token each: the step that every answer consists of.
    one_each = all(seq.num_scheduled == 1 and seq.num_logit_rows == 1 for seq in scheduled)
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
        block_tables=kv_cache.block_tables(rows),
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
