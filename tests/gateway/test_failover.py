"""Upstreams that fail in every way: no client sees a broken or repeated stream, and nothing leaks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running import (
    RunningGateway,
    Upstreams,
    decent,
    events,
    gateway,
    is_error_stream,
    text_of,
)
from tests.lab.streaming_server import Behaviour, Exchange, Streamer


async def fails(exchange: Exchange) -> None:
    await exchange.error(500, "a device was lost")


async def garbage(exchange: Exchange) -> None:
    await exchange.whole(200, b"<html>hello</html>", "text/html")


async def garbage_events(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(b"data: {nonsense}\n\n")
    await exchange.end()


async def hangs(exchange: Exchange) -> None:
    await asyncio.sleep(30)


async def hangs_after_the_head(exchange: Exchange) -> None:
    exchange.begin()
    await asyncio.sleep(30)


async def closes(exchange: Exchange) -> None:
    exchange.writer.close()


async def error_first(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(b'data: {"error": {"message": "overloaded"}}\n\n')
    await exchange.end()


async def empty(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.end()


async def redirects(exchange: Exchange) -> None:
    await exchange.whole(302, b"", extra="Location: http://127.0.0.1:1/\r\n")


def rate_limited(seconds: int) -> Behaviour:
    """Asks to be left alone for so long."""

    async def answer(exchange: Exchange) -> None:
        body = b'{"error": {"message": "slow down"}}'
        await exchange.whole(429, body, extra=f"Retry-After: {seconds}\r\n")

    return answer


SEEN = threading.Event()
"""The client has seen the first byte."""


def half(
    events_sent: int,
    ending: bytes = b"",
    *,
    close: bool = False,
    hang: bool = False,
    seen: threading.Event | None = None,
) -> Behaviour:
    """So many good events, then ``ending``, then the end; after the first one it waits for ``seen``."""

    async def answer(exchange: Exchange) -> None:
        exchange.begin()
        for event in exchange.events(["word "] * 10)[:events_sent]:
            await exchange.send(event)
            while seen is not None and not seen.is_set():
                await asyncio.sleep(0.005)
        if ending:
            await exchange.send(ending)
        if hang:
            await asyncio.sleep(30)
        if close:
            exchange.writer.close()
        else:
            await exchange.end()

    return answer


Pair = tuple[RunningGateway, Streamer, Streamer]


@pytest.fixture(scope="module")
def pair(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """``bad`` is always asked first: it weighs a thousand times more. For the model ``half`` it has time."""
    bad, bad_url = upstreams.start()
    good, good_url = upstreams.start()
    times = {"first_byte_s": 1.0, "answer_s": 1.0, "idle_s": 1.0}
    begins = {"idle_s": 2.0}
    config = {
        "upstreams": {
            "bad": {"url": bad_url, "weight": 1000, "models": {"m": {}}, "timeouts": times},
            "half": {"url": bad_url, "weight": 1000, "models": {"half": {}}, "timeouts": begins},
            "good": {"url": good_url, "models": {"m": {}, "half": {}}},
        },
        "authentication": "none",
        "health": {"eject_after": 1000, "probe_every_s": 60},
        "retries": {"budget": 1.0},
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        yield made, bad, good


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "behaviour",
    [fails, garbage, garbage_events, hangs, hangs_after_the_head, closes, error_first, empty, redirects],
)
def test_a_failure_before_the_first_byte_goes_elsewhere(
    pair: Pair, behaviour: Behaviour, stream: bool
) -> None:
    made, bad, good = pair
    bad.behaviour = behaviour
    asked = len(bad.asked), len(good.asked)
    answer = made.chat(stream=stream)
    assert answer.status_code == 200, answer.text
    tries = 2 if behaviour is closes else 1  # a pooled connection may close just when it is used
    assert (len(bad.asked), len(good.asked)) == (asked[0] + tries, asked[1] + 1)
    if stream:
        assert text_of(answer) == "word0 word1 word2 "
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "word0 word1 word2 "
    assert answer.headers["x-headrace-upstream"] == "good"
    made.wait_idle()


@pytest.mark.parametrize(
    "behaviour",
    [
        half(4, seen=SEEN),
        half(4, close=True, seen=SEEN),
        half(4, hang=True, seen=SEEN),
        half(4, b'data: {"choices": [{"index": 0, "del', close=True, seen=SEEN),
        half(4, b"data: {nonsense}\n\n", seen=SEEN),
        half(4, b"nonsense\n\n", seen=SEEN),
        half(4, b'data: {"error": {"message": "lost"}}\n\n', seen=SEEN),
        half(4, b'event: error\ndata: {"error": {"message": "lost"}}\n\n', close=True, seen=SEEN),
        half(4, b"data: [DONE]\n\n", seen=SEEN),
        half(4, b'data: {"choices": [7]}\n\n', seen=SEEN),
    ],
)
def test_a_failure_in_the_middle_is_one_error_event(pair: Pair, behaviour: Behaviour) -> None:
    made, bad, good = pair
    bad.behaviour = behaviour
    asked = len(good.asked)
    SEEN.clear()
    body = {"model": "half", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    with made.client.stream("POST", "/v1/chat/completions", json=body) as begun:
        parts = begun.iter_raw()
        first = next(parts)
        SEEN.set()
        answer = httpx.Response(200, headers=begun.headers, content=first + b"".join(parts))
    assert is_error_stream(answer), answer.text
    text = "".join(json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in events(answer)[:-1])
    assert text == "word " * 3, "what came before it, once"
    assert len(good.asked) == asked, "nothing is asked twice once the client has seen a byte"
    made.wait_idle()


@pytest.mark.parametrize(
    "behaviour", [half(13), half(12, close=True), half(13, b"data: [DONE]\n"), half(12, b"data: [DONE]")]
)
def test_a_whole_answer_is_whole_without_the_last_formalities(pair: Pair, behaviour: Behaviour) -> None:
    made, bad, _ = pair
    bad.behaviour = behaviour
    assert text_of(made.chat(model="half", stream=True, max_tokens=10)) == "word " * 10
    made.wait_idle()  # else the next one would find it busier than the other


def test_an_upstream_that_asks_for_patience_is_left_alone(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad, bad_url = upstreams.start(rate_limited(60))
    good, good_url = upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {
            "bad": {"url": bad_url, "weight": 1000, "models": {"m": {}}},
            "good": {"url": good_url, "models": {"m": {}}},
        },
        "authentication": "none",
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        for _ in range(4):
            assert made.chat().headers["x-headrace-upstream"] == "good"
        assert len(bad.asked) == 1
        good.behaviour = rate_limited(30)
        refused = made.chat()
        assert refused.status_code == 429
        assert 20 < int(refused.headers["retry-after"]) <= 30, "until the first of them is back"


def test_a_connection_that_closes_as_it_is_used_is_tried_once_more(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where there is no other upstream: most servers close idle connections whenever they like."""
    streamer, url = upstreams.start()

    async def closes_once(exchange: Exchange) -> None:
        streamer.behaviour = decent
        exchange.writer.close()

    config = {"upstreams": {"one": {"url": url, "models": {"m": {}}}}, "authentication": "none"}
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        for stream in (True, False):
            streamer.behaviour = closes_once
            assert made.chat(stream=stream).status_code == 200


