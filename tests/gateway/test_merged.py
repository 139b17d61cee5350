"""Identical requests at the same time: one computation, followed as it goes, whoever leaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import http
from tests.gateway.running import RunningGateway, Upstreams, begin, decent, gateway
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

STATE = "x-headrace-cache"
Merging = tuple[RunningGateway, Streamer, dict[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def merging(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Merging]:
    streamer, url = upstreams.start()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {"price": {"output": 5.0}}}}},
        "tenants": {"acme": {}, "other": {}},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        yield made, streamer, made.key("acme"), made.key("other")


def pauses(release: threading.Event, *, breaks: bool = False) -> Behaviour:
    """Two words, a pause until ``release``, the rest; or the connection's end in the place of the rest."""

    async def behave(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            while not release.is_set():
                await asyncio.sleep(0.01)
            await decent(exchange)
            return
        exchange.begin()
        events = exchange.events([f"word{n} " for n in range(exchange.max_tokens)])
        for event in events[:3]:
            await exchange.send(event)
        while not release.is_set():
            await asyncio.sleep(0.01)
        if breaks:
            exchange.writer.close()
            return
        for event in events[3:]:
            await exchange.send(event)
        await exchange.end()

    return behave


def asked_of(name: str, **more: Any) -> dict[str, Any]:
    """A deterministic chat that no other test asks."""
    return {
        "model": "m",
        "temperature": 0,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": name}],
        **more,
    }


class Client:
    """One stream, read as far as a test wants."""

    def __init__(self, made: RunningGateway, key: dict[str, str], body: dict[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        client = self._stack.enter_context(http.client(made.url))
        asking = client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}, headers=key)
        self.answer = self._stack.enter_context(asking)
        self._lines = self.answer.iter_lines()
        self.text = ""
        self.last: list[str] = []

    def read_until(self, word: str) -> None:
        """Read on until the text has ``word``."""
        while word not in self.text:
            self._take(next(self._lines))

    def read_all(self) -> str:
        for line in self._lines:
            self._take(line)
        return self.text

    def _take(self, line: str) -> None:
        if not line:
            return
        self.last.append(line)
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                self.text += choice["delta"].get("content", "")

    def leave(self) -> None:
        self._stack.close()


def rows(made: RunningGateway) -> tuple[int, int, float]:
    row = made.usage().get("acme", {"requests": 0, "cache_hits": 0, "cost_usd": 0.0})
    return row["requests"], row["cache_hits"], row["cost_usd"]


def test_every_caller_is_told_as_it_comes(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    asked, before = len(streamer.asked), rows(made)
    body = asked_of("as it comes")
    usage = {"stream_options": {"include_usage": True}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            leader = Client(made, key, body)
            leader.read_until("word1")
            follower = Client(made, key, body | usage)
            follower.read_until("word1")  # of what is still being made
            whole = pool.submit(made.chat, key, **body)
            made.wait(lambda: made.metric("requests_running")[""] == 3)
        finally:
            release.set()
            streamer.behaviour = decent
        texts = [leader.read_all(), follower.read_all()]
        answer = whole.result()
    assert texts == ["word0 word1 word2 word3 "] * 2
    assert answer.json()["choices"][0]["message"]["content"] == texts[0]
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert len(streamer.asked) == asked + 1
    states = [leader.answer.headers[STATE], follower.answer.headers[STATE], answer.headers[STATE]]
    assert states == ["miss", "merged", "merged"]
    assert [client.last[-1] for client in (leader, follower)] == ["data: [DONE]"] * 2
    assert "usage" not in "".join(leader.last)
    assert json.loads(follower.last[-2][6:])["usage"]["completion_tokens"] == 4
    assert float(answer.headers["x-headrace-cost-usd"]) == 0
    leader.leave()
    follower.leave()
    made.wait_idle()
    requests, hits, cost = rows(made)
    assert (requests - before[0], hits - before[1]) == (3, 2)
    assert cost - before[2] == pytest.approx(4 * 5e-6)
    assert made.chat(key, **body).headers[STATE] == "hit"


def test_who_began_may_leave(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    asked, before = len(streamer.asked), rows(made)
    body = asked_of("the leader leaves")
    log = made.file.parent / "log"
    left = log.read_text().count("client_gone")
    try:
        leader = Client(made, key, body)
        leader.read_until("word0")
        follower = Client(made, key, body)
        follower.read_until("word0")
        leader.leave()
        made.wait(lambda: log.read_text().count("client_gone") == left + 1)
    finally:
        release.set()
        streamer.behaviour = decent
    assert follower.read_all() == "word0 word1 word2 word3 "
    assert follower.last[-1] == "data: [DONE]"
    follower.leave()
    made.wait_idle()
    assert len(streamer.asked) == asked + 1
    requests, hits, cost = rows(made)
    assert (requests - before[0], hits - before[1]) == (2, 1)
    assert cost - before[2] == pytest.approx(4 * 5e-6), "who began it pays for it"


def test_it_ends_when_nobody_is_left(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    body = asked_of("all leave")
    try:
        clients = [Client(made, key, body) for _ in range(3)]
        for client in clients:
            client.read_until("word1")
        for client in clients:
            client.leave()
        made.wait_idle()  # though the upstream still has not ended
    finally:
        release.set()
        streamer.behaviour = decent
    assert made.chat(key, **body).headers[STATE] == "miss"


def test_who_asked_for_a_whole_answer_may_leave_too(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    asked = len(streamer.asked)
    body = asked_of("the whole leader leaves")
    log = made.file.parent / "log"
    left = log.read_text().count("client_gone")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            leave = begin(made, "chat/completions", body, key)
            made.wait(lambda: made.metric("requests_running")[""] == 1)
            follower = pool.submit(made.chat, key, **body)
            made.wait(lambda: made.metric("requests_running")[""] == 2)
            leave()
            made.wait(lambda: log.read_text().count("client_gone") == left + 1)
        finally:
            release.set()
            streamer.behaviour = decent
        answer = follower.result()
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers[STATE] == "merged"
    assert len(streamer.asked) == asked + 1
    made.wait_idle()


def test_a_stream_does_not_wait_for_a_whole_answer(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    asked = len(streamer.asked)
    body = asked_of("whole first")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            whole = pool.submit(made.chat, key, **body)
            made.wait(lambda: made.metric("requests_running")[""] == 1)
            stream = Client(made, key, body)
            stream.read_until("word1")
        finally:
            release.set()
            streamer.behaviour = decent
        assert stream.read_all() == whole.result().json()["choices"][0]["message"]["content"]
    stream.leave()
    assert len(streamer.asked) == asked + 2
    made.wait_idle()


def test_tenants_and_sampled_requests_compute_for_themselves(merging: Merging) -> None:
    made, streamer, key, other = merging
    release = threading.Event()
    streamer.behaviour = pauses(release)
    asked = len(streamer.asked)
    body, sampled = asked_of("apart"), asked_of("apart", temperature=0.7)
    try:
        clients = [Client(made, *one) for one in ((key, body), (other, body), (key, sampled), (key, sampled))]
        for client in clients:
            client.read_until("word1")
    finally:
        release.set()
        streamer.behaviour = decent
    for client in clients:
        client.read_all()
        client.leave()
    assert len(streamer.asked) == asked + 4
    made.wait_idle()


def test_what_breaks_breaks_for_all(merging: Merging) -> None:
    made, streamer, key, _ = merging
    release = threading.Event()
    streamer.behaviour = pauses(release, breaks=True)
    body = asked_of("breaks", n=2)  # several answers are not continued
    try:
        clients = [Client(made, key, body) for _ in range(2)]
        for client in clients:
            client.read_until("word1")
    finally:
        release.set()
    for client in clients:
        client.read_all()
        assert "[DONE]" not in "".join(client.last)
        assert "message" in json.loads(client.last[-1][6:])["error"]
        client.leave()
    streamer.behaviour = decent
    made.wait_idle()
    assert made.usage("model")["m"]["failed"] >= 2


def test_a_gateway_that_ends_tells_all_of_them(upstreams: Upstreams, tmp_path: Path) -> None:
    release = threading.Event()
    _, url = upstreams.start(pauses(release))
    config = {"upstreams": {"one": {"url": url, "models": {"m": {}}}}, "authentication": "none"}
    with gateway(config, tmp_path, arguments=["--drain-timeout", "0.2"]) as made:
        try:
            clients = [Client(made, {}, asked_of("drained")) for _ in range(2)]
            for client in clients:
                client.read_until("word1")
            assert made.stop() == 0
            for client in clients:
                client.read_all()
                assert "message" in json.loads(client.last[-1][6:])["error"]
                client.leave()
        finally:
            release.set()
