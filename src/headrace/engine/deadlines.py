"""Deadlines: which requests have run out of their time, or are bound to."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from headrace.engine.sequence import Request, Sequence
from headrace.engine.step_cost import StepCost

_LOOK_EVERY_S = 0.05
_REST_S = 0.001  # longer, for each sequence that was looked at: a long line must not take the engine's time
_DOUBT = 0.8  # of the time that is estimated: a request is given up only when even that is not left


class Deadlines:
    """Keeps the requests that have a ``timeout_s``.

    A request is *passed* when its time is over, and *hopeless* when it cannot be complete in time: from what
    steps have cost, the tokens that have to be computed before its own and for it, and the tokens that its
    answer has at least. Each of these is taken for less rather than more.
    """

    def __init__(self, cost: StepCost, max_model_len: int) -> None:
        self._cost = cost
        self._max_model_len = max_model_len
        self.by_time: list[tuple[float, int, Request]] = []  # a heap; ended requests stay until they surface
        self._next_look = -math.inf

    def add(self, request: Request) -> None:
        """A new request."""
        if request.deadline < math.inf:
            heapq.heappush(self.by_time, (request.deadline, request.number, request))

    def passed(self, now: float) -> list[Request]:
        """Requests whose time is over; they are forgotten here."""
        found = []
        while self.by_time and (self.by_time[0][0] <= now or not self.by_time[0][2].sequences):
            _, _, request = heapq.heappop(self.by_time)
            if request.sequences:
                found.append(request)
        return found

    def is_due(self, now: float) -> bool:
        """Whether it is time to look for hopeless requests."""
        return bool(self.by_time) and now >= self._next_look and self._cost.is_known

    def hopeless(
        self,
        now: float,
        running: Iterable[Sequence],
        lines: Iterable[Iterable[Sequence]],
        to_compute: Callable[[Sequence], int],
        *,
        step_tokens: int,
        tokens_per_step: int,
    ) -> dict[Request, str]:
        """Requests that cannot be complete in time, and why.

        ``lines``: who waits, by tenant. ``to_compute``: tokens of a waiting sequence that no cache will have,
        asked in their order. ``step_tokens``: prompt tokens of a step. ``tokens_per_step``: the most that a
        decoding sequence gets.
        """
        looked_at = 0
        found: dict[Request, str] = {}
        running_tokens = 0
        for seq in running:
            lacking = seq.num_lacking - seq.num_loading - 1
            self._judge(seq, now, 0, lacking, step_tokens, tokens_per_step, found)
            running_tokens += lacking
            looked_at += 1
        for line in lines:
            before = running_tokens
            for seq in line:
                own = to_compute(seq)
                self._judge(seq, now, before, own, step_tokens, tokens_per_step, found)
                before += own
                looked_at += 1
        self._next_look = now + _LOOK_EVERY_S + looked_at * _REST_S
        return found

    def _judge(
        self,
        seq: Sequence,
        now: float,
        before: int,
        own: int,
        step_tokens: int,
        tokens_per_step: int,
        found: dict[Request, str],
    ) -> None:
        request = seq.request
        if request.deadline == math.inf or request in found:
            return
        steps = (before + own) / step_tokens + (seq.least_output(self._max_model_len) - 1) / tokens_per_step
        seconds = steps * self._cost.line(1)[0] + (before + own) * self._cost.prompt_token_s
        if now + _DOUBT * seconds <= request.deadline:
            return
        left = request.deadline - now
        found[request] = (
            f"The answer cannot be complete within timeout_s = {request.params.timeout_s:g}: it takes about "
            f"{seconds:.2g} s at the present load, and {left:.2g} s are left ({own} tokens of its prompt "
            f"are to be computed, {before} before them). Allow more time, or try again later."
        )
