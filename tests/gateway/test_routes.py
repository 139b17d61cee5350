"""Routes: which model answers what, who may say otherwise, what it falls back on, and what it saves."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from headrace.gateway.intents.policy import policies
from tests.e2e.running import RunningServer, called, run, serving
from tests.gateway.running import RunningGateway, Upstreams, gateway
from tests.gateway.test_reload import hang_up, rewrite
from tests.lab.streaming_server import Exchange, Streamer

SMALL, LARGE = "small-model", "large-model"
SIMPLE = "Hello! How was your weekend?"
LABELS = (
    "Is the sentiment of this review positive, negative or neutral? Reply with one word: It broke at once."
)
CODE = "Write a Python function that merges two sorted linked lists, with unit tests."
HARD = "Implement a lock-free concurrent hash map in C++ with hazard pointers, and prove it linearizable."


@dataclass
class Routed:
    """A gateway with routes, and what its upstreams have been asked."""

    made: RunningGateway
    small: Streamer
    large: Streamer
    acme: dict[str, str]

    def ask(self, text: str, key: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        headers = {**(key or self.acme), **body.pop("headers", {})}
        messages = [{"role": "user", "content": text}]
        return self.made.chat(headers, **{"model": "auto", "messages": messages, **body})


def config(small: str, large: str, encoder: str, **more: Any) -> dict[str, Any]:
    both = {SMALL: {"quality": 0.5}, LARGE: {"quality": 0.9}}
    return {
        "upstreams": {
            "cheap": {
                "url": small,
                "models": {SMALL: {"context": 4096, "price": {"input": 1.0, "output": 1.0}}},
            },
            "dear": {"url": large, "models": {LARGE: {"price": {"input": 10.0, "output": 10.0}}}},
            "encoder": {"url": encoder, "kind": "headrace", "models": {"minilm-l6": {}}},
        },
        "embeddings": {"model": "minilm-l6", "timeout_ms": 20_000},
        "releases": {"assistant": {"versions": {"v1": {"model": SMALL}, "v2": {"model": LARGE}}}},
        "routes": {
            "auto": {"candidates": both},
            "wary": {"candidates": both, "min_confidence": 1.0},
            "lifting": {"candidates": both, "wanted": {"code": 0.5}, "lift": 1.0},
            "versions": {"candidates": {"assistant": {"quality": 0.5}, LARGE: {"quality": 0.9}}},
            "safe": {"candidates": both, "without_embedding": "large"},
        },
        "aliases": {"best": "auto"},
        "tenants": {
            "acme": {},
            "modest": {"limits": {"models": [SMALL]}},
            "metered": {},
            "capped": {"model_limits": {LARGE: {"requests_per_minute": 1}, SMALL: {"max_output": 7}}},
        },
        **more,
    }


@pytest.fixture(scope="module")
def encoder() -> Iterator[RunningServer]:
    with serving("minilm-l6") as server:
        yield server


@pytest.fixture(scope="module")
def routed(
    encoder: RunningServer, upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    (small, small_url), (large, large_url) = upstreams.start(), upstreams.start()
    asked = config(small_url, large_url, f"{encoder.url}/v1")
    with gateway(asked, tmp_path_factory.mktemp("routed")) as made:
        yield Routed(made, small, large, made.key("acme"))


@pytest.mark.parametrize(
    ("text", "intent", "model"),
    [
        (SIMPLE, "chat", SMALL),
        (LABELS, "classify", SMALL),
        (
            "Summarise in two sentences: the bridge closed, buses replaced trains, and shops lost.",
            "summarise",
            SMALL,
        ),
        (CODE, "code", LARGE),
        ("Solve 3x + 4 = 19 for x and show your steps.", "maths", LARGE),
        ("Write a melancholy poem about the last ferry of the season.", "creative", LARGE),
    ],
)
def test_a_model_is_chosen_by_intent(routed: Routed, text: str, intent: str, model: str) -> None:
    answer = routed.ask(text)
    assert answer.status_code == 200, answer.text
    told = answer.headers
    assert (told["x-headrace-intent"], told["x-headrace-route"]) == (intent, model)
    assert told["x-headrace-intent-by"] == "embedding"
    assert told["x-headrace-route-reason"] == "quality"
    assert 0.5 <= float(told["x-headrace-confidence"]) <= 1
    assert 0 <= float(told["x-headrace-difficulty"]) <= 1
    asked = routed.small if model == SMALL else routed.large
    assert asked.asked[-1].body["model"] == model
    assert asked.asked[-1].body["messages"][0]["content"] == text
    labels = f'intent="{intent}",model="{model}",reason="quality",route="auto"'
    assert routed.made.metric("routed_total")[labels] >= 1


def test_streams_say_it_too(routed: Routed) -> None:
    answer = routed.ask(SIMPLE, stream=True)
    assert answer.headers["x-headrace-route"] == SMALL
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_system_prompt_counts(routed: Routed) -> None:
    system = "You write Python code. Reply with a function and its unit tests only."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "sort by the second item"}]
    answer = routed.made.chat(routed.acme, model="auto", messages=messages)
    assert answer.headers["x-headrace-intent"] == "code"


def test_content_in_parts_and_completions_are_read(routed: Routed) -> None:
    parts = [{"type": "text", "text": CODE}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    chat = routed.made.chat(routed.acme, model="auto", messages=[{"role": "user", "content": parts}])
    body = {"model": "auto", "prompt": CODE, "max_tokens": 3}
    completion = routed.made.client.post("/v1/completions", json=body, headers=routed.acme)
    assert chat.headers["x-headrace-intent"] == completion.headers["x-headrace-intent"] == "code"


def test_an_intent_sets_decoding_where_the_client_does_not(routed: Routed) -> None:
    routed.ask(LABELS)
    assert routed.small.asked[-1].body["temperature"] == 0
    routed.ask(LABELS, temperature=0.7)
    assert routed.small.asked[-1].body["temperature"] == 0.7
    routed.ask(LABELS, top_p=0.5)
    assert "temperature" not in routed.small.asked[-1].body
    routed.ask(LABELS, n=2)
    assert "temperature" not in routed.small.asked[-1].body
    routed.ask(SIMPLE)
    assert "temperature" not in routed.small.asked[-1].body


@pytest.mark.parametrize(("word", "model"), [("small", SMALL), ("large", LARGE), (LARGE, LARGE)])
def test_a_client_may_choose(routed: Routed, word: str, model: str) -> None:
    answer = routed.ask(SIMPLE, headers={"x-headrace-route": word})
    assert answer.headers["x-headrace-route"] == model
    assert answer.headers["x-headrace-route-reason"] == "override"
    assert "x-headrace-intent" not in answer.headers


def test_a_choice_that_is_none_is_refused(routed: Routed) -> None:
    answer = routed.ask(SIMPLE, headers={"x-headrace-route": "middling"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(name in message for name in ("middling", "small", "large", SMALL, LARGE))


def test_a_model_asked_for_by_name_is_not_routed(routed: Routed) -> None:
    answer = routed.ask(CODE, model=SMALL, headers={"x-headrace-route": "large"})
    assert answer.status_code == 200
    assert "x-headrace-route" not in answer.headers
    assert routed.small.asked[-1].body["messages"][0]["content"] == CODE


def test_doubt_goes_to_the_large_model(routed: Routed) -> None:
    answer = routed.ask(SIMPLE, model="wary")
    assert answer.headers["x-headrace-route"] == LARGE
    assert answer.headers["x-headrace-route-reason"] == "confidence"


def test_difficulty_lifts(routed: Routed) -> None:
    easy = routed.ask("Print the numbers 1 to 10 in Python.", model="lifting")
    hard = routed.ask(HARD, model="lifting")
    assert (easy.headers["x-headrace-intent"], hard.headers["x-headrace-intent"]) == ("code", "code")
    assert easy.headers["x-headrace-route"] == SMALL
    assert (hard.headers["x-headrace-route"], hard.headers["x-headrace-route-reason"]) == (
        LARGE,
        "difficulty",
    )


def test_a_release_may_be_a_candidate(routed: Routed) -> None:
    answer = routed.ask(SIMPLE, model="versions")
    assert answer.headers["x-headrace-route"] == "assistant"
    assert answer.headers["x-headrace-version"] == "v1"
    assert routed.small.asked[-1].body["model"] == SMALL


def test_a_request_too_long_for_the_small_model_goes_to_the_large_one(routed: Routed) -> None:
    answer = routed.ask(SIMPLE, max_tokens=5000, n=None)
    assert answer.headers["x-headrace-intent"] == "chat"
    assert answer.headers["x-headrace-route"] == LARGE


def test_a_key_gets_what_it_may_use(routed: Routed) -> None:
    modest = routed.made.key("modest")
    assert routed.ask(CODE, modest).headers["x-headrace-route"] == SMALL
    refused = routed.ask(CODE, modest, headers={"x-headrace-route": "large"})
    assert refused.status_code == 403
    assert LARGE in refused.json()["error"]["message"]


def test_limits_of_the_chosen_model_hold(routed: Routed) -> None:
    capped = routed.made.key("capped")
    answer = routed.ask(CODE, capped)
    assert answer.status_code == 200
    refused = routed.ask(CODE, capped)
    assert refused.status_code == 429
    assert "retry-after" in refused.headers
    assert refused.headers["x-headrace-route"] == LARGE
    routed.ask(SIMPLE, capped, max_tokens=None)
    assert routed.small.asked[-1].body["max_tokens"] == 7
    assert routed.ask(SIMPLE, capped, max_tokens=8).status_code == 400
    routed.made.wait_idle()
    used = routed.made.use(f"share:capped|{LARGE}")
    assert used.running == 0
    assert used.tokens_today == answer.json()["usage"]["total_tokens"]


def test_routes_are_listed_and_write_text_only(routed: Routed) -> None:
    listed = routed.made.client.get("/v1/models", headers=routed.acme).json()["data"]
    cards = {card["id"]: card for card in listed}
    assert {"auto", "best", SMALL, LARGE} <= cards.keys()
    assert cards["best"]["root"] == "auto"
    assert cards["auto"]["max_model_len"] == 4096
    assert routed.ask(SIMPLE, model="best").headers["x-headrace-route"] == SMALL
    body = {"model": "auto", "input": "a text"}
    refused = routed.made.client.post("/v1/embeddings", json=body, headers=routed.acme)
    assert refused.status_code == 400
    assert "route" in refused.json()["error"]["message"]


def test_the_ledger_tells_what_was_saved(routed: Routed, tmp_path: Path) -> None:
    key = routed.made.key("metered")
    cheap = routed.ask(SIMPLE, key, temperature=0)
    hit = routed.ask(SIMPLE, key, temperature=0)
    assert (cheap.headers["x-headrace-cache"], hit.headers["x-headrace-cache"]) == ("miss", "hit")
    assert "x-headrace-route" not in hit.headers, "nothing was chosen"
    dear = routed.ask(CODE, key)
    usages = [answer.json()["usage"]["total_tokens"] for answer in (cheap, hit, dear)]
    routed.made.wait_idle()
    total = routed.made.usage("tenant")["metered"]
    assert total["cost_usd"] == pytest.approx((usages[0] + 10 * usages[2]) / 1e6)
    assert total["baseline_usd"] == pytest.approx(10 * sum(usages) / 1e6)
    assert total["saved_by_cache_usd"] == pytest.approx(10 * usages[1] / 1e6)
    assert total["saved_by_routing_usd"] == pytest.approx(9 * usages[0] / 1e6)
    baseline = routed.made.metric("baseline_cost_usd_total")
    assert baseline['answered="cache",model="auto",tenant="metered"'] == pytest.approx(10 * usages[1] / 1e6)
    assert baseline[f'answered="upstream",model="{SMALL}",tenant="metered"'] == pytest.approx(
        10 * usages[0] / 1e6
    )

    file = str(routed.made.file)
    table = called("gateway", "usage", file, "--by", "route", "--tenant", "metered").stdout.splitlines()
    assert table[0].split("  ")[-1].strip() == "by routing"
    assert table[1].split()[:2] == ["auto", "3"]
    by_intent = json.loads(
        called("gateway", "usage", file, "--by", "intent", "--tenant", "metered", "--json").stdout
    )
    assert {row["group"]: row["requests"] for row in by_intent} == {"chat": 1, "code": 1, "": 1}

    csv_file, json_file = tmp_path / "rows.csv", tmp_path / "rows.jsonl"
    for path in (csv_file, json_file):
        ended = called("gateway", "usage", file, "--tenant", "metered", "--export", str(path))
        assert "wrote 3 requests" in ended.stdout, ended.stderr
    rows = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert [row["intent"] for row in rows] == ["chat", "", "code"]
    assert [row["reason"] for row in rows] == ["quality", "", "quality"]
    assert [row["baseline_nano_usd"] for row in rows] == [10_000 * usage for usage in usages]
    with csv_file.open(newline="") as opened:
        read = list(csv.DictReader(opened))
    assert [row["nano_usd"] for row in read] == [str(row["nano_usd"]) for row in rows]
    assert read[0].keys() == rows[0].keys()
    unknown = called("gateway", "usage", file, "--export", str(tmp_path / "rows.xls"))
    assert unknown.returncode == 1
    assert ".parquet" in unknown.stderr


def test_the_ledger_as_parquet(routed: Routed, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    ended = called("gateway", "usage", str(routed.made.file), "--export", str(path))
    try:
        from pyarrow.parquet import read_table
    except ImportError:
        assert ended.returncode == 1
        assert "pip install pyarrow" in ended.stderr
        assert not path.exists()
    else:
        assert ended.returncode == 0, ended.stderr
        lines = tmp_path / "rows.jsonl"
        called("gateway", "usage", str(routed.made.file), "--export", str(lines))
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert rows
        assert read_table(path).to_pylist() == rows


async def silent(exchange: Exchange) -> None:
    """Answers nothing for longer than anybody waits."""
    await asyncio.sleep(60)


async def broken(exchange: Exchange) -> None:
    """An upstream that is down."""
    await exchange.whole(500, b"{}")


@pytest.mark.parametrize("behaviour", [silent, broken])
def test_without_embeddings_the_features_decide(upstreams: Upstreams, tmp_path: Path, behaviour: Any) -> None:
    (small, small_url), (large, large_url), (_, encoder) = (
        upstreams.start(),
        upstreams.start(),
        upstreams.start(behaviour),
    )
    asked = config(small_url, large_url, encoder, authentication="none")
    asked["embeddings"]["timeout_ms"] = 50
    with gateway(asked, tmp_path) as made:
        routed = Routed(made, small, large, {})
        code, chat = routed.ask(CODE), routed.ask(SIMPLE)
        for answer, intent, model in ((code, "code", LARGE), (chat, "chat", SMALL)):
            assert answer.status_code == 200
            assert answer.headers["x-headrace-intent-by"] == "features"
            assert (answer.headers["x-headrace-intent"], answer.headers["x-headrace-route"]) == (
                intent,
                model,
            )
        safe = routed.ask(SIMPLE, model="safe")
        assert safe.headers["x-headrace-route"] == LARGE
        assert safe.headers["x-headrace-route-reason"] == "no_embedding"
        assert made.metric("routed_without_embedding_total") == {'route="auto"': 2, 'route="safe"': 1}


def test_embeddings_of_another_model_are_not_used(upstreams: Upstreams, tmp_path: Path) -> None:
    """The fake encoder's vectors have two dimensions; the classifier was trained on 384."""
    urls = [upstreams.start()[1] for _ in range(3)]
    with gateway(config(*urls, authentication="none"), tmp_path) as made:
        answer = made.chat(model="auto", messages=[{"role": "user", "content": CODE}])
        assert answer.headers["x-headrace-intent-by"] == "features"
        assert "trained on" in (tmp_path / "log").read_text()


