"""Prompts counted by the upstream's tokenizer: what is reserved, what is asked again, what if it is down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running import RunningGateway, Upstreams, decent, gateway
from tests.gateway.test_reload import hang_up, rewrite
from tests.lab.streaming_server import Exchange, Streamer

WORDS = "word " * 40
MANY = 1_000_000
TOKENIZATION = {"min_tokens": 20, "timeout_ms": 60_000, "send_ids": True}


class Counts:
    """An upstream with a tokenizer that knows words."""

    def __init__(self) -> None:
        self.works = True
        self.slow = False

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path != "/tokenize":
            await decent(exchange)
            return
        while self.slow:
            await asyncio.sleep(0.01)
        if not self.works:
            await exchange.error(404, "not here")
            return
        messages = exchange.body.get("messages")
        text = messages[-1]["content"] if messages else exchange.body["prompt"]
        ids = [len(word) for word in text.split()]
        await exchange.whole(
            200, json.dumps({"count": len(ids), "max_model_len": 99, "tokens": ids}).encode()
        )


Made = tuple[RunningGateway, Streamer, Counts]


@pytest.fixture(scope="module")
def made(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    counts = Counts()
    streamer, url = upstreams.start(counts)
    config = {
        "upstreams": {
            "one": {"url": url, "kind": "headrace", "models": {"m": {"name": "theirs"}}},
            "two": {"url": url, "kind": "compatible", "models": {"unknown": {}}},
        },
        "tenants": {"acme": {"key_limits": {"tokens_per_minute": MANY}}},
        "tokenization": TOKENIZATION,
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as running:
        yield running, streamer, counts


def reserved(made: Made, **body: Any) -> int:
    """Tokens that a request of three tokens' answer takes from a new key's quota, less the answer's."""
    running, _, _ = made
    answer = running.chat(running.key("acme"), **body)
    assert answer.status_code == 200, answer.text
    return MANY - int(answer.headers["x-ratelimit-remaining-tokens"]) - 3


def estimate(text: str) -> int:
    """Of a chat of one user's message: 8 for the message, and one for three bytes of text and role."""
    return 8 + -(-(len(text) + len("user")) // 3)


def asked(streamer: Streamer, path: str) -> list[dict[str, Any]]:
    return [exchange.body for exchange in streamer.asked if exchange.path.endswith(path)]


def test_what_is_reserved_is_exact(made: Made) -> None:
    _, streamer, _ = made
    messages = [{"role": "user", "content": WORDS}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert reserved(made, messages=messages, tools=tools) == 40
    [counted] = asked(streamer, "/tokenize")
    assert counted == {"model": "theirs", "messages": messages, "tools": tools}
    assert reserved(made, messages=messages, tools=tools) == 40
    assert len(asked(streamer, "/tokenize")) == 1, "it is known"


def test_who_cannot_count_is_not_asked(made: Made) -> None:
    _, streamer, _ = made
    before = len(asked(streamer, "/tokenize"))
    assert reserved(made, model="unknown", messages=[{"role": "user", "content": WORDS}]) == estimate(WORDS)
    assert reserved(made, messages=[{"role": "user", "content": "short"}]) == estimate("short")
    assert len(asked(streamer, "/tokenize")) == before


@pytest.mark.parametrize("how", ["works", "slow"])
def test_without_a_count_the_estimate_holds(made: Made, how: str) -> None:
    running, _, counts = made
    setattr(counts, how, how == "slow")
    text = f"{how} {WORDS}"
    try:
        if how == "slow":
            rewrite(running, tokenization=TOKENIZATION | {"timeout_ms": 20})
            hang_up(running, "configuration reloaded")
        assert reserved(made, messages=[{"role": "user", "content": text}]) == estimate(text)
    finally:
        counts.works, counts.slow = True, False
        rewrite(running, tokenization=TOKENIZATION)
        hang_up(running, "configuration reloaded")
    assert running.metric("token_counts_total")['result="failed"'] >= 1


def test_completions_may_be_asked_by_ids(made: Made) -> None:
    running, streamer, _ = made
    body = {"model": "m", "prompt": WORDS, "max_tokens": 2}
    for more, prompt in (({}, [4] * 40), ({"echo": True}, WORDS)):
        running.client.post("/v1/completions", json=body | more, headers=running.key("acme"))
        assert asked(streamer, "/completions")[-1]["prompt"] == prompt


def test_a_context_that_fits_exactly_is_let_through(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start(Counts())
    config = {
        "upstreams": {"one": {"url": url, "kind": "vllm", "models": {"m": {}}}},
        "authentication": "none",
        "tenants": {"default": {"limits": {"max_context": 43}}},
    }
    messages = [{"role": "user", "content": WORDS}]
    with gateway(config | {"tokenization": {"min_tokens": 70, "timeout_ms": 60_000}}, tmp_path) as running:
        assert running.chat(messages=messages).status_code == 200
        assert running.chat(messages=messages, max_tokens=4).status_code == 400
        estimated = [{"role": "user", "content": WORDS[:175]}]  # shorter, but not counted
        assert running.chat(messages=estimated).status_code == 400
