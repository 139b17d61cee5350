"""Quotas: what a request may need is reserved before it runs, and settled to what it used when it ends.

Minutes slide: amounts are kept by the second, and the last 60 count. Days and months are UTC's. A
reservation is held by a lease that its gateway renews; when the gateway dies, the lease ends and what was
reserved is free again. Settling twice, or after the lease, counts what was used once.
"""

from __future__ import annotations

import datetime
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import BudgetError, InvalidRequestError, LimitError
from headrace.gateway.config import Limits
from headrace.gateway.store import Store

LEASE_S = 30.0
NANO = 10**9
_MINUTE = 60
_WHO = {"share": "tenant's use of the model"}
_REQUESTS, _TOKENS, _DAY, _COST_DAY, _COST_MONTH = "requests", "tokens", "day", "cost-day", "cost-month"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whom limits hold for: ``tenant:acme``, ``app:acme|web``, ``key:key_0123``, ``model:m``, or
    ``share:acme|m``, which is what a tenant uses of a model.
    """

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a limit a minute, for the headers: of ``limit``, and seconds until all is back."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """What is used and reserved of a scope now, in the last 60 seconds, and in UTC's day and month."""

    running: int
    requests_in_minute: int
    tokens_in_minute: int
    tokens_today: int
    usd_today: float
    usd_this_month: float


@dataclass(slots=True)
class Reservation:
    """What was reserved. ``requests`` and ``tokens``: the tightest limit a minute of all scopes."""

    request: str
    scopes: tuple[str, ...]
    tokens: int
    nano_usd: int
    second: int
    requests_left: Remaining | None = None
    tokens_left: Remaining | None = None
    settled: bool = field(default=False)


class Quotas:
    """Quotas of a store. ``clock``: seconds since 1970."""

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.time, lease_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._live: set[str] = set()  # requests whose leases are renewed

    def reserve(self, request: str, scopes: Sequence[Scope], tokens: int, nano_usd: int) -> Reservation:
        """Reserve for all scopes or for none. Scopes without limits that count are not counted.

        ``nano_usd``: the most that the request can cost, in 1e-9 dollars. Raises LimitError (BudgetError for
        money) with the time to wait, and InvalidRequestError if waiting would not help.
        """
        now = self._clock()
        scopes = [scope for scope in scopes if scope.limits.count_anything]
        made = Reservation(request, tuple(scope.name for scope in scopes), tokens, nano_usd, int(now))
        with self._store.transaction() as db:
            self._expire(db, now)
            for scope in scopes:
                self._check(db, scope, made, now)
            for name in made.scopes:
                db.execute(
                    "INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?)",
                    (request, name, now + self._lease_s, tokens, nano_usd, made.second),
                )
                _add_use(db, name, made.second, tokens, nano_usd, requests=1)
        self._live.add(request)
        return made

    def settle(
        self,
        reservation: Reservation,
        tokens: int,
        nano_usd: int,
        record: Callable[[sqlite3.Connection], None],
    ) -> None:
        """Put what was used in the place of what was reserved; ``record`` writes in the same transaction."""
        if reservation.settled:
            return
        self._live.discard(reservation.request)  # if what follows fails, the lease's end gives back
        with self._store.transaction() as db:
            for name in reservation.scopes:
                held = db.execute(
                    "DELETE FROM reservations WHERE request = ? AND scope = ? RETURNING tokens, nano_usd",
                    (reservation.request, name),
                ).fetchall()
                # No row: the lease has ended and given everything back already.
                reserved, cost = held[0] if held else (0, 0)
                _add_use(db, name, reservation.second, tokens - reserved, nano_usd - cost)
            record(db)
        reservation.settled = True

    def use(self, scope: str) -> Use:
        """What a scope uses now; zeros where no limit counts."""
        now, db = self._clock(), self._store.db
        [running] = db.execute("SELECT COUNT(*) FROM reservations WHERE scope = ?", (scope,)).fetchone()
        query = "SELECT COALESCE(SUM(amount), 0) FROM spent WHERE scope = ? AND measure = ? AND start > ?"
        since = int(now) - _MINUTE
        requests, tokens = (
            db.execute(query, (scope, measure, since)).fetchone()[0] for measure in (_REQUESTS, _TOKENS)
        )
        day, month = _day(now)[0], _month(now)[0]
        return Use(
            running=running,
            requests_in_minute=requests,
            tokens_in_minute=tokens,
            tokens_today=_spent(db, scope, _DAY, day),
            usd_today=_spent(db, scope, _COST_DAY, day) / NANO,
            usd_this_month=_spent(db, scope, _COST_MONTH, month) / NANO,
        )

    def renew(self) -> None:
        """Hold this gateway's leases for longer; to be called well within ``lease_s``."""
        with self._store.transaction() as db:
            until = self._clock() + self._lease_s
            db.executemany(
                "UPDATE reservations SET expires_at = ? WHERE request = ?",
                [(until, request) for request in self._live],
            )
            oldest = int(self._clock()) - 2 * _MINUTE
            db.execute(
                "DELETE FROM spent WHERE measure IN (?, ?) AND start < ?", (_REQUESTS, _TOKENS, oldest)
            )

    def _expire(self, db: sqlite3.Connection, now: float) -> None:
        for name, tokens, nano_usd, second in db.execute(
            "DELETE FROM reservations WHERE expires_at <= ? RETURNING scope, tokens, nano_usd, second", (now,)
        ).fetchall():
            _add_use(db, name, second, -tokens, -nano_usd)

    def _check(self, db: sqlite3.Connection, scope: Scope, made: Reservation, now: float) -> None:
        limits, name = scope.limits, scope.name
        who = _WHO.get(kind := name.partition(":")[0], kind)
        if limits.concurrency is not None:
            query = "SELECT COUNT(*) FROM reservations WHERE scope = ?"
            [running] = db.execute(query, (name,)).fetchone()
            if running >= limits.concurrency:
                raise LimitError(
                    f"this {who} may have {limits.concurrency} requests at a time: wait until one has ended",
                    retry_after_s=1.0,
                )
        if limits.requests_per_minute is not None:
            left = _in_minute(db, name, _REQUESTS, 1, limits.requests_per_minute, now, f"{who}: requests")
            made.requests_left = _tighter(made.requests_left, left)
        if limits.tokens_per_minute is not None:
            left = _in_minute(db, name, _TOKENS, made.tokens, limits.tokens_per_minute, now, f"{who}: tokens")
            made.tokens_left = _tighter(made.tokens_left, left)
        day, next_day = _day(now)
        if limits.tokens_per_day is not None:
            _fits(made.tokens, limits.tokens_per_day, f"{who}: tokens a day")
            used = _spent(db, name, _DAY, day)
            if used + made.tokens > limits.tokens_per_day:
                raise LimitError(
                    f"{who}: {limits.tokens_per_day} tokens a day, of which {used} are used or reserved; "
                    f"this request needs up to {made.tokens}; the day ends at midnight UTC",
                    retry_after_s=next_day - now,
                )
        if limits.budget_usd is not None:
            daily = limits.budget_period == "day"
            start, end = (day, next_day) if daily else _month(now)
            used = _spent(db, name, _COST_DAY if daily else _COST_MONTH, start)
            budget = round(limits.budget_usd * NANO)
            if used + made.nano_usd > budget:
                raise BudgetError(
                    f"{who}: a budget of ${limits.budget_usd:g} a {limits.budget_period}, of which "
                    f"${used / NANO:.6f} are used or reserved; this request may cost "
                    f"${made.nano_usd / NANO:.6f}",
                    retry_after_s=end - now,
                )


