"""The embedded state: every earlier version leads to this one, and a copy of it is whole."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.gateway.keys import Keys
from headrace.gateway.ledger import usage
from headrace.gateway.stores.tables import MIGRATIONS
from tests.e2e.running import run
from tests.gateway.conftest import Places
from tests.gateway.redis_server import Place
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


def test_a_backup_of_a_running_gateway_is_whole_and_serves(
    upstreams: Upstreams, places: Places, tmp_path: Path
) -> None:
    """Of either store it is a file that a gateway of its own can be started on."""
    _, url = upstreams.start()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": {"limits": {"tokens_per_day": 1_000_000}}},
    }
    with gateway(places().config | config, tmp_path) as made:
        headers = made.key("acme")
        revoked = made.key("acme")
        made.revoke_last()
        before = sum(made.chat(headers).status_code == 200 for _ in range(5))
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                made.chat(headers)

        loading = threading.Thread(target=load)
        loading.start()
        copy = tmp_path / "copy.sqlite"
        done = run("gateway", "backup", str(made.file), str(copy))
        stop.set()
        loading.join()
        assert done.returncode == 0, done.stderr
        again = run("gateway", "backup", str(made.file), str(copy))
        assert again.returncode == 1
        assert "exists" in again.stderr
        nowhere = run("gateway", "backup", str(made.file), str(tmp_path / "none" / "copy"))
        assert nowhere.returncode == 1
        assert nowhere.stderr.count("\n") == 1
    assert "gateway.sqlite" in done.stdout
    assert copy.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.part-*"))
    restored = tmp_path / "restored"
    (restored / "gateway-state").mkdir(parents=True)
    copy.rename(restored / "gateway-state" / "gateway.sqlite")
    with gateway(config, restored) as made:
        counted = made.usage()["acme"]
        assert counted["requests"] >= before
        assert made.use("tenant:acme").tokens_today >= 6 * counted["requests"]
        assert made.chat(headers).status_code == 200, "with the key of before"
        assert made.chat(revoked).status_code == 401
