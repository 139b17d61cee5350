"""The ledger: one row for every request that was let in, written with its settlement, never changed.

Of a document that was read in parts, there is one more for each part.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import ConfigError, InvalidRequestError, NotFoundError, StateError
from headrace.gateway.quotas import NANO
from headrace.gateway.resume import How

if TYPE_CHECKING:
    from headrace.gateway.store import Store

Outcome = Literal["ok", "refused", "failed", "cancelled"]
CacheUse = Literal["hit", "semantic-hit", "merged", "partial-hit", "miss", "off"]
FREE: frozenset[CacheUse] = frozenset({"hit", "semantic-hit", "merged"})
"""Answers that cost nothing: kept ones, and those that an identical request got at the same time and pays
for. Of a partial hit, what was asked costs.
"""
By = Literal["tenant", "app", "key", "model", "upstream", "version", "route", "intent", "day"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. ``estimated``: no upstream told the usage, so it is the gateway's guess. ``upstream``: the
    one that ended the answer; ``resumed``: how, if another one had begun it (empty: none had).

    ``routed``: the route that was asked for, if it was one; ``reason``: why the model was chosen; ``intent``:
    what the request was taken for. ``baseline_nano_usd``: what the same tokens would have cost without the
    cache and at the route's large model.

    A document that was read in parts has a row for each, under the request's id: ``part`` counts them from 1
    on. It is 0 in the row of the request itself, which is that of their merge.
    """

    ended_at: float
    request: str
    tenant: str
    key: str
    model: str
    upstream: str
    route: str
    outcome: Outcome
    cache: CacheUse
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool
    nano_usd: int
    duration_ms: int
    app: str = ""
    release: str = ""
    version: str = ""
    resumed: How | Literal[""] = ""
    routed: str = ""
    intent: str = ""
    confidence: float | None = None
    reason: str = ""
    baseline_nano_usd: int = 0
    part: int = 0

    @property
    def charged_tokens(self) -> int:
        """What counts in quotas."""
        return 0 if self.cache in FREE else self.prompt_tokens + self.completion_tokens


_FREE = ", ".join(f"'{use}'" for use in sorted(FREE))
_GROUPS = {
    "route": "routed",
    "app": "CASE app WHEN '' THEN tenant ELSE tenant || '/' || app END",
    "day": "date(ended_at, 'unixepoch')",
    "version": "CASE release WHEN '' THEN '' ELSE release || '/' || version END",
}
_INSERT = (
    f"INSERT INTO ledger ({', '.join(field.name for field in fields(Entry))}) "
    f"VALUES ({', '.join('?' * len(fields(Entry)))})"
)


values: Callable[[Entry], tuple[Any, ...]] = attrgetter(*(field.name for field in fields(Entry)))
"""A row's values in order. dataclasses.astuple copies each of them deeply, which takes ten times as long."""


def append(db: sqlite3.Connection, entry: Entry) -> None:
    """Write one row, in the caller's transaction."""
    db.execute(_INSERT, values(entry))


@dataclass(frozen=True, slots=True)
class Answered:
    """Which version of a release answered a request, if one did, and when that ended."""

    release: str
    version: str
    ended_at: float


async def score(store: Store, tenant: str, request: str, score: float) -> Answered:
    """Keep what an answer was worth, 0 to 1. ``request``: its id; of those with the same id, the last.

    Raises NotFoundError if no such request of the tenant's has ended, InvalidRequestError if it was scored.
    """
    answered = await store.score(tenant, request, score)
    if answered is None:
        raise NotFoundError(
            "no request with this id has ended here; send the x-request-id of one of your answers",
            param="request_id",
        )
    return answered


def already_scored() -> InvalidRequestError:
    """What stores raise where a request has its score."""
    error = InvalidRequestError("this request has its score already", param="request_id")
    error.status, error.code = 409, "already_scored"
    return error


@dataclass(frozen=True, slots=True)
class Sum:
    """What a group of requests used. Money in dollars.

    ``baseline_usd``: had every route sent everything to its large model, and nothing come out of the cache,
    for the same tokens. It is ``cost_usd`` and what was saved: ``saved_by_cache_usd``, all that hits would
    have cost, and ``saved_by_routing_usd``, less than 0 where something dearer answered. The gateway's own
    embeddings are a cost without a baseline.
    """

    group: str
    requests: int
    failed: int
    cache_hits: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float
    baseline_usd: float
    saved_by_cache_usd: float
    saved_by_routing_usd: float


async def usage(store: Store, by: By, *, since: float = 0.0, tenant: str | None = None) -> list[Sum]:
    """Sums over the ledger from ``since`` (seconds since 1970) on, the dearest group first."""
    baseline = "COALESCE(baseline_nano_usd, nano_usd)"  # rows from before it was kept are their own
    answered = f"cache IN ({_FREE})"
    column = _GROUPS.get(by, by)
    where = "ended_at >= ?"
    values: list[float | str] = [since]
    if tenant is not None:
        where += " AND tenant = ?"
        values.append(tenant)
    try:
        async with store.ledger(since) as db:
            rows = db.execute(
                f"""SELECT {column}, SUM(part = 0), SUM(outcome = 'failed' AND part = 0),
                    SUM({answered} AND part = 0), SUM(prompt_tokens),
                    SUM(cached_tokens), SUM(completion_tokens), SUM(nano_usd) / {NANO}.0,
                    SUM({baseline}) / {NANO}.0, SUM(({baseline} - nano_usd) * ({answered})) / {NANO}.0,
                    SUM(({baseline} - nano_usd) * NOT ({answered})) / {NANO}.0
                    FROM ledger WHERE {where} GROUP BY 1 ORDER BY SUM(nano_usd) DESC, 1""",
                values,
            ).fetchall()
    except (sqlite3.Error, StateError) as error:
        raise ConfigError(f"the ledger in {store.where} cannot be read: {error}") from None
    return [Sum(*row) for row in rows]
