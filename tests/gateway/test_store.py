"""The state, of both kinds: what one gateway writes others read, and a copy is whole.

Of the file, every earlier version leads to this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, InvalidRequestError, NotFoundError
from headrace.gateway.export import export
from headrace.gateway.keys import Keys
from headrace.gateway.ledger import Entry, score, usage
from headrace.gateway.quotas import Quotas, Reservation
from headrace.gateway.releases.state import Event
from headrace.gateway.shaping.settings import Template
from headrace.gateway.shaping.templates import Templates
from headrace.gateway.store import Store
from headrace.gateway.stores.tables import MIGRATIONS
from tests.e2e.running import called
from tests.gateway.conftest import Places
from tests.gateway.redis_server import Kind, Place, RunningRedis
from tests.gateway.running import Upstreams, gateway

LEDGER = (
    "INSERT INTO ledger (ended_at, request, tenant, key, model, upstream, route, outcome, cache, "
    "prompt_tokens, cached_tokens, completion_tokens, estimated, nano_usd, duration_ms) "
    "VALUES (1.0, 'req-1', 'acme', 'key_1', 'm', 'u', 'completions', 'ok', 'miss', 7, 0, 5, 0, 9, 3)"
)


def made_by_version(folder: Path, version: int) -> None:
    """The file as that version left it, with a key, a use and a row of the ledger."""
    with contextlib.closing(sqlite3.connect(folder / "gateway.sqlite", isolation_level=None)) as db:
        for statements in MIGRATIONS[:version]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version={version}")
        db.execute(
            "INSERT INTO keys (id, secret_hash, tenant, name, created_at) "
            "VALUES ('key_1', x'00', 'acme', 'n', 1)"
        )
        db.execute("INSERT INTO spent VALUES ('tenant:acme', 'day', 0, 12)")
        db.execute(LEDGER)


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_every_earlier_version_is_brought_to_this_one(tmp_path: Path, version: int) -> None:
    made_by_version(tmp_path, version)

    async def check() -> None:
        async with Place(tmp_path).opened() as store:
            [key] = await Keys(store).all()
            assert (key.id, key.tenant, key.app) == ("key_1", "acme", "")
            [row] = await usage(store, "tenant")
            assert (row.group, row.prompt_tokens, row.completion_tokens) == ("acme", 7, 5)
            assert [row.group for row in await usage(store, "version")] == [""]
            async with store.ledger(0.0) as db:
                assert db.execute("SELECT amount FROM spent").fetchall() == [(12,)]
                with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                    db.execute("UPDATE ledger SET tenant = 'x'")
            made, _ = await Keys(store).create("acme", app="web")
            assert (await Keys(store).all())[-1] == made
        async with Place(tmp_path / "new").opened():
            pass

    asyncio.run(check())
    tables = "SELECT type, name FROM sqlite_master ORDER BY 1, 2"
    with contextlib.closing(sqlite3.connect(tmp_path / "new" / "gateway.sqlite")) as fresh:
        new = fresh.execute(tables).fetchall()
    with contextlib.closing(sqlite3.connect(tmp_path / "gateway.sqlite")) as db:
        assert db.execute(tables).fetchall() == new
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    made_by_version(tmp_path, len(MIGRATIONS))
    with contextlib.closing(sqlite3.connect(tmp_path / "gateway.sqlite")) as db:
        db.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match="newer headrace"):
        asyncio.run(opened(Place(tmp_path)))


async def opened(where: Place) -> None:
    async with where.opened():
        pass


def test_a_backup_of_a_running_gateway_is_whole_and_fills_the_other_kind_of_store(
    upstreams: Upstreams, kind: Kind, places: Places, redis_server: RunningRedis, tmp_path: Path
) -> None:
    _, url = upstreams.start()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "releases": {"assistant": {"versions": {"v1": {"model": "m"}, "v2": {"model": "m"}}}},
        "tenants": {"acme": {"limits": {"tokens_per_day": 1_000_000}}},
    }
    with gateway(places().config | config, tmp_path) as made:
        headers = made.key("acme")
        revoked = made.key("acme")
        made.revoke_last()
        promoted = called("gateway", "releases", "promote", str(made.file), "assistant", "--version", "v2")
        assert promoted.returncode == 0
        before = sum(made.chat(headers).status_code == 200 for _ in range(5))
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                made.chat(headers)

        loading = threading.Thread(target=load)
        loading.start()
        copy = tmp_path / "copy.sqlite"
        done = called("gateway", "backup", str(made.file), str(copy))
        stop.set()
        loading.join()
        assert done.returncode == 0, done.stderr
        again = called("gateway", "backup", str(made.file), str(copy))
        assert again.returncode == 1
        assert "exists" in again.stderr
        nowhere = called("gateway", "backup", str(made.file), str(tmp_path / "none" / "copy"))
        assert nowhere.returncode == 1
        assert nowhere.stderr.count("\n") == 1
    assert copy.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.part-*"))
    (tmp_path / "restored").mkdir()
    file = tmp_path / "restored" / "gateway.yaml"
    other = {"store": redis_server.url()} if kind == "sqlite" else {}
    file.write_text(json.dumps(config | other))
    ended = called("gateway", "restore", str(file), str(file))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "is no backup" in ended.stderr
    ended = called("gateway", "restore", str(file), str(copy))
    assert ended.returncode == 0, ended.stderr
    assert "is not empty" in called("gateway", "restore", str(file), str(copy)).stderr
    with gateway(config | other, tmp_path / "restored") as made:
        counted = made.usage()["acme"]
        assert counted["requests"] >= before
        assert f"{counted['requests']} rows" in ended.stdout
        used = made.use("tenant:acme")
        assert used.running == 0
        assert 6 * before <= used.tokens_today <= 6 * counted["requests"]
        answer = made.chat(headers, model="assistant")
        assert answer.status_code == 200, "with the key of before"
        assert answer.headers["x-headrace-version"] == "v2"
        assert made.chat(revoked).status_code == 401


def both(places: Places, check: Callable[[Store, Store], Awaitable[None]]) -> None:
    """Run ``check`` on two open stores over the same state, as two gateways have it."""

    async def opened() -> None:
        where = places()
        async with where.opened() as one, where.opened() as other:
            await check(one, other)

    asyncio.run(opened())


def test_a_key_is_the_same_to_all_gateways(places: Places) -> None:
    async def check(one: Store, other: Store) -> None:
        keys, others = Keys(one), Keys(other)
        made, secret = await keys.create("acme", "laptop", "web")
        assert await others.find(secret) == made
        assert abs(made.created_at - time.time()) < 60
        assert await others.find(f"hr-{'x' * 43}") is None
        second = await others.rotate(made.id)
        assert await keys.find(secret) is None
        rotated = await keys.find(second)
        assert rotated is not None
        assert (rotated.id, rotated.app, rotated.name) == (made.id, "web", "laptop")
        await keys.revoke(made.id)
        assert await others.find(second) is None
        for change in (others.rotate, others.revoke):
            with pytest.raises(NotFoundError, match="keys list"):
                await change(made.id)
        later, _ = await keys.create("other")
        listed = await others.all()
        assert [key.id for key in listed] == [made.id, later.id]
        assert listed[0].revoked_at is not None

    both(places, check)


def row(request: str, **changes: Any) -> Entry:
    """A row that ended an hour ago."""
    values: dict[str, Any] = {
        "ended_at": time.time() - 3600,
        "request": request,
        "tenant": "acme",
        "key": "key_1",
        "model": "m",
        "upstream": "u",
        "route": "completions",
        "outcome": "ok",
        "cache": "miss",
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 5,
        "estimated": False,
        "nano_usd": 9,
        "duration_ms": 3,
        "baseline_nano_usd": 9,
    }
    return Entry(**values | changes)


async def settled(store: Store, *entries: Entry) -> None:
    await Quotas(store).settle(
        Reservation(f"hold-{entries[0].request}-{entries[0].tenant}-{entries[0].version}", (), 0, 0),
        0,
        0,
        entries,
    )


def test_the_ledger_sums_what_all_gateways_wrote(places: Places, tmp_path: Path) -> None:
    async def check(one: Store, other: Store) -> None:
        await settled(one, row("1"), row("1", nano_usd=11))
        await settled(other, row("2", tenant="é", cache="hit", nano_usd=0, completion_tokens=6))
        await settled(
            one, row("3", release="r", version="v1", confidence=0.5, outcome="failed", estimated=True)
        )
        sums = {each.group: each for each in await usage(other, "tenant")}
        assert (sums["acme"].requests, sums["acme"].failed, sums["acme"].prompt_tokens) == (3, 1, 21)
        assert (sums["é"].cache_hits, sums["é"].completion_tokens) == (1, 6)
        assert sums["é"].saved_by_cache_usd == pytest.approx(9e-9)
        assert [each.group for each in await usage(one, "version", tenant="acme")] == ["", "r/v1"]
        hour_ago = time.time() - 3590
        assert await usage(one, "tenant", since=hour_ago) == []
        assert len(await usage(one, "tenant", since=hour_ago - 60)) == 2
        assert await export(one, tmp_path / "rows.jsonl") == 4
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert [each["request"] for each in rows] == ["1", "1", "2", "3"]
        assert rows[3]["confidence"] == 0.5
        (tmp_path / "rows.jsonl").unlink()

    both(places, check)


def test_a_score_is_for_the_last_request_of_its_id_and_kept_once(places: Places) -> None:
    async def check(one: Store, other: Store) -> None:
        await settled(one, row("again", version="v1", release="r"))
        await settled(other, row("again", version="v2", release="r", tenant="acme"))
        with pytest.raises(NotFoundError):
            await score(one, "other", "again", 1.0)
        answered = await score(one, "acme", "again", 0.25)
        assert (answered.release, answered.version) == ("r", "v2")
        assert abs(answered.ended_at - (time.time() - 3600)) < 60
        with pytest.raises(InvalidRequestError, match="its score already"):
            await score(other, "acme", "again", 0.5)

    both(places, check)


def test_nobody_overwrites_a_releases_change_that_he_did_not_read(places: Places) -> None:
    """Two gateways learn at the same time; each of their changes is in the end there, and in its order."""
    where, turns = places(), 25

    def add(before: bytes | None, now: float) -> tuple[bytes, Event | None]:
        assert abs(now - time.time()) < 60
        count = int(before or b"0") + 1
        return str(count).encode(), Event("advanced", "v2", str(count))

    async def learn() -> None:
        async with where.opened() as store:
            for _ in range(turns):
                await store.change_release("a/b:c", add)

    def broken(before: bytes | None, now: float) -> tuple[bytes, Event | None]:
        raise ConfigError("it cannot be")

    async def check() -> None:
        async with where.opened() as store:
            with pytest.raises(ConfigError, match="cannot be"):
                await store.change_release("a/b:c", broken)
            assert await store.release("a/b:c") == str(3 * turns).encode()
            assert await store.release("other") is None
            history = await store.history("a/b:c", 4)
            assert [event.detail for event in history] == [str(3 * turns - n) for n in range(4)]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: asyncio.run(learn()), range(3)))
    asyncio.run(check())


def test_templates_are_the_same_to_all_gateways_and_are_copied(places: Places, tmp_path: Path) -> None:
    """Each put is a version; one that says the same is none."""

    async def check(one: Store, other: Store) -> None:
        first, second = Template(text="Say {what}."), Template(text="Tell {what}.")
        templates, others = Templates(one), Templates(other)
        assert await templates.find("greet") is None
        assert [await templates.put("greet", each) for each in (first, first, second)] == [1, 1, 2]
        assert await others.put("a:b", first) == 1
        assert [(each.name, each.version) for each in await others.all()] == [("a:b", 1), ("greet", 2)]
        assert (await others.get("greet")).template == second
        assert (await others.get("greet", 1)).template == first
        assert abs((await others.get("greet")).created_at - time.time()) < 60
        with pytest.raises(NotFoundError, match="there is: a:b, greet"):
            await templates.get("greet", 3)
        await one.back_up(tmp_path / "copy")
        assert await others.remove("greet") == 2
        assert await templates.find("greet") is None
        async with Place(tmp_path / "restored").opened() as restored:
            await restored.restore(tmp_path / "copy")
            assert (await Templates(restored).get("greet", 1)).template == first
            assert (await Templates(restored).get("greet")).version == 2
        (tmp_path / "copy").unlink()

    both(places, check)
