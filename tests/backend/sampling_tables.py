"""Sampling tables for tests, and one way to call the numpy sampler and each path of the native one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import Float32, SamplingTable, StepResult
from headrace.backend.cpu import _native
from headrace.backend.sampling import sample

SAMPLERS: list[str] = ["numpy", *_native.supported_isas()]

_COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "temperature": (np.float32, 1),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "seed": (np.uint64, 0),
    "choice": (np.uint32, 0),
    "position": (np.uint32, 0),
    "num_logprobs": (np.int32, -1),
    "mask_row": (np.int32, -1),
}


def make_table(
    rows: int,
    vocab: int,
    *,
    seen: Sequence[Mapping[int, int]] | None = None,
    bias: Sequence[Mapping[int, float]] | None = None,
    allowed: Sequence[Sequence[int]] = (),
    **columns: Any,
) -> SamplingTable:
    """A table of ``rows`` rows; a column is one value for all of them, or a sequence.

    ``seen``: per row, id -> occurrences in the output. ``bias``: per row, id -> value. ``allowed``: the ids
    that each mask lets through (the bits beyond the vocabulary are set, and must not matter).
    """
    filled: dict[str, Any] = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(columns.pop(name, default), dtype), (rows,)))
        for name, (dtype, default) in _COLUMNS.items()
    }
    assert not columns, f"unknown columns {sorted(columns)}"
    seen = seen if seen is not None else [{}] * rows
    bias = bias if bias is not None else [{}] * rows
    words = (vocab + 31) // 32
    masks = np.zeros((len(allowed), words), np.uint32)
    for mask, ids in zip(masks, allowed, strict=True):
        for token in [*ids, *range(vocab, 32 * words)]:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return SamplingTable(
        **filled,
        seen_start=np.cumsum([0, *map(len, seen)], dtype=np.int32),
        seen_ids=np.array([token for row in seen for token in row], np.int32),
        seen_counts=np.array([count for row in seen for count in row.values()], np.int32),
        bias_start=np.cumsum([0, *map(len, bias)], dtype=np.int32),
        bias_ids=np.array([token for row in bias for token in row], np.int32),
        bias_values=np.array([value for row in bias for value in row.values()], np.float32),
        masks=masks,
    )


def run_sampler(name: str, logits: NDArray[Any], table: SamplingTable) -> StepResult:
    """Sample with "numpy" or a path of the native sampler; ``logits`` ``[m, vocab]`` is left as it is."""
    rows: Float32 = np.array(logits, np.float32, order="C")
    if name == "numpy":
        return sample(rows, table)
    token_ids, logprobs, top_ids, top_logprobs, failed = _native.sample(rows, table, isa=name)
    return StepResult(token_ids, logprobs, top_ids, top_logprobs, failed.astype(np.bool_))