def test_a_candidate_that_is_down_is_passed_over(upstreams: Upstreams, tmp_path: Path) -> None:
    (_, small), (_, large) = upstreams.start(broken), upstreams.start()
    asked = config(small, large, small, authentication="none", health={"eject_after": 1, "eject_s": 60})
    del asked["embeddings"]
    with gateway(asked, tmp_path) as made:
        messages = [{"role": "user", "content": SIMPLE}]
        assert made.chat(model="auto", messages=messages).status_code == 502
        answer = made.chat(model="auto", messages=messages)
        assert answer.status_code == 200
        assert answer.headers["x-headrace-route"] == LARGE


def test_nothing_is_cached_while_a_candidate_is_on_trial(upstreams: Upstreams, tmp_path: Path) -> None:
    """Equal requests may get different versions then, and one's answer is not the other's."""
    urls = [upstreams.start()[1] for _ in range(2)]
    asked = config(*urls, urls[0], authentication="none")
    del asked["embeddings"]
    with gateway(asked, tmp_path) as made:

        def ask() -> str:
            messages = [{"role": "user", "content": SIMPLE}]
            answer = made.chat(model="versions", messages=messages, temperature=0)
            return str(answer.headers["x-headrace-cache"])

        assert [ask(), ask()] == ["miss", "hit"]
        assert called("gateway", "releases", "start", str(made.file), "assistant", "v2").returncode == 0
        made.wait(lambda: made.metric("release_weight")['release="assistant",version="v2"'] > 0)
        assert [ask(), ask()] == ["off", "off"]


