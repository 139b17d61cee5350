"""The sampler in numpy: the oracle of the native one, and what the torch and simulated backends use.

One row at a time, and every quantity in the way that is easiest to check. What decides between tokens is
computed as the native sampler computes it (processed logits and scaled logits in float32), so both choose
the same token unless the uniform or a top-p boundary falls within rounding of a float32 exponential.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import Float32, Int32, SamplingTable, StepResult

Float64 = NDArray[np.float64]
Counter = tuple[int, int, int, int]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(key: int, counter: Counter) -> Counter:
    """Four random 32-bit words: Philox4x32-10 of a 64-bit ``key`` and a counter of four 32-bit words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (the Random123 library).
    """
    k0, k1 = key & _WORD, key >> 32 & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _WORD, p0 >> 32 ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that decides one token: 53 bits of Philox, first word most significant."""
    high, low, _, _ = philox4x32(seed, (choice, position, 0, 0))
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(logits: Float32, table: SamplingTable) -> StepResult:
    """Sample every row of ``logits`` (``[m, vocab]`` float32, left as it is) by its row of ``table``.

    A row fails, alone, when a raw logit is NaN or +inf, when bias and penalties make one so or name an id
    outside the vocabulary, or when no token is left to choose. A failed row's token is 0, its logprobs NaN.

    Raises ValueError when the table's rows or the masks' width do not fit the logits.
    """
    _check_shapes(logits, table)
    rows = logits.shape[0]
    width = max(0, int(table.num_logprobs.max(initial=-1)))
    result = StepResult(
        token_ids=np.zeros(rows, np.int32),
        logprobs=np.full(rows, np.nan, np.float32),
        top_ids=np.full((rows, width), -1, np.int32),
        top_logprobs=np.full((rows, width), np.nan, np.float32),
        failed=np.zeros(rows, np.bool_),
    )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for row in range(rows):
            token = _sample_row(logits[row], table, row)
            if token is None:
                result.failed[row] = True
                continue
            result.token_ids[row] = token
            asked = int(table.num_logprobs[row])
            if asked >= 0:
                logprobs = log_softmax(logits[row])
                result.logprobs[row] = logprobs[token]
                top = np.argsort(-logits[row], kind="stable")[:asked]
                result.top_ids[row, : top.size] = top
                result.top_logprobs[row, : top.size] = logprobs[top]
    return result


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities ``[vocab]`` of one row, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - math.log(np.exp(shifted).sum()), np.float64)


def processed_logits(raw: Float32, table: SamplingTable, row: int) -> Float32 | None:
    """One row after bias, penalties and mask, float32 ``[vocab]``; None when that cannot be sampled from."""
    bias = slice(int(table.bias_start[row]), int(table.bias_start[row + 1]))
    seen = slice(int(table.seen_start[row]), int(table.seen_start[row + 1]))
    bias_ids, seen_ids = table.bias_ids[bias], table.seen_ids[seen]
    logits = raw.copy()
    if bias_ids.size or seen_ids.size:
        touched = np.concatenate([bias_ids, seen_ids])
        if touched.min() < 0 or touched.max() >= raw.size:
            return None
        np.add.at(logits, bias_ids, table.bias_values[bias])
        values, counts = logits[seen_ids], table.seen_counts[seen]
        repetition = table.repetition_penalty[row]
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - table.frequency_penalty[row] * counts.astype(np.float32)
        values = values - np.where(counts > 0, table.presence_penalty[row], np.float32(0))
        logits[seen_ids] = values
        if not logits.max() < np.inf:  # false for NaN as well
            return None

    mask_row = int(table.mask_row[row])
    if mask_row >= 0:
        words = table.masks[mask_row].astype("<u4", copy=False)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: raw.size]
        logits[allowed == 0] = -np.inf
    return logits if logits.max() > -np.inf else None


def candidate_weights(logits: Float32, table: SamplingTable, row: int) -> Float64:
    """Unnormalised probabilities ``[vocab]`` of a row's processed logits; 0 = cut by min-p, top-k or top-p.

    ``table.temperature[row]`` is above 0.
    """
    # Within these bounds no product is infinity times zero.
    inverse = np.float32(1) / min(max(table.temperature[row], np.float32(1e-30)), np.float32(1e30))
    scaled = (logits - logits.max()) * inverse
    weights: Float64 = np.exp(scaled.astype(np.float64))
    min_p, top_k, top_p = float(table.min_p[row]), int(table.top_k[row]), float(table.top_p[row])
    if min_p > 0:
        weights[scaled < np.float32(min(0.0, math.log(min_p)))] = 0
    if top_k <= 0 and top_p >= 1:
        return weights

    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    if top_p < 1:
        cumulative = np.cumsum(weights[order])
        first = int(np.searchsorted(cumulative, top_p * cumulative[-1]))
        weights[order[first + 1 :]] = 0
    return weights


def _sample_row(raw: Float32, table: SamplingTable, row: int) -> int | None:
    if not raw.max() < np.inf:  # false for NaN as well
        return None
    logits = processed_logits(raw, table, row)
    if logits is None:
        return None
    if not table.temperature[row] > 0:
        return int(logits.argmax())
    cumulative = candidate_weights(logits, table, row).cumsum()
    u = uniform(int(table.seed[row]), int(table.choice[row]), int(table.position[row]))
    # The last candidate's cumulative weight is the total; u * total may round up to it, never beyond.
    last = int(cumulative.searchsorted(cumulative[-1]))
    return min(last, int(cumulative.searchsorted(u * cumulative[-1], side="right")))


def _check_shapes(logits: Float32, table: SamplingTable) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0 or logits.dtype != np.float32:
        raise ValueError(f"logits must be float32 [m, vocab], not {logits.dtype} {list(logits.shape)}")
    rows, vocab = logits.shape
    per_row: tuple[Int32 | Float32 | NDArray[np.uint64] | NDArray[np.uint32], ...] = (
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.presence_penalty,
        table.frequency_penalty,
        table.repetition_penalty,
        table.seed,
        table.choice,
        table.position,
        table.num_logprobs,
        table.mask_row,
        table.seen_start[1:],
        table.bias_start[1:],
    )
    if any(column.shape != (rows,) for column in per_row):
        raise ValueError(f"a sampling table for {rows} logit rows needs {rows} entries in each column")
    for name, start, values in (
        ("seen_start", table.seen_start, (table.seen_ids, table.seen_counts)),
        ("bias_start", table.bias_start, (table.bias_ids, table.bias_values)),
    ):
        entries = int(start[-1])
        falls = entries and (start[1:] < start[:-1]).any()
        if start[0] != 0 or entries < 0 or falls or any(v.shape != (entries,) for v in values):
            raise ValueError(f"{name} must ascend from 0 to the number of entries that it divides")
    last_mask = int(table.mask_row.max(initial=-1))
    if last_mask >= table.masks.shape[0]:
        raise ValueError(f"mask_row names masks beyond the {table.masks.shape[0]} that there are")
    if last_mask >= 0 and table.masks.shape[1] != (vocab + 31) // 32:
        raise ValueError(f"masks of a vocabulary of {vocab} need {(vocab + 31) // 32} words a row")
