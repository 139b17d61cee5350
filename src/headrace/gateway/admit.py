"""Stage 4: no more requests at a time than the gateway is to carry; the others wait their turn, or leave."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import OverloadedError
from headrace.gateway.config import Admission

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway

_SEEN = 8  # places given back before their pace says anything
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """What asks for a place. ``work``: its tokens, divided by its tenant's weight.

    ``priority``: lower is more urgent. ``max_waiting``: of its tenant's.
    """

    tenant: str
    work: float
    priority: int = 0
    max_waiting: int | None = None


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    start: float  # virtual time
    number: int
    claim: Claim = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Admissions:
    """Who runs and who waits.

    The most urgent goes first; among equals, tenants share by weight, whatever they queue: start-time fair
    queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over estimated tokens. A request starts, in virtual time,
    where its tenant's one before it ends, and never before now.

    A full queue gives up whoever would be served last, so that nobody fills it against the others. Who could
    not be served in time, at the pace at which places come free, is told so at once.
    """

    def __init__(self, settings: Admission, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self.running = 0
        self._queue: list[_Waiting] = []  # in the order of their turns
        self._of_tenant: Counter[str] = Counter()  # that wait
        self._now = 0.0  # virtual
        self._ends: dict[str, float] = {}  # of each tenant's last request, in virtual time
        self._numbers = itertools.count()
        self._interval_s = 0.0  # between places that come free while somebody waits
        self._freed_at: float | None = None
        self._freed = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    def waiting_of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return self._of_tenant[tenant]

    def configure(self, settings: Admission) -> None:
        """Go by these settings from now on."""
        self.settings = settings
        while self.running < settings.max_running and self._give_turn():
            self.running += 1

    async def enter(self, claim: Claim, until: float) -> None:
        """Wait for a place, not longer than ``until`` (of the clock). Raises OverloadedError."""
        start = max(self._now, self._ends.get(claim.tenant, 0.0))
        if self.running < self.settings.max_running:
            self.running += 1
            self._now, self._ends[claim.tenant] = start, start + claim.work
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(claim.priority, start, next(self._numbers), claim, turn)
        wait_s = min(self.settings.max_wait_s, until - self._clock())
        self._refuse_or_make_room(waiting, wait_s)
        bisect.insort(self._queue, waiting)
        self._of_tenant[claim.tenant] += 1
        self._ends[claim.tenant] = start + claim.work
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # the place came in the same moment
            else:
                self._remove(waiting)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"no place within {max(wait_s, 0.0):.3g} seconds; try again",
                    retry_after_s=self._queue_s(),
                ) from None
            raise

    def leave(self) -> None:
        """Give a place back: to whose turn it is, if anybody waits."""
        now = self._clock()
        if self._queue and self._freed_at is not None:
            self._freed += 1
            self._interval_s += (now - self._freed_at - self._interval_s) * max(1 / self._freed, _SMOOTHING)
        self._freed_at = now if self._queue else None
        if not self._queue:
            self._freed = 0
        if self.running <= self.settings.max_running and self._give_turn():
            return
        self.running -= 1
        if not self.running and not self._queue:  # nobody owes anybody anything
            self._now = 0.0
            self._ends.clear()

    def _give_turn(self) -> bool:
        """Let the first one in; False if nobody waits."""
        while self._queue:
            first = self._queue[0]
            if first.turn.done():  # it has just been cancelled, and does not know yet
                self._remove(first)
                continue
            del self._queue[0]
            self._forget(first)
            self._now = max(self._now, first.start)
            first.turn.set_result(None)
            return True
        return False

    def _remove(self, waiting: _Waiting) -> None:
        """It leaves without its turn: what it would have used is its tenant's again."""
        at = bisect.bisect_left(self._queue, waiting)
        if at < len(self._queue) and self._queue[at] is waiting:
            del self._queue[at]
            self._forget(waiting)
            self._ends[waiting.claim.tenant] -= waiting.claim.work

    def _forget(self, waiting: _Waiting) -> None:
        tenant = waiting.claim.tenant
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def _refuse_or_make_room(self, waiting: _Waiting, wait_s: float) -> None:
        claim = waiting.claim
        if claim.max_waiting is not None and self._of_tenant[claim.tenant] >= claim.max_waiting:
            raise OverloadedError(
                f"{claim.max_waiting} requests of this tenant wait already; try again in a moment",
                retry_after_s=self._queue_s(),
            )
        expected_s = bisect.bisect_left(self._queue, waiting) * self._pace_s()
        if expected_s > wait_s:
            raise OverloadedError(
                f"it would take about {expected_s:.3g} seconds until this request's turn; try again later",
                retry_after_s=expected_s - wait_s,
            )
        if self.waiting < self.settings.max_waiting:
            return
        full = OverloadedError(
            f"{self.waiting} requests wait already; try again in a moment", retry_after_s=self._queue_s()
        )
        if not self._queue or waiting > self._queue[-1]:
            raise full
        last = self._queue[-1]
        self._remove(last)
        if not last.turn.done():
            last.turn.set_exception(full)

    def _pace_s(self) -> float:
        return self._interval_s if self._freed >= _SEEN else 0.0

    def _queue_s(self) -> float:
        return self.waiting * self._pace_s()


async def admit(gateway: Gateway, context: RequestContext) -> None:
    """Take a place; settle gives it back. Raises OverloadedError."""
    tenant = gateway.config.tenants.get(context.tenant)
    work = (context.prompt_tokens + context.output_tokens) / context.weight
    most = tenant.max_waiting if tenant is not None else None
    claim = Claim(context.tenant, work, context.priority, most)
    await gateway.admissions.enter(claim, context.deadline)
    context.admitted = True
