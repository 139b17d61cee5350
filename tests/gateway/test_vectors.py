"""The embedding cache: every input of a batch by itself."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running import RunningGateway, Upstreams, gateway
from tests.gateway.test_cache import STATE, config
from tests.lab.streaming_server import Exchange, Streamer

Cached = tuple[RunningGateway, Streamer, dict[str, str], dict[str, str]]


def vector_of(item: str | list[int]) -> list[float]:
    """Something that float32 holds exactly, and that tells inputs apart."""
    return [len(item) / 4, float(sum(item if isinstance(item, list) else item.encode()) % 97)]


async def embeds(exchange: Exchange) -> None:
    """An upstream that embeds what it is asked for; ten tokens a character."""
    asked = exchange.body["input"]
    inputs = [asked] if isinstance(asked, str) or isinstance(asked[0], int) else asked
    rows: list[Any] = [vector_of(item) for item in inputs]
    if exchange.body.get("encoding_format") == "base64":
        rows = [base64.b64encode(struct.pack("<2f", *row)).decode() for row in rows]
    data = [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)]
    tokens = 10 * sum(map(len, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "model": "m", "data": data, "usage": usage}
    await exchange.whole(200, json.dumps(answer).encode())


@pytest.fixture(scope="module")
def cached(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    streamer, url = upstreams.start(embeds)
    settings = config(url)
    settings["upstreams"]["one"]["models"]["m"]["price"] = {"input": 1000.0}
    with gateway(settings, tmp_path_factory.mktemp("gateway")) as made:
        yield made, streamer, made.key("acme"), made.key("other")


def embed(made: RunningGateway, key: dict[str, str], asked: Any, **body: Any) -> httpx.Response:
    return made.client.post("/v1/embeddings", json={"model": "m", "input": asked, **body}, headers=key)


def vectors(answer: httpx.Response) -> list[Any]:
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    return [item["embedding"] for item in data]


def test_a_batch_asks_only_for_what_is_new(cached: Cached) -> None:
    made, streamer, key, _ = cached
    assert embed(made, key, ["one", "three"]).headers[STATE] == "miss"
    part = embed(made, key, ["seventeen", "three", "new", "seventeen", "one"])
    assert part.headers[STATE] == "partial-hit"
    assert streamer.asked[-1].body["input"] == ["seventeen", "new"]
    assert vectors(part) == [vector_of(text) for text in ("seventeen", "three", "new", "seventeen", "one")]
    assert part.json()["usage"] == {"prompt_tokens": 290, "total_tokens": 290}
    assert float(part.headers["x-headrace-cost-usd"]) == pytest.approx(120 * 1e-3), "what was asked"
    asked = len(streamer.asked)
    hit = embed(made, key, "new")
    assert (hit.headers[STATE], vectors(hit)) == ("hit", [vector_of("new")])
    assert hit.json()["usage"]["prompt_tokens"] == 30
    assert float(hit.headers["x-headrace-cost-usd"]) == 0
    assert len(streamer.asked) == asked


def test_what_makes_a_vector_another_one_counts(cached: Cached) -> None:
    made, _, key, other = cached
    assert embed(made, key, ["word"]).headers[STATE] == "miss"
    for more in ({"dimensions": 2}, {"truncate_prompt_tokens": 3}):
        assert [embed(made, key, ["word"], **more).headers[STATE] for _ in range(2)] == ["miss", "hit"]
    assert embed(made, other, ["word"]).headers[STATE] == "miss", "no tenant learns what another one asked"
    assert embed(made, key | {STATE: "off"}, ["word"]).headers[STATE] == "off"
    assert embed(made, key, ["word"]).headers[STATE] == "hit"


def test_one_vector_serves_both_encodings(cached: Cached) -> None:
    made, _, key, _ = cached
    packed = embed(made, key, ["packed"], encoding_format="base64")
    assert packed.headers[STATE] == "miss"
    plain = embed(made, key, ["packed"], encoding_format="float")
    assert (plain.headers[STATE], vectors(plain)) == ("hit", [vector_of("packed")])
    assert vectors(embed(made, key, ["packed"], encoding_format="base64")) == vectors(packed)


def test_token_ids_are_inputs_too(cached: Cached) -> None:
    made, _, key, _ = cached
    assert embed(made, key, [5, 6, 7]).headers[STATE] == "miss"
    part = embed(made, key, [[1, 2], [5, 6, 7]])
    assert part.headers[STATE] == "partial-hit"
    assert vectors(part) == [vector_of([1, 2]), vector_of([5, 6, 7])]


def test_an_upstream_that_answers_another_count_is_told_of(cached: Cached) -> None:
    made, streamer, key, _ = cached
    embed(made, key, ["kept"])

    async def too_few(exchange: Exchange) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}]
        await exchange.whole(200, json.dumps({"data": data}).encode())

    streamer.behaviour = too_few
    try:
        answer = embed(made, key, ["kept", "lost", "missing"])
    finally:
        streamer.behaviour = embeds
    assert answer.status_code == 502
    assert "2 embeddings were asked for" in answer.json()["error"]["message"]
    assert embed(made, key, ["lost"]).headers[STATE] == "miss", "nothing of it was kept"
    made.wait_idle()


def test_vectors_survive_a_restart(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start(embeds)
    for state in ("miss", "hit"):
        with gateway(config(url), tmp_path) as made:
            assert embed(made, made.key("acme"), ["a document", "and another"]).headers[STATE] == state
            assert made.stop() == 0
