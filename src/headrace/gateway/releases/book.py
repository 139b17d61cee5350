"""Releases in the store: their states, read and changed in one transaction, and what happened to them.

Several gateways, and the commands, may change the same release: nobody writes what he did not just read.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.errors import ConfigError
from headrace.gateway.releases import state as states
from headrace.gateway.releases.settings import Release
from headrace.gateway.releases.state import Event, ReleaseState, What
from headrace.gateway.store import Store

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReleaseState).decode


@dataclass(frozen=True, slots=True)
class PastEvent:
    """A row of a release's history. ``at``: seconds since 1970."""

    at: float
    what: What
    version: str
    detail: str


class ReleaseBook:
    """The releases of a store. ``clock``: seconds since 1970."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def read(self, name: str, release: Release) -> ReleaseState:
        """A release's state; its first one if nothing ever happened to it."""
        return self._read(self._store.db, name, release)

    def change(
        self, name: str, release: Release, change: Callable[[ReleaseState, float], Event | None]
    ) -> tuple[ReleaseState, Event | None]:
        """Let ``change`` (of state and time) alter the state, and note in the history what it says happened.

        What it raises leaves everything as it was.
        """
        now = self._clock()
        with self._store.transaction() as db:
            state = self._read(db, name, release)
            event = change(state, now)
            db.execute("INSERT OR REPLACE INTO releases VALUES (?, ?)", (name, _encode(state)))
            if event is not None:
                db.execute(
                    "INSERT INTO release_events (at, release, what, version, detail) VALUES (?, ?, ?, ?, ?)",
                    (now, name, event.what, event.version, event.detail),
                )
        return state, event

    def start(self, name: str, release: Release, version: str, ab: float | None) -> Event:
        """Begin a canary, or an A/B test with ``ab`` percent. Raises ConfigError if that cannot be."""
        trial = f"trial_{secrets.token_hex(6)}"

        def begin(state: ReleaseState, now: float) -> Event:
            return states.start(name, release, state, version, trial=trial, ab=ab, now=now)

        return self._done(name, release, begin)

    def promote(self, name: str, release: Release, version: str | None) -> Event:
        """Make the candidate, or ``version``, the stable one. Raises ConfigError if that cannot be."""
        return self._done(
            name, release, lambda state, now: states.promote(name, release, state, version, now=now)
        )

    def roll_back(self, name: str, release: Release) -> Event:
        """End the trial, or go back to the version before. Raises ConfigError if there is neither."""
        return self._done(name, release, lambda state, now: states.roll_back(name, release, state, now=now))

    def history(self, name: str, most: int = 100) -> list[PastEvent]:
        """What happened to a release, the last first."""
        rows = self._store.db.execute(
            "SELECT at, what, version, detail FROM release_events WHERE release = ? ORDER BY id DESC LIMIT ?",
            (name, most),
        )
        return [PastEvent(*row) for row in rows]

    def _done(self, name: str, release: Release, change: Callable[[ReleaseState, float], Event]) -> Event:
        _, event = self.change(name, release, change)
        assert event is not None
        return event

    @staticmethod
    def _read(db: sqlite3.Connection, name: str, release: Release) -> ReleaseState:
        try:
            row = db.execute("SELECT state FROM releases WHERE name = ?", (name,)).fetchone()
            return ReleaseState(release.first) if row is None else _decode(row[0])
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise ConfigError(f"the state of the release {name} cannot be read: {error}") from None
