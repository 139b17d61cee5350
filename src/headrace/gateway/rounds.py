"""Whom a request asks, one after the other: everybody once, and where that was in vain, again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace.gateway.balance import balance

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target

_FIRST_PAUSE_S = 0.1  # doubled each time
_MOST_PAUSES = 4


class Rounds:
    """The targets of a request in turn. ``tried``: in this round. ``unfit``: not to be asked again at all.

    A round that nobody has answered is followed by another, after a pause: one upstream may be gone for good
    while what was wrong with the next one, whose turn came at a bad time, has passed. Not where there is only
    one, and not more often than ``retries.attempts`` allow, which whoever asks has to count.
    """

    def __init__(self, gateway: Gateway, context: RequestContext, tried: Collection[Target] = ()) -> None:
        self._gateway, self._context = gateway, context
        self.tried: list[Target] = [*tried]
        self.unfit: list[Target] = []
        self._pauses = 0

    async def next(self, rather_not: Collection[Target] = ()) -> Target | None:
        """The one to ask next; None if there is nobody. ``rather_not``: in the first round the last."""
        while True:
            for others in (rather_not, ()) if rather_not and not self._pauses else ((),):
                out = [*self.tried, *self.unfit, *others]
                if (target := await balance(self._gateway, self._context, out)) is not None:
                    return target
            if not self.tried or not await self._pause():
                return None
            self.tried.clear()

    async def _pause(self) -> bool:
        """Whether there is another round; if so, it is time for it."""
        pause_s, context = _FIRST_PAUSE_S * 2**self._pauses, self._context
        if len(context.targets) < 2 or self._pauses == _MOST_PAUSES:
            return False
        if all(target.upstream.drained or target in self.unfit for target in context.targets):
            return False
        if time.monotonic() + pause_s >= context.deadline:
            return False
        self._pauses += 1
        await asyncio.sleep(pause_s)
        return True
