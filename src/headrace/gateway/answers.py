"""Kept answers in a SQLite file of their own, within bounds of size and age.

The file is a cache: one that another version of headrace wrote is begun anew, and it may be deleted at any
time. Several processes may have it open, so that what is cleared from outside is gone at once.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError
from headrace.gateway.config import CacheSettings

Kind = Literal["answer", "embedding"]

_LARGEST_SHARE = 8  # an entry may take this part of the cache
_VERSION = 2  # of the tables
_MOST_AT_ONCE = 500  # keys in one query
_TABLES = (
    """CREATE TABLE answers (
        fingerprint BLOB PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
        stored_at REAL NOT NULL, used_at REAL NOT NULL, size INTEGER NOT NULL, answer BLOB NOT NULL
    )""",
    "CREATE INDEX answers_used ON answers (used_at)",
    # What the semantic cache knows of an answer's question; it goes when the answer goes.
    """CREATE TABLE questions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint BLOB NOT NULL UNIQUE
            REFERENCES answers (fingerprint) ON DELETE CASCADE,
        scope BLOB NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL
    )""",
    "CREATE INDEX questions_scope ON questions (scope)",
    # What was learned of a question stays: `question` is a hash of its scope and text.
    """CREATE TABLE observations (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, question BLOB NOT NULL, loose INTEGER NOT NULL,
        similarity REAL NOT NULL, right INTEGER NOT NULL
    )""",
    "CREATE INDEX observations_tenant ON observations (tenant)",
)


@dataclass(frozen=True, slots=True)
class Held:
    """What is kept of one tenant's and model's. ``questions``: of the entries, those found by meaning."""

    kind: Kind
    tenant: str
    model: str
    entries: int
    questions: int
    size_bytes: int


class AnswerCache:
    """The file. All methods are for one thread. The longest unused leave first."""

    def __init__(self, folder: Path, settings: CacheSettings) -> None:
        """Raises ConfigError if the file cannot be used."""
        self.configure(settings)
        self.path = folder / "cache.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.db = connect(self.path)
            self._create()
            self._bytes = self._size()
            self.path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the cache {self.path} cannot be used ({error}); it may be deleted") from None

    def configure(self, settings: CacheSettings) -> None:
        """Go by these settings from now on."""
        self.settings = settings
        self._limit = settings.max_mib * 2**20

    def _create(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        if self.db.execute("PRAGMA user_version").fetchone() != (_VERSION,):
            for table in ("questions", "observations", "answers"):
                self.db.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _TABLES:
                self.db.execute(statement)
            self.db.execute(f"PRAGMA user_version={_VERSION}")
        self.db.execute("COMMIT")

    def get(self, fingerprint: bytes) -> bytes | None:
        """The answer, unless it is too old, or cannot be read."""
        return self.get_all([fingerprint]).get(fingerprint)

    def get_all(self, fingerprints: list[bytes]) -> dict[bytes, bytes]:
        """Those of the answers that are there and not too old."""
        now = time.time()
        found: dict[bytes, bytes] = {}
        with contextlib.suppress(sqlite3.Error):
            for begin in range(0, len(fingerprints), _MOST_AT_ONCE):
                part = fingerprints[begin : begin + _MOST_AT_ONCE]
                rows = self.db.execute(
                    f"UPDATE answers SET used_at = ? WHERE fingerprint IN ({', '.join('?' * len(part))}) "
                    "AND stored_at > ? RETURNING fingerprint, answer",
                    (now, *part, now - self.settings.ttl_s),
                )
                found |= {bytes(key): bytes(answer) for key, answer in rows.fetchall()}
        return found

    def put(self, fingerprint: bytes, answer: bytes, kind: Kind, tenant: str, model: str) -> None:
        """Keep an answer, if it is not too large, and make room for it."""
        self.put_all({fingerprint: answer}, kind, tenant, model)

    def put_all(self, answers: dict[bytes, bytes], kind: Kind, tenant: str, model: str) -> None:
        """Keep several answers, in one transaction."""
        now = time.time()
        most = self._limit // _LARGEST_SHARE
        small = [(key, answer) for key, answer in answers.items() if len(answer) <= most]
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self.db.executemany(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (fingerprint) DO UPDATE SET "
                "stored_at = excluded.stored_at, used_at = excluded.used_at, size = excluded.size, "
                "answer = excluded.answer",
                [(key, kind, tenant, model, now, now, len(answer), answer) for key, answer in small],
            )
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        self._bytes += sum(len(answer) for _, answer in small)
        if self._bytes > self._limit:
            self._make_room(now)

    def drop(self, fingerprint: bytes) -> None:
        """Forget one answer."""
        with contextlib.suppress(sqlite3.Error):
            self.db.execute("DELETE FROM answers WHERE fingerprint = ?", (fingerprint,))

    def clear(self, *, tenant: str | None = None, model: str | None = None, kind: Kind | None = None) -> int:
        """Forget all answers, or those of a tenant, a model, a kind; how many there were.

        What the semantic cache learned of a tenant's questions goes when all of the tenant's answers do.
        Raises ConfigError if the file cannot be written.
        """
        where = {"tenant": tenant, "model": model, "kind": kind}
        given = {name: value for name, value in where.items() if value is not None}
        condition = " AND ".join(f"{name} = ?" for name in given) or "TRUE"
        try:
            done = self.db.execute(f"DELETE FROM answers WHERE {condition}", tuple(given.values()))
            if model is None and kind != "embedding":
                self.db.execute("DELETE FROM observations WHERE ? IS NULL OR tenant = ?", (tenant, tenant))
            self._bytes = self._size()
        except sqlite3.Error as error:
            raise ConfigError(f"the cache cannot be cleared: {error}") from None
        return done.rowcount

    def held(self) -> list[Held]:
        """What is kept and not too old, the most first."""
        rows = self.db.execute(
            "SELECT kind, tenant, model, COUNT(*), COUNT(questions.id), SUM(size) FROM answers "
            "LEFT JOIN questions USING (fingerprint) WHERE stored_at > ? GROUP BY 1, 2, 3 ORDER BY 6 DESC",
            (time.time() - self.settings.ttl_s,),
        )
        return [Held(*row) for row in rows]

    def _make_room(self, now: float) -> None:
        self.db.execute("DELETE FROM answers WHERE stored_at <= ?", (now - self.settings.ttl_s,))
        while self._size() > self._limit:
            self.db.execute(
                "DELETE FROM answers WHERE fingerprint IN "
                "(SELECT fingerprint FROM answers ORDER BY used_at "
                "LIMIT max(1, (SELECT COUNT(*) FROM answers) / 10))"
            )
        self._bytes = self._size()

    def _size(self) -> int:
        return int(self.db.execute("SELECT COALESCE(SUM(size), 0) FROM answers").fetchone()[0])

    def close(self) -> None:
        """Let go of the file."""
        self.db.close()


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the file; one for each thread."""
    db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA foreign_keys=ON")
    return db
