"""A stream that breaks goes on at another upstream: its client sees one answer, or one error."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running import RunningGateway, Upstreams, decent, gateway
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

SEEN = threading.Event()
"""The client has seen the first byte."""
WORDS = ["one ", "two ", "three ", "four ", "five "]
LABEL = ": headrace:"


def chunk(exchange: Exchange, name: str, text: str, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of an upstream that gives its streams ``name`` for an id."""
    if exchange.path.endswith("/chat/completions"):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text} if text else {}}
    else:
        choice = {"index": 0, "text": text}
    told = {"id": name, "created": len(name), "model": name, "system_fingerprint": "fp"}
    return _event(told | {"choices": [choice | {"finish_reason": finish} | more]})


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def role(name: str) -> bytes:
    """The first chunk of a chat."""
    delta = {"role": "assistant", "content": ""}
    told = {"id": name, "created": len(name), "model": name, "system_fingerprint": "fp"}
    return _event(told | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def says(
    name: str,
    words: list[str],
    *,
    breaks: bool | bytes = False,
    ids: bool = False,
    prompt: int = 10,
    extra: dict[str, Any] | None = None,
) -> Behaviour:
    """Streams words, a token each; ``breaks``: then closes, once the client has seen something, or sends
    these bytes, which are no HTTP.
    """

    async def answer(exchange: Exchange) -> None:
        exchange.begin()
        if exchange.path.endswith("/chat/completions"):
            await exchange.send(role(name))
        for number, word in enumerate(words):
            told = {"token_ids": [100 + number]} if ids and exchange.body.get("resumable") else {}
            await exchange.send(chunk(exchange, name, word, **told, **(extra or {})))
            while breaks and not SEEN.is_set():
                await asyncio.sleep(0.005)
        if breaks:
            while not SEEN.is_set():
                await asyncio.sleep(0.005)
            if isinstance(breaks, bytes):
                exchange.writer.write(breaks)
                await asyncio.sleep(30)
            exchange.writer.close()
            return
        await exchange.send(chunk(exchange, name, "", "stop"))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(words),
            "total_tokens": prompt + len(words),
        }
        await exchange.send(_event({"id": name, "choices": [], "usage": usage}))
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    return answer


async def fails(exchange: Exchange) -> None:
    await exchange.error(500, "a device was lost")


async def limited(exchange: Exchange) -> None:
    await exchange.whole(429, b'{"error": {"message": "slow down"}}', extra="Retry-After: 1\r\n")


class Trio:
    """A gateway over three upstreams that are asked in their order: each weighs a thousand times the next."""

    def __init__(self, made: RunningGateway, streamers: list[Streamer]) -> None:
        self.made = made
        self.first, self.second, self.third = streamers

    def asked(self) -> list[int]:
        """How often each was."""
        return [len(each.asked) for each in (self.first, self.second, self.third)]

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        """The whole of a stream whose client has seen its first byte before anything breaks."""
        asked: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 9, "temperature": 0} | body
        if path.endswith("/chat/completions"):
            asked.setdefault("messages", [{"role": "user", "content": "count"}])
        self.made.wait_idle()  # whoever is idle is asked before one that is not
        SEEN.clear()
        with self.made.client.stream("POST", path, json=asked) as begun:
            parts = begun.iter_raw()
            first = next(parts)
            SEEN.set()
            return httpx.Response(200, headers=begun.headers, content=first + b"".join(parts))

    def row(self) -> dict[str, Any]:
        """The ledger's last row."""
        self.made.wait_idle()
        with sqlite3.connect(self.made.state / "gateway.sqlite") as db:
            db.row_factory = sqlite3.Row
            return dict(db.execute("SELECT * FROM ledger ORDER BY id DESC LIMIT 1").fetchone())


def trio_of(kind: str, upstreams: Upstreams, folder: Path, **more: Any) -> Iterator[Trio]:
    """Made once a module and kind."""
    started = [upstreams.start() for _ in range(3)]
    config: dict[str, Any] = {
        "upstreams": {
            f"u{number}": {"url": url, "kind": kind, "weight": 10.0 ** (6 - 3 * number), "models": {"m": {}}}
            for number, (_, url) in enumerate(started)
        },
        "authentication": "none",
        "health": {"eject_after": 1000, "probe_every_s": 60},
        "retries": {"budget": 1.0},
        **more,
    }
    with gateway(config, folder) as made:
        yield Trio(made, [streamer for streamer, _ in started])


