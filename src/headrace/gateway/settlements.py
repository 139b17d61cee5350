"""Settlements on their way to the store: what could not be written is kept, and tried again until it is."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import StateError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from headrace.gateway.ledger import Entry
    from headrace.gateway.quotas import Quotas, Reservation

MOST_WAITING = 10_000
_RETRY_S = 0.5
_LAST_TRIES_S = 5.0


@dataclass(frozen=True, slots=True)
class Settlement:
    """What one request used. ``entries``: for the ledger, its own row the last."""

    reservation: Reservation
    tokens: int
    nano_usd: int
    entries: tuple[Entry, ...]


class Settlements:
    """Settlements of one gateway.

    Each is tried at once. One that fails, or is cancelled in the middle, may have been done or not: the store
    does it once, however often it is asked, so it is simply tried again. Memory is bounded by refusing new
    requests while too many wait: what was used is never dropped while the gateway lives.
    """

    def __init__(self, quotas: Quotas, log: FilteringBoundLogger) -> None:
        self._quotas = quotas
        self._log = log
        self._waiting: deque[Settlement] = deque()

    @property
    def waiting(self) -> int:
        """How many are to be tried again."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises StateError while there is no room for what another request will use."""
        if self.waiting >= MOST_WAITING:
            raise StateError("what requests have used cannot be written; try again later")

    async def settle(self, one: Settlement) -> None:
        """Write a settlement, now or later. Raises nothing but CancelledError."""
        try:
            await self._try(one)
        except StateError as error:
            if not self._waiting:  # else it is known
                self._log.error("settlements wait", request_id=one.entries[-1].request, error=error.message)
            self._waiting.append(one)
        except BaseException:
            self._waiting.append(one)
            raise

    async def _try(self, one: Settlement) -> None:
        await self._quotas.settle(one.reservation, one.tokens, one.nano_usd, one.entries)

    async def keep_trying(self) -> None:
        """Try again what waits, for ever."""
        while True:
            await asyncio.sleep(_RETRY_S)
            await self.try_all()

    async def try_all(self) -> bool:
        """Try again what waits, the oldest first; False if something must wait longer."""
        count = self.waiting
        while self._waiting:
            try:
                await self._try(self._waiting[0])
            except StateError:
                return False
            self._waiting.popleft()
        if count:
            self._log.warning("settlements written", count=count)
        return True

    async def aclose(self) -> None:
        """Try for a last few seconds; what is lost then is logged, row by row."""
        try:
            async with asyncio.timeout(_LAST_TRIES_S):
                while not await self.try_all():
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            for one in self._waiting:
                self._log.error("settlement lost", entries=repr(one.entries))
