"""Which upstream gets a request."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running import RunningGateway, Upstreams, decent, gateway
from tests.gateway.test_reload import hang_up, rewrite
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

Three = tuple[RunningGateway, list[Streamer]]


@pytest.fixture(scope="module")
def three(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    made = [upstreams.start() for _ in range(3)]
    config: dict[str, Any] = {
        "upstreams": {
            f"u{number}": {"url": url, "weight": 2 if number == 2 else 1, "models": {"m": {}}}
            for number, (_, url) in enumerate(made)
        },
        "authentication": "none",
        "cache": {"enabled": False},
    }
    config["upstreams"]["u0"]["models"]["short"] = {"context": 100}
    config["upstreams"]["u1"]["models"]["short"] = {"context": 10_000}
    with gateway(config, tmp_path_factory.mktemp("gateway")) as running:
        yield running, [streamer for streamer, _ in made]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def waits_for(release: threading.Event) -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        import asyncio

        while not release.is_set():
            await asyncio.sleep(0.01)
        await decent(exchange)

    return answer


def test_idle_upstreams_share_by_weight(three: Three) -> None:
    made, _ = three
    served = Counter(made.chat().headers["x-headrace-upstream"] for _ in range(40))
    assert served["u2"] == pytest.approx(20, abs=1)
    assert served["u0"] == pytest.approx(10, abs=1)
    made.wait_idle()


def test_the_least_outstanding_tokens_win_not_the_fewest_requests(three: Three) -> None:
    made, streamers = three
    release = threading.Event()
    for streamer in streamers:
        streamer.behaviour = waits_for(release)
    before = [len(streamer.asked) for streamer in streamers]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            big = [pool.submit(made.chat, max_tokens=5000) for _ in range(1)]
            made.wait(lambda: sum(made.metric("upstream_requests").values()) == 1)
            small = []
            for number in range(6):
                small.append(pool.submit(made.chat, max_tokens=100))
                made.wait(lambda n=number: sum(made.metric("upstream_requests").values()) == n + 2)
            tokens = made.metric("upstream_tokens")
        finally:
            release.set()
            for streamer in streamers:
                streamer.behaviour = decent
        assert all(future.result().status_code == 200 for future in big + small)
    asked = [len(streamer.asked) - n for streamer, n in zip(streamers, before, strict=True)]
    assert sorted(asked)[0] == 1, "the one with the long answer got nothing else"
    assert max(tokens.values()) > 5000
    made.wait_idle()


def test_a_conversation_stays_where_its_beginning_is_known(three: Three) -> None:
    made, _ = three
    for number in range(4):
        messages = user(f"{number}: {'once upon a time ' * 60}")
        first = made.chat(messages=messages).headers["x-headrace-upstream"]
        for turn in range(3):
            messages = [*messages, {"role": "assistant", "content": "yes"}, *user(f"and then {turn}")]
            assert made.chat(messages=messages).headers["x-headrace-upstream"] == first


def test_a_beginning_that_all_share_does_not_pile_up_on_one(three: Three) -> None:
    made, streamers = three
    release = threading.Event()
    shared = "the same system prompt for all " * 40
    made.chat(messages=user(shared))
    for streamer in streamers:
        streamer.behaviour = waits_for(release)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        try:
            asked = [pool.submit(made.chat, messages=user(f"{shared}{n}"), max_tokens=500) for n in range(12)]
            made.wait(lambda: sum(made.metric("upstream_requests").values()) == 12)
            spread = made.metric("upstream_requests").values()
        finally:
            release.set()
            for streamer in streamers:
                streamer.behaviour = decent
        assert all(future.result().status_code == 200 for future in asked)
    assert min(spread) >= 1
    assert max(spread) <= 7
    made.wait_idle()


def test_a_session_stays_with_its_upstream(three: Three) -> None:
    made, _ = three
    for number in range(5):
        header = {"x-session-id": f"session {number}"}
        assert len({made.chat(header).headers["x-headrace-upstream"] for _ in range(4)}) == 1


def test_what_does_not_fit_a_context_goes_where_it_fits(three: Three) -> None:
    made, _ = three
    long = made.chat(model="short", messages=user("a b " * 300))
    assert long.headers["x-headrace-upstream"] == "u1"
    assert {made.chat(model="short").headers["x-headrace-upstream"] for _ in range(4)} == {"u0", "u1"}


def test_the_queue_is_bounded_in_length_and_time(
    upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    release = threading.Event()
    _, url = upstreams.start(waits_for(release))
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "authentication": "none",
        "admission": {"max_running": 1, "max_waiting": 1, "max_wait_s": 60},
        "cache": {"enabled": False},
    }
    with (
        gateway(config, tmp_path_factory.mktemp("gateway")) as made,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        running = pool.submit(made.chat)
        made.wait(lambda: made.metric("requests_running")[""] == 1)
        waiting = pool.submit(made.chat)
        made.wait(lambda: made.metric("requests_waiting")[""] == 1)
        refused = made.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"]
        release.set()
        assert {running.result().status_code, waiting.result().status_code} == {200}
        release.clear()
        rewrite(made, admission={"max_running": 1, "max_waiting": 1, "max_wait_s": 0.1})
        hang_up(made, "configuration reloaded")
        running = pool.submit(made.chat)
        made.wait(lambda: made.metric("requests_running")[""] == 1)
        assert made.chat().status_code == 503, "it waited for as long as it may"
        release.set()
        assert running.result().status_code == 200
        made.wait_idle()


def test_the_better_of_two_is_never_the_busiest_of_three(upstreams: Upstreams, tmp_path: Path) -> None:
    """`balancing: {among: two}`: whichever two are drawn, one of them has less to do."""
    started, release = [upstreams.start() for _ in range(3)], threading.Event()
    for streamer, _ in started:
        streamer.behaviour = waits_for(release)
    config = {
        "upstreams": {f"u{n}": {"url": url, "models": {"m": {}}} for n, (_, url) in enumerate(started)},
        "balancing": {"among": "two"},
        "authentication": "none",
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path) as made, concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            asked = [pool.submit(made.chat, max_tokens=100_000)]
            made.wait(lambda: sum(made.metric("upstream_requests").values()) == 1)
            [busiest] = (name for name, count in made.metric("upstream_requests").items() if count)
            for number in range(7):
                asked.append(pool.submit(made.chat, max_tokens=10))
                made.wait(lambda n=number: sum(made.metric("upstream_requests").values()) == n + 2)
            assert made.metric("upstream_requests")[busiest] == 1
        finally:
            release.set()
        assert all(future.result().status_code == 200 for future in asked)
        made.wait_idle()
        messages = user("the beginning of a conversation " * 40)
        first = made.chat(messages=messages).headers["x-headrace-upstream"]
        assert {made.chat(messages=messages).headers["x-headrace-upstream"] for _ in range(8)} == {first}
