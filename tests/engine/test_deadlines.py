"""Requests with a time of their own."""

from __future__ import annotations

import pytest
from small_engines import Answers, Clock, assert_idle, finish, request, run, small_engine, tokens

from headrace.backend.simulated import Latency
from headrace.engine.config import SpeculativeConfig
from headrace.engine.engine import Engine
from headrace.errors import InvalidRequestError

LATENCY = Latency(step_s=0.1, token_s=0.01)  # a prompt of 100 tokens takes 1.1 s, each token of output 0.11


def timed_engine(**settings: object) -> Engine:
    return small_engine(clock=Clock(), latency=LATENCY, **settings)  # type: ignore[arg-type]


def warmed_up(**settings: object) -> Engine:
    """An engine that knows what its steps cost."""
    engine = timed_engine(**settings)
    for number in range(5):
        run(engine, [request(f"warm{number}", tokens(50, number), max_tokens=10, ignore_eos=True)])
    return engine


def test_a_deadline_ends_a_request_that_runs() -> None:
    """Its client had given up; the answer went on for a minute."""
    engine = timed_engine()
    engine.add(request("late", tokens(10, 1), n=2, max_tokens=300, ignore_eos=True, timeout_s=1.0))
    engine.add(request("other", tokens(10, 2), max_tokens=50, ignore_eos=True))
    answers = Answers()
    finish(engine, answers)
    for choice in (0, 1):
        late = answers["late", choice]
        assert late.finish_reason == "error"
        assert late.last.error_kind == "DeadlineExceededError"  # type: ignore[union-attr]
        assert late.last.error_message == "The answer was not complete within timeout_s = 1."  # type: ignore[union-attr]
        assert 2 <= len(late.token_ids) <= 10
    assert len(answers["other", 0].token_ids) == 50
    assert (engine.stats().deadlines_missed, engine.stats().deadlines_refused) == (1, 0)


def test_a_deadline_ends_a_request_that_waits() -> None:
    engine = timed_engine(max_num_seqs=1)
    engine.add(request("first", tokens(10, 1), max_tokens=100, ignore_eos=True))
    engine.add(request("waits", tokens(10, 1), max_tokens=1, timeout_s=2.0))
    answers = Answers()
    finish(engine, answers)
    assert answers["waits", 0].last.error_kind == "DeadlineExceededError"  # type: ignore[union-attr]
    assert len(answers["first", 0].token_ids) == 100


def test_a_deadline_that_is_kept_changes_nothing() -> None:
    free = run(timed_engine(), [request("r", tokens(40, 1), max_tokens=30)])
    timed = run(warmed_up(), [request("r", tokens(40, 1), max_tokens=30, timeout_s=60.0)])
    assert timed.texts() == free.texts()


def test_what_cannot_be_in_time_fails_at_once() -> None:
    """It computed its long prompt for nothing, while others waited."""
    engine = warmed_up()
    before = engine.stats()
    engine.add(request("hopeless", tokens(350, 77), max_tokens=5, timeout_s=1.0))  # 3.6 s, and the answer
    engine.add(request("possible", tokens(50, 2), max_tokens=5, ignore_eos=True, timeout_s=6.0))
    answers = Answers()
    finish(engine, answers)
    hopeless = answers["hopeless", 0].last
    assert hopeless is not None
    assert hopeless.error_kind == "DeadlineExceededError"
    assert hopeless.error_message is not None
    assert "cannot be complete within timeout_s = 1: it takes about" in hopeless.error_message
    assert "350 tokens of its prompt" in hopeless.error_message
    assert answers["possible", 0].finish_reason == "length"
    after = engine.stats()
    assert after.deadlines_refused == 1
    assert after.batch_tokens - before.batch_tokens < 100, "the prompt was computed all the same"


def test_a_long_answer_that_was_asked_for_counts() -> None:
    """Without a stop token it takes as many steps as max_tokens says; with one it may end at once."""
    ending = {"max_tokens": 100}
    engine = warmed_up()
    answers = run(engine, [request("sure", tokens(9, 1), ignore_eos=True, timeout_s=4.0, **ending)])  # type: ignore[arg-type]
    assert answers["sure", 0].token_ids == []
    assert engine.stats().deadlines_refused == 1
    engine = warmed_up()
    run(engine, [request("maybe", tokens(9, 1), timeout_s=4.0, **ending)])  # type: ignore[arg-type]
    assert engine.stats().deadlines_refused == 0


def test_the_queue_counts_and_cached_prompts_do_not() -> None:
    """Ten equal prompts ahead in the line are computed once."""
    engine = warmed_up(max_num_seqs=2, num_blocks=400)
    shared = tokens(300, 1)
    run(engine, [request("first", shared, max_tokens=1)])
    for number in range(10):
        engine.add(request(f"equal{number}", shared, max_tokens=1))
    engine.add(request("last", tokens(20, 2), max_tokens=1, timeout_s=8.0))
    answers = Answers()
    finish(engine, answers)
    assert answers["last", 0].finish_reason == "length"
    for number in range(10):
        engine.add(request(f"different{number}", tokens(300, number + 50), max_tokens=1))
    engine.add(request("late", tokens(20, 3), max_tokens=1, timeout_s=8.0))
    finish(engine, answers)
    assert answers["late", 0].last.error_kind == "DeadlineExceededError"  # type: ignore[union-attr]
    assert engine.stats().deadlines_refused == 1


def test_speculation_may_be_fast_enough() -> None:
    """Five tokens a step are possible: nobody is refused who could be lucky."""
    lucky = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1, adaptive=False)
    engine = warmed_up(speculative=lucky)
    answers = run(engine, [request("r", tokens(9, 1), max_tokens=40, ignore_eos=True, timeout_s=4.0)])
    assert len(answers["r", 0].token_ids) > 20


def test_nobody_is_refused_before_anything_was_measured() -> None:
    engine = timed_engine()
    run(engine, [request("r", tokens(300, 1), max_tokens=1, timeout_s=0.5)])
    assert (engine.stats().deadlines_missed, engine.stats().deadlines_refused) == (0, 0) or (
        engine.stats().deadlines_missed == 1
    )


def test_an_aborted_request_has_no_deadline() -> None:
    """Its deadline passed, and another request of the same name was ended for it."""
    engine = timed_engine()
    engine.add(request("r", tokens(9, 1), max_tokens=300, ignore_eos=True, timeout_s=1.0))
    engine.step()
    engine.abort("r")
    answers = run(engine, [request("r", tokens(9, 1), max_tokens=100, ignore_eos=True)])
    assert len(answers["r", 0].token_ids) == 100
    assert_idle(engine)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_bad_timeouts_are_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        small_engine().add(request("r", tokens(5, 1), timeout_s=timeout_s))
