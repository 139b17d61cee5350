"""Short embedding requests that share an upstream request: whose vectors, whose tokens, whose mistakes.

Those of clients, and those that the gateway makes itself to tell what a request wants.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.gateway.intents.classifier import read_classifier
from tests import http
from tests.gateway.running import RunningGateway, Upstreams, begin, decent, gateway
from tests.lab.streaming_server import Exchange, Streamer

Batching = tuple[RunningGateway, Streamer, dict[str, str], dict[str, str]]
WINDOW_MS = 10_000.0  # the most: so long that only its fourth text sends a batch, however slow the machine


async def embeds(exchange: Exchange) -> None:
    """A vector of the text's length, a token a word; a text with `bad` is refused, `awful` is a failure."""
    inputs = exchange.body["input"]
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if any("bad" in text for text in inputs):
        await exchange.error(400, "there is something bad")
        return
    if any("awful" in text for text in inputs):
        await exchange.error(500, "it fell over")
        return
    tokens = [len(text.split()) for text in inputs]
    usage: dict[str, Any] = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    if exchange.body["model"] == "ours":
        usage["prompt_tokens_by_input"] = tokens
    if exchange.body["model"] == "silent":
        usage = {}
    data = [
        {"index": index, "embedding": [float(len(text)), 0.1], "object": "embedding"}
        for index, text in enumerate(inputs)
    ]
    answer = {"object": "list", "model": exchange.body["model"], "data": data, "usage": usage}
    await exchange.whole(200, json.dumps(answer).encode())


