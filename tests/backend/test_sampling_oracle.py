"""The native sampler against the numpy one over generated tables, and the numpy one against torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.backend.batch import Float32, SamplingTable, StepResult
from headrace.backend.sampling import candidate_weights, processed_logits, sample, uniform
from tests.backend.sampling_tables import SAMPLERS, make_table, run_sampler

PATHS = SAMPLERS[1:]
BOUNDARY = 1e-6
"""How far float32 weights may move the uniform or top-p relative to a boundary between tokens."""


def acceptable_tokens(logits: Float32, table: SamplingTable, row: int) -> set[int]:
    """What the oracle chooses when the uniform and top-p move by BOUNDARY either way."""
    processed = processed_logits(logits, table, row)
    assert processed is not None
    u = uniform(int(table.seed[row]), int(table.choice[row]), int(table.position[row]))
    tokens = set()
    for shift in (-BOUNDARY, 0, BOUNDARY):
        moved = table
        if table.top_p[row] < 1:
            moved = replace(table, top_p=(table.top_p + shift).astype(np.float32))
        cumulative = np.cumsum(candidate_weights(processed, moved, row))
        last = int(np.searchsorted(cumulative, cumulative[-1]))
        for target in (u - BOUNDARY, u, u + BOUNDARY):
            tokens.add(min(last, int(np.searchsorted(cumulative, target * cumulative[-1], side="right"))))
    return tokens


def assert_agrees(path: str, logits: Float32, table: SamplingTable, expected: StepResult) -> int:
    """Compare one path with the oracle's result; returns how many tokens a boundary made differ."""
    result = run_sampler(path, logits, table)
    assert result.failed.tolist() == expected.failed.tolist()
    assert result.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(result.top_logprobs, expected.top_logprobs, atol=1e-5, rtol=1e-6)
    same = result.token_ids == expected.token_ids
    np.testing.assert_allclose(result.logprobs[same], expected.logprobs[same], atol=1e-5, rtol=1e-6)
    for row in np.flatnonzero(~same).tolist():
        assert table.temperature[row] > 0, "greedy has no boundary"
        assert int(result.token_ids[row]) in acceptable_tokens(logits[row], table, row)
    return int((~same).sum())


KINDS = ["normal", "sharp", "flat", "equal", "few values", "half banned", "huge", "one leads"]


def make_logits(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> Float32:
    normal = rng.normal(size=(rows, vocab))
    made: dict[str, NDArray[Any]] = {
        "normal": normal * 3,
        "sharp": normal * 30,
        "flat": normal * 0.01,
        "equal": np.full((rows, vocab), -1.5),
        "few values": rng.integers(-2, 3, (rows, vocab)),
        "half banned": np.where(rng.random((rows, vocab)) < 0.5, -np.inf, normal),
        "huge": normal * 1e37,
        "one leads": np.where(np.arange(vocab) == rng.integers(vocab), 12.0, normal),
    }
    return made[kind].astype(np.float32)


def some_ids(vocab: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab - 1), max_size=min(most, vocab), unique=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32, SamplingTable]:
    vocab = draw(st.integers(1, 70) | st.sampled_from([1000, 1023, 1024, 1025, 1040, 2100]))
    rows = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = make_logits(draw(st.sampled_from(KINDS)), rows, vocab, rng)
    for row, value in draw(
        st.dictionaries(st.integers(0, rows - 1), st.sampled_from([np.nan, np.inf]), max_size=1)
    ).items():
        logits[row, rng.integers(vocab)] = value

    def each(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(strategy, min_size=rows, max_size=rows))

    def within(low: float, high: float) -> st.SearchStrategy[float]:
        return st.floats(low, high, width=32)

    allowed = [draw(some_ids(vocab, 12)) for _ in range(2)]
    bias_values = st.sampled_from([-np.inf, -100.0, -1.0, 0.5, 3.0, 100.0])
    return logits, make_table(
        rows,
        vocab,
        temperature=each(st.sampled_from([0, 1, 1e-6, 1e-45, 1e30, 3e38]) | within(0.125, 4)),
        top_k=each(st.sampled_from([0, -1, 1, vocab - 1, vocab, 2**31 - 1]) | st.integers(1, 80)),
        top_p=each(st.sampled_from([1, 0]) | within(0, 1)),
        min_p=each(st.sampled_from([0, 1]) | within(0, 1)),
        presence_penalty=each(st.just(0) | within(-2, 2)),
        frequency_penalty=each(st.just(0) | within(-2, 2)),
        repetition_penalty=each(st.just(1) | within(0.5, 2)),
        seed=[np.uint64(seed) for seed in each(st.integers(0, 2**64 - 1))],
        choice=each(st.integers(0, 2**32 - 1)),
        position=each(st.integers(0, 2**32 - 1)),
        num_logprobs=each(st.integers(-1, 6) | st.just(vocab + 1)),
        seen=[dict.fromkeys(ids, i) for i, ids in enumerate(each(some_ids(vocab, 8)))],
        bias=[{token: draw(bias_values) for token in ids} for ids in each(some_ids(vocab, 4))],
        allowed=allowed,
        mask_row=each(st.sampled_from([-1, -1, 0, 1])),
    )


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_native_equals_numpy(case: tuple[Float32, SamplingTable]) -> None:
    logits, table = case
    expected = sample(logits, table)
    for path in PATHS:
        assert_agrees(path, logits, table, expected)


