"""A request's tokens and logprobs do not depend on its neighbours, on chunks, on memory or on caches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_engines import Answers, Clock, finish, request, run, small_engine, tokens

from headrace.engine.request import EngineRequest

SHARED = tokens(70, seed=99)


def seventeen() -> list[EngineRequest]:
    """Requests of every kind, some of which share a prefix."""
    requests = [
        request("greedy", tokens(33, 1), temperature=0.0, max_tokens=40, ignore_eos=True),
        request("short", tokens(1, 2), max_tokens=3),
        request("exact", tokens(32, 3), max_tokens=20, logprobs=3),
        request("long", tokens(150, 4), max_tokens=60, temperature=0.7, top_p=0.9),
        request("top-k", tokens(20, 5), max_tokens=30, top_k=5, min_p=0.02, logprobs=0),
        request("three", SHARED[:64], max_tokens=25, n=3),
        request("repeats", tokens(40, 6), max_tokens=50, repetition_penalty=1.3, ignore_eos=True),
        request("counts", tokens(40, 7), max_tokens=50, presence_penalty=0.5, frequency_penalty=0.4),
        request("biased", tokens(17, 8), max_tokens=30, logit_bias={3: 4.0, 9: -100.0}),
        request("patient", tokens(17, 9), max_tokens=40, min_tokens=30, stop_token_ids=[1, 2, 3, 4, 5]),
    ]
    return requests + [
        request(f"shared{i}", SHARED[: 50 + 3 * i] + tokens(i, i), max_tokens=15 + i) for i in range(7)
    ]


def alone(
    requests: list[EngineRequest], *, max_model_len: int = 400, windows: tuple[int | None, ...] = (None,)
) -> dict[tuple[str, int], Any]:
    """What every request gets on a large engine of its own."""
    texts: dict[tuple[str, int], Any] = {}
    for each in requests:
        key = (msgspec.msgpack.encode(each), max_model_len, windows)
        if key not in _alone:
            engine = small_engine(
                max_model_len=max_model_len,
                windows=windows,
                max_num_batched_tokens=4096,
                prefix_caching=False,
            )
            _alone[key] = run(engine, [each]).texts()
        texts.update(_alone[key])
    return texts


_alone: dict[Any, dict[tuple[str, int], Any]] = {}


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
@pytest.mark.parametrize("chunk", [1, 7, 16, 4096])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_same_among_16_others_in_any_chunks(
    windows: tuple[int | None, ...], chunk: int, prefix_caching: bool
) -> None:
    """A sequence whose positions slipped by one at a chunk's edge answered differently in company."""
    requests = seventeen()
    engine = small_engine(windows=windows, max_num_batched_tokens=chunk, prefix_caching=prefix_caching)
    assert run(engine, requests).texts() == alone(requests, windows=windows)


@pytest.mark.parametrize("num_blocks", [8, 13, 31])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_same_after_preemption(num_blocks: int, prefix_caching: bool) -> None:
    """A preempted sequence that forgot its output, or its penalties' counts, went on with another text."""
    kinds = [{"temperature": 0.0}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"logprobs": 2}]
    requests = [
        request(
            f"r{i}", tokens(5 + 4 * i, i), max_tokens=70 - i, ignore_eos=True, n=1 + i % 2, **kinds[i % 4]
        )
        for i in range(8)
    ]
    engine = small_engine(num_blocks=num_blocks, max_model_len=128, prefix_caching=prefix_caching)
    assert run(engine, requests).texts() == alone(requests)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("standing", [False, True], ids=["equals", "priorities and tenants"])
def test_twenty_long_requests_on_a_pool_for_two(prefix_caching: bool, standing: bool) -> None:
    """Two sequences that took turns in preempting each other would never have ended."""
    requests = [
        request(
            f"r{i}",
            tokens(100 + i, i),
            max_tokens=100,
            ignore_eos=True,
            temperature=0.8,
            priority=i * 7 % 3 if standing else 0,
            tenant=f"t{i * 5 % 4}" if standing else "",
        )
        for i in range(20)
    ]
    engine = small_engine(
        num_blocks=26, max_num_batched_tokens=64, prefix_caching=prefix_caching, clock=Clock()
    )
    answers = run(engine, requests, max_steps=1200)
    assert answers.texts() == alone(requests)
    needed = sum(len(each.prompt_token_ids) + 99 for each in requests)
    assert engine.stats().batch_tokens < 1.3 * needed, "too much was computed again"
    assert all(len(answer.token_ids) == 100 for answer in answers.values())


def test_same_after_aborts_around_it() -> None:
    """A row or block given back by an aborted neighbour must carry nothing over to its next user."""
    requests = seventeen()
    expected = alone(requests)
    engine = small_engine(num_blocks=60, max_num_batched_tokens=48, max_num_seqs=8)
    answers = Answers()
    for i, each in enumerate(requests):
        engine.add(request(f"victim{i}", tokens(60, i), max_tokens=200, ignore_eos=True, logit_bias={1: 9.0}))
        engine.add(each)
    for i in range(len(requests)):
        for _ in range(3):
            answers.take(engine.step())
        answers.take(engine.abort(f"victim{i}"))
        engine.kv_cache.check()
    finish(engine, answers)
    mine = {key: text for key, text in answers.texts().items() if not key[0].startswith("victim")}
    assert mine == expected


def test_choices_differ_and_the_first_is_the_one_of_n_1() -> None:
    """All choices drew the same noise: n=4 returned one text four times."""
    four = run(small_engine(), [request("r", tokens(20, 1), n=4, max_tokens=20, ignore_eos=True)])
    one = run(small_engine(), [request("r", tokens(20, 1), n=1, max_tokens=20, ignore_eos=True)])
    assert four["r", 0].token_ids == one["r", 0].token_ids
    assert len({tuple(answer.token_ids) for answer in four.values()}) == 4


def test_warm_cache_gives_the_same_text() -> None:
    """A full hit on a prompt of whole blocks left nothing to compute, so no token could be sampled."""
    engine = small_engine()
    prompt = tokens(64, 1)
    cold = run(engine, [request("r", prompt, max_tokens=20, logprobs=2)])
    warm = run(engine, [request("r", prompt, max_tokens=20, logprobs=2)])
    assert warm.texts() == cold.texts()
    assert cold["r", 0].last.num_cached_tokens == 0  # type: ignore[union-attr]
    assert warm["r", 0].last.num_cached_tokens == 48  # type: ignore[union-attr]
