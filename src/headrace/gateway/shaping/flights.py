"""Identical requests at the same time: one computation, which all who ask follow as it goes.

The first to ask leads: the computation runs for it, in a task of its own, and is settled as its request. Who
asks the same meanwhile follows: a stream is told what was told so far and then every event as it comes, a
whole answer is had at the end, and neither costs anything. Whoever leaves leaves alone: the computation goes
on for those who stay, on the leader's account, and ends when nobody is left.

A stream follows only a stream. While a whole answer is being made, a stream for the same request is asked for
itself, so that its first word does not wait for the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import orjson

from headrace.errors import HeadraceError, OverloadedError, UpstreamError
from headrace.gateway.settle import settle
from headrace.web.errors import error_event

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext, Stream
    from headrace.gateway.gateway import Gateway

_MOST_TOLD_BYTES = 2**20  # beyond, nobody joins a stream any more
_AHEAD_BYTES = 256 * 2**10  # that the upstream may be ahead of the client that reads most
_MOST_BEHIND_BYTES = 4 * 2**20  # that a follower may be behind
_USAGE = b'"usage"'


class Flights:
    """What is being computed now. For one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[bytes, bool], Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, fingerprint: bytes, *, stream: bool) -> Flight | None:
        """A computation of the same answer that a request in this form can follow."""
        flight = self._under_way.get((fingerprint, True))
        if flight is not None and flight.joinable:
            return flight
        return None if stream else self._under_way.get((fingerprint, False))

    def open(self, leader: RequestContext, fingerprint: bytes) -> Flight | None:
        """A computation for ``leader``; None while there is one in the same form that cannot be joined."""
        key = fingerprint, leader.stream
        if key in self._under_way:
            return None
        flight = self._under_way[key] = Flight(self, leader, key)
        return flight

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is held on to until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def land(self, flight: Flight) -> None:
        """Its answer is kept, or it has none: who asks from now on does not follow it."""
        if self._under_way.get(flight.key) is flight:
            del self._under_way[flight.key]

    async def aclose(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Flight:
    """One computation, its leader, and who follows. ``record``: the answer, once it is whole and good."""

    def __init__(self, flights: Flights, leader: RequestContext, key: tuple[bytes, bool]) -> None:
        self.leader = leader
        self.key = key
        self.record: bytes | None = None
        self.all_told = False  # nothing follows in the stream
        self.ended = asyncio.Event()  # and is settled, as far as the leader's context goes
        self._flights = flights
        self._begun = asyncio.Event()
        self._failure: HeadraceError | None = None
        self._told: list[bytes] | None = []  # of a stream; None: too much to be kept
        self._told_bytes = 0
        self._readers: list[Reader] = []
        self._room = asyncio.Event()  # a reader has read on
        self._followers = 0
        self._waiting = 0  # of them, for the whole answer
        self._task: asyncio.Task[None] | None = None

    @property
    def joinable(self) -> bool:
        """Whether all that was told can be told again."""
        return self._told is not None and self._failure is None

    async def lead(self, gateway: Gateway, compute: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have ``compute`` fill in the leader's context, where a stream is shared with who follows.

        Raises whatever it raises. Cancelled, it goes on if somebody follows: then the leader's request is
        settled when it ends, and not before.
        """
        self._task = self._flights.start(self._fly(gateway, compute))
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            await self.leave_leader()
            raise
        if self._failure is not None:
            raise self._failure

    async def follow(self, context: RequestContext) -> bytes | Reader | None:
        """The answer, or a stream of it; None if there was none to be had in the request's time."""
        self.leader.deadline = max(self.leader.deadline, context.deadline)
        stream, reader = context.stream, None
        self._followers += 1
        self._waiting += not stream
        self._room.set()
        try:
            async with asyncio.timeout(max(context.deadline - time.monotonic(), 0.0)) as context.patience:
                await (self._begun if stream else self.ended).wait()
            if not stream:
                return self.record
            if self.joinable:
                reader = self._new_reader(context)
            return reader
        except TimeoutError:
            return None
        finally:
            self._waiting -= not stream
            if reader is None:
                self.leave_follower()

    async def leave_leader(self) -> None:
        """The leader's client has gone: end it, unless somebody follows."""
        if self.ended.is_set() or self.leader.handed_over:
            return
        if self._followers:
            self.leader.handed_over = True
            return
        assert self._task is not None
        self._task.cancel()
        await self.ended.wait()

    def leave_follower(self) -> None:
        """A follower needs it no more."""
        self._followers -= 1
        self._room.set()
        if self.leader.handed_over and not self._followers and self._task is not None:
            self._task.cancel()

    def forget(self, reader: Reader) -> None:
        """The reader takes no more."""
        with contextlib.suppress(ValueError):
            self._readers.remove(reader)
        self._room.set()

    def has_read(self) -> None:
        """A reader has taken what it was told."""
        self._room.set()

    async def _fly(self, gateway: Gateway, compute: Callable[[], Coroutine[Any, Any, None]]) -> None:
        context = self.leader
        try:
            await compute()
            if isinstance(context.answer, bytes):
                self.record, context.outcome = context.answer, "ok"
            elif context.answer is not None:
                await self._share(context.answer)
                self.record = context.recorded
        except asyncio.CancelledError:  # nobody is left, or the gateway ends
            context.outcome = "cancelled"
            self._fail(OverloadedError("the gateway gave this request up; try again"))
        except HeadraceError as error:
            context.outcome = "refused" if error.status < 500 else "failed"
            self._fail(error)
        except Exception as error:
            context.outcome = "failed"
            gateway.log.error("unexpected error", request_id=context.id, exc_info=error)
            self._fail(HeadraceError(f"something went wrong in the gateway; it is logged as {context.id}"))
        finally:
            self.all_told = True
            self._begun.set()
            self.ended.set()
            for reader in self._readers:
                reader.wake()
            if context.handed_over:
                context.handed_over = False
                await settle(gateway, context)

    def _fail(self, error: HeadraceError) -> None:
        self._failure = error
        if self._begun.is_set():  # who reads has to be told in the stream
            self._tell(error_event(error))

    async def _share(self, source: Stream) -> None:
        """Tell everybody what comes."""
        try:
            if not self.leader.handed_over:
                self.leader.answer = self._new_reader(self.leader)
            self._begun.set()
            async with contextlib.aclosing(source.__aiter__()) as events:
                async for data in events:
                    self._tell(data)
                    await self._wait_for_readers()
            if self.leader.outcome == "failed":  # it broke off: who asks from now on has it asked again
                self._flights.land(self)
            self.all_told = True
            for reader in self._readers:
                reader.wake()
        finally:
            await source.aclose()

    def _tell(self, data: bytes) -> None:
        if self._told is not None:
            self._told.append(data)
            self._told_bytes += len(data)
            if self._told_bytes > _MOST_TOLD_BYTES:
                self._told = None
        for reader in tuple(self._readers):  # who is too far behind leaves
            reader.push(data)

    async def _wait_for_readers(self) -> None:
        """Be no further ahead than the quickest one wants, and not at all ahead of nobody."""
        while (
            not self._waiting
            and self._readers
            and min(reader.behind_bytes for reader in self._readers) > _AHEAD_BYTES
        ):
            self._room.clear()
            await self._room.wait()

    def _new_reader(self, context: RequestContext) -> Reader:
        reader = Reader(self, context, self._told or [])
        self._readers.append(reader)
        return reader


class Reader:
    """A shared stream for one of those who asked."""

    def __init__(self, flight: Flight, context: RequestContext, told: list[bytes]) -> None:
        self.behind_bytes = sum(map(len, told))
        self._flight = flight
        self._context = context
        self._queue = list(told)
        self._news = asyncio.Event()
        self._problem = ""
        self._closed = False

    @property
    def _leads(self) -> bool:
        return self._context is self._flight.leader

    def push(self, data: bytes) -> None:
        """Take the next events."""
        self._queue.append(data)
        self.behind_bytes += len(data)
        if self.behind_bytes > _MOST_BEHIND_BYTES:  # the quickest one is never that far behind
            self._problem = "the stream was not read fast enough to be shared"
            self._queue.clear()
            self._flight.forget(self)
        self._news.set()

    def wake(self) -> None:
        """Look whether it is over."""
        self._news.set()

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        while True:
            if self._queue:
                data, self.behind_bytes = b"".join(self._queue), 0
                self._queue.clear()
                self._flight.has_read()
                if not self._context.wants_usage:
                    data = without_usage(data)
                if data:
                    if self._context.first_token_at is None and not self._leads:
                        self._context.first_token_at = time.monotonic()
                    yield data
            elif self._problem:
                yield error_event(UpstreamError(self._problem))
                return
            elif self._flight.all_told:
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        """Wait for news, within the request's time; the leader's is kept by who asks the upstream."""
        self._news.clear()
        if self._leads:
            await self._news.wait()
            return
        context = self._context
        try:
            async with asyncio.timeout(max(context.deadline - time.monotonic(), 0.0)) as context.patience:
                await self._news.wait()
        except TimeoutError:
            self._problem = "the request took longer than it may"

    async def aclose(self) -> None:
        """Take no more. A follower's request ends here as the leader's does; it has cost nothing."""
        if self._closed:
            return
        self._closed = True
        flight, context = self._flight, self._context
        flight.forget(self)
        over = flight.all_told and not self._queue and not self._problem
        if over:
            await flight.ended.wait()
        if self._leads:
            await flight.leave_leader()
            return
        flight.leave_follower()
        if over:
            context.outcome, context.usage = flight.leader.outcome, flight.leader.usage
        else:
            context.outcome = "failed" if self._problem else "cancelled"


def without_usage(events: bytes) -> bytes:
    """Whole events of a stream, for a client that did not ask for usage."""
    if _USAGE not in events:
        return events
    kept = []
    for block in events.split(b"\n\n"):
        if _USAGE in block and block.startswith(b"data: {"):
            chunk = orjson.loads(block[6:])
            if "usage" in chunk and "choices" in chunk:
                if not chunk["choices"]:
                    continue
                del chunk["usage"]
                kept.append(b"data: " + orjson.dumps(chunk))
                continue
        kept.append(block)
    return b"\n\n".join(kept)
