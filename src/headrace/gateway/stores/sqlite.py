"""The embedded store: one SQLite file, written in small transactions, synced in groups.

A commit survives the end of the process at once. A thread makes commits survive a power failure: it syncs
the write-ahead log at most ``SYNC_S`` later, so that no request waits for a disk.

Its methods wait for nothing, so that no cancellation can cut one in two.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from headrace.errors import ConfigError, StateError
from headrace.gateway.keys import Key
from headrace.gateway.ledger import Answered, Entry, already_scored, append
from headrace.gateway.quotas import Held, Refused, Reservation, Scope, Use
from headrace.gateway.releases.book import PastEvent
from headrace.gateway.stores import sqlite_quotas
from headrace.gateway.stores.copying import backed_up, new_file
from headrace.gateway.stores.tables import migrate

if TYPE_CHECKING:
    from headrace.gateway.releases.state import Event
    from headrace.gateway.store import Change, TemplateRow

SYNC_S = 0.1
_sync = getattr(os, "fdatasync", os.fsync)  # of the data alone where that can be had: commits wait less
_OPEN_S = 30.0  # the longest wait for others that open the same file
_WAL_BYTES = 4 * 2**20  # a longer log is copied into the file
_KEY = "id, tenant, app, name, created_at, rotated_at, revoked_at"


class SqliteStore:
    """A :class:`~headrace.gateway.store.Store` in a file, which several processes may have open.

    All methods are for one thread. ``clock``: seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / "gateway.sqlite"
        self._clock = clock
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._syncer: threading.Thread | None = None

    @property
    def where(self) -> str:
        """The file."""
        return str(self.path)

    async def open(self) -> None:
        """Open the file, and make it if there is none."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite waits for no one while it turns a new file to its write-ahead log: one opens at a time.
            with filelock.FileLock(f"{self.path}.lock", timeout=_OPEN_S, mode=0o600):
                self.db = _connect(self.path)
                migrate(self.db, self.where)
            self.path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the gateway's state in {self.path.parent} cannot be used: {error}") from None
        self._syncer = threading.Thread(target=self._keep_synced, name="sync-gateway-state", daemon=True)
        self._syncer.start()

    async def aclose(self) -> None:
        """Sync what is committed and let go of the file."""
        if self._syncer is not None:
            self._closing.set()
            self._dirty.set()
            self._syncer.join()
            self.db.close()

    async def now(self) -> float:
        """The clock's time."""
        return self._clock()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self.db
        except sqlite3.Error as error:
            raise StateError(f"the state in {self.path} cannot be read or written: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and nothing of another's in between."""
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            self._dirty.set()

    async def hold(self, made: Reservation, scopes: Sequence[Scope], lease_s: float) -> Held | Refused:
        """See :class:`~headrace.gateway.store.Store`, here and below."""
        with self._transaction() as db:
            return sqlite_quotas.hold(db, made, scopes, self._clock(), lease_s)

    async def settle(
        self, reservation: Reservation, tokens: int, nano_usd: int, entries: Sequence[Entry]
    ) -> None:
        with self._transaction() as db:
            sqlite_quotas.settle(db, reservation, tokens, nano_usd)
            for entry in entries:
                append(db, entry)
        reservation.settled = True

    async def renew(self, requests: Sequence[str], lease_s: float) -> None:
        with self._transaction() as db:
            sqlite_quotas.renew(db, requests, self._clock(), lease_s)

    async def use(self, scope: str) -> Use:
        with self._reading() as db:
            return sqlite_quotas.use(db, scope, self._clock())

    async def add_key(self, key: Key, secret_hash: bytes) -> None:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO keys (id, secret_hash, tenant, app, name, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (key.id, secret_hash, key.tenant, key.app, key.name, key.created_at),
            )

    async def rotate_key(self, key_id: str, secret_hash: bytes, at: float) -> bool:
        return self._change_key(key_id, "secret_hash = ?, rotated_at = ?", secret_hash, at)

    async def revoke_key(self, key_id: str, at: float) -> bool:
        return self._change_key(key_id, "revoked_at = ?", at)

    def _change_key(self, key_id: str, change: str, *values: object) -> bool:
        with self._transaction() as db:
            done = db.execute(
                f"UPDATE keys SET {change} WHERE id = ? AND revoked_at IS NULL", (*values, key_id)
            )
            return bool(done.rowcount)

    async def find_key(self, secret_hash: bytes) -> Key | None:
        query = f"SELECT {_KEY} FROM keys WHERE secret_hash = ? AND revoked_at IS NULL"
        with self._reading() as db:
            row = db.execute(query, (secret_hash,)).fetchone()
        return None if row is None else Key(*row)

    async def all_keys(self) -> list[Key]:
        with self._reading() as db:
            return [Key(*row) for row in db.execute(f"SELECT {_KEY} FROM keys ORDER BY created_at")]

    @contextlib.asynccontextmanager
    async def ledger(self, since: float) -> AsyncIterator[sqlite3.Connection]:
        with self._reading() as db:
            yield db

    async def score(self, tenant: str, request: str, score: float) -> Answered | None:
        with self._transaction() as db:
            row = db.execute(
                "SELECT id, release, version, ended_at FROM ledger WHERE request = ? AND tenant = ? "
                "ORDER BY id DESC LIMIT 1",
                (request, tenant),
            ).fetchone()
            if row is None:
                return None
            values = row[0], self._clock(), score
            if not db.execute("INSERT OR IGNORE INTO feedback VALUES (?, ?, ?)", values).rowcount:
                raise already_scored()
        return Answered(*row[1:])

    async def release(self, name: str) -> bytes | None:
        with self._reading() as db:
            return self._release(db, name)

    @staticmethod
    def _release(db: sqlite3.Connection, name: str) -> bytes | None:
        row = db.execute("SELECT state FROM releases WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    async def change_release(self, name: str, change: Change) -> tuple[bytes, Event | None]:
        now = self._clock()
        with self._transaction() as db:
            state, event = change(self._release(db, name), now)
            db.execute("INSERT OR REPLACE INTO releases VALUES (?, ?)", (name, state))
            if event is not None:
                db.execute(
                    "INSERT INTO release_events (at, release, what, version, detail) VALUES (?, ?, ?, ?, ?)",
                    (now, name, event.what, event.version, event.detail),
                )
        return state, event

    async def history(self, name: str, most: int) -> list[PastEvent]:
        query = (
            "SELECT at, what, version, detail FROM release_events WHERE release = ? ORDER BY id DESC LIMIT ?"
        )
        with self._reading() as db:
            return [PastEvent(*row) for row in db.execute(query, (name, most))]

    async def put_template(self, name: str, content: str, same: Callable[[str], bool]) -> int:
        with self._transaction() as db:
            last = db.execute(
                "SELECT version, content FROM templates WHERE name = ? ORDER BY version DESC LIMIT 1", (name,)
            ).fetchone()
            if last is not None and same(last[1]):
                return int(last[0])
            version = 1 if last is None else int(last[0]) + 1
            db.execute("INSERT INTO templates VALUES (?, ?, ?, ?)", (name, version, self._clock(), content))
        return version

    async def template(self, name: str, version: int | None) -> TemplateRow | None:
        query = (
            "SELECT name, version, created_at, content FROM templates WHERE name = ? AND version = "
            "COALESCE(?, (SELECT MAX(version) FROM templates WHERE name = ?))"
        )
        with self._reading() as db:
            found: TemplateRow | None = db.execute(query, (name, version, name)).fetchone()
        return found

    async def all_templates(self) -> list[TemplateRow]:
        query = "SELECT name, MAX(version), created_at, content FROM templates GROUP BY name ORDER BY name"
        with self._reading() as db:
            return db.execute(query).fetchall()

    async def remove_template(self, name: str) -> int:
        with self._transaction() as db:
            return db.execute("DELETE FROM templates WHERE name = ?", (name,)).rowcount

    async def back_up(self, to: Path) -> int:
        """Copy the file, as of one moment, while others go on."""
        with new_file(to, self.where) as copy:
            self.db.backup(copy)
        return to.stat().st_size

    async def restore(self, source: Path) -> int:
        """Copy the file's pages."""
        with self._reading() as db, backed_up(source) as copy:
            if any(db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in ("keys", "ledger")):
                raise ConfigError(f"{self.path} is not empty: move it away first")
            copy.backup(db)
            self._dirty.set()
            return int(db.execute("SELECT COUNT(*) FROM ledger").fetchone()[0])

    def _keep_synced(self) -> None:
        log = Path(f"{self.path}-wal")
        own = _connect(self.path)
        while not self._closing.is_set():
            self._dirty.wait()
            self._closing.wait(SYNC_S / 2)  # more commits may share the sync
            self._dirty.clear()
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk shows in the next commit
                with log.open("rb+") as opened:
                    _sync(opened.fileno())
                    size = os.fstat(opened.fileno()).st_size
                if size > _WAL_BYTES:
                    own.execute("PRAGMA wal_checkpoint(PASSIVE)")
        own.close()


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA wal_autocheckpoint=0")  # the thread does it, so that no request waits for it
    return db