@pytest.mark.parametrize("vocab", [49152, 262144])
def test_native_equals_numpy_on_real_vocabularies(vocab: int) -> None:
    """All kinds of distributions under all kinds of cuts; differences at boundaries stay rare."""
    rng = np.random.default_rng(vocab)
    cuts: list[dict[str, float]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 5000, "top_p": 0.95},
        {"min_p": 0.05, "top_p": 0.99, "temperature": 0.7},
    ]
    columns: dict[str, Any] = {
        name: [cut.get(name, default) for cut in cuts]
        for name, default in [("temperature", 1), ("top_p", 1), ("top_k", 0), ("min_p", 0)]
    }
    rows = len(cuts)
    differing = total = 0
    for kind in KINDS if vocab < 100_000 else KINDS[:3]:
        logits = make_logits(kind, rows, vocab, rng)
        table = make_table(
            rows,
            vocab,
            **columns,
            seed=[np.uint64(seed) for seed in rng.integers(0, 2**64, rows, dtype=np.uint64)],
            num_logprobs=[5, -1, 0, 20, -1, 1],
            seen=[{int(token): 2 for token in rng.choice(vocab, 300, replace=False)} for _ in cuts],
            repetition_penalty=1.1,
            allowed=[range(1, vocab, 3)],
            mask_row=[-1, 0, -1, -1, 0, -1],
        )
        expected = sample(logits, table)
        assert not expected.failed.any()
        for path in PATHS:
            differing += assert_agrees(path, logits, table, expected)
            total += rows
    assert differing <= 0.02 * total


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.25, 3, width=32),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.0625, 1, width=32),
    min_p=st.floats(0, 0.5, width=32),
    repetition=st.floats(0.5, 2, width=32),
)
def test_numpy_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> None:
    """Probabilities against Hugging Face's processors, in the sampler's order."""
    rng = np.random.default_rng(seed)
    vocab = 50
    logits = rng.normal(size=(1, vocab)).astype(np.float32) * 2
    prompt = np.unique(rng.integers(0, vocab, 10))
    table = make_table(
        1,
        vocab,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        seen=[{int(token): 0 for token in prompt}],
    )
    processed = processed_logits(logits[0], table, 0)
    assert processed is not None
    weights = candidate_weights(processed, table, 0)

    ids = torch.tensor(prompt[None])
    scores = torch.tensor(logits)
    scores = RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    expected = torch.softmax(scores[0].double(), 0).numpy()
    np.testing.assert_allclose(weights / weights.sum(), expected, atol=2e-6)


def test_numpy_penalties_and_logprobs_equal_torch() -> None:
    """OpenAI's formula for presence and frequency, over counts of the output; logprobs by log_softmax."""
    rng = np.random.default_rng(11)
    rows, vocab = 6, 120
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 4
    outputs = rng.integers(0, vocab, (rows, 300))
    counts = torch.stack([torch.bincount(torch.tensor(out), minlength=vocab) for out in outputs])
    table = make_table(
        rows,
        vocab,
        temperature=0,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        num_logprobs=8,
        seen=[{t: int(row[t]) for t in range(vocab) if row[t] > 0} for row in counts],
    )
    result = sample(logits, table)
    raw = torch.tensor(logits)
    expected = (raw - 0.4 * counts - 0.7 * (counts > 0)).argmax(1)
    assert result.token_ids.tolist() == expected.tolist()
    logprobs = torch.log_softmax(raw.double(), 1)
    np.testing.assert_allclose(result.logprobs, logprobs.gather(1, expected[:, None])[:, 0], atol=1e-6)
    top = logprobs.topk(8, 1)
    assert result.top_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(result.top_logprobs, top.values, atol=1e-6)