def test_routes_follow_a_reload(upstreams: Upstreams, tmp_path: Path) -> None:
    urls = [upstreams.start()[1] for _ in range(2)]
    asked = config(*urls, urls[0], authentication="none")
    del asked["embeddings"]
    with gateway(asked, tmp_path) as made:

        def ask() -> str:
            messages = [{"role": "user", "content": SIMPLE}]
            return str(made.chat(model="auto", messages=messages).headers["x-headrace-route"])

        assert ask() == SMALL
        asked["routes"]["auto"]["wanted"] = {"cooking": 0.9}
        rewrite(made, routes=asked["routes"])
        hang_up(made, "does not know the intent cooking")
        assert ask() == SMALL
        asked["routes"]["auto"]["wanted"] = {"chat": 0.9}
        rewrite(made, routes=asked["routes"])
        hang_up(made, "configuration reloaded")
        assert ask() == LARGE


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "large-model: {quality: 0.9}",
            "other: {quality: 0.9}",
            "gateway.yaml:7: routes.auto.candidates.other: ",
        ),
        (
            "small: small-model",
            "small: tiny",
            "gateway.yaml:8: routes.auto.small: ",
        ),
        ("quality: 0.9", "quality: 1.5", "gateway.yaml:7: routes.auto.candidates.large-model.quality"),
        ("wanted: {code: 0.8}", "wanted: {cooking: 0.8}", "does not know the intent cooking; it knows chat"),
        ("temperature: 0.2", "temperature: 9", "routes.auto.decoding.chat.temperature"),
        ("temperature: 0.2", "max_tokens: 9", "routes.auto.decoding.chat.max_tokens"),
        ("  auto:", "  small-model:", "small-model is the name of a model or release already"),
        ("port: 0", "port: 0\nclassifier: nothing.json", "nothing.json cannot be read"),
        ("port: 0", "port: 0\nclassifier: gateway.yaml", "gateway.yaml is no classifier"),
    ],
)
def test_a_mistake_in_a_route_is_said(tmp_path: Path, old: str, new: str, said: str) -> None:
    good = """\
upstreams:
  one: {url: "http://127.0.0.1:1/v1", models: {small-model: {}, large-model: {}}}
routes:
  auto:
    candidates:
      small-model: {quality: 0.5}
      large-model: {quality: 0.9}
    small: small-model
    wanted: {code: 0.8}
    decoding: {chat: {temperature: 0.2}}
port: 0
"""
    assert old in good
    path = tmp_path / "gateway.yaml"
    path.write_text(good.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        policies(read_config(path))
    assert said in error.value.message


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    both = {SMALL: {"quality": 0.5}, LARGE: {"quality": 0.9}}
    upstream = {"url": "http://127.0.0.1:1/v1", "models": {SMALL: {}, LARGE: {}}}
    route = {"candidates": both, "wanted": {"cooking": 0.9}}
    path.write_text(json.dumps({"upstreams": {"one": upstream}, "routes": {"auto": route}}))
    ended = run("gateway", "run", str(path), "--port", "0")
    assert ended.returncode == 1
    assert "does not know the intent cooking" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
