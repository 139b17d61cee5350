"""Releases from outside: canaries that decide, A/B tests that report, and nothing lost at a switch."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from tests.e2e.running import called, run
from tests.gateway.conftest import Places
from tests.gateway.running import RunningGateway, Upstreams, decent, gateway, text_of
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

CANARY = {"steps": [50, 100], "hold_s": 0.2, "min_requests": 10}
Two = tuple[RunningGateway, Streamer, Streamer]


def config_of(one: str, two: str, **changes: Any) -> dict[str, Any]:
    return {
        "upstreams": {
            "one": {"url": one, "models": {"old": {}}},
            "two": {"url": two, "models": {"new": {}}},
        },
        "aliases": {"helper": "assistant"},
        "releases": {
            "assistant": {
                "versions": {"v1": {"model": "old"}, "v2": {"model": "new"}, "v3": {"model": "new"}},
                "canary": CANARY,
            }
        },
        "tenants": {"acme": {"limits": {"models": ["assistant"]}}, "other": {}},
        **changes,
    }


@contextmanager
def two(upstreams: Upstreams, folder: Path, **changes: Any) -> Iterator[Two]:
    (first, one), (second, other) = upstreams.start(), upstreams.start()
    with gateway(config_of(one, other, **changes), folder) as made:
        yield made, first, second


def releases(made: RunningGateway, command: str, *arguments: str) -> str:
    ended = called("gateway", "releases", command, str(made.file), "assistant", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def report(made: RunningGateway) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(releases(made, "report", "--json"))
    return told


def drive(
    made: RunningGateway, headers: dict[str, str], over: Callable[[], bool], **body: Any
) -> Counter[str]:
    """Ask until something is true; how often each version answered, and how often with an error."""
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + 120
    while not over():
        assert time.monotonic() < deadline, (seen, report(made))
        for _ in range(5):
            answer = made.chat(headers, model="assistant", **body)
            seen[answer.headers.get("x-headrace-version", "")] += 1
            seen[str(answer.status_code)] += 1
    return seen


def weight(made: RunningGateway, version: str) -> float:
    return made.metric("release_weight")[f'release="assistant",version="{version}"']


def failing(how: Callable[[Exchange], Any]) -> Behaviour:
    async def behaviour(exchange: Exchange) -> None:
        await how(exchange)

    return behaviour


def test_a_good_canary_is_promoted_without_a_lost_request(
    upstreams: Upstreams, places: Places, tmp_path: Path
) -> None:
    with two(upstreams, tmp_path, **places().config) as (made, _, second):
        headers = made.key("acme")
        assert made.chat(headers, model="helper").headers["x-headrace-version"] == "v1"
        assert "50%" in releases(made, "start", "v2")
        made.wait(lambda: weight(made, "v2") == 50)
        seen = drive(made, headers, lambda: weight(made, "v2") == 100)
        assert seen["200"] == seen["v1"] + seen["v2"]
        assert seen["v2"] >= 10
        assert made.chat(headers, model="assistant").headers["x-headrace-version"] == "v2"
        assert second.asked[-1].body["model"] == "new"
        told = report(made)
        assert (told["stable"], told["previous"]) == ("v2", "v1")
        assert [event["what"] for event in told["history"]] == ["promoted", "started"]
        assert "no regression" in told["verdict"]
        by_version = made.usage("version")
        assert by_version["assistant/v2"]["requests"] >= seen["v2"]
        assert made.stop() == 0
    with gateway(json.loads(json.dumps(config_again(made))), tmp_path) as again:
        assert again.chat(headers, model="assistant").headers["x-headrace-version"] == "v2"
        releases(again, "rollback")
        again.wait(lambda: weight(again, "v1") == 100)
        assert again.chat(headers, model="assistant").headers["x-headrace-version"] == "v1"


def config_again(made: RunningGateway) -> dict[str, Any]:
    import yaml

    read: dict[str, Any] = yaml.safe_load(made.file.read_text())
    return read


def test_a_canary_that_fails_goes_back(upstreams: Upstreams, tmp_path: Path) -> None:
    slow_step = {**CANARY, "hold_s": 3600}
    changes = config_of("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1")["releases"]
    changes["assistant"]["canary"] = slow_step
    with two(upstreams, tmp_path, releases=changes, health={"eject_after": 1000}) as (made, _, second):
        second.behaviour = failing(lambda exchange: exchange.error(400, "what is this?"))
        headers = made.key("acme")
        releases(made, "start", "v2")
        made.wait(lambda: weight(made, "v2") == 50)
        seen = drive(made, headers, lambda: weight(made, "v2") == 0)
        assert seen["400"] >= 3
        told = report(made)
        assert told["stable"] == "v1"
        assert "100.00% of the requests failed, of v1 0.00%" in told["verdict"]
        assert {made.chat(headers, model="assistant").status_code for _ in range(10)} == {200}
        counted = made.metric("release_requests_total")
        assert counted['outcome="refused",release="assistant",version="v2"'] == seen["400"]
        made.wait_idle()


def test_a_canary_that_is_slow_goes_back(upstreams: Upstreams, tmp_path: Path) -> None:
    changes = config_of("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1")["releases"]
    changes["assistant"]["canary"] = {**CANARY, "hold_s": 3600}

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.2)
        await decent(exchange)

    with two(upstreams, tmp_path, releases=changes) as (made, _, second):
        second.behaviour = slow
        headers = made.key("acme")
        releases(made, "start", "v2")
        made.wait(lambda: weight(made, "v2") == 50)
        drive(made, headers, lambda: weight(made, "v2") == 0, stream=True)
        told = report(made)
        assert "TTFT p95 is " in told["verdict"]
        stable, candidate = told["sides"]
        assert candidate["median_ttft_s"] > max(0.19, stable["median_ttft_s"])


def test_an_ab_test_keeps_its_keys_apart_and_tells_how_sure_it_is(
    upstreams: Upstreams, tmp_path: Path
) -> None:
    with two(upstreams, tmp_path) as (made, _, _):
        headers = made.key("acme")
        releases(made, "start", "v2", "--ab", "40")
        made.wait(lambda: weight(made, "v2") == 40)
        users = [f"user-{number}" for number in range(150)]

        def version_of(user: str) -> str:
            by_header = made.chat({**headers, "x-headrace-key": user}, model="assistant")
            by_field = made.chat(headers, model="assistant", user=user)
            score = 1.0 if by_field.headers["x-headrace-version"] == "v2" else 0.2
            for answer in (by_header, by_field):
                told = {"request_id": answer.headers["x-request-id"], "score": score}
                assert made.client.post("/v1/feedback", json=told, headers=headers).status_code == 200
            assert by_header.headers["x-headrace-version"] == by_field.headers["x-headrace-version"]
            return by_field.headers["x-headrace-version"]

        with ThreadPoolExecutor(4) as pool:
            versions = list(pool.map(version_of, users))
        assert 35 <= versions.count("v2") <= 85, "about 40%"
        assert {made.chat(headers, model="assistant").headers["x-headrace-version"] for _ in range(10)} in (
            {"v1"},
            {"v2"},
        ), "without another key, the API key's"
        made.wait(lambda: sum(side["scores"] for side in report(made)["sides"]) == 300)
        told = report(made)
        tests = {test["measure"]: test for test in told["tests"]}
        assert tests["score"]["p_differs"] < 0.01
        assert tests["score"]["p_worse"] > 0.5
        assert tests["failed"]["p_differs"] == 1.0
        assert told["sides"][1]["score"] == pytest.approx(1.0)
        assert told["sides"][0]["score"] == pytest.approx(0.2)
        shown = releases(made, "report")
        assert "mean score" in shown
        assert "v2 (40%)" in shown
        assert weight(made, "v2") == 40
        releases(made, "promote")
        made.wait(lambda: weight(made, "v2") == 100)


def test_feedback_is_for_ones_own_requests_and_once(
    upstreams: Upstreams, places: Places, tmp_path: Path
) -> None:
    with two(upstreams, tmp_path, **places().config) as (made, _, _):
        headers, others = made.key("acme"), made.key("other")
        own = made.chat(headers, model="assistant").headers["x-request-id"]

        def give(told: Any, who: dict[str, str] = headers) -> tuple[int, str]:
            answer = made.client.post("/v1/feedback", json=told, headers=who)
            return answer.status_code, answer.json().get("error", {}).get("code", "")

        assert give({"request_id": own, "score": 1}, others) == (404, "not_found")
        assert give({"request_id": own, "score": 1}, {})[0] == 401
        assert give({"request_id": "req-never", "score": 1}) == (404, "not_found")
        for wrong in (2, -0.1, True, "1", None):
            assert give({"request_id": own, "score": wrong})[0] == 400
        assert give({"request_id": own, "score": 1, "why": "x"})[0] == 400
        assert give([own]) == (400, "invalid_value")
        assert give({"request_id": own, "score": 0.5})[0] == 200
        assert give({"request_id": own, "score": 0.5}) == (409, "already_scored")
        assert made.client.get("/v1/feedback", headers=headers).status_code == 405


def test_a_hit_never_crosses_versions(upstreams: Upstreams, tmp_path: Path) -> None:
    with two(upstreams, tmp_path) as (made, first, second):
        headers = made.key("acme")
        for state in ("miss", "hit"):
            assert made.chat(headers, model="assistant", temperature=0).headers["x-headrace-cache"] == state
        for version, state in (("v2", "miss"), ("v3", "miss"), ("v1", "hit")):
            releases(made, "promote", "--version", version)
            made.wait(lambda version=version: weight(made, version) == 100)  # type: ignore[misc]
            answer = made.chat(headers, model="assistant", temperature=0)
            assert (answer.headers["x-headrace-version"], answer.headers["x-headrace-cache"]) == (
                version,
                state,
            )
        assert (len(first.asked), len(second.asked)) == (1, 2)


def test_a_switch_under_load_loses_nothing(upstreams: Upstreams, tmp_path: Path) -> None:
    with two(upstreams, tmp_path, cache={"enabled": False}) as (made, first, _):
        release = threading.Event()

        async def late(exchange: Exchange) -> None:
            while not release.is_set():
                await asyncio.sleep(0.01)
            await decent(exchange)

        first.behaviour = late
        headers = made.key("acme")
        with ThreadPoolExecutor(8) as pool:
            early = [pool.submit(made.chat, headers, model="assistant", stream=True) for _ in range(4)]
            made.wait(lambda: len(first.asked) == 4)
            releases(made, "promote", "--version", "v2")
            made.wait(lambda: weight(made, "v2") == 100)
            after = made.chat(headers, model="assistant", stream=True)
            assert after.headers["x-headrace-version"] == "v2"
            release.set()
            answers = [future.result() for future in early]
        assert {answer.headers["x-headrace-version"] for answer in answers} == {"v1"}
        assert {text_of(answer) for answer in answers} == {text_of(after)}
        made.wait_idle()


def test_upstreams_of_a_version_and_the_models_that_a_key_sees(upstreams: Upstreams, tmp_path: Path) -> None:
    (first, one), (second, other) = upstreams.start(), upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": one, "models": {"m": {}}}, "two": {"url": other, "models": {"m": {}}}},
        "releases": {
            "assistant": {
                "stable": "blue",
                "versions": {
                    "green": {"model": "m", "upstreams": ["one"]},
                    "blue": {"model": "m", "upstreams": ["two"]},
                },
            }
        },
        "tenants": {"acme": {"limits": {"models": ["assistant"]}}},
    }
    with gateway(config, tmp_path) as made:
        headers = made.key("acme")
        for _ in range(4):
            assert made.chat(headers, model="assistant").headers["x-headrace-upstream"] == "two"
        assert (len(first.asked), len(second.asked)) == (0, 4)
        assert made.chat(headers, model="m").status_code == 403
        [card] = made.client.get("/v1/models", headers=headers).json()["data"]
        assert (card["id"], card["root"]) == ("assistant", "m")


def test_the_commands_say_what_is_wrong(upstreams: Upstreams, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps(config_of("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1")))

    def said(*arguments: str) -> str:
        ended = called("gateway", "releases", arguments[0], str(path), *arguments[1:])
        assert ended.returncode == 1, ended.stdout
        assert ended.stderr.count("\n") == 1
        return ended.stderr

    assert "it has: assistant" in said("start", "other", "v2")
    assert "it has: v1, v2, v3" in said("start", "assistant", "v9")
    assert called("gateway", "releases", "start", str(path), "assistant", "v2").returncode == 0
    assert "v2 is in a canary" in said("start", "assistant", "v3")
    listed = json.loads(called("gateway", "releases", "list", str(path), "--json").stdout)
    assert (listed[0]["stable"], listed[0]["candidate"], listed[0]["weight"]) == ("v1", "v2", 50)
    # a file that has lost the version on trial is refused
    config = json.loads(path.read_text())
    del config["releases"]["assistant"]["versions"]["v2"]
    path.write_text(json.dumps(config))
    ended = run("gateway", "run", str(path), "--port", "0")
    assert ended.returncode == 1
    assert "v2 is in a canary, but not among the versions" in ended.stderr
    assert called("gateway", "releases", "rollback", str(path), "assistant").returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {}}, "releases.a.versions"),
        (
            {"versions": {"v": {"model": "none"}}},
            "gateway.yaml:1: releases.a.versions.v: Value error, v is the model none, which",
        ),
        ({"versions": {"v": {"model": "old", "upstreams": ["two"]}}}, "served by two, which has no old"),
        ({"versions": {"v": {"model": "old", "upstreams": ["x"]}}}, "served by x, which is no upstream"),
        ({"stable": "w"}, "w is none of the versions v"),
        ({"canary": {"steps": [5, 5, 100]}}, "growing percentages that end in 100"),
        ({"canary": {"steps": [5, 50]}}, "growing percentages that end in 100"),
        ({"canary": {"alpha": 0}}, "releases.a.canary.alpha"),
    ],
)
def test_mistakes_in_the_file_are_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = config_of("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1", tenants={}, aliases={})
    config["releases"] = {"a": {"versions": {"v": {"model": "old"}}, **change}}
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert said in error.value.message
