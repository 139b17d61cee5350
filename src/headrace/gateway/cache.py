"""Stage 5: the exact cache. The same request of the same tenant gets the answer that it got before.

Answers are kept as the upstream gave them, a stream as its events, and replayed through the same filter.
Identical requests at the same time are asked once: the others wait for that one's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from headrace.errors import ConfigError
from headrace.gateway.config import CacheSettings
from headrace.gateway.sse import DONE, EventFilter
from headrace.gateway.usage import Usage, told

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway

HEADER = "x-headrace-cache"
_LARGEST_SHARE = 8  # an entry may take this part of the cache


class AnswerCache:
    """Answers in a SQLite file of their own, the longest unused leaving first."""

    def __init__(self, folder: Path, settings: CacheSettings) -> None:
        """Raises ConfigError if the file cannot be used."""
        self.configure(settings)
        self._flights: dict[bytes, asyncio.Future[bool]] = {}
        path = folder / "cache.sqlite"
        try:
            self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS answers (fingerprint BLOB PRIMARY KEY, stored_at REAL NOT NULL, "
                "used_at REAL NOT NULL, size INTEGER NOT NULL, answer BLOB NOT NULL)"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS answers_used ON answers (used_at)")
            self._bytes = self._size()
            path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the cache {path} cannot be used ({error}); it may be deleted") from None

    def configure(self, settings: CacheSettings) -> None:
        """Go by these settings from now on."""
        self.settings = settings
        self._limit = settings.max_mib * 2**20

    def clear(self) -> int:
        """Forget all answers; how many there were. Raises ConfigError if the file cannot be written."""
        try:
            count = self._db.execute("DELETE FROM answers").rowcount
        except sqlite3.Error as error:
            raise ConfigError(f"the cache cannot be cleared: {error}") from None
        self._bytes = 0
        return count

    def get(self, fingerprint: bytes) -> bytes | None:
        """The answer, unless it is too old, or cannot be read."""
        now = time.time()
        try:
            rows = self._db.execute(
                "UPDATE answers SET used_at = ? WHERE fingerprint = ? AND stored_at > ? RETURNING answer",
                (now, fingerprint, now - self.settings.ttl_s),
            ).fetchall()
        except sqlite3.Error:
            return None
        return bytes(rows[0][0]) if rows else None

    def put(self, fingerprint: bytes, answer: bytes) -> None:
        """Keep an answer, if it is not too large, and make room for it."""
        if len(answer) * _LARGEST_SHARE > self._limit:
            return
        now = time.time()
        self._db.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)",
            (fingerprint, now, now, len(answer), answer),
        )
        self._bytes += len(answer)
        if self._bytes > self._limit:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        self._db.execute("DELETE FROM answers WHERE stored_at <= ?", (now - self.settings.ttl_s,))
        while self._size() > self._limit:
            self._db.execute(
                "DELETE FROM answers WHERE fingerprint IN "
                "(SELECT fingerprint FROM answers ORDER BY used_at "
                "LIMIT max(1, (SELECT COUNT(*) FROM answers) / 10))"
            )
        self._bytes = self._size()

    def _size(self) -> int:
        return int(self._db.execute("SELECT COALESCE(SUM(size), 0) FROM answers").fetchone()[0])

    def flight(self, fingerprint: bytes) -> asyncio.Future[bool] | None:
        """The same request under way; None, and the caller's is it from now on, if there was none."""
        found = self._flights.get(fingerprint)
        if found is None:
            self._flights[fingerprint] = asyncio.get_running_loop().create_future()
        return found

    def land(self, fingerprint: bytes, answer: bytes | None) -> None:
        """The request is over, with an answer or without."""
        if answer is not None:
            with contextlib.suppress(sqlite3.Error):  # a full disk, say: the answer itself is good
                self.put(fingerprint, answer)
        flight = self._flights.pop(fingerprint, None)
        if flight is not None and not flight.done():
            flight.set_result(answer is not None)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


async def look_up(gateway: Gateway, context: RequestContext) -> None:
    """Fill in answer and usage on a hit; else the fingerprint to store under, if the answer may be kept."""
    cache = gateway.cache
    if cache is None or not _may_keep(context, cache.settings):
        return
    fingerprint = _fingerprint(gateway, context)
    context.cache = "miss"
    answer = cache.get(fingerprint)
    if answer is None and (flight := cache.flight(fingerprint)) is not None:
        wait_s = max(context.deadline - time.monotonic(), 0.0)
        done, _ = await asyncio.wait({flight}, timeout=wait_s)
        if done and flight.result():
            answer = cache.get(fingerprint)
        if answer is None:  # that one failed: to queue up behind the next would be slower for all
            return
    if answer is None:
        context.fingerprint = fingerprint
        return
    context.cache = "hit"
    if context.stream:
        replayed = ReplayedStream(answer, wants_usage=context.wants_usage)
        context.answer, context.usage = replayed, replayed.usage
    else:
        context.answer = answer
        context.usage = told(orjson.loads(answer).get("usage")) or Usage(
            context.prompt_tokens, estimated=True
        )
    context.outcome = "ok"


class ReplayedStream:
    """A stream out of the cache, in one piece."""

    def __init__(self, record: bytes, *, wants_usage: bool) -> None:
        events = EventFilter(wants_usage=wants_usage)
        self._events = events.feed(record) + DONE
        self.usage = events.usage or Usage(0, events.chunks, estimated=True)

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        yield self._events

    async def aclose(self) -> None:
        """Nothing to let go of."""


def _may_keep(context: RequestContext, settings: CacheSettings) -> bool:
    wish = context.headers.get(HEADER, "").strip().lower()
    if wish in ("on", "off"):
        return wish == "on"
    if context.route == "embeddings" or settings.sampled:
        return True
    temperature = context.body.get("temperature")
    return isinstance(temperature, (int, float)) and temperature == 0


def _fingerprint(gateway: Gateway, context: RequestContext) -> bytes:
    """Of all that can make a difference to the answer, and of whose it is."""
    where = sorted((t.upstream.config.url, t.name) for t in context.candidates)
    asked = {name: value for name, value in context.body.items() if name != "stream_options"}
    names = [context.model, context.release, context.version]
    parts = [context.tenant, context.route, names, where, context.stream, asked]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()
