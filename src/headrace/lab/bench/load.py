"""One stage of load: closed (so many users at a time) or open (arrivals that wait for nobody)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.lab.bench.arrivals import Arrivals, arrivals
from headrace.lab.bench.client import ask
from headrace.lab.bench.endpoint import Endpoint
from headrace.lab.bench.records import ABANDONED, INTERRUPTED, Record
from headrace.lab.bench.workload import Message, Turn, Workload

if TYPE_CHECKING:
    import aiohttp

MAX_OUTSTANDING = 512
"""Requests of an open loop under way at once; a server that lets more pile up is saturated."""
DRAIN_S = 60.0
"""Time for what still runs when a stage's window has ended; then it is given up."""
_FAIL_PAUSE_S = 0.05  # a closed loop over a server that refuses at once must not spin
_HOPELESS = 50  # requests that all fail, after which a stage ends


@dataclass(frozen=True, slots=True)
class Stage:
    """What to do to the server.

    ``level``: users (closed) or requests a second (open). Load starts ``warmup_s`` before the window, which
    lasts ``duration_s`` (longer, until every user has sent one request) or as long as ``requests`` take; one
    of the two is None. ``number`` picks the
    workload's conversations. ``times``: a trace's arrivals instead of ``arrivals``; they know no warm-up.
    """

    kind: Literal["closed", "open"]
    level: float
    number: int
    duration_s: float | None = 15.0
    requests: int | None = None
    warmup_s: float = 2.0
    arrivals: Arrivals = "poisson"
    times: tuple[float, ...] = ()
    seed: int = 0

    @property
    def label(self) -> str:
        """How tables name it, equal for equal stages of two runs."""
        if self.times:
            return f"trace ({len(self.times)} arrivals)"
        if self.kind == "closed":
            return f"{self.level:g} user{'s' if self.level != 1 else ''}"
        return f"{self.level:.4g} req/s {self.arrivals}"


