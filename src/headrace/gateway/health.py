"""An upstream's health: ejected after failures in a row, back slowly, at rest while it asks for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.gateway.config import Health
from headrace.gateway.connections import failures

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Upstream

_LEAST_SHARE = 0.1
_FIRST_REST_S = 1.0  # after a 429 that does not say for how long


class HealthState:
    """What requests and probes have shown of one upstream. ``clock``: monotonic seconds."""

    def __init__(self, settings: Health, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._failures = 0
        self._failed_probes = 0
        self._ejections = 0
        self._ejected_until = float("-inf")
        self._rests = 0  # in a row that it did not say the length of
        self.resting_until = float("-inf")

    def share(self) -> float:
        """How much of its weight it gets: 0 while ejected, then slowly back to 1."""
        since = self._clock() - self._ejected_until
        if since < 0:
            return 0.0
        return min(max(since / self.settings.recover_s, _LEAST_SHARE), 1.0)

    def resting(self) -> bool:
        """Whether it asked to be left alone for now (429 and retry-after)."""
        return self._clock() < self.resting_until

    def rest(self, seconds: float | None) -> None:
        """It asked to be left alone for so long; without a length, for twice as long each time in a row."""
        if seconds is None:
            if self.resting():  # what was under way is refused as well: that is no new time
                return
            seconds = min(_FIRST_REST_S * 2**self._rests, self.settings.eject_max_s)
            self._rests = min(self._rests + 1, 16)
        self.resting_until = max(self.resting_until, self._clock() + seconds)

    def accepted(self) -> None:
        """It took a request on: it can do with as many."""
        self._rests = 0

    def succeeded(self) -> None:
        """A request got a good answer."""
        self._failures = 0
        if self.share() == 1.0:
            self._ejections = 0

    def failed(self) -> None:
        """A request failed on its account. While it recovers, one is enough to eject it again."""
        self._failures += 1
        if self._failures >= self.settings.eject_after or 0.0 < self.share() < 1.0:
            self._eject()

    def probed(self, *, good: bool) -> None:
        """A probe was answered, or not. Good ones say nothing of requests, so they heal nothing."""
        self._failed_probes = 0 if good else self._failed_probes + 1
        if self._failed_probes >= self.settings.eject_after:
            self._eject()

    def _eject(self) -> None:
        settings = self.settings
        length = min(settings.eject_s * 2 ** min(self._ejections, 16), settings.eject_max_s)
        self._ejected_until = self._clock() + length
        self._ejections += 1
        self._failures = 0


async def keep_probing(gateway: Gateway, upstream: Upstream) -> None:
    """Ask an upstream for ever whether it lives."""
    known = False
    while True:
        every = gateway.config.health.probe_every_s
        try:
            async with asyncio.timeout(max(every, 1.0)):
                if await upstream.probe(gateway.connections) == "loaded" and not known:
                    await upstream.learn(gateway.connections)
        except failures():
            upstream.state = "failed"
        known = upstream.state == "loaded"  # one that comes back may have come back with another model
        if not upstream.away:
            upstream.health.probed(good=known)
        try:
            async with asyncio.timeout(max(every, 1.0)):
                await upstream.look(gateway.connections)
        except failures():  # what it tells of its load is good to know, and no more
            upstream.forget()
        await asyncio.sleep(every)
