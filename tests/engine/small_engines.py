"""Engines small enough to reason about, and what every engine test does with them."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.backend.runner import Runner, RunnerSettings
from headrace.backend.simulated import Latency, SimulatedRunner, simulated_architecture
from headrace.engine.build import SPARE_LOGIT_ROWS
from headrace.engine.config import SchedulerConfig
from headrace.engine.draft_model import DraftModel
from headrace.engine.engine import Engine
from headrace.engine.kv_tier import KVTier
from headrace.engine.kv_tier_store import Job, MemoryStore, Parts, TierBlock
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams, TokenLogprobs

VOCAB = 64
EOS = 7


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class DraftSizes:
    """A draft model: sizes, and its runner (None = of the target's kind, so that its guesses are right)."""

    runner: type[SimulatedRunner] | None = None
    num_blocks: int = 256
    max_model_len: int = 400
    vocab_size: int = VOCAB
    latency: Latency | None = None


class Lazy:
    """A worker that does jobs when it is waited for, and now and then before: the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._jobs: list[tuple[bool, Job]] = []

    def submit(self, job: Job, *, urgent: bool) -> None:
        self._jobs.append((urgent, job))
        if self._rng.random() < 0.2:
            self._do(self._rng.randrange(len(self._jobs) + 1))

    def wait(self, timeout_s: float) -> None:
        self._do(len(self._jobs))

    def close(self) -> None:
        self._do(len(self._jobs))

    def _do(self, count: int) -> None:
        in_order = sorted(self._jobs, key=lambda each: not each[0])  # stable: the urgent ones first
        self._jobs = in_order[count:]
        for _, job in in_order[:count]:
            job()


class Unreliable(MemoryStore):
    """Loses a block now and then, and some day takes no more."""

    def __init__(self, num_slots: int, block_bytes: tuple[int, ...], seed: int) -> None:
        super().__init__(num_slots, block_bytes)
        self._rng = random.Random(seed)

    def write(self, block: TierBlock, parts: Parts) -> None:
        if self._rng.random() < 0.02:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(block, parts)

    def read(self, block: TierBlock, groups: frozenset[int]) -> Parts | None:
        chance = self._rng.random()
        if chance < 0.05:
            raise OSError(errno.EIO, "Input/output error")
        return None if chance < 0.2 else super().read(block, groups)


@dataclass(frozen=True)
class TierSizes:
    """A second tier in memory; ``lazy``: it takes its time; ``unreliable``: it forgets."""

    num_blocks: int
    lazy: bool = False
    unreliable: bool = False

    def open(self, runner: Runner, clock: Callable[[], float] = time.monotonic) -> KVTier:
        store = (
            Unreliable(self.num_blocks, runner.block_bytes, seed=1)
            if self.unreliable
            else MemoryStore(self.num_blocks, runner.block_bytes)
        )
        return KVTier(runner, store, Lazy(seed=2) if self.lazy else None, clock=clock)


def small_engine(
    *,
    num_blocks: int = 256,
    max_model_len: int = 400,
    windows: tuple[int | None, ...] = (None,),
    window_blocks: int | None = None,
    prefix_caching: bool = True,
    seed: int | None = 0,
    runner: type[SimulatedRunner] = SimulatedRunner,
    clock: Clock | None = None,
    latency: Latency | None = None,
    draft: DraftSizes | None = None,
    tier: TierSizes | Callable[[Runner], KVTier | None] | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine on a simulated runner; ``scheduler`` are fields of SchedulerConfig.

    ``window_blocks``: what groups with a window have beside one that has none, which have ``num_blocks``.
    With a ``clock``, steps take ``latency`` of its time and no other time passes. ``draft``: the draft model
    of ``speculative`` settings that ask for one. ``tier``: its sizes, or how it is opened.
    """
    config = SchedulerConfig(**scheduler)
    max_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)
    settings = RunnerSettings(
        num_blocks=num_blocks,
        max_batch_tokens=config.max_num_batched_tokens,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        max_logit_rows=min(max_sequences + SPARE_LOGIT_ROWS, config.max_num_batched_tokens),
        group_blocks=()
        if window_blocks is None or len(set(windows)) < 2
        else tuple(num_blocks if window is None else window_blocks + 1 for window in windows),
    )
    architecture = simulated_architecture(vocab_size=VOCAB, max_positions=max_model_len, windows=windows)
    sleep = clock.sleep if clock else time.sleep
    opened = runner(architecture, settings, latency=latency, sleep=sleep)
    drafter = None
    if config.speculative is not None and config.speculative.method == "draft_model":
        sizes = draft or DraftSizes()
        small = replace(
            settings,
            num_blocks=min(sizes.num_blocks, num_blocks),
            group_blocks=(),
            max_model_len=min(sizes.max_model_len, max_model_len),
            max_logit_rows=max_sequences,
        )
        drafter = DraftModel(
            (sizes.runner or runner)(
                simulated_architecture(
                    vocab_size=sizes.vocab_size, max_positions=small.max_model_len, windows=windows
                ),
                small,
                latency=sizes.latency,
                sleep=sleep,
            ),
            small,
            vocab_size=VOCAB,
            prefix_caching=prefix_caching,
            clock=clock or time.monotonic,
        )
    return Engine(
        opened,
        settings,
        config,
        prefix_caching=prefix_caching,
        seed=seed,
        clock=clock or time.monotonic,
        drafter=drafter,
        tier=tier.open(opened, clock or time.monotonic)
        if isinstance(tier, TierSizes)
        else tier and tier(opened),
    )