def test_when_all_fail_the_last_failure_is_told(pair: Pair) -> None:
    made, bad, good = pair
    bad.behaviour = good.behaviour = fails
    try:
        for stream in (True, False):
            answer = made.chat(stream=stream)
            assert answer.status_code == 502
            assert "a device was lost" in answer.json()["error"]["message"]
    finally:
        bad.behaviour = good.behaviour = decent


@pytest.mark.parametrize("stream", [False, True])
def test_when_all_have_failed_once_they_are_asked_again(pair: Pair, stream: bool) -> None:
    """As many as ``retries.attempts`` are, three."""
    made, bad, good = pair
    asked = len(bad.asked) + len(good.asked)

    async def second_time(exchange: Exchange) -> None:
        if len(bad.asked) + len(good.asked) == asked + 3:
            return await decent(exchange)
        await fails(exchange)

    bad.behaviour = good.behaviour = second_time
    try:
        answer = made.chat(stream=stream)
    finally:
        bad.behaviour = good.behaviour = decent
    assert answer.status_code == 200
    assert "word2" in answer.text


def test_an_upstream_that_keeps_failing_is_ejected_and_comes_back(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad, bad_url = upstreams.start(fails)
    _, good_url = upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {
            "bad": {"url": bad_url, "weight": 1000, "models": {"m": {}}},
            "good": {"url": good_url, "models": {"m": {}}},
        },
        "authentication": "none",
        "health": {"eject_after": 3, "eject_s": 2.0, "recover_s": 0.4, "probe_every_s": 60},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        while len(bad.asked) < 3:
            assert made.chat().headers["x-headrace-upstream"] == "good"
        assert made.metric("upstream_share")['upstream="bad"'] == 0
        assert made.chat().headers["x-headrace-upstream"] == "good"
        assert len(bad.asked) == 3
        bad.behaviour = decent
        made.wait(lambda: made.metric("upstream_share")['upstream="bad"'] == 1.0)
        assert made.chat().headers["x-headrace-upstream"] == "bad"


def test_clients_are_not_told_where_upstreams_are(tmp_path: Path) -> None:
    config = {
        "upstreams": {"secret-host": {"url": "http://127.0.0.1:9/v1", "models": {"m": {}}}},
        "authentication": "none",
    }
    with gateway(config, tmp_path) as made:
        answer = made.chat()
        assert answer.status_code == 502
        assert "no connection" in answer.json()["error"]["message"]
        assert "127.0.0.1" not in answer.text


def test_probes_find_a_dead_upstream_before_requests_do(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, url = upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {
            "dead": {"url": "http://127.0.0.1:9/v1", "weight": 1000, "models": {"m": {}}},
            "good": {"url": url, "models": {"m": {}}},
        },
        "authentication": "none",
        "health": {"eject_after": 2, "probe_every_s": 0.05},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        made.wait(lambda: made.metric("upstream_share")['upstream="dead"'] == 0)
        assert made.chat().status_code == 200
        assert made.metric("retries_total")[""] == 0


def test_many_clients_on_hostile_upstreams(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every client gets a whole stream or one error event; the ledger is the sum of all usages."""
    kinds = [decent, fails, half(4, close=True), garbage_events, decent, rate_limited(1), closes, decent]
    turn = iter(range(10**6))

    async def moody(exchange: Exchange) -> None:
        await kinds[next(turn) % len(kinds)](exchange)

    urls = [upstreams.start(behaviour)[1] for behaviour in (moody, moody, decent)]
    config: dict[str, Any] = {
        "upstreams": {
            f"u{number}": {"url": url, "models": {"m": {"price": {"output": 1.0}}}}
            for number, url in enumerate(urls)
        },
        "authentication": "none",
        "cache": {"enabled": False},
        "retries": {"budget": 1.0},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:

        def ask(number: int) -> int:
            """Tokens of the answer, by what the client was told; 0 where it was told of a failure."""
            stream = number % 2 == 0
            extra = {"stream_options": {"include_usage": True}} if stream else {}
            answer = made.chat(stream=stream, max_tokens=1 + number % 5, **extra)
            if answer.status_code != 200:
                assert answer.status_code in (429, 502), answer.text
                return 0
            if not stream:
                return int(answer.json()["usage"]["completion_tokens"])
            if events(answer)[-1] != "[DONE]":
                assert is_error_stream(answer)
                return 0
            words = text_of(answer).split()
            assert words == [f"word{n}" for n in range(len(words))], "whole, in order, once"
            return int(json.loads(events(answer)[-2])["usage"]["completion_tokens"])

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            tokens = sum(pool.map(ask, range(200)))
        made.wait_idle()
        assert tokens > 100
        by_outcome = made.metric("requests_total")
        assert sum(by_outcome.values()) == 200
        settled = made.usage()["default"]
        assert settled["requests"] == 200
        broken = made.metric("upstream_failures_total")
        cut = sum(value for labels, value in broken.items() if "mid_stream" in labels)
        # a stream that breaks after four events is charged with what had come: role and three words
        assert settled["completion_tokens"] == tokens + 4 * cut


def refuses(status: int, error: Any) -> Behaviour:
    """Says no, in an engine's own way."""

    async def answer(exchange: Exchange) -> None:
        await exchange.whole(status, json.dumps(error).encode())

    return answer


TOO_LONG = {"error": {"message": "shorten it", "code": "context_length_exceeded"}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, TOO_LONG),
        (
            400,
            {"object": "error", "message": "This model's maximum context length is 8 tokens.", "code": 400},
        ),
        (400, {"error": {"code": 400, "message": "the request exceeds the available context size"}}),
        (400, {"error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8"}}),
        (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 8", "error_type": "validation"}),
    ],
)
def test_a_prompt_too_long_for_one_goes_to_another(pair: Pair, status: int, error: Any, stream: bool) -> None:
    made, bad, good = pair
    bad.behaviour, good.behaviour = refuses(status, error), decent
    asked, failed = len(bad.asked), made.metric("upstream_failures")
    answer = made.chat(stream=stream)
    assert (answer.status_code, answer.headers["x-headrace-upstream"]) == (200, "good")
    assert len(bad.asked) == asked + 1
    assert made.metric("upstream_failures") == failed, "that is no failure"
    made.wait_idle()


def test_what_is_too_long_for_all_is_told_so(pair: Pair) -> None:
    made, bad, good = pair
    bad.behaviour = good.behaviour = refuses(400, TOO_LONG)
    asked = len(bad.asked), len(good.asked)
    answer = made.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (len(bad.asked), len(good.asked)) == (asked[0] + 1, asked[1] + 1)
    bad.behaviour = refuses(400, {"error": {"message": "temperature must not be negative"}})
    assert made.chat().status_code == 400
    assert len(good.asked) == asked[1] + 1, "other mistakes are the client's alone"
    good.behaviour = decent
    made.wait_idle()
