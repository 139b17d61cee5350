"""Reserve and settle: nobody over a limit whatever happens at the same time, and nothing kept by the dead."""

from __future__ import annotations

import concurrent.futures
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BudgetError, HeadraceError, InvalidRequestError, LimitError
from headrace.gateway.config import Limits
from headrace.gateway.quotas import NANO, Quotas, Reservation, Scope
from headrace.gateway.store import Store
from tests.gateway.running import RunningGateway, Upstreams, gateway
from tests.lab.streaming_server import Exchange

NOON = 1_780_000_000 // 86_400 * 86_400 + 43_200


class Clock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self) -> None:
        self.now = float(NOON)

    def __call__(self) -> float:
        return self.now


@contextmanager
def quotas(clock: Clock, lease_s: float = 30.0) -> Iterator[tuple[Store, Quotas]]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        try:
            yield store, Quotas(store, clock, lease_s)
        finally:
            store.close()


def nothing(_: sqlite3.Connection) -> None:
    """No row for the ledger."""


def held(store: Store) -> int:
    return int(store.db.execute("SELECT COUNT(*) FROM reservations").fetchone()[0])


def amounts(store: Store, measure: str) -> int:
    query = "SELECT COALESCE(SUM(amount), 0) FROM spent WHERE measure = ? AND scope = 'tenant:a'"
    return int(store.db.execute(query, (measure,)).fetchone()[0])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, 60), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 80)),
        st.tuples(st.just("wait"), st.integers(1, 45), st.just(0)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_no_order_of_events_passes_a_limit_or_loses_a_count(steps: list[tuple[str, int, int]]) -> None:
    """Against a model that remembers every request: what it used, or what it holds, and when it came."""
    limits = Limits(requests_per_minute=8, tokens_per_minute=100, tokens_per_day=1000, concurrency=3)
    clock = Clock()
    with quotas(clock) as (store, first):
        serving, running = first, dict[str, tuple[Reservation, float]]()
        came: list[tuple[int, str]] = []
        tokens: dict[str, int] = {}
        for number, (what, amount, extra) in enumerate(steps):
            if what == "wait":
                clock.now += amount
                serving.renew()
            elif what == "crash":  # a new gateway starts; the dead one renews nothing, its leases end
                serving = Quotas(store, clock)
                clock.now += 31
                for name in running:
                    tokens[name] = 0
                running.clear()
            elif what == "settle" and running:
                name = sorted(running)[amount % len(running)]
                reservation, _ = running.pop(name)
                serving.settle(reservation, extra, 0, nothing)
                serving.settle(reservation, extra, 0, nothing)  # twice counts once
                tokens[name] = extra
            elif what == "reserve":
                minute = [name for second, name in came if second > int(clock.now) - 60]
                fits = (
                    len(running) < 3
                    and len(minute) < 8
                    and sum(tokens[name] for name in minute) + amount <= 100
                    and sum(tokens.values()) + amount <= 1000
                )
                try:
                    made = serving.reserve(str(number), [Scope("tenant:a", limits)], amount, 0)
                except LimitError as error:
                    assert not fits
                    assert error.retry_after_s > 0
                else:
                    assert fits
                    running[str(number)] = made, clock.now
                    came.append((int(clock.now), str(number)))
                    tokens[str(number)] = amount
        for name, (reservation, _) in running.items():
            serving.settle(reservation, tokens[name], 0, nothing)
        serving.reserve(
            "last", [Scope("tenant:b", Limits(concurrency=1))], 1, 0
        )  # ends what leases have ended
        assert amounts(store, "day") == sum(tokens.values())
        assert held(store) == 1


def test_a_settlement_that_fails_is_given_back_by_the_leases_end() -> None:
    """A full disk, say: what is not renewed ends, though its gateway lives on."""
    clock = Clock()
    with quotas(clock) as (store, made):
        scope = [Scope("tenant:a", Limits(concurrency=1))]
        reservation = made.reserve("1", scope, 5, 0)

        def fails(_: sqlite3.Connection) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with pytest.raises(sqlite3.OperationalError):
            made.settle(reservation, 5, 0, fails)
        assert held(store) == 1
        clock.now += 20
        made.renew()
        clock.now += 11
        made.reserve("2", scope, 5, 0)


def test_waiting_as_long_as_told_is_enough_and_not_too_long() -> None:
    clock = Clock()
    with quotas(clock) as (_, made):
        scope = [Scope("tenant:a", Limits(tokens_per_minute=100))]
        made.settle(made.reserve("1", scope, 60, 0), 60, 0, nothing)
        clock.now += 10
        made.settle(made.reserve("2", scope, 40, 0), 40, 0, nothing)
        clock.now += 10
        with pytest.raises(LimitError) as refused:
            made.reserve("3", scope, 50, 0)
        clock.now += refused.value.retry_after_s - 1
        with pytest.raises(LimitError):
            made.reserve("3", scope, 50, 0)
        clock.now += 1
        made.reserve("3", scope, 50, 0)


def test_what_never_fits_is_told_so_and_not_to_wait() -> None:
    with (
        quotas(Clock()) as (_, made),
        pytest.raises(InvalidRequestError, match="this request alone needs up to 101"),
    ):
        made.reserve("1", [Scope("tenant:a", Limits(tokens_per_minute=100))], 101, 0)


def test_a_scope_that_refuses_leaves_the_others_untouched() -> None:
    with quotas(Clock()) as (store, made):
        scopes = [Scope("tenant:a", Limits(concurrency=9)), Scope("key:k", Limits(concurrency=1))]
        made.reserve("1", scopes, 10, 0)
        with pytest.raises(LimitError, match="this key may have 1 requests at a time"):
            made.reserve("2", scopes, 10, 0)
        assert amounts(store, "day") == 10


@pytest.mark.parametrize(("period", "wait_s"), [("day", 43_200), ("month", 3 * 86_400)])
def test_a_budget_is_kept_until_its_period_ends(period: Any, wait_s: int) -> None:
    clock = Clock()
    with quotas(clock) as (_, made):
        scope = [Scope("tenant:a", Limits(budget_usd=1.0, budget_period=period))]
        made.settle(made.reserve("1", scope, 1, NANO // 2), 1, NANO // 4, nothing)
        made.settle(made.reserve("2", scope, 1, NANO // 2), 1, NANO // 2, nothing)
        with pytest.raises(BudgetError) as refused:
            made.reserve("3", scope, 1, NANO // 2)
        assert refused.value.code == "insufficient_quota"
        clock.now += refused.value.retry_after_s
        made.reserve("3", scope, 1, NANO // 2)


def test_processes_at_the_same_time_share_one_limit(tmp_path: Path) -> None:
    """Each thread has a connection of its own, as another process would."""
    limits = Limits(concurrency=7, tokens_per_minute=1000)

    def reserve(number: int) -> int:
        store = Store(tmp_path)
        try:
            made, got = Quotas(store), 0
            for turn in range(10):
                try:
                    made.reserve(f"{number}-{turn}", [Scope("tenant:a", limits)], 10, 0)
                    got += 1
                except HeadraceError:
                    pass
            return got
        finally:
            store.close()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(reserve, range(6))) == 7


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    """The change to a write-ahead log once failed where another was opening: SQLite does not wait there."""
    for turn in range(10):
        together = threading.Barrier(8)

        def opened(folder: Path, together: threading.Barrier = together) -> None:
            together.wait()
            Store(folder).close()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(opened, [tmp_path / str(turn)] * 8))


def test_the_ledger_cannot_be_rewritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.db.execute(
        "INSERT INTO ledger VALUES "
        "(1, 0, 'r', 't', 'k', 'm', 'u', 'x', 'ok', 'off', 1, 0, 1, 0, 5, 1, '', '', '')"
    )
    for statement in ("UPDATE ledger SET nano_usd = 0", "DELETE FROM ledger"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store.db.execute(statement)
    store.close()


@pytest.fixture(scope="module")
def limited(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    _, url = upstreams.start()
    config = {
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
    upstreams: Upstreams, tmp_path: Path
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
    config = {
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
    store = Store(tmp_path / "gateway-state")
    limits = Limits(concurrency=1, tokens_per_day=5000)
    later = Quotas(store, lambda: time.time() + 31)
    assert held(store) == 1, "the tenant's; the key has no limits"
    later.reserve("next", [Scope("tenant:acme", limits)], 5000, 0)
    store.close()
