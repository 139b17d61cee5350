"""The ledger: one row for every request that was let in, written with its settlement, never changed."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import astuple, dataclass, fields
from typing import Literal

from headrace.errors import ConfigError, InvalidRequestError, NotFoundError
from headrace.gateway.quotas import NANO
from headrace.gateway.store import Store

Outcome = Literal["ok", "refused", "failed", "cancelled"]
CacheUse = Literal["hit", "miss", "off"]
By = Literal["tenant", "app", "key", "model", "upstream", "version", "day"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. ``estimated``: no upstream told the usage, so it is the gateway's guess."""

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


_GROUPS = {
    "app": "CASE app WHEN '' THEN tenant ELSE tenant || '/' || app END",
    "day": "date(ended_at, 'unixepoch')",
    "version": "CASE release WHEN '' THEN '' ELSE release || '/' || version END",
}
_INSERT = (
    f"INSERT INTO ledger ({', '.join(field.name for field in fields(Entry))}) "
    f"VALUES ({', '.join('?' * len(fields(Entry)))})"
)


def append(db: sqlite3.Connection, entry: Entry) -> None:
    """Write one row, in the caller's transaction."""
    db.execute(_INSERT, astuple(entry))


@dataclass(frozen=True, slots=True)
class Answered:
    """Which version of a release answered a request, if one did, and when that ended."""

    release: str
    version: str
    ended_at: float


def score(store: Store, tenant: str, request: str, score: float) -> Answered:
    """Keep what an answer was worth, 0 to 1. ``request``: its id; of those with the same id, the last.

    Raises NotFoundError if no such request of the tenant's has ended, InvalidRequestError if it was scored.
    """
    with store.transaction() as db:
        row = db.execute(
            "SELECT id, release, version, ended_at FROM ledger WHERE request = ? AND tenant = ? "
            "ORDER BY id DESC LIMIT 1",
            (request, tenant),
        ).fetchone()
        if row is None:
            raise NotFoundError(
                "no request with this id has ended here; send the x-request-id of one of your answers",
                param="request_id",
            )
        try:
            db.execute("INSERT INTO feedback VALUES (?, ?, ?)", (row[0], time.time(), score))
        except sqlite3.IntegrityError:
            error = InvalidRequestError("this request has its score already", param="request_id")
            error.status, error.code = 409, "already_scored"
            raise error from None
    return Answered(*row[1:])


@dataclass(frozen=True, slots=True)
class Sum:
    """What a group of requests used. ``cost_usd`` in dollars."""

    group: str
    requests: int
    failed: int
    cache_hits: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float


def usage(store: Store, by: By, *, since: float = 0.0, tenant: str | None = None) -> list[Sum]:
    """Sums over the ledger from ``since`` (seconds since 1970) on, the dearest group first."""
    column = _GROUPS.get(by, by)
    where = "ended_at >= ?"
    values: list[float | str] = [since]
    if tenant is not None:
        where += " AND tenant = ?"
        values.append(tenant)
    try:
        rows = store.db.execute(
            f"""SELECT {column}, COUNT(*), SUM(outcome = 'failed'), SUM(cache = 'hit'), SUM(prompt_tokens),
                SUM(cached_tokens), SUM(completion_tokens), SUM(nano_usd) / {NANO}.0
                FROM ledger WHERE {where} GROUP BY 1 ORDER BY SUM(nano_usd) DESC, 1""",
            values,
        ).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"the ledger in {store.path} cannot be read: {error}") from None
    return [Sum(*row) for row in rows]
