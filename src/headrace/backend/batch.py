"""The typed hand-off between engine and backend: :class:`Batch` goes down, :class:`StepResult` comes back.

An encoder takes every sequence whole: all its tokens, from position 0, in one step, and one logit row.

A Batch is immutable while it is in flight; the next step may be the same Batch with other numbers in it. All
arrays are C-contiguous numpy arrays.
``n`` tokens, ``r`` sequences, ``m`` logit rows, ``g`` KV groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 16
"""Tokens per KV block, everywhere."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class SamplingTable:
    """How each of the ``m`` logit rows is sampled. Filled by the engine from the sequences' parameters.

    Order of application: ``bias`` added, penalties, ``mask``, then temperature, min-p, top-k, top-p.
    Logprobs are of the raw distribution, before all of them.
    """

    temperature: Float32  # [m]; 0 = greedy (lowest id wins ties)
    top_k: Int32  # [m]; 0 = off; equal logits: lower ids first
    top_p: Float32  # [m]; 1 = off
    min_p: Float32  # [m]; 0 = off
    presence_penalty: Float32  # [m]; 0 = off; over output tokens
    frequency_penalty: Float32  # [m]; 0 = off; over output tokens
    repetition_penalty: Float32  # [m]; 1 = off; over prompt and output tokens
    seed: NDArray[np.uint64]  # [m]; Philox key
    choice: NDArray[np.uint32]  # [m]; Philox counter word 0: index among the request's n
    position: NDArray[np.uint32]  # [m]; Philox counter word 1: absolute position of the sampled token
    num_logprobs: Int32  # [m]; -1 = none, 0 = the sampled token's only, k = the top k's as well
    seen_start: Int32  # [m + 1]; row i's seen tokens are seen_ids[seen_start[i]:seen_start[i + 1]]
    seen_ids: Int32  # distinct ids within a row, any order; empty for rows without penalties
    seen_counts: Int32  # occurrences in the output; 0 = in the prompt only
    bias_start: Int32  # [m + 1]; as seen_start
    bias_ids: Int32
    bias_values: Float32  # added to the logit; -inf bans
    mask_row: Int32  # [m]; row of masks, or -1
    masks: NDArray[np.uint32]  # [k, ceil(vocab / 32)]; bit set = allowed (bit i of word j is id 32 j + i)

    @classmethod
    def greedy(cls, rows: int) -> Self:
        """Greedy sampling of ``rows`` logit rows, nothing else asked for."""
        none, starts = np.zeros(0, np.int32), np.zeros(rows + 1, np.int32)
        zeros, whole = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        return cls(
            temperature=zeros,
            top_k=whole,
            top_p=np.ones(rows, np.float32),
            min_p=zeros,
            presence_penalty=zeros,
            frequency_penalty=zeros,
            repetition_penalty=np.ones(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            choice=np.zeros(rows, np.uint32),
            position=np.zeros(rows, np.uint32),
            num_logprobs=np.full(rows, -1, np.int32),
            seen_start=starts,
            seen_ids=none,
            seen_counts=none,
            bias_start=starts,
            bias_ids=none,
            bias_values=np.zeros(0, np.float32),
            mask_row=np.full(rows, -1, np.int32),
            masks=np.zeros((0, 0), np.uint32),
        )


@dataclass(slots=True)
class Batch:
    """One step's work. Sequence ``i`` owns tokens ``query_start[i]:query_start[i + 1]``."""

    token_ids: Int32  # [n]; scheduler
    positions: Int32  # [n]; scheduler; consecutive within a sequence
    query_start: Int32  # [r + 1]; scheduler
    context_len: Int32  # [r]; tokens in the KV cache after this step, this step's included
    slot_mapping: tuple[
        Int32, ...
    ]  # g x [n]; KVCache: block * BLOCK_SIZE + offset where each token's K, V go
    block_tables: tuple[Int32, ...]  # g x [r, widest]; KVCache: physical block of each logical block
    logit_rows: Int32  # [m]; scheduler: indices into the n tokens whose successor is sampled
    sampling: SamplingTable  # m rows


@dataclass(slots=True)
class StepResult:
    """What one step sampled; row ``i`` belongs to ``batch.logit_rows[i]``."""

    token_ids: Int32  # [m]
    logprobs: Float32  # [m]; of the sampled token, raw distribution; NaN where not asked for
    top_ids: Int32  # [m, k]; k = the largest num_logprobs; -1 beyond a row's own number
    top_logprobs: Float32  # [m, k]; descending
    failed: NDArray[np.bool_]  # [m]; True = non-finite logits or vector: the token, or vector, is meaningless
    vectors: Float32 | None = None  # [r, hidden]; of encoders, which sample nothing: token_ids are all -1


def pooled(vectors: Float32) -> StepResult:
    """An encoder's result: ``vectors [r, hidden]``, of which no sequence has more than one logit row."""
    rows = len(vectors)
    return StepResult(
        token_ids=np.full(rows, -1, np.int32),
        logprobs=np.full(rows, np.nan, np.float32),
        top_ids=np.empty((rows, 0), np.int32),
        top_logprobs=np.empty((rows, 0), np.float32),
        failed=np.logical_not(np.isfinite(vectors).all(axis=1)),
        vectors=vectors,
    )
