"""Whatever arrives, leaves, hurries or lacks memory: everybody gets the answer that he would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_schedules import SPECULATION, World, random_shape
from small_engines import VOCAB, Clock, small_engine, tokens
from test_speculation import RepetitiveRunner

from headrace.backend.batch import Batch, StepResult
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import Latency
from headrace.engine.build import build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.memory import block_bytes
from headrace.model.weights import open_checkpoint

CASES, CHUNK = 2000, 100
MAX_MODEL_LEN = 128


def simulated(**settings: Any) -> Engine:
    settings = {"latency": Latency(0.1, 0.01), "max_model_len": MAX_MODEL_LEN} | settings
    return small_engine(runner=RepetitiveRunner, **settings)


SIMULATED = World(
    shapes=[
        random_shape(seed, [tokens(80, 1), tokens(80, 2), tokens(9, 3) * 9], VOCAB, [1, 2, 9, 17, 40])
        for seed in range(240)
    ],
    choices={
        "num_blocks": [8, 8, 9, 10, 12, 20, 100],
        "windows": [(None,), (None, 20)],
        "window_blocks": [None, 8, 8, 9, 30],
        "prefix_caching": [True, True, False],
        "max_num_seqs": [1, 3, 16, 16, 16],
        "max_num_batched_tokens": [4, 16, 25, 25, 60, 60, 512],
        "speculative": list(SPECULATION),
        "tpot_target_ms": [None, None, 150.0, 400.0],
        "priority_aging_s": [0.0, 1.0, 10.0],
    },
    max_requests=8,
    build=simulated,
    plain=lambda **deciding: small_engine(
        runner=RepetitiveRunner,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=4096,
        prefix_caching=False,
        **deciding,
    ),
    deciding=("windows",),
)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_schedules(first: int) -> None:
    """Guards against every bug of block tables, sharing, preemption, order, drafts and deadlines at once."""
    for seed in range(first, first + CHUNK):
        SIMULATED.explain(seed)


def test_schedules_have_in_them_what_they_are_to_guard() -> None:
    """All of them passed after a change that had made them all harmless."""
    totals = dict.fromkeys(
        ("num_preemptions", "deadlines_missed", "deadlines_refused", "draft_tokens_accepted"), 0
    )
    hits = 0
    for seed in range(60):
        stats = SIMULATED.check(SIMULATED.schedule(seed)).stats()
        hits += stats.prefix_cache_hits
        for name in totals:
            totals[name] += getattr(stats, name)
    assert all(totals.values()), totals
    assert hits > 1000


class Forgetful(RepetitiveRunner):
    """Loses the K and V of one slot now and then, as a block that is freed too early would."""

    def run(self, batch: Batch) -> StepResult:
        if batch.context_len.max() > 60:
            self._slot_tokens[0][batch.block_tables[0][0, 0] * 16] = 5
        return super().run(batch)


def test_a_mistake_is_found_and_made_small() -> None:
    """A test that cannot fail proves nothing, and one with nine requests in it explains nothing."""
    world = World(
        SIMULATED.shapes,
        SIMULATED.choices,
        SIMULATED.max_requests,
        build=lambda **settings: small_engine(
            **{"runner": Forgetful, "latency": Latency(0.1, 0.01), "max_model_len": MAX_MODEL_LEN} | settings
        ),
        plain=SIMULATED.plain,
        deciding=SIMULATED.deciding,
    )
    with pytest.raises(AssertionError, match=r"seed \d+: .* has another answer than alone") as caught:
        for seed in range(40):
            world.explain(seed)
    assert 1 <= str(caught.value).count("Arrival(") <= 3


# The same on a real model


class TickingClock(Clock):
    """Moves on at every look, so that waiting takes time on an engine whose steps take none of it."""

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[World]:
    """One loaded model under engines of all sizes."""
    checkpoint = open_checkpoint(smollm2_path)
    largest = build_engine(
        smollm2_path,
        ModelConfig(max_model_len=MAX_MODEL_LEN),
        CacheConfig(kv_cache_memory_bytes=64 * block_bytes(checkpoint.architecture)),
        SchedulerConfig(max_num_batched_tokens=128, speculative=SPECULATION[1]),
    )
    runner = largest.runner

    def build(
        *, num_blocks: int = 64, clock: Clock | None = None, prefix_caching: bool = False, **scheduler: Any
    ) -> Engine:
        config = SchedulerConfig(**{"max_num_batched_tokens": 128} | scheduler)
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        settings = RunnerSettings(
            num_blocks=num_blocks,
            max_batch_tokens=config.max_num_batched_tokens,
            max_sequences=rows,
            max_model_len=MAX_MODEL_LEN,
            max_logit_rows=min(rows + 32, config.max_num_batched_tokens),
        )
        return Engine(
            runner, settings, config, prefix_caching=prefix_caching, seed=0, clock=clock or TickingClock()
        )

    phrase = [504, 5345, 282, 4649, 314, 42, 365, 260]
    yield World(
        shapes=[
            random_shape(seed, [phrase * 5, tokens(40, 1), [*phrase, *tokens(30, 2)]], 40_000, [1, 3, 5])
            for seed in range(16)
        ],
        choices={
            "num_blocks": [9, 12, 64],
            "prefix_caching": [True, True, False],
            "max_num_seqs": [2, 16],
            "max_num_batched_tokens": [16, 25, 128],
            "speculative": list(SPECULATION),
            "tpot_target_ms": [None, 10.0],
            "priority_aging_s": [0.1, 10.0],
        },
        max_requests=3,
        build=build,
        plain=build,
        clock=TickingClock,
    )
    runner.close()


@pytest.mark.native
def test_random_schedules_on_a_real_model(smollm2: World) -> None:
    """What the simulated runner cannot show: that kernels compute the same rows in any company."""
    for seed in range(24):
        smollm2.explain(seed)
