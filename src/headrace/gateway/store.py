"""The gateway's embedded state: one SQLite file, written in small transactions, synced in groups.

A commit survives the end of the process at once. A thread makes commits survive a power failure: it syncs
the write-ahead log at most ``SYNC_S`` later, so that no request waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import filelock

from headrace.errors import ConfigError

SYNC_S = 0.1
_sync = getattr(os, "fdatasync", os.fsync)  # of the data alone where that can be had: commits wait less
_OPEN_S = 30.0  # the longest wait for others that open the same file
_WAL_BYTES = 4 * 2**20  # a longer log is copied into the file
_MIGRATIONS = (
    (
        """CREATE TABLE keys (
            id TEXT PRIMARY KEY, secret_hash BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, name TEXT NOT NULL,
            created_at REAL NOT NULL, rotated_at REAL, revoked_at REAL
        )""",
        # What was used of a scope (a tenant or a key) in a period, which begins at `start`.
        """CREATE TABLE spent (
            scope TEXT NOT NULL, measure TEXT NOT NULL, start INTEGER NOT NULL, amount INTEGER NOT NULL,
            PRIMARY KEY (scope, measure, start)
        ) WITHOUT ROWID""",
        "CREATE INDEX spent_start ON spent (measure, start)",
        # One row a scope of a request under way.
        """CREATE TABLE reservations (
            request TEXT NOT NULL, scope TEXT NOT NULL, expires_at REAL NOT NULL,
            tokens INTEGER NOT NULL, nano_usd INTEGER NOT NULL, second INTEGER NOT NULL,
            PRIMARY KEY (request, scope)
        ) WITHOUT ROWID""",
        "CREATE INDEX reservations_scope ON reservations (scope)",
        "CREATE INDEX reservations_expiry ON reservations (expires_at)",
        """CREATE TABLE ledger (
            id INTEGER PRIMARY KEY, ended_at REAL NOT NULL, request TEXT NOT NULL, tenant TEXT NOT NULL,
            key TEXT NOT NULL, model TEXT NOT NULL, upstream TEXT NOT NULL, route TEXT NOT NULL,
            outcome TEXT NOT NULL, cache TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, estimated INTEGER NOT NULL,
            nano_usd INTEGER NOT NULL, duration_ms INTEGER NOT NULL
        )""",
        "CREATE INDEX ledger_ended ON ledger (ended_at)",
        """CREATE TRIGGER ledger_is_not_rewritten BEFORE UPDATE ON ledger
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END""",
        """CREATE TRIGGER ledger_is_kept BEFORE DELETE ON ledger
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END""",
    ),
    (
        "ALTER TABLE keys ADD COLUMN app TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN app TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN release TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN version TEXT NOT NULL DEFAULT ''",
        "CREATE INDEX ledger_request ON ledger (request)",
        "CREATE TABLE releases (name TEXT PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID",
        """CREATE TABLE release_events (
            id INTEGER PRIMARY KEY, at REAL NOT NULL, release TEXT NOT NULL, what TEXT NOT NULL,
            version TEXT NOT NULL, detail TEXT NOT NULL
        )""",
        "CREATE INDEX release_events_release ON release_events (release, id)",
        # What clients thought of answers: one score for a row of the ledger.
        """CREATE TABLE feedback (
            entry INTEGER PRIMARY KEY REFERENCES ledger (id), at REAL NOT NULL, score REAL NOT NULL
        )""",
    ),
    ("ALTER TABLE ledger ADD COLUMN resumed TEXT NOT NULL DEFAULT ''",),
    (
        # What a route made of a request, and what that would have cost without: NULL where it was not kept.
        "ALTER TABLE ledger ADD COLUMN routed TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN intent TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN confidence REAL",
        "ALTER TABLE ledger ADD COLUMN reason TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE ledger ADD COLUMN baseline_nano_usd INTEGER",
    ),
    (
        # Of a document that was read in parts, their rows beside the request's own, which is part 0.
        "ALTER TABLE ledger ADD COLUMN part INTEGER NOT NULL DEFAULT 0",
        """CREATE TABLE templates (
            name TEXT NOT NULL, version INTEGER NOT NULL, created_at REAL NOT NULL, content TEXT NOT NULL,
            PRIMARY KEY (name, version)
        ) WITHOUT ROWID""",
    ),
)
"""The statements that lead from each version of the file to the next; its version is how many were done."""


class Store:
    """An open file of state. All methods are for one thread; several processes may have it open."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder can't be used, or was written by a newer headrace."""
        self.path = folder / "gateway.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite waits for no one while it turns a new file to its write-ahead log: one opens at a time.
            with filelock.FileLock(f"{self.path}.lock", timeout=_OPEN_S, mode=0o600):
                self.db = _connect(self.path)
                _migrate(self.db, self.path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the gateway's state in {folder} cannot be used: {error}") from None
        self.path.chmod(0o600)
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._keep_synced, name="sync-gateway-state", daemon=True)
        self._syncer.start()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and nothing of another's in between."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield self.db
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        self._dirty.set()

    def back_up(self, to: Path) -> int:
        """Copy the file to ``to`` as of one moment, while others go on; how many bytes that are.

        The copy has its name only once it is whole, checked and on the disk. Raises ConfigError if ``to``
        exists or cannot be written.
        """
        if to.exists():
            raise ConfigError(f"{to} exists; name a file that does not")
        partial = to.with_name(f"{to.name}.part-{os.getpid()}")
        try:
            partial.touch(mode=0o600, exist_ok=False)
            with contextlib.closing(sqlite3.connect(partial)) as copy:
                self.db.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, complete in itself
                [found] = copy.execute("PRAGMA integrity_check").fetchone()
                if found != "ok":
                    raise ConfigError(f"the copy of {self.path} is damaged: {found}")
            with partial.open("rb+") as written:
                os.fsync(written.fileno())
            os.link(partial, to)  # unlike a renaming, this overwrites nothing
            return to.stat().st_size
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the state cannot be copied to {to}: {error}") from None
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Sync what is committed and let go of the file."""
        self._closing.set()
        self._dirty.set()
        self._syncer.join()
        self.db.close()

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


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")  # two processes may open a new file at once
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version > len(_MIGRATIONS):
        raise ConfigError(f"{path} was written by a newer headrace: upgrade this one")
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version={len(_MIGRATIONS)}")
    db.execute("COMMIT")
