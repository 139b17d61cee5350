"""The semantic cache, over HTTP: a real encoder embeds, a stand-in for a model knows what means the same."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.semantic_cache import (
    answer_to,
    config_of,
    meanings,
    order,
    score,
    similarity_only,
)
from tests import http
from tests.e2e.running import RunningServer, called, serving
from tests.gateway.running import RunningGateway, Upstreams, events, gateway
from tests.gateway.test_reload import hang_up, rewrite
from tests.lab.streaming_server import Exchange, Streamer

STATE = "x-headrace-cache"
KNOWN = meanings("learn") | meanings("held-out")
LEARN, HELD_OUT = order(0)
CAPITAL = "What is the capital of Peru?"
TRUSTING = 0.9
"""A budget within which everything that the verifier passes is served."""
SAME = ["Tell me the capital of Peru.", "What's Peru's capital?", "what is peru's capital"]


async def answers(exchange: Exchange) -> None:
    """One answer for each meaning, in one of three wordings; unknown texts all mean Peru's capital."""
    text = exchange.body["messages"][-1]["content"]
    said = answer_to(text, KNOWN[text]) if text in KNOWN else "Lima is the capital of Peru."
    if exchange.body.get("stream"):
        exchange.begin()
        for event in exchange.events([f"{word} " for word in said.split()]):
            await exchange.send(event)
        await exchange.end()
    else:
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
        answer = {"object": "chat.completion", "choices": [choice], "usage": usage}
        await exchange.whole(200, json.dumps(answer).encode())


@pytest.fixture(scope="module")
def encoder() -> Iterator[RunningServer]:
    with serving("minilm-l6") as server:
        yield server


@pytest.fixture
def model(upstreams: Upstreams) -> tuple[Streamer, str]:
    return upstreams.start(answers)


def settings(model: str, encoder: str, **semantic: Any) -> dict[str, Any]:
    made = config_of(model, encoder, 0.3)
    made["cache"]["semantic"] |= semantic
    made["upstreams"]["model"]["models"]["m"] = {"price": {"input": 1.0, "output": 1.0}}
    return made


