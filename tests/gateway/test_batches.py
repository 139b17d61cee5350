"""Short embedding requests that share an upstream request: whose vectors, whose tokens, whose mistakes."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import http
from tests.gateway.running import RunningGateway, Upstreams, begin, gateway
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
        "upstreams": {"one": {"url": url, "models": {"ours": price, "theirs": price}}},
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