@pytest.fixture(scope="module")
def batching(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    streamer, url = upstreams.start(embeds)
    price = {"price": {"input": 1.0}}
    config = {
        "upstreams": {"one": {"url": url, "models": {"ours": price, "theirs": price, "silent": price}}},
        "tenants": {"acme": {}, "other": {}},
        "cache": {"enabled": False},
        "retries": {"attempts": 1},
        "batching": {"window_ms": WINDOW_MS, "max_inputs": 4, "short_tokens": 50},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        yield made, streamer, made.key("acme"), made.key("other")


def together(
    batching: Batching, *inputs: Any, keys: list[dict[str, str]] | None = None, **body: Any
) -> tuple[list[httpx.Response], list[Any]]:
    """Requests that come at once: their answers, and the inputs that the upstream was asked for."""
    made, streamer, key, _ = batching
    asked = len(streamer.asked)

    def embed(number: int) -> httpx.Response:
        asks = {"model": "ours", "input": inputs[number], **body}
        headers = key if keys is None else keys[number]
        return http.post(f"{made.url}/v1/embeddings", json=asks, headers=headers)

    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        answers = list(pool.map(embed, range(len(inputs))))
    return answers, [exchange.body["input"] for exchange in streamer.asked[asked:]]


def test_each_gets_its_own_and_pays_for_its_own(batching: Batching) -> None:
    made, _, _, _ = batching
    made.usage()
    answers, asked = together(batching, "a b c", ["dd", "eee ee"], ["f f f f f"])
    assert sorted(map(str, *asked)) == ["a b c", "dd", "eee ee", "f f f f f"]
    vectors = [[item["embedding"][0] for item in answer.json()["data"]] for answer in answers]
    assert vectors == [[5.0], [2.0, 6.0], [9.0]]
    assert [[item["index"] for item in answer.json()["data"]] for answer in answers] == [[0], [0, 1], [0]]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3, 3, 5]
    assert [float(answer.headers["x-headrace-cost-usd"]) for answer in answers] == pytest.approx(
        [3e-6, 3e-6, 5e-6]
    )
    assert {answer.json()["model"] for answer in answers} == {"ours"}
    assert made.metric("batches_total")[""] >= 1
    made.wait_idle()


def test_where_the_upstream_tells_only_the_sum_it_is_shared_out(batching: Batching) -> None:
    answers, asked = together(batching, "a b c", "de fg", "hij kl mno p", "q", model="theirs")
    assert len(asked) == 1
    shares = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
    assert sum(shares) == 3 + 2 + 4 + 1
    assert shares[2] == max(shares)


def test_where_the_upstream_tells_nothing_it_is_the_estimate(batching: Batching) -> None:
    answers, asked = together(batching, "a b c", "de fg", "hij kl mno p", "q", model="silent")
    assert len(asked) == 1
    shares = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
    assert sum(shares) >= len("a b cde fghij kl mno pq") // 3
    assert shares[2] == max(shares)


@pytest.mark.parametrize(("text", "status"), [("a bad one", 400), ("an awful one", 502)])
def test_a_bad_one_fails_alone(batching: Batching, text: str, status: int) -> None:
    made, _, _, _ = batching
    answers, asked = together(batching, ["good", "fine"], text, "better")
    assert [answer.status_code for answer in answers] == [200, status, 200]
    assert [answer.json()["data"][0]["embedding"][0] for answer in (answers[0], answers[2])] == [4.0, 6.0]
    assert [len(inputs) for inputs in asked][:1] == [4]
    assert len(asked) == 4, "together, and then one by one"
    made.wait_idle()


def test_they_go_when_they_are_enough(batching: Batching) -> None:
    answers, asked = together(batching, ["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"])
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [len(inputs) for inputs in asked] == [4, 4]


def test_who_does_not_go_with_them_goes_alone(batching: Batching) -> None:
    _, _, key, other = batching
    pairs = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    _, asked = together(batching, *pairs, keys=[key, other, key, other])
    assert sorted(sorted(inputs) for inputs in asked) == [["a", "b", "e", "f"], ["c", "d", "g", "h"]]
    for alone in ("word " * 100, [1, 2, 3.5]):  # too long, and no text
        _, asked = together(batching, *pairs[:2], alone)
        assert len(asked) == 2
        assert alone in asked


def test_who_leaves_does_not_hold_up_the_others(batching: Batching) -> None:
    made, streamer, key, _ = batching
    asked = len(streamer.asked)
    leave = begin(made, "embeddings", {"model": "ours", "input": "gone"}, key)
    made.wait(lambda: made.metric("requests_running")[""] == 1)
    leave()
    made.wait_idle()
    assert len(streamer.asked) == asked, "nobody waited for it any more"
    answers, sent = together(batching, ["a", "b"], ["c", "d"])
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [len(inputs) for inputs in sent] == [4]


class Encoder:
    """An upstream that encodes, and answers chats. ``inputs``: what it was asked to encode, each time."""

    def __init__(self) -> None:
        self.inputs: list[list[str]] = []
        self._size = read_classifier().dimensions

    async def __call__(self, exchange: Exchange) -> None:
        if not exchange.path.endswith("/embeddings"):
            await decent(exchange)
            return
        inputs = exchange.body["input"]
        self.inputs.append(inputs)
        if any("bad" in text for text in inputs):
            await exchange.error(400, "there is something bad")
        elif any("awful" in text for text in inputs):
            await exchange.error(500, "it fell over")
        else:
            data = [{"index": n, "embedding": [0.1] * self._size} for n in range(len(inputs))]
            tokens = [len(text.split()) for text in inputs]
            usage = {"prompt_tokens": sum(tokens), "prompt_tokens_by_input": tokens}
            await exchange.whole(200, json.dumps({"data": data, "usage": usage}).encode())


Routing = tuple[RunningGateway, Encoder, dict[str, str], dict[str, str]]


@pytest.fixture
def routing(upstreams: Upstreams, tmp_path: Path) -> Iterator[Routing]:
    """A route whose classifier asks for embeddings, of which two of a tenant's make a batch."""
    encoder = Encoder()
    _, url = upstreams.start(encoder)
    config = {
        "upstreams": {"one": {"url": url, "models": {"small": {}, "large": {}, "encoder": {}}}},
        "tenants": {"acme": {}, "other": {}},
        "routes": {"auto": {"candidates": {"small": {"quality": 0.5}, "large": {"quality": 0.9}}}},
        "embeddings": {"model": "encoder", "timeout_ms": 30_000, "window_ms": WINDOW_MS, "max_inputs": 2},
        "retries": {"attempts": 1},
    }
    with gateway(config, tmp_path) as made:
        yield made, encoder, made.key("acme"), made.key("other")


def classified(made: RunningGateway, *asks: tuple[str, dict[str, str]]) -> list[str]:
    """Requests to the route that come at once: by what each was judged."""

    def ask(one: tuple[str, dict[str, str]]) -> str:
        body = {"model": "auto", "max_tokens": 2, "messages": [{"role": "user", "content": one[0]}]}
        answer = httpx.post(f"{made.url}/v1/chat/completions", json=body, headers=one[1], timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-headrace-intent-by"]

    with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(ask, asks))


def test_texts_to_be_classified_go_together_but_never_with_another_tenants(routing: Routing) -> None:
    """Each waits for the second of its own tenant, whoever comes in between."""
    made, encoder, acme, other = routing
    asks = [("what is a mill", acme), ("what is a mill", other), ("a weir", acme), ("a sluice", other)]
    assert classified(made, *asks) == ["embedding"] * 4
    assert sorted(map(sorted, encoder.inputs)) == [
        ["a sluice", "what is a mill"],
        ["a weir", "what is a mill"],
    ]
    assert made.metric("batches_total")[""] == 2
    assert made.metric("batched_requests_total")[""] == 4
    rows = made.rows("(gateway)")
    assert sorted(row["prompt_tokens"] for row in rows) == [2, 2, 4, 4], "each row has its own tokens"
    assert {(row["outcome"], row["key"]) for row in rows} == {("ok", "")}
    assert classified(made, ("a weir", acme)) == ["embedding"]
    assert len(encoder.inputs) == 2, "it is known"
    made.wait_idle()


def test_a_text_that_cannot_be_embedded_costs_only_itself(routing: Routing) -> None:
    made, encoder, acme, _ = routing
    assert classified(made, ("a bad one", acme), ("a good one", acme)) == ["features", "embedding"]
    assert sorted(map(sorted, encoder.inputs[1:])) == [["a bad one"], ["a good one"]]
    made.wait_idle()


def test_an_encoder_that_fails_is_not_asked_for_each_of_them_again(routing: Routing) -> None:
    made, encoder, acme, _ = routing
    assert classified(made, ("an awful one", acme), ("a good one", acme)) == ["features"] * 2
    assert len(encoder.inputs) == 1
    made.wait_idle()
