"""Who gets a place next: urgent ones first, tenants by weight, and nobody kept waiting for nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OverloadedError
from headrace.gateway.admit import Admissions, Claim
from headrace.gateway.config import Admission
from tests.gateway.running import Upstreams, decent, gateway
from tests.lab.streaming_server import Exchange


class Line:
    """Admissions with one place, which is taken; who gets it next is written down."""

    def __init__(self, **changes: Any) -> None:
        self.now = 0.0
        settings = Admission(**{"max_running": 1, "max_wait_s": 60.0, **changes})
        self.admissions = Admissions(settings, lambda: self.now)
        self.served: list[str] = []
        self.refused: list[tuple[str, OverloadedError]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def take(self) -> None:
        await self.admissions.enter(Claim("nobody", 0.0), self.now + 60)

    async def ask(self, name: str, claim: Claim, wait_s: float = 60.0) -> asyncio.Task[None]:
        async def one() -> None:
            try:
                await self.admissions.enter(claim, self.now + wait_s)
            except OverloadedError as error:
                self.refused.append((name, error))
            else:
                self.served.append(name)

        task = asyncio.create_task(one())
        self.tasks.append(task)
        await self.settle()
        return task

    async def settle(self) -> None:
        """Let everybody notice what happened."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def serve_all(self) -> list[str]:
        while self.admissions.running:
            self.admissions.leave()
            await self.settle()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.served


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_a_tenant_with_one_request_does_not_wait_behind_a_hundred_of_anothers() -> None:
    async def story() -> None:
        line = Line()
        await line.take()
        for number in range(100):
            await line.ask(f"big-{number}", Claim("big", 10.0))
        await line.ask("small-0", Claim("small", 10.0))
        served = await line.serve_all()
        assert served.index("small-0") <= 1
        assert [name for name in served if name.startswith("big")] == [f"big-{n}" for n in range(100)]

    run(story())


def test_tenants_share_by_weight_whatever_the_size_of_their_requests() -> None:
    """One tenant sends long requests, the other short ones and has twice the weight: tokens decide."""

    async def story() -> None:
        line = Line()
        await line.take()
        for number in range(60):
            await line.ask(f"long {number}", Claim("long", 100 / 1))
        for number in range(600):
            await line.ask(f"short {number}", Claim("short", 20 / 2))
        tokens: Counter[str] = Counter()
        for name in (await line.serve_all())[:220]:
            tokens[name.split()[0]] += 100 if name.startswith("long") else 20
        assert tokens["short"] / tokens["long"] == pytest.approx(2.0, rel=0.1)

    run(story())


def test_urgent_requests_go_first_and_equal_ones_take_turns() -> None:
    async def story() -> None:
        line = Line()
        await line.take()
        for name, priority in (("a-late", 5), ("a", 0), ("a-more", 0), ("a-now", -1)):
            await line.ask(name, Claim("a", 1.0, priority))
        await line.ask("b", Claim("b", 1.0, 0))
        served = await line.serve_all()
        assert served[0] == "a-now"
        assert served[-1] == "a-late"
        assert served.index("b") < served.index("a-more")

    run(story())


def test_a_full_queue_gives_up_the_one_that_would_be_last() -> None:
    async def story() -> None:
        line = Line(max_waiting=3)
        await line.take()
        for number in range(4):
            await line.ask(f"big-{number}", Claim("big", 10.0))
        assert [name for name, _ in line.refused] == ["big-3"], "it would be the last itself"
        await line.ask("small", Claim("small", 10.0))
        assert [name for name, _ in line.refused] == ["big-3", "big-2"]
        assert (await line.serve_all()) == ["big-0", "small", "big-1"]

    run(story())


def test_a_tenant_may_have_a_bound_of_its_own() -> None:
    async def story() -> None:
        line = Line()
        await line.take()
        for number in range(3):
            await line.ask(str(number), Claim("a", 1.0, max_waiting=2))
        [(name, error)] = line.refused
        assert name == "2"
        assert "2 requests of this tenant" in error.message
        assert line.admissions.waiting_of("a") == 2

    run(story())


