"""Documents that are too long for one request: parts, their merge, and who pays for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from headrace.gateway.shaping.documents import cut
from tests.e2e.running import called
from tests.gateway.running import RunningGateway, Upstreams, begin, gateway, text_of
from tests.lab.streaming_server import Exchange, Streamer

PLAN = {"over_tokens": 400, "part_tokens": 100, "part_output_tokens": 8, "max_parts": 8, "parallel": 2}
PRICE = {"input": 1.0, "output": 5.0}
TEXT = " ".join(f"Sentence number {number} stands here." for number in range(50))
Made = tuple[RunningGateway, "Reader", dict[str, str], dict[str, str]]


class Reader:
    """An upstream that answers a part with its number, and a merge with the notes' words."""

    def __init__(self) -> None:
        self.fails: int | None = None
        self.held = threading.Event()
        self.held.set()
        self.now = self.most = 0
        self.streamer: Streamer | None = None

    async def __call__(self, exchange: Exchange) -> None:
        part = re.search(r"\nPart (\d+) of (\d+):\n", exchange.body["messages"][-1]["content"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            while not self.held.is_set():
                await asyncio.sleep(0.01)
            if part is not None and int(part[1]) == self.fails:
                await exchange.error(400, "I do not like this one")
                return
            text = f"note {part[1]}" if part is not None else "all of it"
            await self._answer(exchange, text)
        finally:
            self.now -= 1

    async def _answer(self, exchange: Exchange, text: str) -> None:
        words = [f"{word} " for word in text.split()]
        if exchange.body.get("stream"):
            exchange.begin()
            for event in exchange.events(words):
                await exchange.send(event)
            await exchange.end()
            return
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        answer = {"choices": [choice], "usage": exchange.usage(len(words))}
        await exchange.whole(200, json.dumps(answer).encode())

    @property
    def asked(self) -> list[dict[str, Any]]:
        assert self.streamer is not None
        return [exchange.body for exchange in self.streamer.asked]


@pytest.fixture(scope="module")
def made(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    reader = Reader()
    reader.streamer, url = upstreams.start(reader)
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {"context": 1000, "price": PRICE}, "plain": {}}}},
        "tenants": {
            "acme": {"limits": {"tokens_per_day": 1_000_000}},
            "poor": {"limits": {"tokens_per_minute": 1000}, "key_limits": {"max_context": 600}},
        },
        "aliases": {"reader": "m"},
        "documents": {"reports": PLAN | {"models": ["reader"]}, "auto": {"part_output_tokens": 8}},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as running:
        yield running, reader, running.key("acme"), running.key("poor")


