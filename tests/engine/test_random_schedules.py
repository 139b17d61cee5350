"""Whatever arrives, leaves, hurries or lacks memory: everybody gets the answer that he would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from random_schedules import SPECULATION, World, random_shape
from small_engines import VOCAB, Clock, DraftSizes, TierSizes, draft_model, small_engine, tokens
from test_speculation import RepetitiveRunner

from headrace.backend import open_runner
from headrace.backend.batch import Batch, StepResult
from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import Latency, SimulatedRunner
from headrace.engine.build import build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.draft_model import DraftModel
from headrace.engine.engine import Engine
from headrace.engine.memory import block_bytes
from headrace.model.weights import open_checkpoint

CASES, CHUNK = 2000, 100
MAX_MODEL_LEN = 128
QUICK = Latency(0.01, 0.001)
DRAFTS = [
    DraftSizes(latency=QUICK),
    DraftSizes(latency=QUICK, num_blocks=9),
    DraftSizes(latency=QUICK, num_blocks=2),
    DraftSizes(latency=QUICK, max_model_len=50),
    DraftSizes(latency=QUICK, vocab_size=VOCAB - 3),
    DraftSizes(latency=QUICK, vocab_size=VOCAB + 9),
    DraftSizes(latency=QUICK, runner=SimulatedRunner),  # guesses something else
    DraftSizes(latency=Latency(0.2, 0.01)),  # takes longer than what it drafts for
]

TIERS = [
    None,
    None,
    TierSizes(3),
    TierSizes(200),
    TierSizes(8, lazy=True),
    TierSizes(200, lazy=True),
    TierSizes(200, lazy=True, unreliable=True),
]


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
        "draft": DRAFTS,
        "tier": TIERS,
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

# Short prompts, long answers and few blocks: everybody is let in and somebody has to give way.
CROWDED = World(
    shapes=[
        random_shape(seed, [tokens(30, 1), tokens(30, 2), tokens(9, 3) * 3], VOCAB, [50, 90])
        for seed in range(60)
    ],
    choices=SIMULATED.choices
    | {
        "num_blocks": [8, 9, 10, 14],
        "window_blocks": [None, 8, 9],
        "tier": [None, *TIERS[2:]],
        "max_num_batched_tokens": [25, 60, 512],
        "speculative": [None, SPECULATION[1]],
    },
    max_requests=6,
    build=SIMULATED.build,
    plain=SIMULATED.plain,
    deciding=SIMULATED.deciding,
)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_schedules(first: int) -> None:
    """Guards against every bug of block tables, sharing, preemption, order, drafts and deadlines at once."""
    for seed in range(first, first + CHUNK):
        SIMULATED.explain(seed)


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_random_schedules_in_a_crowd(first: int) -> None:
    """The same where preemption is the rule and the second tier has much to do."""
    for seed in range(first, first + 40):
        CROWDED.explain(seed)


def test_schedules_have_in_them_what_they_are_to_guard() -> None:
    """All of them passed after a change that had made them all harmless."""
    totals = dict.fromkeys(
        ("num_preemptions", "tier_hits", "deadlines_missed", "deadlines_refused", "draft_tokens_accepted"), 0
    )
    hits = 0
    by_model = 0
    for seed in range(60):
        engine = SIMULATED.check(SIMULATED.schedule(seed))
        stats = engine.stats()
        hits += stats.prefix_cache_hits
        by_model += stats.draft_tokens_accepted if draft_model(engine) is not None else 0
        for name in totals:
            totals[name] += getattr(stats, name)
    assert all(totals.values()), totals
    assert hits > 1000
    assert by_model > 100
    names = ("preemptions_swapped", "preemptions_recomputed", "tier_hits", "tier_failures")
    crowded = dict.fromkeys(names, 0)
    for seed in range(100):  # what is swapped goes by measured times: how soon all of it happens, too
        stats = CROWDED.check(CROWDED.schedule(seed)).stats()
        for name in crowded:
            crowded[name] += getattr(stats, name)
        if all(crowded.values()):
            break
    assert all(crowded.values()), crowded


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


@contextmanager
def world_on(
    path: Path, prefixes: list[list[int]], vocab: int, kv_cache_dtype: KVCacheDtype, **sizes: Any
) -> Iterator[World]:
    """One loaded model under engines of all sizes."""
    checkpoint = open_checkpoint(path)
    largest = build_engine(
        path,
        ModelConfig(max_model_len=MAX_MODEL_LEN, threads=1),
        CacheConfig(
            kv_cache_memory_bytes=64 * block_bytes(checkpoint.architecture, kv_cache_dtype),
            kv_cache_dtype=kv_cache_dtype,
        ),
        SchedulerConfig(max_num_batched_tokens=128, speculative=SPECULATION[1]),
    )
    runner = largest.runner
    drafting = open_runner(
        checkpoint,
        "cpu",
        RunnerSettings(
            num_blocks=64,
            max_batch_tokens=128,
            max_sequences=16,
            max_model_len=MAX_MODEL_LEN,
            threads=1,
            kv_cache_dtype=kv_cache_dtype,
        ),
    )

    def build(
        *,
        num_blocks: int = 64,
        clock: Clock | None = None,
        prefix_caching: bool = False,
        tier: TierSizes | None = None,
        **scheduler: Any,
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
        clock = clock or TickingClock()
        drafter = None
        if config.speculative is not None and config.speculative.method == "draft_model":
            drafter = DraftModel(
                drafting,
                settings,
                vocab_size=runner.architecture.vocab_size,
                prefix_caching=prefix_caching,
                clock=clock,
            )
        return Engine(
            runner,
            settings,
            config,
            prefix_caching=prefix_caching,
            seed=0,
            clock=clock,
            drafter=drafter,
            tier=tier and tier.open(runner, Clock()),  # on which nothing takes time: it always pays
        )

    settings = {"max_tokens": [1, 3, 5], "num_blocks": [9, 12, 64], "max_requests": 3} | sizes
    yield World(
        shapes=[random_shape(seed, prefixes, vocab, settings["max_tokens"]) for seed in range(16)],
        choices={
            "num_blocks": settings["num_blocks"],
            "tier": [None, TierSizes(100), TierSizes(100, lazy=True)],
            "prefix_caching": [True, True, False],
            "max_num_seqs": [2, 16],
            "max_num_batched_tokens": [16, 25, 128],
            "speculative": list(SPECULATION),
            "tpot_target_ms": [None, 10.0],
            "priority_aging_s": [0.1, 10.0],
        },
        max_requests=settings["max_requests"],
        build=build,
        plain=build,
        clock=TickingClock,
    )
    runner.close()
    drafting.close()


def test_random_schedules_on_a_real_model(smollm2_path: Path) -> None:
    """What the simulated runner cannot show: that kernels compute the same rows in any company."""
    phrase = [504, 5345, 282, 4649, 314, 42, 365, 260]
    prefixes = [phrase * 5, tokens(40, 1), [*phrase, *tokens(30, 2)]]
    with world_on(smollm2_path, prefixes, 40_000, "auto") as world:
        for seed in range(24):
            world.explain(seed)


@pytest.mark.native
@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("smollm2", "auto"), ("gemma3", "int8")])
def test_random_schedules_on_tiny_models(name: str, kv_cache_dtype: KVCacheDtype, tmp_path: Path) -> None:
    """The same on every path of the CPU, in one group of layers and in two, where memory is short."""
    from tests.model.tiny import CASES

    CASES[name](tmp_path)
    prefixes = [tokens(30, 1), tokens(30, 2), tokens(9, 3) * 3]
    sizes = {"max_tokens": [5, 50, 90], "num_blocks": [8, 9, 10, 14], "max_requests": 6}
    totals = dict.fromkeys(("num_preemptions", "tier_hits", "prefix_cache_hits", "draft_tokens_accepted"), 0)
    with world_on(tmp_path, prefixes, 300, kv_cache_dtype, **sizes) as world:
        for seed in range(24):
            stats = world.explain(seed).stats()
            for event in totals:
                totals[event] += getattr(stats, event)
    assert all(totals.values()), totals
