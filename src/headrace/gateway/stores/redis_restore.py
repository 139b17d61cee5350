"""Fills an empty Redis with what a backup holds."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec

from headrace.gateway.keys import Key
from headrace.gateway.ledger import Entry
from headrace.gateway.quotas import DAY_S, day_of, month_of
from headrace.gateway.releases.book import PastEvent
from headrace.gateway.stores.redis_keys import (
    FEEDBACK,
    KEYS,
    LEDGER,
    SECRETS,
    KeptKey,
    history,
    release,
    row_of,
    template,
)

_BATCH = 500
_AMOUNTS = {  # measure: the hash's kind, its field, how long it is kept; as in lua/common.lua
    "day": ("day", "tokens", 3 * DAY_S),
    "cost-day": ("day", "nano_usd", 3 * DAY_S),
    "cost-month": ("month", "nano_usd", 70 * DAY_S),
}


async def fill(client: Any, copy: sqlite3.Connection, now: float) -> int:
    """Write all of it, and keys last: before them, nobody is served. How many rows the ledger has."""
    async with client.pipeline() as pipe:
        for name, state in copy.execute("SELECT name, state FROM releases"):
            pipe.set(release(name), state)
        events = copy.execute("SELECT release, at, what, version, detail FROM release_events ORDER BY id")
        for name, *event in events:
            pipe.lpush(history(name), msgspec.json.encode(PastEvent(*event)))
        rows = copy.execute("SELECT name, version, created_at, content FROM templates ORDER BY version")
        for name, version, created_at, content in rows:
            pipe.hset(template(name), str(version), f"{created_at:.6f} {content}")
            pipe.hset(template(name), "last", version)
        _quotas(pipe, copy, now)
        await pipe.execute()
    count = await _ledger(client, copy)
    async with client.pipeline() as pipe:
        columns = ", ".join(field.name for field in fields(Key))
        for secret_hash, *values in copy.execute(f"SELECT secret_hash, {columns} FROM keys"):
            kept = KeptKey(Key(*values), bytes(secret_hash).hex())
            pipe.hset(KEYS, kept.key.id, msgspec.json.encode(kept))
            if kept.key.revoked_at is None:
                pipe.hset(SECRETS, kept.secret_hash, kept.key.id)
        await pipe.execute()
    return count


def _quotas(pipe: Any, copy: sqlite3.Connection, now: float) -> None:
    """Of the day and the month that are not over."""
    query = "SELECT scope, amount FROM spent WHERE measure = ? AND start = ?"
    starts = {"day": day_of(now)[0], "month": month_of(now)[0]}
    for measure, (kind, field, keep_s) in _AMOUNTS.items():
        start = starts[kind]
        for scope, amount in copy.execute(query, (measure, start)):
            key = f"headrace:{kind}:{start}:{scope}"
            pipe.hset(key, field, amount)
            pipe.expire(key, keep_s)


async def _ledger(client: Any, copy: sqlite3.Connection) -> int:
    names = ", ".join(field.name for field in fields(Entry))
    scores = dict(copy.execute("SELECT entry, at || ' ' || score FROM feedback"))
    rows: Iterator[tuple[Any, ...]] = copy.execute(f"SELECT id, {names} FROM ledger ORDER BY id")
    count = 0
    while batch := list(itertools.islice(rows, _BATCH)):
        async with client.pipeline() as pipe:
            for _, *values in batch:
                entry = Entry(*values)
                pipe.xadd(LEDGER, {"at": f"{entry.ended_at:.6f}", "row": row_of(entry)})
            written = await pipe.execute()
            given = [(at, scores[row[0]]) for at, row in zip(written, batch, strict=True) if row[0] in scores]
            for at, score in given:
                pipe.hset(FEEDBACK, at, score)
            await pipe.execute()
        count += len(batch)
    return count