def ask(
    made: RunningGateway, text: str, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    """A question, and whatever is to be learned from the answer learned."""
    asked = {"temperature": 0, "messages": [{"role": "user", "content": text}], **body}
    answer = made.chat(headers, **asked)
    assert answer.status_code == 200, answer.text
    made.wait(lambda: made.metric("semantic_learning")[""] == 0)
    return answer


def teach(made: RunningGateway, headers: dict[str, str] | None = None, texts: list[str] = LEARN[:60]) -> None:
    for text in texts:
        ask(made, text, headers)


def test_a_question_that_means_the_same_gets_the_answer(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    streamer, url = model
    with gateway(settings(url, f"{encoder.url}/v1"), tmp_path) as made:
        teach(made)
        first = ask(made, CAPITAL)
        asked = len(streamer.asked)
        second = ask(made, SAME[0])
        assert (first.headers[STATE], second.headers[STATE]) == ("miss", "semantic-hit")
        assert 0.8 < float(second.headers["x-headrace-cache-similarity"]) < 1
        assert second.json() == first.json()
        assert float(second.headers["x-headrace-cost-usd"]) == 0
        stream = ask(made, SAME[1], stream=True, stream_options={"include_usage": True})
        assert stream.headers[STATE] == "semantic-hit"
        *_, finish, usage, done = events(stream)
        assert json.loads(finish)["choices"][0]["finish_reason"] == "stop"
        assert (json.loads(usage)["usage"]["completion_tokens"], done) == (6, "[DONE]")
        assert len(streamer.asked) == asked
        for wish in ("off", "exact", "refresh"):
            assert ask(made, SAME[2], {STATE: wish}).headers[STATE] in ("off", "miss")
        # a near miss, and what differs before the last text
        assert ask(made, "What is the capital of Chile?").headers[STATE] == "miss"
        system = {"role": "system", "content": "Answer in French."}
        for more in (
            {"messages": [system, {"role": "user", "content": SAME[0]}]},
            {"max_tokens": 4},
            {"response_format": {"type": "json_object"}},
            {"n": 2},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            {"logprobs": True},
        ):
            assert ask(made, SAME[0], **more).headers[STATE] == "miss", more
        sums = made.usage("model")
        assert sums["m"]["cache_hits"] == made.metric("semantic_lookups_total")['result="served"']
        assert sums["minilm-l6"]["requests"] > 0
        assert made.usage()["(gateway)"]["cost_usd"] == 0
        made.wait_idle()


def test_it_is_for_who_asks_for_it_and_no_tenant_gets_anothers(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    _, url = model
    config = settings(url, f"{encoder.url}/v1", by_default=False, max_false_hit_rate=TRUSTING)
    tenants = {"acme": {"limits": {"requests_per_minute": 1000}}, "other": {}}
    config |= {"authentication": "keys", "tenants": tenants}
    with gateway(config, tmp_path) as made:
        key, other = made.key("acme"), made.key("other")
        wish = {STATE: "semantic"}
        ask(made, CAPITAL, key | wish)
        assert ask(made, SAME[0], key).headers[STATE] == "miss"
        assert ask(made, SAME[1], key | wish).headers[STATE] == "semantic-hit"
        assert ask(made, SAME[1], key).headers[STATE] == "miss", "what was served is not kept as its own"
        assert ask(made, SAME[1], other | wish).headers[STATE] == "miss"
        # a sampled request is kept on request
        assert ask(made, CAPITAL, key | wish, temperature=1.0).headers[STATE] == "miss"
        assert ask(made, SAME[0], key | wish, temperature=1.0).headers[STATE] == "semantic-hit"
        assert ask(made, SAME[2], key, temperature=1.0).headers[STATE] == "off"
        # and of the exact cache's own hit it does not ask for vectors
        looked_up = made.metric("semantic_lookups_total")
        assert ask(made, CAPITAL, key | wish).headers[STATE] == "hit"
        assert made.metric("semantic_lookups_total") == looked_up


def test_answers_age_and_the_longest_unused_leave(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    _, url = model
    config = settings(url, f"{encoder.url}/v1", max_entries=10, max_false_hit_rate=1e-6)
    with gateway(config, tmp_path) as made:
        teach(made, texts=LEARN[:30])
        [row] = json.loads(called("gateway", "cache", "stats", str(made.file), "--json").stdout)
        assert (row["entries"], row["questions"] <= 20) == (30, True)
    folder = tmp_path / "aged"
    folder.mkdir()
    config = settings(url, f"{encoder.url}/v1", max_false_hit_rate=TRUSTING)
    config["cache"]["ttl_s"] = 1e-6
    with gateway(config, folder) as made:
        for text in (CAPITAL, *SAME):
            assert ask(made, text).headers[STATE] == "miss"


def test_a_reload_switches_it_on_and_off(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    _, url = model
    config = settings(url, f"{encoder.url}/v1", max_false_hit_rate=TRUSTING)
    semantic = config["cache"].pop("semantic")
    embeddings = config.pop("embeddings")
    with gateway(config, tmp_path) as made:
        ask(made, CAPITAL)
        assert ask(made, SAME[0]).headers[STATE] == "miss"
        rewrite(made, embeddings=embeddings, cache={"semantic": semantic})
        hang_up(made, "configuration reloaded")
        ask(made, CAPITAL, {STATE: "refresh"})
        assert ask(made, CAPITAL, seed=1).headers[STATE] == "miss"
        assert ask(made, SAME[0], seed=1).headers[STATE] == "semantic-hit"
        rewrite(made, embeddings=None, cache={})
        hang_up(made, "configuration reloaded")
        assert ask(made, SAME[1], seed=1).headers[STATE] == "miss"
        assert made.stop(signal.SIGTERM) == 0


def test_it_knows_after_a_restart_and_forgets_on_command(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    _, url = model
    config = settings(url, f"{encoder.url}/v1")
    with gateway(config, tmp_path) as made:
        teach(made)
        ask(made, CAPITAL)
        assert made.stop(signal.SIGTERM) == 0
    with gateway(config, tmp_path) as made:
        assert ask(made, SAME[0]).headers[STATE] == "semantic-hit"
        [row] = json.loads(called("gateway", "cache", "stats", str(made.file), "--json").stdout)
        assert row["kind"] == "answer"
        assert 0 < row["questions"] <= row["entries"]
        called("gateway", "cache", "clear", str(made.file), "--tenant", "default")
        assert ask(made, SAME[0]).headers[STATE] == "miss"
        assert ask(made, SAME[1]).headers[STATE] == "miss", "what was learned is forgotten as well"


def test_a_share_of_safe_answers_is_checked(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    streamer, url = model
    with gateway(settings(url, f"{encoder.url}/v1", explore=1), tmp_path) as made:
        teach(made)
        ask(made, CAPITAL)
        asked = len(streamer.asked)
        assert ask(made, SAME[0]).headers[STATE] == "miss"
        assert len(streamer.asked) == asked + 1
        checks = made.metric("semantic_checks_total")
        assert checks['candidate="safe",result="right"'] >= 1
        assert made.metric("semantic_lookups_total").get('result="served"', 0) == 0


async def is_down(exchange: Exchange) -> None:
    await exchange.error(500, "no encoder today")


async def never_answers(exchange: Exchange) -> None:
    await asyncio.sleep(60)


async def nonsense(exchange: Exchange) -> None:
    data = [{"index": 0, "embedding": [0.0, 0.0]}]
    await exchange.whole(200, json.dumps({"data": data}).encode())


def test_a_late_vector_is_there_for_the_next_one(
    upstreams: Upstreams, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    release = threading.Event()

    async def late(exchange: Exchange) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)
        data = [{"index": n, "embedding": [3.0, 4.0]} for n in range(len(exchange.body["input"]))]
        await exchange.whole(200, json.dumps({"data": data}).encode())

    streamer, encoder = upstreams.start(late)
    config = settings(model[1], encoder)
    config["embeddings"]["timeout_ms"] = 5
    with gateway(config, tmp_path) as made:
        for limit in (1, 2, 3):
            assert ask(made, CAPITAL, max_tokens=limit).headers[STATE] == "miss"
        assert [asked.body["input"] for asked in streamer.asked] == [[CAPITAL]], (
            "it is on its way: asked once"
        )
        assert made.metric("semantic_lookups_total") == {'result="no embedding"': 3.0}
        release.set()
        made.wait_idle()
        ask(made, CAPITAL, max_tokens=4)
        assert made.metric("semantic_lookups_total")['result="no neighbour"'] == 1
        assert len(streamer.asked) == 1


@pytest.mark.parametrize("behaviour", [is_down, never_answers, nonsense])
def test_without_embeddings_every_question_is_a_miss(
    upstreams: Upstreams, model: tuple[Streamer, str], tmp_path: Path, behaviour: Any
) -> None:
    _, encoder = upstreams.start(behaviour)
    config = settings(model[1], encoder)
    config["upstreams"]["encoder"]["kind"] = "compatible"
    config["embeddings"]["timeout_ms"] = 20
    with gateway(config, tmp_path) as made:
        for text in (CAPITAL, *SAME):
            assert ask(made, text).headers[STATE] == "miss"
        assert ask(made, CAPITAL).headers[STATE] == "hit", "the exact cache needs none"
        assert made.metric("semantic_lookups_total")['result="no embedding"'] == 4
        assert made.stop(signal.SIGTERM) == 0


def test_false_hits_stay_within_the_budget_where_similarity_alone_errs(
    encoder: RunningServer, model: tuple[Streamer, str], tmp_path: Path
) -> None:
    """Thresholds are learned on one part of the pairs; the other part, with its near-misses, counts."""
    _, url = model
    budget = 0.05
    with gateway(config_of(url, f"{encoder.url}/v1", budget), tmp_path) as made:
        teach(made, texts=LEARN)
        got = []
        for text in HELD_OUT:
            answer = ask(made, text)
            said = int(re.findall(r"\d+", answer.json()["choices"][0]["message"]["content"])[0]) // 37
            got.append((text, said if answer.headers[STATE] == "semantic-hit" else None))
    ours = score(got, KNOWN)
    assert ours.false_hit_rate <= budget
    assert ours.found >= 0.3, "and it does hit"
    vectors = encode(encoder, LEARN + HELD_OUT)
    for threshold in (0.8, 0.9):
        hits = similarity_only(LEARN + HELD_OUT, vectors, threshold)[len(LEARN) :]
        baseline = score([(text, None if hit is None else KNOWN[hit]) for text, hit in hits], KNOWN)
        assert baseline.false_hit_rate > max(ours.false_hit_rate, budget), threshold


def encode(encoder: RunningServer, texts: list[str]) -> dict[str, Any]:
    import numpy as np

    body = {"model": "minilm-l6", "input": texts}
    data = http.post(f"{encoder.url}/v1/embeddings", json=body, timeout=60).json()["data"]
    return {text: np.array(item["embedding"]) for text, item in zip(texts, data, strict=True)}
