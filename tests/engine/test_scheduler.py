"""Who runs when, what is computed, and how sequences end."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from small_engines import EOS, Answers, Clock, assert_idle, finish, request, run, small_engine, tokens

from headrace.backend.batch import Batch, Float32
from headrace.backend.simulated import SimulatedRunner
from headrace.engine.engine import Engine
from headrace.errors import ContextLengthError, InvalidRequestError, OverloadedError

ENDLESS = {"ignore_eos": True, "max_tokens": 300}


def step_until_running(engine: Engine, count: int) -> Answers:
    answers = Answers()
    for _ in range(100):
        if engine.stats().num_running_seqs == count:
            return answers
        answers.take(engine.step())
    raise AssertionError(f"never saw {count} running")


# Order


def test_a_long_prompt_does_not_stall_decodes() -> None:
    """Prefill once took the whole budget, and every stream paused while somebody pasted a book."""
    engine = small_engine(max_num_batched_tokens=16)
    for i in range(4):
        engine.add(request(f"chat{i}", tokens(4, i), **ENDLESS))
    answers = step_until_running(engine, 4)
    engine.add(request("book", tokens(300, 9), max_tokens=1, priority=-1))
    for _ in range(300 // 12 - 1):
        news = engine.step()
        assert {output.request_id for output in news} == {f"chat{i}" for i in range(4)}
        answers.take(news)
    engine.scheduler.abort_all()
    assert_idle(engine)


def test_priority_then_arrival() -> None:
    """A queue by priority alone let later requests of the same priority overtake."""
    engine = small_engine(max_num_seqs=1)
    order = []
    for name, priority in [("c", 1), ("d", 1), ("a", 0), ("b", 0), ("e", 2)]:
        engine.add(request(name, tokens(5, 1), priority=priority, max_tokens=2, ignore_eos=True))
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["a", "b", "c", "d", "e"]


def test_nobody_overtakes_one_that_waits_for_blocks() -> None:
    """A stream of small requests kept a large one waiting for ever: there was never enough room at once."""
    engine = small_engine(num_blocks=8, max_model_len=128)
    engine.add(request("running", tokens(60, 1), max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(request("large", tokens(100, 2), max_tokens=1))
    engine.add(request("small", tokens(5, 3), max_tokens=1))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["running", "large", "small"]


def test_more_sequences_than_tokens_in_a_step() -> None:
    """With a budget below the number of running sequences, the last ones were never given a token."""
    engine = small_engine(max_num_seqs=16, max_num_batched_tokens=3)
    requests = [request(f"r{i}", tokens(10, i), max_tokens=5, ignore_eos=True) for i in range(10)]
    answers = run(engine, requests)
    assert all(len(answer.token_ids) == 5 for answer in answers.values())


def test_the_victim_is_the_last_in_order() -> None:
    """Preempting the first in order for the last one's sake made both start over in turns."""
    engine = small_engine(num_blocks=8, max_model_len=128)
    engine.add(request("low", tokens(30, 1), priority=5, max_tokens=60, ignore_eos=True))
    engine.step()
    engine.add(request("high", tokens(30, 2), priority=0, max_tokens=60, ignore_eos=True))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
        engine.kv_cache.check()
    assert order == ["high", "low"]
    assert engine.stats().num_preemptions == 1


def test_a_full_pool_does_not_thrash() -> None:
    """Newcomers took the blocks that the running ones needed a moment later, and were preempted again."""
    engine = small_engine(num_blocks=20, max_model_len=128)
    run(engine, [request(f"r{i}", tokens(30, i), max_tokens=60, ignore_eos=True) for i in range(20)])
    assert engine.stats().num_preemptions < 20


# Sharing


@pytest.mark.parametrize("chunk", [16, 512])
def test_16_equal_cold_prompts_compute_the_prompt_once(chunk: int) -> None:
    """They arrived together, found nothing in the cache, and each computed the same 100 tokens."""
    engine = small_engine(max_num_batched_tokens=chunk)
    prompt = tokens(100, 1)
    answers = run(engine, [request(f"r{i}", prompt, max_tokens=1) for i in range(16)])
    assert len(answers) == 16
    assert (
        engine.stats().batch_tokens == 100 + 15 * 4
    )  # the tail behind the last full block is everyone's own
    assert engine.stats().prefix_cache_hits == 15 * 96