def test_who_cannot_be_in_time_is_told_at_once_and_for_how_long() -> None:
    async def story() -> None:
        line = Line(max_wait_s=20.0)
        await line.take()
        for number in range(12):
            await line.ask(str(number), Claim("a", 1.0))
        for _ in range(10):  # a place comes free every two seconds
            line.now += 2.0
            line.admissions.leave()
            await line.settle()
        for number in range(12, 40):
            await line.ask(str(number), Claim("a", 1.0))
        assert line.admissions.waiting == 11, "with two that were left, so many fit into 20 seconds"
        error = line.refused[-1][1]
        assert "22 seconds until this request's turn" in error.message
        assert error.retry_after_s == pytest.approx(2.0)
        await line.ask("urgent", Claim("a", 1.0, -1))
        assert line.admissions.waiting == 12, "its turn comes earlier"
        await line.serve_all()

    run(story())


def test_a_larger_place_lets_those_in_who_wait() -> None:
    async def story() -> None:
        line = Line()
        await line.take()
        for number in range(3):
            await line.ask(str(number), Claim("a", 1.0))
        line.admissions.configure(Admission(max_running=3))
        await asyncio.sleep(0)
        assert (line.admissions.running, line.admissions.waiting) == (3, 1)
        line.admissions.configure(Admission(max_running=1))
        line.admissions.leave()
        assert (line.admissions.running, line.admissions.waiting) == (2, 1)
        await line.serve_all()

    run(story())


CLAIMS = st.builds(Claim, st.sampled_from("abc"), st.floats(0.1, 100), st.integers(-2, 2), st.just(4))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(CLAIMS, st.sampled_from(["leave", "cancel", "cancel and leave"])), max_size=60))
def test_no_order_of_events_leaks_a_place(events: list[Claim | str]) -> None:
    async def story() -> None:
        line = Line(max_running=2, max_waiting=6)
        for number, event in enumerate(events):
            if isinstance(event, Claim):
                await line.ask(str(number), event)
            if event == "leave" and line.admissions.running:
                line.admissions.leave()
            elif str(event).startswith("cancel") and line.tasks:
                line.tasks[number % len(line.tasks)].cancel()
                if event == "cancel and leave" and line.admissions.running:
                    line.admissions.leave()
                else:
                    await asyncio.sleep(0)
        # what was cancelled at the very moment it got its place is neither served nor refused
        await line.serve_all()
        assert (line.admissions.running, line.admissions.waiting) == (0, 0)
        assert all(not line.admissions.waiting_of(tenant) for tenant in "abc")

    run(story())


def test_over_http_a_small_tenant_passes_a_big_ones_queue(upstreams: Upstreams, tmp_path: Path) -> None:
    streamer, url = upstreams.start()
    release = threading.Event()
    order: list[str] = []

    async def one_by_one(exchange: Exchange) -> None:
        order.append(exchange.body["messages"][0]["content"])
        while not release.is_set():
            await asyncio.sleep(0.005)
        await decent(exchange)

    streamer.behaviour = one_by_one
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"big": {"most_urgent": -5}, "small": {}},
        "admission": {"max_running": 1, "max_waiting": 7, "max_wait_s": 30},
    }
    with (
        gateway(config, tmp_path) as made,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        big, small = made.key("big"), made.key("small")

        def ask(who: dict[str, str], text: str, **body: Any) -> Any:
            return made.chat(who, messages=[{"role": "user", "content": text}], **body)

        futures = [pool.submit(ask, big, "first")]
        made.wait(lambda: len(order) == 1)
        for number in range(5):
            futures.append(pool.submit(ask, big, f"big {number}"))
            made.wait(lambda number=number: sum(made.metric("requests_waiting").values()) == number + 1)  # type: ignore[misc]
        futures.append(pool.submit(ask, small, "small", priority=-1000))
        made.wait(lambda: sum(made.metric("requests_waiting").values()) == 6)
        urgent = {**big, "x-headrace-priority": "-3"}
        futures.append(pool.submit(ask, urgent, "urgent"))
        made.wait(lambda: sum(made.metric("requests_waiting").values()) == 7)
        full = ask(big, "one too many")
        assert full.status_code == 503
        assert int(full.headers["retry-after"]) >= 1
        assert ask({**big, "x-headrace-priority": "soon"}, "x").status_code == 400
        assert ask(big, "x", priority="soon").json()["error"]["param"] == "priority"
        release.set()
        assert {future.result().status_code for future in futures} == {200}
        assert order[1] == "urgent"
        assert order.index("small") <= 3, (
            "its priority is no better than its tenant's allowance, its share is"
        )
        with contextlib.suppress(KeyError):
            assert streamer.asked[-1].body["priority"] == 0
        made.wait_idle()
