"""Quotas in SQL. What is done here is one transaction of the caller's."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from headrace.gateway.quotas import (
    MINUTE_S,
    NANO,
    Held,
    Refused,
    Reservation,
    Scope,
    Use,
    budget_of,
    day_of,
    month_of,
)

_REQUESTS, _TOKENS, _DAY, _COST_DAY, _COST_MONTH = "requests", "tokens", "day", "cost-day", "cost-month"


def hold(
    db: sqlite3.Connection, made: Reservation, scopes: Sequence[Scope], now: float, lease_s: float
) -> Held | Refused:
    """Reserve for all scopes, or say which one refuses; before that, what leases have ended is free."""
    expire(db, now)
    held = Held(made.second or int(now), [], [])
    for scope in scopes:
        refused = _check(db, scope, made, now, held)
        if refused is not None:
            return refused
    for scope in scopes:
        done = db.execute(
            "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?, ?, ?)",
            (made.request, scope.name, now + lease_s, made.tokens, made.nano_usd, held.second),
        )
        if done.rowcount:
            _add_use(db, scope.name, held.second, made.tokens, made.nano_usd, requests=1)
    return held


def expire(db: sqlite3.Connection, now: float) -> None:
    """Free what leases that have ended held."""
    for name, tokens, nano_usd, second in db.execute(
        "DELETE FROM reservations WHERE expires_at <= ? RETURNING scope, tokens, nano_usd, second", (now,)
    ).fetchall():
        _add_use(db, name, second, -tokens, -nano_usd)


def _check(db: sqlite3.Connection, scope: Scope, made: Reservation, now: float, held: Held) -> Refused | None:
    limits, name = scope.limits, scope.name
    query = "SELECT EXISTS (SELECT 1 FROM reservations WHERE request = ? AND scope = ?)"
    if db.execute(query, (made.request, name)).fetchone() == (1,):
        requests, tokens = (_sum_of(_minute(db, name, measure, now)) for measure in (_REQUESTS, _TOKENS))
        held.requests.append(requests - 1)
        held.tokens.append(tokens - made.tokens)
        return None
    if limits.concurrency is not None:
        query = "SELECT COUNT(*) FROM reservations WHERE scope = ?"
        [running] = db.execute(query, (name,)).fetchone()
        if running >= limits.concurrency:
            return Refused(scope, "running", running, now)
    rows = _minute(db, name, _REQUESTS, now) if limits.requests_per_minute is not None else []
    held.requests.append(_sum_of(rows))
    if limits.requests_per_minute is not None:
        excess = held.requests[-1] + 1 - limits.requests_per_minute
        if excess > 0:
            return Refused(scope, "requests", held.requests[-1], now, _free_at(rows, excess, now))
    rows = _minute(db, name, _TOKENS, now) if limits.tokens_per_minute is not None else []
    held.tokens.append(_sum_of(rows))
    if limits.tokens_per_minute is not None:
        excess = held.tokens[-1] + made.tokens - limits.tokens_per_minute
        if excess > 0:
            return Refused(scope, "tokens", held.tokens[-1], now, _free_at(rows, excess, now))
    day = day_of(now)[0]
    if limits.tokens_per_day is not None:
        used = _spent(db, name, _DAY, day)
        if used + made.tokens > limits.tokens_per_day:
            return Refused(scope, "day", used, now)
    budget = budget_of(limits)
    if budget is not None:
        daily = limits.budget_period == "day"
        used = _spent(db, name, *((_COST_DAY, day) if daily else (_COST_MONTH, month_of(now)[0])))
        if used + made.nano_usd > budget:
            return Refused(scope, "cost", used, now)
    return None


def settle(db: sqlite3.Connection, reservation: Reservation, tokens: int, nano_usd: int) -> None:
    """What was used, in the place of what was reserved."""
    for name in reservation.scopes:
        held = db.execute(
            "DELETE FROM reservations WHERE request = ? AND scope = ? RETURNING tokens, nano_usd",
            (reservation.request, name),
        ).fetchall()
        # No row: the lease has ended and given everything back already.
        reserved, cost = held[0] if held else (0, 0)
        _add_use(db, name, reservation.second, tokens - reserved, nano_usd - cost)


def renew(db: sqlite3.Connection, requests: Sequence[str], now: float, lease_s: float) -> None:
    """Leases that last from now; minutes that nobody asks for any more are forgotten."""
    db.executemany(
        "UPDATE reservations SET expires_at = ? WHERE request = ?",
        [(now + lease_s, request) for request in requests],
    )
    oldest = int(now) - 2 * MINUTE_S
    db.execute("DELETE FROM spent WHERE measure IN (?, ?) AND start < ?", (_REQUESTS, _TOKENS, oldest))


def use(db: sqlite3.Connection, scope: str, now: float) -> Use:
    """What a scope uses now."""
    [running] = db.execute("SELECT COUNT(*) FROM reservations WHERE scope = ?", (scope,)).fetchone()
    requests, tokens = (_sum_of(_minute(db, scope, measure, now)) for measure in (_REQUESTS, _TOKENS))
    day, month = day_of(now)[0], month_of(now)[0]
    return Use(
        running=running,
        requests_in_minute=requests,
        tokens_in_minute=tokens,
        tokens_today=_spent(db, scope, _DAY, day),
        usd_today=_spent(db, scope, _COST_DAY, day) / NANO,
        usd_this_month=_spent(db, scope, _COST_MONTH, month) / NANO,
    )


def _minute(db: sqlite3.Connection, scope: str, measure: str, now: float) -> list[tuple[int, int]]:
    """Seconds of the last minute, and what was used in each."""
    return db.execute(
        "SELECT start, amount FROM spent WHERE scope = ? AND measure = ? AND start > ? ORDER BY start",
        (scope, measure, int(now) - MINUTE_S),
    ).fetchall()


def _sum_of(rows: list[tuple[int, int]]) -> int:
    return sum(amount for _, amount in rows)


def _free_at(rows: list[tuple[int, int]], excess: int, now: float) -> float:
    """When so much of the minute has slid away."""
    for start, spent in rows:
        excess -= spent
        if excess <= 0:
            return float(start + MINUTE_S)
    return now + MINUTE_S


def _add_use(
    db: sqlite3.Connection, scope: str, second: int, tokens: int, nano_usd: int, requests: int = 0
) -> None:
    day, month = day_of(second)[0], month_of(second)[0]
    rows = (
        (scope, _REQUESTS, second, requests),
        (scope, _TOKENS, second, tokens),
        (scope, _DAY, day, tokens),
        (scope, _COST_DAY, day, nano_usd),
        (scope, _COST_MONTH, month, nano_usd),
    )
    db.executemany(
        "INSERT INTO spent VALUES (?, ?, ?, ?) "
        "ON CONFLICT (scope, measure, start) DO UPDATE SET amount = amount + excluded.amount",
        [row for row in rows if row[3]],
    )


def _spent(db: sqlite3.Connection, scope: str, measure: str, start: int) -> int:
    query = "SELECT amount FROM spent WHERE scope = ? AND measure = ? AND start = ?"
    row = db.execute(query, (scope, measure, start)).fetchone()
    return 0 if row is None else int(row[0])