class Load:
    """Runs one stage. ``records`` holds every request that was sent, whatever became of it.

    The window is ``begin_s`` to ``end_s`` of the stage's clock. ``saturated``: requests piled up beyond
    ``MAX_OUTSTANDING``, or would not end in ``DRAIN_S``, and were given up.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        workload: Workload,
        stage: Stage,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.stage = stage
        self.records: list[Record] = []
        self.in_flight = 0
        self.done = 0
        self.failed = 0
        self.saturated = False
        self.interrupted = False
        self.begin_s = 0.0 if stage.times else stage.warmup_s
        self.end_s = 0.0
        self._session = session
        self._endpoint = endpoint
        self._workload = workload
        self._count_tokens = count_tokens
        self._uncounted: list[tuple[Record, str]] = []
        self._warm = self._measured = 0
        self._last_taken_s = 0.0
        self._why = INTERRUPTED
        self._tasks: set[asyncio.Task[object]] = set()
        self._bug: BaseException | None = None
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._began

    @property
    def progress(self) -> float:
        """0 … 1, by time or by requests, whichever is nearer the end."""
        stage, shares = self.stage, [0.0]
        if stage.duration_s is not None:
            shares.append(self.now() / (stage.warmup_s + stage.duration_s))
        if stage.requests:
            shares.append(self.done / (stage.requests + self._warm))
        return min(max(shares), 1.0)

    def interrupt(self) -> None:
        """Send nothing more and cut off what runs; what is done stays."""
        self.interrupted = True
        self._cancel(INTERRUPTED)

    async def run(self) -> None:
        """The whole stage, to the end of its last request."""
        self._began = time.perf_counter()
        driver = self._spawn(self._closed() if self.stage.kind == "closed" else self._open())
        await asyncio.wait({driver})
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=0 if self.saturated else DRAIN_S)
            if late:
                self.saturated = not self.interrupted
                self._cancel(ABANDONED if self.saturated else INTERRUPTED)
                await asyncio.wait(late)
        if self._bug is not None:
            raise self._bug
        self._close_window()
        self._count()

    def _close_window(self) -> None:
        stage = self.stage
        last_end = max((record.end_s for record in self.records), default=self.now())
        if self.interrupted or self.saturated:
            self.end_s = min(self.now(), self.begin_s + (stage.duration_s or float("inf")))
        elif stage.requests is None and stage.duration_s is not None:
            self.end_s = max(self.begin_s + stage.duration_s, self._last_taken_s)
        else:
            self.end_s = last_end
        self.end_s = max(self.end_s, self.begin_s + 1e-6)

    def _cancel(self, why: str) -> None:
        self._why = why
        for task in self._tasks:
            task.cancel()

    @property
    def _hopeless(self) -> bool:
        """Everything has failed so far, and nothing is under way that a busy server may still answer."""
        return self.done >= _HOPELESS and self.failed == self.done and not self.in_flight

    def _take(self) -> int | None:
        """The number of the next conversation, negative while warming up; None when there is none."""
        stage, at = self.stage, self.now()
        if self.interrupted or self.saturated:
            return None
        if self._hopeless:
            return None
        if at < self.begin_s:
            self._warm += 1
            return -self._warm
        enough = self._measured >= stage.level  # a slow server is waited for: one request a user
        if stage.duration_s is not None and at >= self.begin_s + stage.duration_s and enough:
            return None
        if stage.requests is not None and self._measured * self._workload.turns >= stage.requests:
            return None
        self._measured += 1
        self._last_taken_s = at
        return self._measured - 1

    async def _closed(self) -> None:
        async def user() -> None:
            while (number := self._take()) is not None:
                conversation = self._workload.conversation(self.stage.number, number)
                if not await self._converse(conversation, number, None):
                    await asyncio.sleep(_FAIL_PAUSE_S)

        users = [self._spawn(user()) for _ in range(int(self.stage.level))]
        # The first to leave shows that the stage is over; nobody has to wait for those that hang.
        length_s = None if self.stage.duration_s is None else self.begin_s + self.stage.duration_s + DRAIN_S
        await asyncio.wait(users, timeout=length_s, return_when=asyncio.FIRST_COMPLETED)

    async def _open(self) -> None:
        for at, number in self._schedule():
            conversation = self._workload.conversation(self.stage.number, number)
            await asyncio.sleep(max(at - self.now(), 0.0))
            if len(self._tasks) > MAX_OUTSTANDING:
                self.saturated = True
            if self.saturated or self._hopeless:
                return
            self._spawn(self._converse(conversation, number, at))
        if self.stage.duration_s is not None and self.stage.requests is None and not self.stage.times:
            await asyncio.sleep(max(self.begin_s + self.stage.duration_s - self.now(), 0.0))

    def _schedule(self) -> Iterator[tuple[float, int]]:
        stage = self.stage
        rng = np.random.default_rng((stage.seed, stage.number, 1))
        times = iter(stage.times) if stage.times else arrivals(stage.arrivals, stage.level, rng)
        end = float("inf") if stage.duration_s is None or stage.times else self.begin_s + stage.duration_s
        for at in times:
            sent = self._measured * self._workload.turns
            if at >= end or (stage.requests is not None and sent >= stage.requests):
                return
            if at < self.begin_s:
                self._warm += 1
                yield at, -self._warm
            else:
                self._measured += 1
                yield at, self._measured - 1

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug

    async def _converse(self, conversation: list[Turn], number: int, at: float | None) -> bool:
        """All turns of a conversation, each after the answer to the one before. False if one failed."""
        said: list[Message] = []
        turns = self._workload.turns
        for turn, asked in enumerate(conversation):
            said += asked.messages
            index = number * turns + turn if number >= 0 else number * turns
            record = Record(index=index, turn=turn)
            body = self._endpoint.body(said, asked.max_tokens)
            record.scheduled_s = self.now() if at is None or turn else at
            text = await self._send(record, body)
            if not record.ok:
                return False
            said.append({"role": "assistant", "content": text})
            window_s = self.stage.duration_s
            if window_s is not None and self.now() > self.begin_s + window_s:
                break  # the user leaves with the window: later turns would meet an emptier server
        return True

    async def _send(self, record: Record, body: bytes) -> str:
        endpoint = self._endpoint
        self.in_flight += 1
        self.records.append(record)
        try:
            text = await ask(
                self._session, endpoint.url, body, endpoint.headers, endpoint.timeout_s, record, self.now
            )
        except asyncio.CancelledError:
            record.error = self._why
            record.end_s = self.now()
            raise
        finally:
            self.in_flight -= 1
            self.done += 1
            self.failed += not record.ok
        if record.ok and record.output_tokens is None:
            self._uncounted.append((record, text))
        return text

    def _count(self) -> None:
        """Tokens of answers without usage, counted after the load: counting takes the client's time."""
        for record, text in self._uncounted:
            if self._count_tokens is not None:
                record.token_source, record.output_tokens = "tokenizer", self._count_tokens(text)
            else:
                record.token_source, record.output_tokens = "chunks", len(record.chunk_s)
