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
from tests.e2e.running import run
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
    first = made.chat(key, temperature=0, stream=stream)
    second = made.chat(key, stream=stream, temperature=0)
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


def test_embeddings_are_kept(cached: Cached) -> None:
    made, _, key, _ = cached
    for state in ("miss", "hit"):
        answer = made.client.post("/v1/embeddings", json={"model": "m", "input": "a"}, headers=key)
        assert answer.headers[STATE] == state


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
        [row] = json.loads(run("gateway", "usage", str(made.file), "--by", "model", "--json").stdout)
        assert (row["requests"], row["cache_hits"], row["completion_tokens"]) == (2, 1, 6)
        assert row["cost_usd"] == pytest.approx(3 * 5e-6)


def test_it_keeps_within_its_bounds(tmp_path: Path) -> None:
    """The longest unused leave first; what is too old is no hit."""
    cache = AnswerCache(tmp_path, CacheSettings(max_mib=1, ttl_s=100))
    answer = b"x" * 100_000
    for number in range(30):
        cache.put(b"%d" % number, answer)
        assert cache.get(b"0") is not None, "used all the time"
    kept = [number for number in range(30) if cache.get(b"%d" % number) is not None]
    assert len(kept) * len(answer) <= 2**20
    assert kept[0] == 0
    assert kept[1:] == list(range(30 - len(kept) + 1, 30))
    cache.put(b"large", b"x" * 2**20)
    assert cache.get(b"large") is None
    cache.close()
    old = AnswerCache(tmp_path, CacheSettings(max_mib=1, ttl_s=1e-9))
    assert old.get(b"0") is None
    old.close()
