"""Steps that follow a target for the time between tokens."""

from __future__ import annotations

import numpy as np
import pytest
from small_engines import Answers, Clock, finish, request, run, small_engine, tokens

from headrace.backend.batch import Batch, StepResult
from headrace.backend.simulated import Latency, SimulatedRunner
from headrace.engine.build import check_scheduler_config
from headrace.engine.config import SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.step_cost import StepCost
from headrace.errors import ConfigError

LATENCY = Latency(step_s=0.020, token_s=0.001)  # a full step of 512 tokens takes half a second


def gaps(target_ms: float | None, prompts: int = 6) -> tuple[list[float], Engine]:
    """Seconds of each step in which three chats decode, while long prompts come in."""
    clock = Clock()
    engine = small_engine(
        clock=clock,
        latency=LATENCY,
        max_model_len=2000,
        num_blocks=1200,
        max_num_batched_tokens=512,
        tpot_target_ms=target_ms,
    )
    for number in range(3):
        engine.add(request(f"chat{number}", tokens(5, number), max_tokens=900, ignore_eos=True))
    for _ in range(20):
        engine.step()
    found = []
    for number in range(prompts):
        engine.add(request(f"book{number}", tokens(1000, 100 + number), max_tokens=1))
        for _ in range(40):
            before = clock.now
            news = engine.step()
            assert {f"chat{i}" for i in range(3)} <= {output.request_id for output in news}
            found.append(clock.now - before)
    return found, engine


def test_without_a_target_prompts_take_the_step() -> None:
    found, engine = gaps(None)
    assert max(found) > 0.4
    engine.scheduler.abort_all()


@pytest.mark.parametrize("target_ms", [50.0, 100.0])
def test_the_target_bounds_every_step(target_ms: float) -> None:
    """Chats paused for half a second whenever somebody pasted a book."""
    found, engine = gaps(target_ms)
    late = [gap for gap in found if gap > 1.2 * target_ms / 1000]
    assert len(late) <= 2, late
    busy = [gap for gap in found if gap > 0.030]
    assert sum(busy) / len(busy) > 0.7 * target_ms / 1000, "what the target allows is used"
    assert engine.stats().step_token_budget < 512
    engine.scheduler.abort_all()


class Climbing(SimulatedRunner):
    """Prompt tokens cost more the longer their context, as attention does, and three times what they did."""

    def run(self, batch: Batch) -> StepResult:
        counts = np.diff(batch.query_start)
        beyond = ((counts - 1) * (1 + batch.context_len / 500)).sum()
        self._sleep(0.020 + 0.001 * float(beyond))
        return super().run(batch)


@pytest.mark.parametrize("target_ms", [24.0, 27.0, 60.0])
def test_the_mean_is_kept_whatever_prompts_cost(target_ms: float) -> None:
    """At least 16 tokens of a prompt went into each step, whatever they took: twice the target."""
    clock = Clock()
    engine = small_engine(
        runner=Climbing,
        clock=clock,
        max_model_len=2000,
        num_blocks=1200,
        max_num_batched_tokens=512,
        tpot_target_ms=target_ms,
    )
    engine.add(request("chat", tokens(5, 1), max_tokens=1500, ignore_eos=True))
    for _ in range(40):
        engine.step()
    for number in range(4):
        engine.add(request(f"book{number}", tokens(1000, 100 + number), max_tokens=1))
    means = []
    for _ in range(6):
        start = clock.now
        for _ in range(60):
            engine.step()
        means.append((clock.now - start) / 60)
    assert max(means) < 1.06 * target_ms / 1000, means
    assert means[1] > 0.9 * target_ms / 1000, "what the target allows is used"
    engine.scheduler.abort_all()


def test_a_context_costs() -> None:
    """The end of a long prompt was taken to cost what the beginning of another did."""
    cost = StepCost()
    for number in range(200):
        start = 100 * (number % 20)
        cost.note(4, 0.020)
        mean = start + 7.5
        cost.note(4, 0.020 + 16 * 0.001 * (1 + mean / 1000), prompt_tokens=16, context_tokens=16 * mean)
    assert cost.prompt_token_s_at(0) == pytest.approx(0.001, rel=0.1)
    assert cost.prompt_token_s_at(2000) == pytest.approx(0.003, rel=0.1)


def test_prompts_move_under_an_impossible_target() -> None:
    """A target below a step's own cost would have starved every prompt."""
    clock = Clock()
    engine = small_engine(
        clock=clock, latency=LATENCY, max_model_len=2000, num_blocks=400, tpot_target_ms=1.0
    )
    engine.add(request("chat", tokens(5, 1), max_tokens=300, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.add(request("book", tokens(500, 2), max_tokens=1))
    answers = Answers()
    started = clock.now
    for _ in range(130):
        answers.take(engine.step())
    assert answers["book", 0].finish_reason == "length"
    assert clock.now - started < 130 * 0.021 * 1.25  # prompts get a fifth of the time that decodes take
    finish(engine, answers)


def test_alone_a_prompt_takes_the_whole_step() -> None:
    """The bound held although nobody decoded: a prompt alone took ten times as long."""
    clock = Clock()
    engine = small_engine(
        clock=clock, latency=LATENCY, max_model_len=2000, num_blocks=400, tpot_target_ms=50.0
    )
    run(engine, [request("r", tokens(1000, 1), max_tokens=1)])
    assert engine.stats().num_steps == 2


def test_the_target_changes_no_answer() -> None:
    requests = [request(f"r{i}", tokens(50 + 9 * i, i), max_tokens=30, ignore_eos=True) for i in range(8)]
    paced = small_engine(clock=Clock(), latency=LATENCY, tpot_target_ms=40.0)
    assert run(paced, requests).texts() == run(small_engine(), requests).texts()


def test_the_cost_of_prompts_is_learnt_beside_that_of_decodes() -> None:
    """Prompt tokens in the fit made a decoded token look ten times as dear: drafts were given up."""
    cost = StepCost()
    assert not cost.is_known
    for _ in range(20):
        cost.note(4, 0.020 + 4 * 0.0001)
        cost.note(4, 0.020 + 4 * 0.0001 + 100 * 0.001, prompt_tokens=100)
    assert cost.is_known
    assert cost.prompt_token_s == pytest.approx(0.001, rel=0.05)
    assert cost.line(4)[0] == pytest.approx(0.0204, rel=0.01)
    cost.note(1, 0.0)  # a coarse clock
    cost.note(4, 60.0, prompt_tokens=100)  # the machine slept
    assert cost.prompt_token_s < 0.002


@pytest.mark.parametrize("name", ["tpot_target_ms", "priority_aging_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "50"])
def test_bad_settings(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        check_scheduler_config(SchedulerConfig(**{name: value}))  # type: ignore[arg-type]
