"""Reserve and settle: nobody over a limit whatever happens at the same time, and nothing kept by the dead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import BudgetError, InvalidRequestError, LimitError, StateError
from headrace.gateway.config import Limits
from headrace.gateway.ledger import Entry, append
from headrace.gateway.quotas import NANO, Quotas, Reservation, Scope, month_of
from headrace.gateway.settlements import Settlement, Settlements
from headrace.gateway.store import Store
from headrace.observe.logs import logger
from tests.gateway.conftest import Places
from tests.gateway.redis_server import Place
from tests.gateway.running import RunningGateway, Upstreams, gateway
from tests.lab.streaming_server import Exchange

NOON = 1_780_000_000 // 86_400 * 86_400 + 43_200


class Clock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self) -> None:
        self.now = float(NOON)

    def __call__(self) -> float:
        return self.now


def entry(request: str = "r", tokens: int = 0) -> tuple[Entry]:
    """A row of the ledger."""
    return (Entry(NOON, request, "a", "k", "m", "u", "x", "ok", "off", tokens, 0, 0, False, 9, 1),)


@asynccontextmanager
async def quotas(where: Place, clock: Clock, lease_s: float = 30.0) -> AsyncIterator[tuple[Store, Quotas]]:
    async with where.opened(clock) as store:
        yield store, Quotas(store, lease_s)


async def rows(store: Store) -> list[tuple[str, int]]:
    """Request and tokens of each row of the ledger, sorted."""
    async with store.ledger(0.0) as db:
        return sorted(db.execute("SELECT request, prompt_tokens FROM ledger").fetchall())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, 60), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 80)),
        st.tuples(st.just("wait"), st.integers(1, 45), st.just(0)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_no_order_of_events_passes_a_limit_or_loses_a_count(
    places: Places, steps: list[tuple[str, int, int]]
) -> None:
    """Against a model that remembers every request: what it used, or what it holds, and when it came."""
    asyncio.run(no_order_passes(places(), steps))


async def no_order_passes(where: Place, steps: list[tuple[str, int, int]]) -> None:
    limits = Limits(requests_per_minute=8, tokens_per_minute=100, tokens_per_day=1000, concurrency=3)
    scope = Scope("tenant:a", limits)
    clock = Clock()
    async with quotas(where, clock) as (store, first):
        serving, running = first, dict[str, tuple[Reservation, float]]()
        came: list[tuple[int, str]] = []
        tokens: dict[str, int] = {}
        written: list[tuple[str, int]] = []
        for number, (what, amount, extra) in enumerate(steps):
            if what == "wait":
                clock.now += amount
                await serving.renew()
            elif what == "crash":  # a new gateway starts; the dead one renews nothing, its leases end
                serving = Quotas(store)
                clock.now += 31
                for name in running:
                    tokens[name] = 0
                running.clear()
            elif what == "settle" and running:
                name = sorted(running)[amount % len(running)]
                reservation, _ = running.pop(name)
                await serving.settle(reservation, extra, 0, entry(name, extra))
                await serving.settle(reservation, extra, 0, entry(name, extra))  # twice counts once
                tokens[name] = extra
                written.append((name, extra))
            elif what == "reserve":
                minute = [name for second, name in came if second > int(clock.now) - 60]
                fits = (
                    len(running) < 3
                    and len(minute) < 8
                    and sum(tokens[name] for name in minute) + amount <= 100
                    and sum(tokens.values()) + amount <= 1000
                )
                try:
                    made = await serving.reserve(str(number), [scope], amount, 0)
                except LimitError as error:
                    assert not fits
                    assert error.retry_after_s > 0
                else:
                    assert fits
                    running[str(number)] = made, clock.now
                    came.append((int(clock.now), str(number)))
                    tokens[str(number)] = amount
        for name, (reservation, _) in running.items():
            await serving.settle(reservation, tokens[name], 0, entry(name, tokens[name]))
            written.append((name, tokens[name]))
        # ends what leases have ended
        await serving.reserve("last", [Scope("tenant:b", Limits(concurrency=1))], 1, 0)
        used = await serving.use("tenant:a")
        assert (used.running, used.tokens_today) == (0, sum(tokens.values()))
        assert (await serving.use("tenant:b")).running == 1
        assert await rows(store) == sorted(written)


class Flaky:
    """A store whose answers get lost: a call does nothing, or all of it, or is cancelled after that."""

    def __init__(self, store: Store, faults: list[str]) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def hold(self, *arguments: Any) -> Any:
        return await self._faulty(self._store.hold, *arguments)

    async def settle(self, *arguments: Any) -> Any:
        return await self._faulty(self._store.settle, *arguments)

    async def _faulty(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        fault = self._faults.pop() if self._faults else "none"
        if fault == "before":
            raise StateError("it did not get there")
        result = await call(*arguments)
        if fault == "after":
            raise StateError("its answer was lost")
        if fault == "cancelled":
            raise asyncio.CancelledError
        return result


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    faults=st.lists(st.sampled_from(["none", "none", "before", "after", "cancelled"]), max_size=40),
    uses=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    gateways=st.integers(1, 3),
)
def test_whatever_is_lost_on_the_way_is_settled_once(
    places: Places, faults: list[str], uses: list[int], gateways: int
) -> None:
    """Many requests at a time at several gateways: what was used is counted and written exactly once."""
    asyncio.run(settled_once(places(), faults, uses, gateways))


async def settled_once(where: Place, faults: list[str], uses: list[int], gateways: int) -> None:
    clock, limit = Clock(), 40
    scopes = [Scope("tenant:a", Limits(tokens_per_day=limit, concurrency=4)), Scope("key:k", Limits())]
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(where.opened(clock)) for _ in range(gateways)]
        sides = [Quotas(Flaky(store, faults)) for store in stores]  # type: ignore[arg-type]
        settlements = [Settlements(side, logger(level="critical")) for side in sides]
        done: dict[str, int] = {}

        async def request(number: int, used: int) -> None:
            side, name = number % gateways, f"{number:02}"
            try:
                made = await sides[side].reserve(name, scopes, used, 0)
            except (LimitError, StateError, asyncio.CancelledError):
                return
            await asyncio.sleep(0)
            done[name] = used
            with suppress(asyncio.CancelledError):
                await settlements[side].settle(Settlement(made, used, 0, entry(name, used)))

        await asyncio.gather(*(request(number, used) for number, used in enumerate(uses)))
        for side in settlements:
            while side.waiting:
                with suppress(asyncio.CancelledError):
                    await side.try_all()
        assert await rows(stores[0]) == sorted(done.items())
        clock.now += 31  # what was reserved without anybody's knowing ends
        await Quotas(stores[0]).reserve("last", scopes, 0, 0)
        used = await stores[0].use("tenant:a")
        assert used.running == 1
        assert used.tokens_today == sum(done.values()) <= limit


def test_a_settlement_that_fails_is_given_back_by_the_leases_end(places: Places) -> None:
    """A full disk, say: what is not renewed ends, though its gateway lives on; what was used counts later."""

    async def check(where: Place) -> None:
        clock = Clock()
        scope = [Scope("tenant:a", Limits(concurrency=1))]
        async with quotas(where, clock) as (store, _):
            made = Quotas(Flaky(store, ["before", "none"]))  # type: ignore[arg-type]
            reservation = await made.reserve("1", scope, 5, 0)
            with pytest.raises(StateError):
                await made.settle(reservation, 5, 0, entry())
            assert (await made.use("tenant:a")).running == 1
            clock.now += 20
            await made.renew()
            clock.now += 11
            await made.reserve("2", scope, 5, 0)
            await made.settle(reservation, 7, 0, entry())
            used = await made.use("tenant:a")
            assert (used.running, used.tokens_today) == (1, 12)

    asyncio.run(check(places()))


def test_waiting_as_long_as_told_is_enough_and_not_too_long(places: Places) -> None:
    async def check(where: Place) -> None:
        clock = Clock()
        async with quotas(where, clock) as (_, made):
            scope = [Scope("tenant:a", Limits(tokens_per_minute=100))]
            await made.settle(await made.reserve("1", scope, 60, 0), 60, 0, entry())
            clock.now += 10
            await made.settle(await made.reserve("2", scope, 40, 0), 40, 0, entry())
            clock.now += 10
            with pytest.raises(LimitError) as refused:
                await made.reserve("3", scope, 50, 0)
            clock.now += refused.value.retry_after_s - 1
            with pytest.raises(LimitError):
                await made.reserve("3", scope, 50, 0)
            clock.now += 1
            last = await made.reserve("3", scope, 50, 0)
            assert last.tokens_left is not None
            assert last.tokens_left.remaining == 10

    asyncio.run(check(places()))


def test_what_never_fits_is_told_so_and_not_to_wait(places: Places) -> None:
    async def check(where: Place) -> None:
        async with quotas(where, Clock()) as (_, made):
            with pytest.raises(InvalidRequestError, match="this request alone needs up to 101"):
                await made.reserve("1", [Scope("tenant:a", Limits(tokens_per_minute=100))], 101, 0)

    asyncio.run(check(places()))


def test_more_scopes_are_reserved_for_behind_the_first_ones(places: Places) -> None:
    """All of the new ones or none, and a scope that is there already counts once."""

    async def check(where: Place) -> None:
        async with quotas(where, Clock()) as (_, made):
            first, second = (Scope(name, Limits(tokens_per_day=100)) for name in ("tenant:a", "share:a|m"))
            tight = Scope("model:m", Limits(tokens_per_day=100, concurrency=1))
            await made.reserve("0", [tight], 1, 0)
            reservation = await made.reserve("1", [first], 10, 0)
            with pytest.raises(LimitError, match="this model may have 1 requests"):
                await made.extend(reservation, [second, tight])
            assert (await made.use("share:a|m")).tokens_today == 0
            await made.extend(reservation, [first, second])
            assert (await made.use("tenant:a")).tokens_today == 10
            await made.settle(reservation, 4, 0, entry())
            for scope in (first, second):
                used = await made.use(scope.name)
                assert (used.running, used.tokens_today) == (0, 4)

    asyncio.run(check(places()))


@pytest.mark.parametrize(("period", "wait_s"), [("day", 43_200), ("month", 3 * 86_400)])
def test_a_budget_is_kept_until_its_period_ends(places: Places, period: Any, wait_s: int) -> None:
    async def check(where: Place) -> None:
        clock = Clock()
        async with quotas(where, clock) as (_, made):
            scope = [Scope("tenant:a", Limits(budget_usd=1.0, budget_period=period))]
            await made.settle(await made.reserve("1", scope, 1, NANO // 2), 1, NANO // 4, entry())
            await made.settle(await made.reserve("2", scope, 1, NANO // 2), 1, NANO // 2, entry())
            with pytest.raises(BudgetError) as refused:
                await made.reserve("3", scope, 1, NANO // 2)
            assert refused.value.code == "insufficient_quota"
            clock.now += refused.value.retry_after_s
            await made.reserve("3", scope, 1, NANO // 2)

    asyncio.run(check(places()))


@pytest.mark.parametrize("date", ["2024-02-29", "2025-02-28", "2025-12-31", "2026-01-01", "2100-03-01"])
def test_a_months_money_ends_with_the_month(places: Places, date: str) -> None:
    """The scripts of Redis know the calendar too, leap years and all."""

    async def check(where: Place) -> None:
        clock = Clock()
        midnight = datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC)
        clock.now = midnight.timestamp()
        start, end = month_of(clock.now)
        async with quotas(where, clock) as (_, made):
            scope = [Scope("tenant:a", Limits(budget_usd=1.0))]
            for at, month in ((start, 1), (end - 1, 2), (end, 1), (end + 86_399, 2)):
                clock.now = at
                await made.settle(await made.reserve(str(at), scope, 1, 1), 1, NANO // 4, entry())
                assert (await made.use("tenant:a")).usd_this_month == month / 4

    asyncio.run(check(places()))


def test_gateways_at_the_same_time_share_one_limit(places: Places) -> None:
    """Each thread has connections of its own, as another process would."""
    where = places()
    limits = Limits(concurrency=7, tokens_per_minute=1000)

    async def reserve(number: int) -> int:
        got = 0
        async with where.opened() as store:
            made = Quotas(store)
            for turn in range(10):
                with suppress(LimitError):
                    await made.reserve(f"{number}-{turn}", [Scope("tenant:a", limits)], 10, 0)
                    got += 1
        return got

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(lambda number: asyncio.run(reserve(number)), range(6))) == 7


def test_many_open_new_state_at_once(tmp_path: Path) -> None:
    """The change to a write-ahead log once failed where another was opening: SQLite does not wait there."""

    async def opened(folder: Path) -> None:
        async with Place(folder).opened():
            pass

    for turn in range(4):
        together = threading.Barrier(8)

        def open_it(folder: Path, together: threading.Barrier = together) -> None:
            together.wait()
            asyncio.run(opened(folder))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(open_it, [tmp_path / str(turn)] * 8))


def test_the_ledger_cannot_be_rewritten(tmp_path: Path) -> None:
    async def check() -> None:
        async with Place(tmp_path).opened() as store, store.ledger(0.0) as db:
            append(db, *entry())
            for statement in ("UPDATE ledger SET nano_usd = 0", "DELETE FROM ledger"):
                with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                    db.execute(statement)

    asyncio.run(check())


@pytest.fixture(scope="module")
def limited(
    upstreams: Upstreams, places: Places, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    _, url = upstreams.start()
    config = {
        **places().config,
        "upstreams": {"one": {"url": url, "models": {"m": {"price": {"output": 1000.0}}}}},
        "tenants": {
            "requests": {"limits": {"requests_per_minute": 2}},
            "tokens": {"limits": {"tokens_per_minute": 100}, "key_limits": {"tokens_per_minute": 60}},
            "money": {"limits": {"budget_usd": 0.01}},
            "free": {},
        },
    }
    with gateway(config, tmp_path_factory.mktemp("gateway")) as made:
        yield made


def test_a_refusal_says_when_to_come_back(limited: RunningGateway) -> None:
    key = limited.key("requests")
    first = limited.chat(key)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "60s"
    assert limited.chat(key, stream=True).headers["x-ratelimit-remaining-requests"] == "0"
    refused = limited.chat(key)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    assert limited.chat(limited.key("free")).status_code == 200, "others are not concerned"


def test_tokens_are_settled_to_what_was_used(limited: RunningGateway) -> None:
    key = limited.key("tokens")
    for expected in (54, 48, 42):  # 3 + 3 tokens were used each time, however much was reserved
        answer = limited.chat(key)
        assert answer.status_code == 200
        reserved = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert reserved < expected
    assert limited.chat(key, max_tokens=59).status_code == 400, "the key's limit is the tighter one"


def test_a_spent_budget_is_insufficient_quota(limited: RunningGateway) -> None:
    key = limited.key("money")
    assert limited.chat(key, max_tokens=8).status_code == 200
    refused = limited.chat(key, max_tokens=3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert limited.chat(key, max_tokens=2).status_code == 200, "what is left of it may be used"


def test_a_killed_gateway_holds_nothing_for_longer_than_its_leases(
    upstreams: Upstreams, places: Places, tmp_path: Path
) -> None:
    """Killed in the middle of a stream; the next one on the same state frees what that had reserved."""
    begun = False

    async def endless(exchange: Exchange) -> None:
        import asyncio

        nonlocal begun
        exchange.begin()
        for event in exchange.events(["word "] * 1000):
            await exchange.send(event)
            begun = True
            await asyncio.sleep(0.02)

    _, url = upstreams.start(endless)
    where = places()
    config = {
        **where.config,
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": {"limits": {"concurrency": 1, "tokens_per_day": 5000}}},
    }
    with gateway(config, tmp_path) as made, concurrent.futures.ThreadPoolExecutor(1) as pool:
        key = made.key("acme")
        pool.submit(made.chat, key, stream=True)
        made.wait(lambda: begun)
        assert made.chat(key).status_code == 429, "one at a time"
        made.process.send_signal(signal.SIGKILL)
        made.process.wait()
        assert made.use("tenant:acme").running == 1
        if where.url is None:
            where = Place(made.state)
    limits = Limits(concurrency=1, tokens_per_day=5000)

    async def later() -> None:
        async with where.opened(lambda: time.time() + 31) as store:
            await Quotas(store).reserve("next", [Scope("tenant:acme", limits)], 5000, 0)

    asyncio.run(later())
