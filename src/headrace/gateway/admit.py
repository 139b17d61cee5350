"""Stage 4: no more requests at a time than the gateway is to carry; the others wait their turn, or leave."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from headrace.errors import OverloadedError
from headrace.gateway.config import Admission

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


class Admissions:
    """Who runs and who waits, first come, first served."""

    def __init__(self, settings: Admission) -> None:
        self._settings = settings
        self._queue: deque[asyncio.Future[None]] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def enter(self, until: float) -> None:
        """Wait for a place, not longer than ``until`` (monotonic seconds). Raises OverloadedError."""
        settings = self._settings
        if self.running < settings.max_running:
            self.running += 1
            return
        if self.waiting >= settings.max_waiting:
            raise OverloadedError(f"{self.waiting} requests wait already; try again in a moment")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(min(settings.max_wait_s, until - time.monotonic())):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the place came in the same moment
                self.leave()
            elif turn in self._queue:
                self._queue.remove(turn)
            if isinstance(error, TimeoutError):
                raise OverloadedError(f"no place within {settings.max_wait_s:g} seconds; try again") from None
            raise

    def leave(self) -> None:
        """Give a place back: to who has waited longest, if anybody does."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


async def admit(gateway: Gateway, context: RequestContext) -> None:
    """Take a place; settle gives it back. Raises OverloadedError."""
    await gateway.admissions.enter(context.deadline)
    context.admitted = True