def ask(made: Made, text: str, key: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    running, _, acme, _ = made
    plan = body.pop("plan", None)
    headers = (key or acme) | ({"x-headrace-document-plan": plan} if plan else {})
    messages = [
        {"role": "system", "content": "You are exact."},
        {"role": "user", "content": "Earlier."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": text},
    ]
    return running.chat(headers, **{"model": "reader", "max_tokens": 4, "messages": messages, **body})


def test_parts_and_their_merge(made: Made) -> None:
    running, reader, _, _ = made
    before, asked = running.usage("key"), len(reader.asked)
    task = f"Which numbers are there?\n<document>\n{TEXT}\n</document>\nOnly the primes."
    answer = ask(made, task, temperature=0.5, tools=[{}], stop=["x"])
    assert answer.status_code == 200, answer.text
    *parts, merge = reader.asked[asked:]
    count = len(parts)
    assert answer.headers["x-headrace-document-plan"] == "reports"
    assert answer.headers["x-headrace-parts"] == str(count)
    assert 4 <= count <= 8
    told = {}
    for part in parts:
        assert [message["role"] for message in part["messages"]] == ["system", "user"]
        prompt = part["messages"][-1]["content"]
        assert "Task: Which numbers are there?\n\nOnly the primes.\n" in prompt
        number, of, piece = re.search(r"\nPart (\d+) of (\d+):\n(.*)", prompt, re.DOTALL).groups()  # type: ignore[union-attr]
        assert int(of) == count
        told[int(number)] = piece
        assert (part["max_tokens"], part["temperature"]) == (8, 0.5)
        assert not part.keys() & {"tools", "stop", "stream"}
        assert len(piece) <= 300
    assert "".join(told[number] for number in range(1, count + 1)) == TEXT
    assert [message["role"] for message in merge["messages"]] == ["system", "user", "assistant", "user"]
    last = merge["messages"][-1]["content"]
    assert "\n\n".join(f"[{n}] note {n}" for n in range(1, count + 1)) in last
    assert "Sentence" not in last
    assert (merge["stop"], merge["max_tokens"]) == (["x"], 4)
    assert "document_plan" not in merge
    # one request of the tenant's; tokens and cost are those of all
    [(key, after)] = running.usage("key").items()
    earlier = before.get(key, {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost_usd": 0.0})
    assert after["requests"] - earlier["requests"] == 1
    headers = {
        name: float(answer.headers[f"x-headrace-parts-{name}"]) for name in ("prompt-tokens", "cost-usd")
    }
    prompt = headers["prompt-tokens"] + answer.json()["usage"]["prompt_tokens"]
    assert after["prompt_tokens"] - earlier["prompt_tokens"] == prompt
    assert after["completion_tokens"] - earlier["completion_tokens"] == 2 * count + 3
    cost = float(answer.headers["x-headrace-cost-usd"])
    assert cost == pytest.approx(after["cost_usd"] - earlier["cost_usd"])
    assert cost == pytest.approx((prompt + 5 * (2 * count + 3)) * 1e-6)
    assert headers["cost-usd"] < cost
    exported = running.file.parent / "rows.jsonl"
    called("gateway", "usage", str(running.file), "--export", str(exported))
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    mine = [row["part"] for row in rows if row["request"] == answer.headers["x-request-id"]]
    assert (sorted(mine), mine[-1]) == ([*range(count + 1)], 0)
    log = [json.loads(line) for line in (running.file.parent / "log").read_text().splitlines()]
    logged = [row for row in log if row.get("event") == "document part"][-count:]
    assert {row["part"] for row in logged} == {*range(1, count + 1)}
    assert {row["request_id"] for row in logged} == {answer.headers["x-request-id"]}
    running.wait_idle()


def test_the_merge_is_streamed(made: Made) -> None:
    answer = ask(made, TEXT, stream=True)
    assert text_of(answer) == "all of it "
    assert answer.headers["x-headrace-parts"] == "6"


def test_parts_are_read_a_few_at_a_time(made: Made) -> None:
    running, reader, _, _ = made
    reader.most = 0
    reader.held.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            asking = pool.submit(ask, made, TEXT)
            running.wait(lambda: reader.now == 2)
        finally:
            reader.held.set()
        assert asking.result().status_code == 200
    assert reader.most == 2
    running.wait_idle()


def test_parts_are_kept_like_any_answer(made: Made) -> None:
    _, reader, _, _ = made
    first = ask(made, TEXT, temperature=0)
    asked = len(reader.asked)
    second = ask(made, TEXT, temperature=0)
    assert len(reader.asked) == asked
    assert (first.headers["x-headrace-cache"], second.headers["x-headrace-cache"]) == ("miss", "hit")
    assert float(second.headers["x-headrace-cost-usd"]) == 0
    assert ask(made, TEXT + " One more.", temperature=0).status_code == 200
    assert len(reader.asked) == asked + 1  # only what has changed is read, and this gives the same notes


@pytest.mark.parametrize(
    ("text", "body", "split"),
    [
        (TEXT, {}, True),
        ("short", {}, False),
        (TEXT, {"model": "m"}, False),  # not by this name, unless it is asked for
        (TEXT, {"model": "m", "plan": "reports"}, True),
        (TEXT, {"model": "m", "document_plan": "reports"}, True),
        (TEXT, {"plan": "off"}, False),
        (TEXT, {"plan": "auto"}, False),  # which goes by the model's context
        (TEXT * 3, {"plan": "auto"}, True),
    ],
)
def test_when_it_is_done(made: Made, text: str, body: dict[str, Any], split: bool) -> None:
    answer = ask(made, text, **body)
    assert answer.status_code == 200, answer.text
    assert ("x-headrace-parts" in answer.headers) == split


def test_a_part_that_fails_ends_it(made: Made) -> None:
    running, reader, _, _ = made
    reader.fails = 3
    try:
        refused = ask(made, TEXT)
    finally:
        reader.fails = None
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == "part 3 of 6 of the document failed: I do not like this one"
    running.wait_idle()
    row = running.usage("key")
    assert sum(entry["cost_usd"] for entry in row.values()) > 0, "what was read costs"


@pytest.mark.parametrize(
    ("text", "body", "said"),
    [
        (TEXT, {"plan": "unknown"}, "there is: auto, reports, off"),
        (TEXT, {"document_plan": 3}, "there is: auto, reports, off"),
        (TEXT * 2, {}, "makes 12 parts of about 100 tokens; the plan reports allows 8"),
        (TEXT, {"max_tokens": 900}, "the model has 1000"),
        ([{"type": "image_url", "image_url": {}}, {"type": "text", "text": TEXT}], {}, "all text"),
    ],
)
def test_what_cannot_be_is_refused(made: Made, text: Any, body: dict[str, Any], said: str) -> None:
    _, reader, _, _ = made
    asked = len(reader.asked)
    refused = ask(made, text, **body)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]
    assert len(reader.asked) == asked


def test_the_quota_must_hold_all_parts(made: Made) -> None:
    _, reader, _, poor = made
    asked = len(reader.asked)
    refused = ask(made, TEXT, poor)  # no prompt has over 600 tokens, but all together have over 1000
    assert refused.status_code == 400
    assert "this request alone needs up to" in refused.json()["error"]["message"]
    assert len(reader.asked) == asked


def test_a_client_that_leaves_ends_the_parts(made: Made) -> None:
    running, reader, key, _ = made
    reader.held.clear()
    body = {"model": "reader", "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]}
    try:
        leave = begin(running, "chat/completions", body, key)
        running.wait(lambda: reader.now > 0)
        leave()
        running.wait_idle()
    finally:
        reader.held.set()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("{models: [x]}", "x is a model that no upstream has"),
        ("{part_prompt: 'no place'}", "part_prompt needs {{part}}"),
        ("{merge_prompt: '{{notes}} {{what}}'}", "it may have count, notes, task"),
        ("{part_tokens: 20, overlap_tokens: 11}", "half of part_tokens"),
    ],
)
def test_a_plan_that_cannot_be_is_told_with_its_line(tmp_path: Path, plan: str, said: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"upstreams: {{one: {{url: 'http://u/v1', models: {{m: {{}}}}}}}}\ndocuments:\n  d: {plan}\n"
    )
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert f"{file}:3: documents.d" in refused.value.message
    assert said in refused.value.message


@given(st.text(max_size=400), st.integers(8, 100), st.booleans())
def test_pieces_are_the_text(text: str, most_bytes: int, overlaps: bool) -> None:
    overlap = most_bytes // 2 if overlaps else 0
    pieces = cut(text, most_bytes, overlap)
    assert all(len(piece.encode()) <= most_bytes for piece in pieces)
    if not overlaps:
        assert "".join(pieces) == text
        return
    at = 0
    for piece in pieces:  # each begins within what was there, or right behind it
        begin = text.find(piece, max(at - most_bytes, 0))
        assert 0 <= begin <= at
        at = begin + len(piece)
    assert text.endswith(pieces[-1])