def _in_minute(
    db: sqlite3.Connection, scope: str, measure: str, amount: int, limit: int, now: float, what: str
) -> Remaining:
    _fits(amount, limit, f"{what} a minute")
    rows = db.execute(
        "SELECT start, amount FROM spent WHERE scope = ? AND measure = ? AND start > ? ORDER BY start",
        (scope, measure, int(now) - _MINUTE),
    ).fetchall()
    used = sum(row[1] for row in rows)
    excess = used + amount - limit
    if excess > 0:
        free_at = now + _MINUTE
        for start, spent in rows:
            excess -= spent
            if excess <= 0:
                free_at = start + _MINUTE
                break
        raise LimitError(
            f"{what} a minute: {limit}, of which {used} are used or reserved; this request needs {amount}",
            retry_after_s=max(free_at - now, 0.001),
        )
    return Remaining(limit, limit - used - amount, float(_MINUTE))


def _fits(amount: int, limit: int, what: str) -> None:
    if amount > limit:
        raise InvalidRequestError(
            f"{what}: {limit}, but this request alone needs up to {amount}: shorten it or lower max_tokens"
        )


def _tighter(one: Remaining | None, other: Remaining) -> Remaining:
    return other if one is None or other.remaining < one.remaining else one


def _add_use(
    db: sqlite3.Connection, scope: str, second: int, tokens: int, nano_usd: int, requests: int = 0
) -> None:
    day, month = _day(second)[0], _month(second)[0]
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


def _day(now: float) -> tuple[int, int]:
    start = int(now) // 86_400 * 86_400
    return start, start + 86_400


def _month(now: float) -> tuple[int, int]:
    first = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    following = (first + datetime.timedelta(days=32)).replace(day=1)
    return int(first.timestamp()), int(following.timestamp())
