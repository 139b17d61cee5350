"""Quotas: what a request may need is reserved before it runs, and settled to what it used when it ends.

Minutes slide: amounts are kept by the second, and the last 60 count. Days and months are UTC's. A
reservation is held by a lease that its gateway renews; when the gateway dies, the lease ends and what was
reserved is free again. Settling twice, or after the lease, counts what was used once.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headrace.errors import BudgetError, HeadraceError, InvalidRequestError, LimitError
from headrace.gateway.config import Limits

if TYPE_CHECKING:
    from headrace.gateway.ledger import Entry
    from headrace.gateway.store import Store

LEASE_S = 30.0
NANO = 10**9
MINUTE_S = 60
DAY_S = 86_400
_WHO = {"share": "tenant's use of the model"}
_FULL_S = 1.0  # to wait where too many run: nobody knows when one of them ends

Measure = Literal["running", "requests", "tokens", "day", "cost"]


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
    """What was reserved. ``second``: when it was, 0 if no limit counts it. ``requests_left`` and
    ``tokens_left``: the tightest limit a minute of all scopes.
    """

    request: str
    scopes: tuple[str, ...]
    tokens: int
    nano_usd: int
    second: int = 0
    requests_left: Remaining | None = None
    tokens_left: Remaining | None = None
    settled: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Held:
    """What a store says of a reservation that it has made in this ``second``. ``requests`` and ``tokens``:
    what each scope had used and reserved of its last minute before, in the scopes' order.
    """

    second: int
    requests: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Refused:
    """What a store says of a reservation that does not fit: the first scope, and the first of its limits.

    ``used``: of it, or reserved. ``free_at``: when the minute has room again, for limits a minute.
    """

    scope: Scope
    measure: Measure
    used: int
    now: float
    free_at: float = 0.0


class Quotas:
    """Quotas of a store."""

    def __init__(self, store: Store, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._lease_s = lease_s
        self._live: set[str] = set()  # requests whose leases are renewed

    async def reserve(self, request: str, scopes: Sequence[Scope], tokens: int, nano_usd: int) -> Reservation:
        """Reserve for all scopes or for none. Scopes without limits that count are not counted.

        ``nano_usd``: the most that the request can cost, in 1e-9 dollars. Raises LimitError (BudgetError for
        money) with the time to wait, InvalidRequestError if waiting would not help, and StateError.
        """
        made = Reservation(request, (), tokens, nano_usd)
        await self.extend(made, scopes)
        self._live.add(request)
        return made

    async def extend(self, made: Reservation, scopes: Sequence[Scope]) -> None:
        """Reserve the same for more scopes, or for none of them. Raises as :meth:`reserve` does."""
        scopes = [scope for scope in scopes if scope.limits.count_anything]
        if not scopes:
            return
        for scope in scopes:
            _check_that_it_ever_fits(scope, made)
        said = await self._store.hold(made, scopes, self._lease_s)
        if isinstance(said, Refused):
            raise _refusal(said, made)
        made.second = said.second
        made.scopes = tuple(dict.fromkeys((*made.scopes, *(scope.name for scope in scopes))))
        for scope, requests, used in zip(scopes, said.requests, said.tokens, strict=True):
            if (limit := scope.limits.requests_per_minute) is not None:
                made.requests_left = _tighter(made.requests_left, limit, limit - requests - 1)
            if (limit := scope.limits.tokens_per_minute) is not None:
                made.tokens_left = _tighter(made.tokens_left, limit, limit - used - made.tokens)

    async def settle(
        self, reservation: Reservation, tokens: int, nano_usd: int, entries: Sequence[Entry]
    ) -> None:
        """Put what was used in the place of what was reserved, and append ``entries`` to the ledger.

        Raises StateError if that is not certain: it may be tried again, and until then the lease's end gives
        back what was reserved.
        """
        if reservation.settled:
            return
        self._live.discard(reservation.request)
        await self._store.settle(reservation, tokens, nano_usd, entries)

    async def use(self, scope: str) -> Use:
        """What a scope uses now; zeros where no limit counts."""
        return await self._store.use(scope)

    async def renew(self) -> None:
        """Hold this gateway's leases for longer; to be called well within ``lease_s``."""
        await self._store.renew([*self._live], self._lease_s)


def _who(scope: Scope) -> str:
    kind = scope.name.partition(":")[0]
    return _WHO.get(kind, kind)


def _check_that_it_ever_fits(scope: Scope, made: Reservation) -> None:
    limits, who = scope.limits, _who(scope)
    for limit, what in (
        (limits.tokens_per_minute, "tokens a minute"),
        (limits.tokens_per_day, "tokens a day"),
    ):
        if limit is not None and made.tokens > limit:
            raise InvalidRequestError(
                f"{who}: {what}: {limit}, but this request alone needs up to {made.tokens}: "
                "shorten it or lower max_tokens"
            )


def _refusal(refused: Refused, made: Reservation) -> HeadraceError:
    limits, who, used, now = refused.scope.limits, _who(refused.scope), refused.used, refused.now
    if refused.measure == "running":
        return LimitError(
            f"this {who} may have {limits.concurrency} requests at a time: wait until one has ended",
            retry_after_s=_FULL_S,
        )
    if refused.measure == "day":
        return LimitError(
            f"{who}: {limits.tokens_per_day} tokens a day, of which {used} are used or reserved; "
            f"this request needs up to {made.tokens}; the day ends at midnight UTC",
            retry_after_s=day_of(now)[1] - now,
        )
    if refused.measure == "cost":
        _, end = day_of(now) if limits.budget_period == "day" else month_of(now)
        return BudgetError(
            f"{who}: a budget of ${limits.budget_usd:g} a {limits.budget_period}, of which "
            f"${used / NANO:.6f} are used or reserved; this request may cost ${made.nano_usd / NANO:.6f}",
            retry_after_s=end - now,
        )
    requests = refused.measure == "requests"
    limit, amount = (limits.requests_per_minute, 1) if requests else (limits.tokens_per_minute, made.tokens)
    return LimitError(
        f"{who}: {refused.measure} a minute: {limit}, of which {used} are used or reserved; "
        f"this request needs {amount}",
        retry_after_s=max(refused.free_at - now, 0.001),
    )


def _tighter(one: Remaining | None, limit: int, left: int) -> Remaining:
    return Remaining(limit, left, float(MINUTE_S)) if one is None or left < one.remaining else one


def budget_of(limits: Limits) -> int | None:
    """In 1e-9 dollars."""
    return None if limits.budget_usd is None else round(limits.budget_usd * NANO)


def day_of(now: float) -> tuple[int, int]:
    """UTC's day: its first second, and the next one's."""
    start = int(now) // DAY_S * DAY_S
    return start, start + DAY_S


def month_of(now: float) -> tuple[int, int]:
    """UTC's month: its first second, and the next one's."""
    first = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    following = (first + datetime.timedelta(days=32)).replace(day=1)
    return int(first.timestamp()), int(following.timestamp())
