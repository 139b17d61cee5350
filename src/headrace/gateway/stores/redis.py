"""The shared store: a Redis for several gateways, asked in one round trip for a reservation, one to settle.

What must not be cut in two is a Lua script (``lua/``), which Redis runs alone; its time is Redis's, so that
gateways whose clocks differ count the same minutes. A script that is asked again because its answer was lost
does nothing again. Rarer changes (keys, releases) are read, made here, and written if nobody was quicker.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import msgspec
import orjson

from headrace.errors import ConfigError, StateError
from headrace.gateway.keys import Key
from headrace.gateway.ledger import Answered, Entry, already_scored, append
from headrace.gateway.quotas import NANO, Held, Measure, Refused, Reservation, Scope, Use, budget_of
from headrace.gateway.releases.book import PastEvent
from headrace.gateway.stores.copying import (
    backed_up,
    copy_feedback,
    copy_key,
    copy_quotas,
    copy_release,
    new_file,
)
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
from headrace.gateway.stores.redis_restore import fill
from headrace.gateway.stores.tables import migrate
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.gateway.releases.state import Event
    from headrace.gateway.store import Change, TemplateRow

T = TypeVar("T")
Client: TypeAlias = Any  # redis-py's types leave open what each answer is
Pipeline: TypeAlias = Any

_VERSION = 1  # of what lies under the keys
_OLDEST = (6, 2)
_TIMEOUT_S = 1.0  # to connect, and to answer; each is tried twice
_CONNECTIONS = 50
_ALL = 2**31
_PAGE = 500  # rows of the ledger in one answer
_SCRIPTS = ("hold", "settle", "renew", "use", "score", "find_key", "quotas", "template")


class RedisStore:
    """A :class:`~headrace.gateway.store.Store` in a Redis, which several gateways may have open.

    ``clock``: in the place of Redis's own.
    """

    def __init__(self, url: str, password: str | None, clock: Callable[[], float] | None = None) -> None:
        self._url = url
        self._password = password
        self._clock = clock
        self._client: Client = None
        self._scripts: dict[str, Callable[..., Any]] = {}
        self._id = unique_id("gateway")
        self._known: list[str] = []  # reservations that are settled, as Redis need not remember any more

    @property
    def where(self) -> str:
        """The address, without the password."""
        return self._url

    @property
    def client(self) -> Client:
        """The connections."""
        assert self._client is not None, "the store is not open"
        return self._client

    async def open(self) -> None:
        """Connect, and see that it is a Redis that forgets nothing by itself."""
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ConfigError("a store in Redis needs redis-py: pip install 'headrace[gateway]'") from None
        pool = BlockingConnectionPool.from_url(
            self._url,
            password=self._password,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
        )
        self._client = Redis.from_pool(pool)
        lua = resources.files(__package__) / "lua"
        common = (lua / "common.lua").read_text("utf-8")
        for name in _SCRIPTS:
            self._scripts[name] = self.client.register_script(
                common + (lua / f"{name}.lua").read_text("utf-8")
            )
        try:
            with self._stating():
                await self._check()
        except StateError as error:
            raise ConfigError(error.message) from None

    async def _check(self) -> None:
        told = await self.client.info()
        version = tuple(int(part) for part in str(told.get("redis_version", "0")).split(".")[:2])
        if version < _OLDEST:
            raise ConfigError(f"{self.where} is Redis {told.get('redis_version')}; it must be 6.2 or newer")
        policy = told.get("maxmemory_policy", "noeviction")
        if told.get("maxmemory") and policy != "noeviction":
            raise ConfigError(
                f"{self.where} drops keys when its memory is full (maxmemory-policy {policy}), and with them "
                "quotas and the ledger; set it to noeviction"
            )
        await self.client.set("headrace:version", _VERSION, nx=True)
        written = await self.client.get("headrace:version")
        if int(written or 0) > _VERSION:
            raise ConfigError(f"{self.where} was written by a newer headrace: upgrade this one")

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            with contextlib.suppress(StateError), self._stating():
                await self.client.delete(f"headrace:settled:{self._id}")
            await self.client.aclose()
            await self.client.connection_pool.disconnect()

    @contextlib.contextmanager
    def _stating(self) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise StateError(f"the gateway's state in {self.where} cannot be used: {error}") from error

    async def _run(self, script: str, *arguments: str | bytes | int | float) -> Any:
        given = "" if self._clock is None else repr(self._clock())
        with self._stating():
            return await self._scripts[script](args=[given, *arguments])

    async def now(self) -> float:
        """Redis's time."""
        with self._stating():
            return await self._now(self.client)

    async def _now(self, client: Client) -> float:
        if self._clock is not None:
            return self._clock()
        seconds, micros = await client.time()
        return float(int(seconds) + int(micros) / 1e6)

    async def hold(self, made: Reservation, scopes: Sequence[Scope], lease_s: float) -> Held | Refused:
        """See :class:`~headrace.gateway.store.Store`, here and below."""
        encoded = orjson.dumps([_limits_of(scope) for scope in scopes])
        said = await self._run(
            "hold", made.request, made.tokens, made.nano_usd, made.second, lease_s, encoded
        )
        if said[0] == b"refused":
            _, index, measure, used, now, free_at = said
            which = cast("Measure", measure.decode())
            return Refused(scopes[index], which, int(used), now=float(now), free_at=float(free_at))
        second, *counts = map(int, said[1:])
        return Held(second, counts[::2], counts[1::2])

    async def settle(
        self, reservation: Reservation, tokens: int, nano_usd: int, entries: Sequence[Entry]
    ) -> None:
        local = time.time() if self._clock is None else self._clock()
        rows = [[max(local - entry.ended_at, 0.0), row_of(entry).decode()] for entry in entries]
        known, self._known = self._known, []
        try:
            await self._run(
                "settle",
                self._id,
                reservation.request,
                reservation.second,
                tokens,
                nano_usd,
                orjson.dumps(reservation.scopes),
                orjson.dumps(rows),
                entries[-1].tenant,
                entries[-1].request,
                orjson.dumps(known),
            )
        except BaseException:
            self._known += known
            raise
        reservation.settled = True
        self._known.append(reservation.request)

    async def renew(self, requests: Sequence[str], lease_s: float) -> None:
        await self._run("renew", lease_s, orjson.dumps(requests))

    async def use(self, scope: str) -> Use:
        running, requests, tokens, today, nano_today, nano_month = map(int, await self._run("use", scope))
        return Use(running, requests, tokens, today, nano_today / NANO, nano_month / NANO)

    async def add_key(self, key: Key, secret_hash: bytes) -> None:
        with self._stating():
            async with self.client.pipeline() as pipe:
                pipe.hset(KEYS, key.id, msgspec.json.encode(KeptKey(key, secret_hash.hex())))
                pipe.hset(SECRETS, secret_hash.hex(), key.id)
                await pipe.execute()

    async def rotate_key(self, key_id: str, secret_hash: bytes, at: float) -> bool:
        return await self._change_key(
            key_id, lambda kept: KeptKey(replace(kept.key, rotated_at=at), secret_hash.hex())
        )

    async def revoke_key(self, key_id: str, at: float) -> bool:
        return await self._change_key(
            key_id, lambda kept: KeptKey(replace(kept.key, revoked_at=at), kept.secret_hash)
        )

    async def _change_key(self, key_id: str, change: Callable[[KeptKey], KeptKey]) -> bool:
        async def attempt(pipe: Pipeline) -> bool:
            kept = _key(await pipe.hget(KEYS, key_id))
            if kept is None or kept.key.revoked_at is not None:
                await pipe.unwatch()
                return False
            after = change(kept)
            pipe.multi()
            pipe.hset(KEYS, key_id, msgspec.json.encode(after))
            pipe.hdel(SECRETS, kept.secret_hash)
            if after.key.revoked_at is None:
                pipe.hset(SECRETS, after.secret_hash, key_id)
            return True

        return await self._swap(KEYS, attempt)

    async def find_key(self, secret_hash: bytes) -> Key | None:
        kept = _key(await self._run("find_key", secret_hash.hex()))
        return None if kept is None else kept.key

    async def all_keys(self) -> list[Key]:
        with self._stating():
            found = await self.client.hvals(KEYS)
        keys = [kept.key for kept in map(_key, found) if kept is not None]
        return sorted(keys, key=lambda key: key.created_at)

    @contextlib.asynccontextmanager
    async def ledger(self, since: float) -> AsyncIterator[sqlite3.Connection]:
        """A copy of the rows in a temporary file."""
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as db:
            migrate(db, self.where)
            db.execute("BEGIN")
            async for _, entry in self.entries(since):
                append(db, entry)
            db.execute("COMMIT")
            yield db

    async def entries(self, since: float) -> AsyncIterator[tuple[str, Entry]]:
        """The ledger's rows that were written from ``since`` on, with their ids, oldest first."""
        begin = f"{int(since * 1000)}-0" if since > 0 else "-"
        while True:
            with self._stating():
                page = await self.client.xrange(LEDGER, begin, "+", count=_PAGE)
            for row_id, fields in page:
                yield row_id.decode(), _entry(fields[b"at"], fields[b"row"])
            if len(page) < _PAGE:
                return
            begin = f"({page[-1][0].decode()}"

    async def score(self, tenant: str, request: str, score: float) -> Answered | None:
        said = await self._run("score", tenant, request, score)
        if said is None:
            return None
        if said == b"scored":
            raise already_scored()
        entry = _entry(*said)
        return Answered(entry.release, entry.version, entry.ended_at)

    async def release(self, name: str) -> bytes | None:
        with self._stating():
            state: bytes | None = await self.client.get(release(name))
        return state

    async def change_release(self, name: str, change: Change) -> tuple[bytes, Event | None]:
        key = release(name)

        async def attempt(pipe: Pipeline) -> tuple[bytes, Event | None]:
            now = await self._now(pipe)
            state, event = change(await pipe.get(key), now)
            pipe.multi()
            pipe.set(key, state)
            if event is not None:
                past = PastEvent(now, event.what, event.version, event.detail)
                pipe.lpush(history(name), msgspec.json.encode(past))
            return state, event

        return await self._swap(key, attempt)

    async def history(self, name: str, most: int) -> list[PastEvent]:
        with self._stating():
            found = await self.client.lrange(history(name), 0, most - 1)
        return [msgspec.json.decode(event, type=PastEvent) for event in found]

    async def put_template(self, name: str, content: str, same: Callable[[str], bool]) -> int:
        key = template(name)

        async def attempt(pipe: Pipeline) -> int:
            now, last = await self._now(pipe), int(await pipe.hget(key, "last") or 0)
            if last and same(_template(name, last, await pipe.hget(key, str(last)))[3]):
                await pipe.unwatch()
                return last
            pipe.multi()
            pipe.hset(key, str(last + 1), f"{now:.6f} {content}")
            pipe.hset(key, "last", last + 1)
            return last + 1

        return await self._swap(key, attempt)

    async def template(self, name: str, version: int | None) -> TemplateRow | None:
        found = await self._run("template", name, "" if version is None else version)
        return None if found is None else _template(name, int(found[0]), found[1])

    async def all_templates(self) -> list[TemplateRow]:
        with self._stating():
            keys = [key async for key in self.client.scan_iter(template("*"), count=_PAGE)]
        names = sorted({key.decode().removeprefix(template("")) for key in keys})
        found = [await self.template(name, None) for name in names]
        return [row for row in found if row is not None]

    async def remove_template(self, name: str) -> int:
        with self._stating():
            async with self.client.pipeline() as pipe:
                pipe.hlen(template(name))
                pipe.delete(template(name))
                fields, _ = await pipe.execute()
        return max(int(fields) - 1, 0)

    async def _swap(self, key: str, attempt: Callable[[Pipeline], Awaitable[T]]) -> T:
        """Let ``attempt`` read, and queue what it makes of that, until nobody was quicker at ``key``."""
        from redis.exceptions import WatchError

        while True:
            with self._stating():
                async with self.client.pipeline() as pipe:
                    await pipe.watch(key)
                    made = await attempt(pipe)
                    try:
                        await pipe.execute()
                    except WatchError:
                        continue
                    return made

    async def back_up(self, to: Path) -> int:
        """Write quotas as of one moment, then keys and releases, then the ledger up to now."""
        with new_file(to, self.where) as copy:
            migrate(copy, self.where)
            copy.execute("BEGIN")
            for flat in await self._run("quotas"):
                copy_quotas(copy, flat[0].decode(), flat[1:])
            await self._copy_rest(copy)
            copy.execute("COMMIT")
        return to.stat().st_size

    async def restore(self, source: Path) -> int:
        """Write what the file has, and leave out minutes that have passed."""
        with backed_up(source) as copy, self._stating():
            if await self.client.exists(KEYS, LEDGER):
                raise ConfigError(f"{self.where} is not empty: name another database of it")
            return await fill(self.client, copy, await self._now(self.client))

    async def _copy_rest(self, copy: sqlite3.Connection) -> None:
        with self._stating():
            keys = await self.client.hvals(KEYS)
            feedback = await self.client.hgetall(FEEDBACK)
            states = [name async for name in self.client.scan_iter(release("*"), count=_PAGE)]
            for key in states:
                name = key.decode().removeprefix(release(""))
                state = await self.client.get(key)
                copy_release(copy, name, state, reversed(await self.history(name, _ALL)))
        for last in await self.all_templates():
            for version in range(1, last[1] + 1):
                if (row := await self.template(last[0], version)) is not None:
                    copy.execute("INSERT INTO templates VALUES (?, ?, ?, ?)", row)
        for kept in map(_key, keys):
            if kept is not None:
                copy_key(copy, kept.key, bytes.fromhex(kept.secret_hash))
        async for row_id, entry in self.entries(0.0):
            append(copy, entry)
            if (given := feedback.get(row_id.encode())) is not None:
                copy_feedback(copy, *map(float, given.split()))


def _limits_of(scope: Scope) -> dict[str, Any]:
    limits = scope.limits
    found = {
        "running": limits.concurrency,
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "day": limits.tokens_per_day,
        "cost": budget_of(limits),
    }
    given = {measure: limit for measure, limit in found.items() if limit is not None}
    return {"name": scope.name, "period": limits.budget_period, **given}


def _template(name: str, version: int, encoded: bytes) -> TemplateRow:
    created_at, _, content = encoded.decode().partition(" ")
    return name, version, float(created_at), content


def _key(encoded: bytes | None) -> KeptKey | None:
    return None if encoded is None else msgspec.json.decode(encoded, type=KeptKey)


def _entry(ended_at: bytes, row: bytes) -> Entry:
    return Entry(float(ended_at), *orjson.loads(row))
