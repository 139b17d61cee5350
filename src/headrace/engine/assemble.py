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
    counts = np.array([seq.num_scheduled for seq in scheduled], np.int32)
    starts = np.array([seq.num_computed_tokens for seq in scheduled], np.int32)
    wanted = np.array([seq.num_logit_rows for seq in scheduled], np.int32)
    query_start = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    num_tokens = int(query_start[-1])
    positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
    token_ids = np.concatenate(
        [
            seq.tokens(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled)
            for seq in scheduled
        ]
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=starts + counts,
        slot_mapping=kv_cache.slot_mapping(np.repeat(rows, counts), positions),
        block_tables=kv_cache.block_tables(rows),
        logit_rows=_last_of_each(query_start[1:], wanted),
        sampling=sampling.table(
            [
                (seq, end + 1 - back)
                for seq, end in zip(scheduled, (starts + counts - 1).tolist(), strict=True)
                for back in range(seq.num_logit_rows - 1, -1, -1)
            ]
        ),
    )


def _last_of_each(ends: Int32, counts: Int32) -> Int32:
    """The last ``counts[i]`` indices before ``ends[i]``, one after the other."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    return np.repeat(ends - counts - before, counts) + np.arange(counts.sum(), dtype=np.int32)
