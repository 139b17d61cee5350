"""A backup: a file of the embedded store's, filled by whatever store there is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.gateway.stores.sqlite_quotas import expire
from headrace.gateway.stores.tables import migrate

if TYPE_CHECKING:
    from headrace.gateway.keys import Key
    from headrace.gateway.releases.book import PastEvent

_MINUTE = {"r": "requests", "t": "tokens"}


@contextlib.contextmanager
def new_file(to: Path, what: str) -> Iterator[sqlite3.Connection]:
    """A new database that gets its name once it is filled, checked and on the disk.

    Raises ConfigError, naming ``what`` it was to hold, if ``to`` exists or cannot be written.
    """
    if to.exists():
        raise ConfigError(f"{to} exists; name a file that does not")
    partial = to.with_name(f"{to.name}.part-{os.getpid()}")
    try:
        partial.touch(mode=0o600, exist_ok=False)
        with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            yield copy
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, complete in itself
            [found] = copy.execute("PRAGMA integrity_check").fetchone()
            if found != "ok":
                raise ConfigError(f"the copy of {what} is damaged: {found}")
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        os.link(partial, to)  # unlike a renaming, this overwrites nothing
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"the state cannot be copied to {to}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def backed_up(source: Path) -> Iterator[sqlite3.Connection]:
    """What a backup holds, as this version has it and with all leases ended; the file stays as it is.

    Raises ConfigError if it cannot be read or is not whole.
    """
    if not source.is_file():
        raise ConfigError(f"there is no file {source}")
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as file,
            contextlib.closing(sqlite3.connect("", isolation_level=None)) as copy,
        ):
            file.backup(copy)
            [found] = copy.execute("PRAGMA integrity_check").fetchone()
            if found != "ok":
                raise ConfigError(f"{source} is damaged: {found}")
            migrate(copy, str(source))
            expire(copy, float("inf"))
            yield copy
    except sqlite3.Error as error:
        raise ConfigError(f"{source} is no backup of a gateway's state: {error}") from None


def copy_key(copy: sqlite3.Connection, key: Key, secret_hash: bytes) -> None:
    """A key's row."""
    copy.execute(
        "INSERT INTO keys (id, secret_hash, tenant, app, name, created_at, rotated_at, revoked_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (key.id, secret_hash, key.tenant, key.app, key.name, key.created_at, key.rotated_at, key.revoked_at),
    )


def copy_release(copy: sqlite3.Connection, name: str, state: bytes, history: Iterable[PastEvent]) -> None:
    """A release's state and its history, oldest first."""
    copy.execute("INSERT INTO releases VALUES (?, ?)", (name, state))
    copy.executemany(
        "INSERT INTO release_events (at, release, what, version, detail) VALUES (?, ?, ?, ?, ?)",
        [(event.at, name, event.what, event.version, event.detail) for event in history],
    )


def copy_feedback(copy: sqlite3.Connection, at: float, score: float) -> None:
    """The score of the row of the ledger that was written last."""
    copy.execute("INSERT INTO feedback SELECT MAX(id), ?, ? FROM ledger", (at, score))


def copy_quotas(copy: sqlite3.Connection, key: str, flat: Sequence[bytes]) -> None:
    """A hash of Redis's quotas (``lua/common.lua`` names them); ``flat``: fields and values in turn."""
    fields = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    _, kind, rest = key.split(":", 2)
    spent: list[tuple[str, str, int, int]] = []
    if kind == "minute":
        spent = [(rest, _MINUTE[name[0]], int(name[1:]), int(amount)) for name, amount in fields.items()]
    elif kind == "hold":
        ends_at = float(fields["ends_at"])
        tokens, nano_usd, second = (int(fields[name]) for name in ("tokens", "nano_usd", "second"))
        copy.executemany(
            "INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?)",
            [(rest, name[1:], ends_at, tokens, nano_usd, second) for name in fields if name[0] == "@"],
        )
    else:
        start, scope = rest.split(":", 1)
        measures = {"nano_usd": f"cost-{kind}", "tokens": "day"}
        spent = [(scope, measures[name], int(start), int(amount)) for name, amount in fields.items()]
    copy.executemany("INSERT INTO spent VALUES (?, ?, ?, ?)", spent)