@pytest.fixture(scope="module")
def vllm(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """They continue messages."""
    yield from trio_of("vllm", upstreams, tmp_path_factory.mktemp("vllm"), cache={"enabled": True})


@pytest.fixture(scope="module")
def ours(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """They continue tokens."""
    yield from trio_of("headrace", upstreams, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def cloud(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """They continue nothing."""
    yield from trio_of("openai", upstreams, tmp_path_factory.mktemp("cloud"), cache={"enabled": False})


def chunks_of(answer: httpx.Response) -> tuple[list[dict[str, Any]], bool]:
    """The chunks of a whole stream, and whether its client was told that it is a continued text."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    *blocks, last, nothing = answer.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", ""), answer.text
    comments = [block for block in blocks if block.startswith(":")]
    assert all(comment.startswith(LABEL) for comment in comments)
    return [json.loads(block[6:]) for block in blocks if not block.startswith(":")], bool(comments)


def assert_one_stream(chunks: list[dict[str, Any]], name: str) -> str:
    """One id, one role, one end; returns the text."""
    choices = [choice for one in chunks for choice in one["choices"]]
    assert {(one["id"], one.get("model", name)) for one in chunks} == {(name, name)}
    assert sum("role" in choice.get("delta", {}) for choice in choices) <= 1
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert choices[-1]["finish_reason"]
    assert all("token_ids" not in choice for choice in choices)
    return "".join(choice.get("delta", {}).get("content", "") + choice.get("text", "") for choice in choices)


def is_broken(answer: httpx.Response) -> bool:
    """Whether it ends in one error event, without [DONE]."""
    return answer.text.count("event: error") == 1 and "[DONE]" not in answer.text


def test_a_chat_goes_on_from_its_text(vllm: Trio) -> None:
    vllm.first.behaviour = says("a", WORDS[:3], breaks=True)
    vllm.second.behaviour = says("b", WORDS[3:], prompt=13)
    asked = vllm.asked()
    body = {"stream_options": {"include_usage": True}, "min_tokens": 4, "seed": 7}
    chunks, labelled = chunks_of(vllm.stream(**body))
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert labelled
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert vllm.asked() == [asked[0] + 1, asked[1] + 1, asked[2]]
    going_on = vllm.second.asked[-1].body
    assert going_on["messages"][1:] == [{"role": "assistant", "content": "one two three "}]
    assert (going_on["continue_final_message"], going_on["add_generation_prompt"]) == (True, False)
    assert (going_on["max_tokens"], going_on["min_tokens"], going_on["seed"]) == (6, 1, 7)
    row = vllm.row()
    assert (row["upstream"], row["outcome"], row["resumed"]) == ("u1", "ok", "text")
    assert (row["prompt_tokens"], row["completion_tokens"], row["estimated"]) == (10, 5, 1)
    assert vllm.made.metric("resumed_total")['how="text",upstream="u1"'] == 1
    assert vllm.stream(**body).headers["x-headrace-cache"] == "miss", "what may differ is not kept"


def test_a_completion_goes_on_from_prompt_and_text(vllm: Trio) -> None:
    vllm.first.behaviour = says("a", WORDS[:2], breaks=True)
    vllm.second.behaviour = says("b", WORDS[2:])
    chunks, labelled = chunks_of(vllm.stream("/v1/completions", prompt="zero ", user="x"))
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert labelled
    assert vllm.second.asked[-1].body["prompt"] == "zero one two "
    for more in (
        {"prompt": [1, 2]},
        {"prompt": "zero", "max_tokens": None},
        {"prompt": "zero", "echo": True},
    ):
        assert is_broken(vllm.stream("/v1/completions", **more)), more


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_what_a_text_does_not_hold_is_not_continued(vllm: Trio, body: dict[str, Any]) -> None:
    vllm.first.behaviour = says("a", WORDS[:3], breaks=True)
    asked = vllm.asked()
    assert is_broken(vllm.stream(**body))
    assert vllm.asked()[1:] == asked[1:]
    assert vllm.row()["outcome"] == "failed"


def test_said_otherwise_than_as_text_is_not_continued(vllm: Trio) -> None:
    """Reasoning, say: no other server could be told what was thought."""
    vllm.first.behaviour = says("a", [""], breaks=True, extra={"delta": {"reasoning_content": "hm"}})
    assert is_broken(vllm.stream())


def test_a_stream_breaks_twice(vllm: Trio) -> None:
    vllm.first.behaviour = says("a", WORDS[:1], breaks=True)
    vllm.second.behaviour = says("b", WORDS[1:3], breaks=True)
    vllm.third.behaviour = says("c", WORDS[3:])
    chunks, _ = chunks_of(vllm.stream())
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert vllm.third.asked[-1].body["messages"][-1]["content"] == "one two three "


def test_bytes_that_are_no_http_are_noticed(vllm: Trio) -> None:
    """aiohttp closes the connection and lets who waits for the body wait: for a minute, the idle timeout."""
    vllm.first.behaviour = says("a", WORDS[:3], breaks=b"\xff noise \x00\r\n")
    vllm.second.behaviour = says("b", WORDS[3:])
    chunks, _ = chunks_of(vllm.stream())
    assert assert_one_stream(chunks, "a") == "".join(WORDS)

    async def noise(exchange: Exchange) -> None:
        exchange.begin("application/json")
        await exchange.send(b'{"choices": ')
        exchange.writer.write(b"\xff noise \x00\r\n")
        await asyncio.sleep(30)

    vllm.first.behaviour = noise
    body = {"model": "m", "messages": [{"role": "user", "content": "whole"}], "max_tokens": 3}
    vllm.second.behaviour = decent
    answer = vllm.made.client.post("/v1/chat/completions", json=body, timeout=50)
    assert answer.headers["x-headrace-upstream"] == "u1"


@pytest.mark.parametrize("behaviour", [fails, limited])
def test_one_that_cannot_go_on_is_passed_over(vllm: Trio, behaviour: Behaviour) -> None:
    vllm.first.behaviour = says("a", WORDS[:3], breaks=True)
    vllm.second.behaviour = behaviour
    vllm.third.behaviour = says("c", WORDS[3:])
    chunks, _ = chunks_of(vllm.stream())
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    vllm.third.behaviour = fails
    vllm.second.behaviour = fails
    assert is_broken(vllm.stream()), "all of them were asked"


@pytest.mark.parametrize("body", [{}, {"logprobs": True}, {"tools": [{"function": {"name": "f"}}]}])
def test_before_its_first_word_any_stream_begins_again(cloud: Trio, body: dict[str, Any]) -> None:
    cloud.first.behaviour = says("a", [], breaks=True)
    cloud.second.behaviour = says("b", WORDS)
    chunks, labelled = chunks_of(cloud.stream(**body))
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert not labelled
    assert cloud.second.asked[-1].raw_body == cloud.first.asked[-1].raw_body
    assert cloud.row()["resumed"] == "again"
    cloud.first.behaviour = says("a", WORDS[:1], breaks=True)
    assert is_broken(cloud.stream(**body)), "an API's model continues no text"


def test_ours_go_on_from_tokens(ours: Trio) -> None:
    ours.first.behaviour = says("a", WORDS[:3], breaks=True, ids=True)
    ours.second.behaviour = says("b", WORDS[3:], ids=True)
    chunks, labelled = chunks_of(ours.stream(temperature=1, top_p=0.5))
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert not labelled, "it is the same answer"
    first, second = ours.first.asked[-1].body, ours.second.asked[-1].body
    resume = {"token_ids": [100, 101, 102], "system_fingerprint": "fp"}
    assert second == first | {"resume": resume}
    assert first["seed"] == second["seed"], "what is sampled goes on with the same noise"
    row = ours.row()
    assert (row["upstream"], row["resumed"]) == ("u1", "exact")


def test_another_build_of_ours_gets_the_text(ours: Trio) -> None:
    async def another_build(exchange: Exchange) -> None:
        if "resume" in exchange.body:
            error = {"message": "another", "code": "fingerprint_mismatch"}
            await exchange.whole(409, json.dumps({"error": error}).encode())
        else:
            await says("b", WORDS[3:], ids=True)(exchange)

    ours.first.behaviour = says("a", WORDS[:3], breaks=True, ids=True)
    ours.second.behaviour = another_build
    chunks, labelled = chunks_of(ours.stream())
    assert assert_one_stream(chunks, "a") == "".join(WORDS)
    assert labelled
    assert ours.second.asked[-1].body["continue_final_message"] is True
    assert ours.row()["resumed"] == "text"


def test_an_exact_answer_is_kept_and_replayed(ours: Trio) -> None:
    ours.first.behaviour = says("a", WORDS[:3], breaks=True, ids=True)
    ours.second.behaviour = says("b", WORDS[3:], ids=True)
    body = {"messages": [{"role": "user", "content": "to be kept"}]}
    first = ours.stream(**body)
    ours.made.wait_idle()
    again = ours.stream(**body)
    assert again.headers["x-headrace-cache"] == "hit"
    assert again.text == first.text


def test_a_client_that_wants_tokens_sees_them(ours: Trio) -> None:
    ours.first.behaviour = says("a", WORDS, ids=True)
    chunks, _ = chunks_of(ours.stream(resumable=True))
    assert [c["choices"][0].get("token_ids") for c in chunks][1:-1] == [[100 + n] for n in range(5)]


def test_a_client_that_leaves_meanwhile_leaves_nothing(ours: Trio) -> None:
    async def hangs(exchange: Exchange) -> None:
        await asyncio.sleep(30)

    ours.first.behaviour = says("a", WORDS[:3], breaks=True, ids=True)
    ours.second.behaviour = hangs
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "leave"}]}
    SEEN.clear()
    asked = len(ours.second.asked)
    with ours.made.client.stream("POST", "/v1/chat/completions", json=body) as begun:
        parts = begun.iter_raw()
        next(parts)
        SEEN.set()
        ours.made.wait(lambda: len(ours.second.asked) > asked)
        assert ours.made.metric("upstream_requests")['upstream="u1"'] == 1
    assert ours.row()["outcome"] == "cancelled"


def test_time_and_budget_hold(upstreams: Upstreams, tmp_path: Path) -> None:
    """A budget of nothing still has ten retries; the request's time is that of all its upstreams."""
    config = {"retries": {"budget": 0.0}, "request_timeout_s": 3.0, "cache": {"enabled": False}}
    for trio in trio_of("vllm", upstreams, tmp_path, **config):
        trio.first.behaviour = says("a", WORDS[:3], breaks=True)
        trio.second.behaviour = trio.third.behaviour = says("b", WORDS[3:])
        for _ in range(10):
            chunks_of(trio.stream())
        assert is_broken(trio.stream())


def breaks_once(streamer: Streamer) -> Behaviour:
    """In the middle; asked again, it says the rest."""

    async def answer(exchange: Exchange) -> None:
        streamer.behaviour = says("d", WORDS[3:], ids=True)
        await says("a", WORDS[:3], breaks=True, ids=True)(exchange)

    return answer


def test_where_it_broke_is_asked_again_when_nobody_else_can(upstreams: Upstreams, tmp_path: Path) -> None:
    """One replica is dead and another was asked at a bad time: the one that broke off is back since."""
    retries = {"budget": 1.0, "attempts": 5}
    for trio in trio_of("headrace", upstreams, tmp_path, retries=retries, cache={"enabled": False}):
        trio.first.behaviour = breaks_once(trio.first)
        trio.second.behaviour = trio.third.behaviour = fails
        chunks, _ = chunks_of(trio.stream())
        assert assert_one_stream(chunks, "a") == "".join(WORDS)
        assert trio.asked() == [2, 1, 1]
        assert trio.row()["resumed"] == "exact"


def test_one_that_hangs_in_the_middle(upstreams: Upstreams, tmp_path: Path) -> None:
    async def falls_silent(exchange: Exchange) -> None:
        exchange.begin()
        await exchange.send(role("a") + chunk(exchange, "a", "one ", token_ids=[100]))
        await asyncio.sleep(30)

    urls = [upstreams.start(falls_silent)[1], upstreams.start(says("b", WORDS[1:], ids=True))[1]]
    shared: dict[str, Any] = {"kind": "headrace", "models": {"m": {}}}
    config: dict[str, Any] = {
        "upstreams": {
            "silent": {"url": urls[0], "weight": 1000.0, "timeouts": {"idle_s": 0.5}, **shared},
            "good": {"url": urls[1], **shared},
        },
        "authentication": "none",
        "health": {"probe_every_s": 60},
    }
    with gateway(config, tmp_path) as made:
        answer = made.chat(stream=True)
        chunks, _ = chunks_of(answer)
        assert assert_one_stream(chunks, "a") == "".join(WORDS)
        made.wait_idle()