def test_choices_share_their_prompt() -> None:
    """n=4 cost four prefills."""
    engine = small_engine()
    run(engine, [request("r", tokens(100, 1), n=4, max_tokens=1)])
    assert engine.stats().batch_tokens == 100 + 3 * 4
    assert engine.stats().prompt_tokens == 100


def test_waiters_go_on_when_the_one_they_wait_for_is_gone() -> None:
    """The sequence that computed the shared prefix was aborted; those that waited for it waited for ever."""
    engine = small_engine(max_num_batched_tokens=16, num_blocks=30)
    prompt = tokens(200, 1)
    for name in ("first", "second", "third"):
        engine.add(request(name, prompt, max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.stats().num_running_seqs == 1
    answers = Answers()
    answers.take(engine.abort("first"))
    finish(engine, answers, max_steps=60)
    assert answers["third", 0].finish_reason == "length"
    assert engine.stats().batch_tokens < 2 * 200


def test_those_that_wait_for_a_prefix_hold_up_nobody() -> None:
    """A queue of equal prompts blocked every other request until the first of them was computed."""
    engine = small_engine(max_num_batched_tokens=100, max_model_len=200)
    for i in range(3):
        engine.add(request(f"equal{i}", tokens(90, 1), max_tokens=1))
    engine.add(request("other", tokens(5, 2), max_tokens=1))
    assert {output.request_id for output in engine.step()} == {"equal0", "other"}
    finish(engine, Answers())


def test_salts_do_not_share() -> None:
    """A tenant could tell from the time to its first token what another had asked."""
    engine = small_engine()
    prompt = tokens(64, 1)
    run(engine, [request("a", prompt, salt="x", max_tokens=1)])
    other = run(engine, [request("b", prompt, salt="y", max_tokens=1)])
    same = run(engine, [request("c", prompt, salt="x", max_tokens=1)])
    assert other["b", 0].last.num_cached_tokens == 0  # type: ignore[union-attr]
    assert same["c", 0].last.num_cached_tokens == 48  # type: ignore[union-attr]


def test_the_next_turn_finds_the_generated_tokens() -> None:
    """Only prompts were cached: every turn of a conversation computed the last answer again."""
    engine = small_engine()
    first = run(engine, [request("turn1", tokens(20, 1), max_tokens=60, ignore_eos=True)])
    history = tokens(20, 1) + first["turn1", 0].token_ids + tokens(5, 2)
    second = run(engine, [request("turn2", history, max_tokens=1)])
    assert second["turn2", 0].last.num_cached_tokens == 64  # type: ignore[union-attr] # of 79 computed


# Ends


def test_the_ways_to_end() -> None:
    """Each reason, with the stop token as the last of the tokens and named."""
    plain = run(small_engine(), [request("r", tokens(9, 1), max_tokens=300, ignore_eos=True)])[
        "r", 0
    ].token_ids
    assert len(plain) == 300

    at = plain.index(EOS)
    eos = run(small_engine(), [request("r", tokens(9, 1), max_tokens=300)])["r", 0]
    assert (eos.token_ids, eos.finish_reason) == (plain[: at + 1], "stop")
    assert eos.last.stop_token_id == EOS  # type: ignore[union-attr]

    other = plain[5]
    stop = run(small_engine(), [request("r", tokens(9, 1), ignore_eos=True, stop_token_ids=[other])])["r", 0]
    assert (stop.token_ids, stop.finish_reason) == (plain[: plain.index(other) + 1], "stop")

    length = run(small_engine(), [request("r", tokens(9, 1), max_tokens=4, ignore_eos=True)])["r", 0]
    assert (length.token_ids, length.finish_reason) == (plain[:4], "length")

    context = run(
        small_engine(max_model_len=50), [request("r", tokens(9, 1), max_tokens=None, ignore_eos=True)]
    )
    assert (context["r", 0].token_ids, context["r", 0].finish_reason) == (plain[:41], "length")


def test_min_tokens_bans_eos_and_stop_ids_until_then() -> None:
    """A stop token sampled too early was let through as text, which confused every template."""
    loves_to_stop = {EOS: 50.0, 3: 50.0}
    answer = run(
        small_engine(),
        [
            request(
                "r", tokens(9, 1), max_tokens=30, min_tokens=10, stop_token_ids=[3], logit_bias=loves_to_stop
            )
        ],
    )["r", 0]
    assert len(answer.token_ids) == 11
    assert not {EOS, 3} & set(answer.token_ids[:10])
    assert answer.finish_reason == "stop"


def test_logprobs_are_one_for_each_token() -> None:
    """Asked for none, the sampled token's, or the top ones: exactly that many come."""
    answers = run(
        small_engine(),
        [request(str(k), tokens(9, 1), max_tokens=5, ignore_eos=True, logprobs=k) for k in (None, 0, 3)],
    )
    assert answers["None", 0].logprobs == []
    for k in (0, 3):
        answer = answers[str(k), 0]
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        assert all(len(entry.top_ids) == len(entry.top_logprobs) == k for entry in answer.logprobs)
        assert all(entry.logprob <= 0 for entry in answer.logprobs)


def test_penalties_see_each_token_once_with_its_count() -> None:
    """Presence and frequency count the output only, repetition the prompt too; both survive a preemption."""
    prompt = [1, 1, 2, 3]
    engine = small_engine()
    engine.add(request("output", prompt, frequency_penalty=0.5, max_tokens=200, ignore_eos=True))
    engine.add(request("both", prompt, repetition_penalty=1.2, max_tokens=200, ignore_eos=True))
    engine.add(request("none", prompt, max_tokens=200, ignore_eos=True))
    answers = Answers()
    for _ in range(150):
        batch = engine.scheduler.schedule(0.0)
        assert batch is not None
        table = batch.sampling
        for i, name in enumerate(("output", "both", "none")):
            part = slice(table.seen_start[i], table.seen_start[i + 1])
            ids = table.seen_ids[part].tolist()
            output = answers[name, 0].token_ids if answers else []
            expected = Counter(output) if name != "none" else Counter()
            if name == "both":
                expected.update(dict.fromkeys(prompt, 0))
            assert len(ids) == len(set(ids))
            assert dict(zip(ids, table.seen_counts[part].tolist(), strict=True)) == dict(expected)
        answers.take(engine.scheduler.commit(engine.runner.run(batch), 0.0, 0.0))


def test_unseeded_requests_differ_but_follow_the_engines_seed() -> None:
    """Two requests without a seed got the same text, or a seeded engine could not be repeated."""

    def texts(seed: int | None) -> list[list[int]]:
        prompt = tokens(20, 1)
        requests = [request(f"r{i}", prompt, seed=None, max_tokens=20, ignore_eos=True) for i in range(3)]
        return [answer.token_ids for answer in run(small_engine(seed=seed), requests).values()]

    assert texts(5) == texts(5)
    assert texts(5) != texts(6)
    assert len({tuple(text) for text in texts(5)}) == 3


POISON = 13


class Poisoned(SimulatedRunner):
    """Computes NaN for every query that is the token POISON, as overflowing activations would."""

    def logits(self, batch: Batch) -> Float32:
        logits = super().logits(batch)
        logits[batch.token_ids[batch.logit_rows] == POISON] = np.nan
        return logits


def test_a_failed_row_ends_its_sequence_only() -> None:
    """NaN in one sequence ended the step with an exception, and every stream with it. Later, its last block
    was cached, and the same prompt failed again for somebody else.
    """
    engine = small_engine(runner=Poisoned)
    good = request("good", tokens(33, 1), max_tokens=20, ignore_eos=True, logit_bias={POISON: -100.0})
    bad = request("bad", [*tokens(31, 2), POISON], max_tokens=5)
    answers = run(engine, [bad, good])
    assert answers["bad", 0].finish_reason == "error"
    assert answers["bad", 0].last.error_kind == "GenerationError"  # type: ignore[union-attr]
    assert answers["bad", 0].token_ids == []
    assert len(answers["good", 0].token_ids) == 20
    longer = run(engine, [request("longer", [*tokens(31, 2), POISON, 1], max_tokens=1)])
    assert longer["longer", 0].last.num_cached_tokens == 0  # type: ignore[union-attr]


# Limits


def test_waiting_too_long_is_an_error() -> None:
    """A request at the end of a stuck queue hung until its client gave up."""
    clock = Clock()
    engine = small_engine(clock=clock, max_num_seqs=1, max_queue_time_s=20.0)
    engine.add(request("runs", tokens(5, 1), **ENDLESS))
    answers = Answers()
    answers.take(engine.step())
    engine.add(request("waits", tokens(5, 2), n=2, max_tokens=1))
    clock.sleep(21.0)
    answers.take(engine.step())
    for choice in (0, 1):
        assert answers["waits", choice].finish_reason == "error"
        assert answers["waits", choice].last.error_kind == "OverloadedError"  # type: ignore[union-attr]
    assert engine.stats().num_waiting_seqs == 0
    finish(engine, answers)
    assert answers["runs", 0].finish_reason == "length"


def test_a_preempted_sequence_does_not_expire() -> None:
    """Queue time counted from arrival also for a sequence that had run for a minute and was preempted."""
    clock = Clock()
    engine = small_engine(clock=clock, num_blocks=8, max_model_len=128, max_queue_time_s=20.0)
    for i in range(2):
        engine.add(request(f"r{i}", tokens(30, i), max_tokens=60, ignore_eos=True))
    answers = Answers()
    while engine.stats().num_preemptions == 0:
        answers.take(engine.step())
    clock.sleep(21.0)
    finish(engine, answers)
    assert all(answer.finish_reason == "length" for answer in answers.values())


def test_a_full_queue_refuses() -> None:
    """Without a bound the queue grew until memory ended."""
    engine = small_engine(max_num_seqs=1, max_waiting=2)
    for i in range(2):
        engine.add(request(f"r{i}", tokens(5, i), max_tokens=1))
    with pytest.raises(OverloadedError):
        engine.add(request("one too many", tokens(5, 3)))
    engine.step()
    engine.add(request("now", tokens(5, 3), max_tokens=1))
    finish(engine, Answers())


def test_prompts_that_never_fit_are_refused_at_once() -> None:
    """A prompt larger than the pool waited for blocks that could never come, and all others behind it."""
    engine = small_engine(num_blocks=4, max_model_len=400)
    with pytest.raises(ContextLengthError, match=r"KV pool holds 64 tokens, but the prompt has 64"):
        engine.add(request("r", tokens(64, 1)))
    run(engine, [request("r", tokens(63, 1), max_tokens=5)])
    with pytest.raises(ContextLengthError, match=r"context is 400 tokens, but the prompt has 400"):
        small_engine(max_model_len=400).add(request("r", tokens(400, 1)))


def test_two_requests_of_one_id() -> None:
    """The second one's outputs went to the first one's client."""
    engine = small_engine()
    engine.add(request("r", tokens(5, 1)))
    with pytest.raises(InvalidRequestError, match="under way"):
        engine.add(request("r", tokens(5, 1)))


# Abort


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_abort_frees_at_once(state: str) -> None:
    """A client that left kept its blocks until its last token."""
    engine = small_engine(max_num_batched_tokens=16)
    engine.add(request("r", tokens(64, 1), n=2, **ENDLESS))
    for _ in range({"waiting": 0, "prefill": 2, "decode": 20}[state]):
        engine.step()
    ended = engine.abort("r")
    assert {(output.choice, output.finish_reason) for output in ended} == {(0, "abort"), (1, "abort")}
    assert_idle(engine)
    assert engine.abort("r") == []


def test_abort_of_one_choice_leaves_the_others() -> None:
    """A stop string in one choice ended all of them."""
    engine = small_engine()
    alone = run(small_engine(), [request("r", tokens(20, 1), n=3, max_tokens=30, ignore_eos=True)])
    engine.add(request("r", tokens(20, 1), n=3, max_tokens=30, ignore_eos=True))
    answers = Answers()
    for _ in range(6):
        answers.take(engine.step())
    answers.take(engine.abort("r", 1))
    assert engine.abort("r", 1) == []
    finish(engine, answers)
    assert answers["r", 1].finish_reason == "abort"
    assert [answers["r", i].token_ids for i in (0, 2)] == [alone["r", i].token_ids for i in (0, 2)]


def test_stats_add_up() -> None:
    """The dashboards' counters: what was asked, computed, found and generated."""
    engine = small_engine(num_blocks=64)
    engine.add(request("r", tokens(40, 1), max_tokens=10, ignore_eos=True))
    engine.add(request("s", tokens(8, 2), max_tokens=10, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running_seqs, stats.num_waiting_seqs) == (2, 0)
    assert stats.num_blocks - stats.num_free_blocks == 3 + 1
    assert stats.kv_cache_usage == 4 / 64
    finish(engine, Answers())
    run(engine, [request("again", tokens(40, 1), max_tokens=10, ignore_eos=True)])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (88, 30)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (88, 32)
    assert stats.prefix_cache_hit_rate == 32 / 88
    assert stats.batch_tokens == 48 + 8 + 2 * 9 + 9
    assert stats.num_steps == 20
    assert stats.step_seconds > 0
