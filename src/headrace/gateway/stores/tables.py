"""The tables of the embedded state, and how each version of them became the next."""

from __future__ import annotations

import sqlite3

from headrace.errors import ConfigError

MIGRATIONS = (
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


def migrate(db: sqlite3.Connection, where: str) -> None:
    """Bring a file to this version. Raises ConfigError, naming ``where``, if it is of a newer one."""
    db.execute("BEGIN IMMEDIATE")  # two processes may open a new file at once
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise ConfigError(f"{where} was written by a newer headrace: upgrade this one")
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
    db.execute("COMMIT")
