"""Releases in the store: their states, read and changed in one transaction, and what happened to them.

Several gateways, and the commands, may change the same release: nobody writes what he did not just read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.errors import ConfigError
from headrace.gateway.releases import state as states
from headrace.gateway.releases.settings import Release
from headrace.gateway.releases.state import Event, ReleaseState, What

if TYPE_CHECKING:
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
    """The releases of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, name: str, release: Release) -> ReleaseState:
        """A release's state; its first one if nothing ever happened to it."""
        return _state(await self._store.release(name), name, release)

    async def change(
        self, name: str, release: Release, change: Callable[[ReleaseState, float], Event | None]
    ) -> tuple[ReleaseState, Event | None]:
        """Let ``change`` (of state and time) alter the state, and note in the history what it says happened.

        What it raises leaves everything as it was. It is called again if another was quicker.
        """

        def altered(before: bytes | None, now: float) -> tuple[bytes, Event | None]:
            state = _state(before, name, release)
            event = change(state, now)
            return _encode(state), event

        after, event = await self._store.change_release(name, altered)
        return _state(after, name, release), event

    async def start(self, name: str, release: Release, version: str, ab: float | None) -> Event:
        """Begin a canary, or an A/B test with ``ab`` percent. Raises ConfigError if that cannot be."""
        trial = f"trial_{secrets.token_hex(6)}"

        def begin(state: ReleaseState, now: float) -> Event:
            return states.start(name, release, state, version, trial=trial, ab=ab, now=now)

        return await self._done(name, release, begin)

    async def promote(self, name: str, release: Release, version: str | None) -> Event:
        """Make the candidate, or ``version``, the stable one. Raises ConfigError if that cannot be."""
        return await self._done(
            name, release, lambda state, now: states.promote(name, release, state, version, now=now)
        )

    async def roll_back(self, name: str, release: Release) -> Event:
        """End the trial, or go back to the version before. Raises ConfigError if there is neither."""
        return await self._done(
            name, release, lambda state, now: states.roll_back(name, release, state, now=now)
        )

    async def history(self, name: str, most: int = 100) -> list[PastEvent]:
        """What happened to a release, the last first."""
        return await self._store.history(name, most)

    async def _done(
        self, name: str, release: Release, change: Callable[[ReleaseState, float], Event]
    ) -> Event:
        _, event = await self.change(name, release, change)
        assert event is not None
        return event


def _state(encoded: bytes | None, name: str, release: Release) -> ReleaseState:
    try:
        return ReleaseState(release.first) if encoded is None else _decode(encoded)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the state of the release {name} cannot be read: {error}") from None