def check_blocks(engine: Engine) -> None:
    """Prove that no block leaked, of the draft model's either."""
    engine.kv_cache.check()
    if (model := draft_model(engine)) is not None:
        model.kv_cache.check()


def draft_model(engine: Engine) -> DraftModel | None:
    """The draft model of an engine that has one."""
    speculation = engine.scheduler.speculation
    return speculation.drafter if speculation and isinstance(speculation.drafter, DraftModel) else None


def tokens(count: int, seed: int) -> list[int]:
    """``count`` token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def request(
    name: str,
    prompt: list[int],
    *,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    weight: float = 1.0,
    **params: Any,
) -> EngineRequest:
    """A request with a seed of its own unless ``params`` says otherwise."""
    params.setdefault("seed", sum(name.encode()))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=[EOS],
        priority=priority,
        tenant=tenant,
        tenant_weight=weight,
        cache_salt=salt,
    )


@dataclass
class Answer:
    """All news of one sequence, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    last: EngineOutput | None = None

    def text(self) -> tuple[Any, ...]:
        """What must not depend on neighbours, bit by bit."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason


class Answers(dict[tuple[str, int], Answer]):
    """Answers by request id and choice; takes outputs in and insists on one end for each."""

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            answer = self.setdefault((output.request_id, output.choice), Answer())
            assert answer.finish_reason is None, "news after the end"
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs or []
            if output.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "prompt_logprobs came twice"
                answer.prompt_logprobs = output.prompt_logprobs
            answer.finish_reason = output.finish_reason
            answer.last = output

    def texts(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        return {key: answer.text() for key, answer in self.items()}


def run(engine: Engine, requests: list[EngineRequest], *, max_steps: int = 20_000) -> Answers:
    """Add all requests, step until nothing is left, and prove that nothing leaked."""
    for each in requests:
        engine.add(each)
    answers = Answers()
    finish(engine, answers, max_steps=max_steps)
    return answers


def finish(engine: Engine, answers: Answers, *, max_steps: int = 20_000) -> None:
    """Step until nothing is left."""
    for _ in range(max_steps):
        if not engine.has_work:
            break
        answers.take(engine.step())
        check_blocks(engine)
    assert_idle(engine)
    assert all(answer.finish_reason for answer in answers.values())


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or holds a block."""
    check_blocks(engine)
    stats = engine.stats()
    assert (stats.num_running_seqs, stats.num_waiting_seqs) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    caches = [engine.kv_cache]
    if (model := draft_model(engine)) is not None:
        caches.append(model.kv_cache)
    assert all(count == 0 for cache in caches for pool in cache.pools for count in pool.references)
