"""The exact cache: what is kept, for whom, and how it comes back."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.answers import AnswerCache
from headrace.gateway.config import CacheSettings
from tests.e2e.running import called
from tests.gateway.running import RunningGateway, Upstreams, decent, events, gateway, text_of
from tests.gateway.test_balance import waits_for
from tests.lab.streaming_server import Exchange, Streamer

Cached = tuple[RunningGateway, Streamer, dict[str, str], dict[str, str]]
STATE = "x-headrace-cache"


def config(url: str, **cache: Any) -> dict[str, Any]:
    return {
        "upstreams": {"one": {"url": url, "models": {"m": {"price": {"output": 5.0}}}}},
        "tenants": {"acme": {}, "other": {}},
        "cache": cache,
    }


@pytest.fixture(scope="module")
def cached(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    streamer, url = upstreams.start()
    with gateway(config(url), tmp_path_factory.mktemp("gateway")) as made:
        yield made, streamer, made.key("acme"), made.key("other")


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_deterministic_request_is_asked_once(cached: Cached, stream: bool) -> None:
    made, streamer, key, _ = cached
    asked = len(streamer.asked)
    own = {"temperature": 0, "user": f"one who streams: {stream}"}
    first = made.chat(key, **own, stream=stream)
    second = made.chat(key, stream=stream, **own)
    assert (first.headers[STATE], second.headers[STATE]) == ("miss", "hit")
    assert first.text == second.text
    assert len(streamer.asked) == asked + 1
    if not stream:
        assert float(second.headers["x-headrace-cost-usd"]) == 0
    made.wait_idle()


def test_a_replayed_stream_tells_usage_to_who_asks(cached: Cached) -> None:
    made, streamer, key, _ = cached
    asked = len(streamer.asked)
    with_usage = {"stream_options": {"include_usage": True}}
    silent = made.chat(key, temperature=0, stream=True, max_tokens=4)
    told = made.chat(key, temperature=0, stream=True, max_tokens=4, **with_usage)
    assert len(streamer.asked) == asked + 1
    assert told.headers[STATE] == "hit"
    assert '"completion_tokens": 4' in events(told)[-2]
    assert "usage" not in silent.text
    assert text_of(told) == text_of(silent)


@pytest.mark.parametrize("first", [False, True], ids=["whole first", "stream first"])
def test_an_answer_serves_both_forms(cached: Cached, first: bool) -> None:
    made, streamer, key, _ = cached
    asked = len(streamer.asked)
    body = {"temperature": 0, "max_tokens": 5, "user": f"first {first}"}
    with_usage = {"stream_options": {"include_usage": True}}
    answers = {stream: made.chat(key, stream=stream, **body) for stream in (first, not first)}
    replayed = made.chat(key, stream=True, **body, **with_usage)
    assert len(streamer.asked) == asked + 1
    assert [answers[stream].headers[STATE] for stream in (first, not first)] == ["miss", "hit"]
    whole = answers[False].json()
    assert whole["object"] == "chat.completion"
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(answers[True])}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert whole["usage"]["completion_tokens"] == 5
    assert "usage" not in answers[True].text
    last = json.loads(events(replayed)[-2])
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_completions_serve_both_forms(cached: Cached) -> None:
    made, streamer, key, _ = cached
    text = "once upon a time"
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    answer = {"id": "c", "object": "text_completion", "choices": [choice], "usage": usage}

    async def completes(exchange: Exchange) -> None:
        await exchange.whole(200, json.dumps(answer).encode())

    streamer.behaviour = completes
    body = {"model": "m", "prompt": "tell", "temperature": 0}
    try:
        assert made.client.post("/v1/completions", json=body, headers=key).json() == answer
    finally:
        streamer.behaviour = decent
    replayed = made.client.post("/v1/completions", json=body | {"stream": True}, headers=key)
    assert replayed.headers[STATE] == "hit"
    *chunks, done = events(replayed)
    read = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert ("".join(piece["text"] for piece in read), done) == (text, "[DONE]")
    assert [piece["finish_reason"] for piece in read] == [None, "stop"]


def test_what_an_upstream_gave_up_is_not_kept(cached: Cached) -> None:
    made, streamer, key, _ = cached
    choice = {"index": 0, "message": {"role": "assistant", "content": "I was"}, "finish_reason": "abort"}

    async def aborts(exchange: Exchange) -> None:
        await exchange.whole(200, json.dumps({"choices": [choice]}).encode())

    streamer.behaviour = aborts
    try:
        assert made.chat(key, temperature=0, max_tokens=21).status_code == 200
    finally:
        streamer.behaviour = decent
    assert made.chat(key, temperature=0, max_tokens=21).headers[STATE] == "miss"


def test_a_request_may_have_its_answer_made_anew(cached: Cached) -> None:
    made, streamer, key, _ = cached
    body = {"temperature": 0, "max_tokens": 22}
    made.chat(key, **body)
    asked = len(streamer.asked)
    assert made.chat(key | {STATE: "refresh"}, **body).headers[STATE] == "miss"
    assert len(streamer.asked) == asked + 1
    assert made.chat(key, **body).headers[STATE] == "hit"
    refused = made.chat(key | {STATE: "sometimes"}, **body)
    assert refused.status_code == 400
    assert "on, off, exact, semantic, refresh" in refused.json()["error"]["message"]


def test_another_version_behind_the_name_makes_answers_void(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    settings = config(url)
    for version, states in (("1", ["miss", "hit"]), ("2", ["miss", "hit"]), ("1", ["hit"])):
        settings["upstreams"]["one"]["models"]["m"]["version"] = version
        with gateway(settings, tmp_path) as made:
            key = made.key("acme")
            assert [made.chat(key, temperature=0).headers[STATE] for _ in states] == states


def test_it_is_shown_and_cleared_from_outside(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    with gateway(config(url), tmp_path) as made:
        one, two = made.key("acme"), made.key("other")
        for key in (one, two):
            made.chat(key, temperature=0)
        made.client.post("/v1/embeddings", json={"model": "m", "input": "a"}, headers=one)
        held = json.loads(called("gateway", "cache", "stats", str(made.file), "--json").stdout)
        found = {(row["kind"], row["tenant"], row["model"]): row["entries"] for row in held}
        assert found == {
            ("answer", "acme", "m"): 1,
            ("answer", "other", "m"): 1,
            ("embedding", "acme", "m"): 1,
        }
        said = called(
            "gateway", "cache", "clear", str(made.file), "--tenant", "acme", "--kind", "answer"
        ).stdout
        assert said == "forgot 1 entry\n"
        assert [made.chat(key, temperature=0).headers[STATE] for key in (one, two)] == ["miss", "hit"]
        assert called("gateway", "cache", "clear", str(made.file)).stdout == "forgot 3 entries\n"
        assert made.chat(two, temperature=0).headers[STATE] == "miss"
    settings = config(url, enabled=False)
    made.file.write_text(json.dumps(settings))
    failed = called("gateway", "cache", "stats", str(made.file))
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "has no cache" in failed.stderr


def test_sampled_requests_are_kept_on_request_only(cached: Cached) -> None:
    made, _, key, _ = cached
    for body in ({}, {"temperature": 0.7}, {"seed": 3}):
        assert [made.chat(key, **body).headers[STATE] for _ in range(2)] == ["off", "off"]
    wish = key | {STATE: "on"}
    assert [made.chat(wish, temperature=0.7).headers[STATE] for _ in range(2)] == ["miss", "hit"]
    refuse = key | {STATE: "off"}
    assert [made.chat(refuse, temperature=0).headers[STATE] for _ in range(2)] == ["off", "off"]


def test_no_tenant_gets_anothers_answer_and_every_field_counts(cached: Cached) -> None:
    made, _, key, other = cached
    body = {"temperature": 0, "max_tokens": 7}
    assert made.chat(key, **body).headers[STATE] == "miss"
    assert made.chat(other, **body).headers[STATE] == "miss"
    for more in ({"max_tokens": 8}, {"stop": "x"}, {"seed": 1}, {"tools": [{}]}, {"unknown": [1]}):
        assert made.chat(key, **body | more).headers[STATE] == "miss"
    assert made.chat(key, **body).headers[STATE] == "hit"


def test_identical_requests_at_once_are_asked_once(cached: Cached) -> None:
    made, streamer, key, _ = cached
    release = threading.Event()
    streamer.behaviour = waits_for(release)
    asked = len(streamer.asked)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            answers = [pool.submit(made.chat, key, temperature=0, max_tokens=9) for _ in range(8)]
            made.wait(lambda: made.metric("requests_running")[""] == 8)
        finally:
            release.set()
            streamer.behaviour = decent
        assert len({answer.result().text for answer in answers}) == 1
    assert len(streamer.asked) == asked + 1
    made.wait_idle()


def test_who_waited_for_a_failure_asks_for_himself(cached: Cached) -> None:
    made, streamer, key, _ = cached
    release = threading.Event()

    async def fails_late(exchange: Exchange) -> None:
        import asyncio

        while not release.is_set():
            await asyncio.sleep(0.01)
        streamer.behaviour = decent
        await exchange.error(400, "not this one")

    streamer.behaviour = fails_late
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        try:
            answers = [pool.submit(made.chat, key, temperature=0, max_tokens=11) for _ in range(3)]
            made.wait(lambda: made.metric("requests_running")[""] == 3)
        finally:
            release.set()
        assert sorted(answer.result().status_code for answer in answers) == [200, 200, 400]
    made.wait_idle()


def test_a_broken_stream_is_not_kept(cached: Cached) -> None:
    made, streamer, key, _ = cached

    async def half(exchange: Exchange) -> None:
        exchange.begin()
        for event in exchange.events(["word "] * 5)[:3]:
            await exchange.send(event)
        await exchange.end()

    streamer.behaviour = half
    try:
        made.chat(key, temperature=0, stream=True, max_tokens=13)
    finally:
        streamer.behaviour = decent
    assert made.chat(key, temperature=0, stream=True, max_tokens=13).headers[STATE] == "miss"


def test_it_survives_a_restart_and_the_ledger_says_what_it_saved(
    upstreams: Upstreams, tmp_path: Path
) -> None:
    _, url = upstreams.start()
    with gateway(config(url), tmp_path) as made:
        key = made.key("acme")
        assert made.chat(key, temperature=0).headers[STATE] == "miss"
        assert made.stop() == 0
    with gateway(config(url), tmp_path) as made:
        assert made.chat(key, temperature=0).headers[STATE] == "hit"
        [row] = json.loads(called("gateway", "usage", str(made.file), "--by", "model", "--json").stdout)
        assert (row["requests"], row["cache_hits"], row["completion_tokens"]) == (2, 1, 6)
        assert row["cost_usd"] == pytest.approx(3 * 5e-6)


def test_it_keeps_within_its_bounds(tmp_path: Path) -> None:
    """The longest unused leave first; what is too old is no hit."""
    cache = AnswerCache(tmp_path, CacheSettings(max_mib=1, ttl_s=100))
    answer = b"x" * 100_000
    for number in range(30):
        cache.put(b"%d" % number, answer, "answer", "acme", "m")
        assert cache.get(b"0") is not None, "used all the time"
    kept = [number for number in range(30) if cache.get(b"%d" % number) is not None]
    assert len(kept) * len(answer) <= 2**20
    assert kept[0] == 0
    assert kept[1:] == list(range(30 - len(kept) + 1, 30))
    cache.put(b"large", b"x" * 2**20, "answer", "acme", "m")
    assert cache.get(b"large") is None
    cache.close()
    old = AnswerCache(tmp_path, CacheSettings(max_mib=1, ttl_s=1e-9))
    assert old.get(b"0") is None
    old.close()
