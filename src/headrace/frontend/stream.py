"""Text as an asynchronous stream: the bridge from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType

from headrace.frontend.outputs import TextOutput
from headrace.frontend.text_request import TextRequest


class LoopWaker:
    """Wakes requests on one event loop; however many have news, the loop is called once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # wakers are kept by loop: a strong one would keep both for ever
        self._ready: deque[tuple[TextRequest, asyncio.Event]] = deque()
        self._called = False

    def wake(self, request: TextRequest, event: asyncio.Event) -> None:
        """Any thread. If the loop is closed, nobody will ever read: the request is aborted."""
        self._ready.append((request, event))
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            if self._called:
                return
            self._called = True
            with contextlib.suppress(RuntimeError):  # closed a moment ago
                loop.call_soon_threadsafe(self._drain)
                return
        while self._ready:
            self._ready.popleft()[0].abort()

    def _drain(self) -> None:
        self._called = False  # before reading: what is appended from now on calls again
        while self._ready:
            request, event = self._ready.popleft()
            request.process()
            event.set()


class TextStream:
    """An asynchronous iterator over the news of a request that has been submitted.

    Each item is everything that is new, at most one :class:`TextOutput` per choice: a slow consumer gets
    longer deltas, not more items. Stop strings are looked for as tokens arrive, whether or not anyone
    reads. Ends after the last choice's ``finish_reason``. Cancelling a wait, closing, or dropping the
    stream aborts the request at once.
    """

    def __init__(
        self, submit: Callable[[Callable[[TextRequest], None]], TextRequest], waker: LoopWaker
    ) -> None:
        event = self._event = asyncio.Event()
        self._closed = False
        self._request: TextRequest | None = None
        # The engine holds the request; were the stream reachable from it, dropping it would go unnoticed.
        self._request = submit(lambda request: waker.wake(request, event))
        self.request_id = self._request.request_id
        self.told = self._request.told

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> list[TextOutput]:
        request = self._request
        while not self._closed and request is not None:
            if outputs := request.take():
                return outputs
            if request.finished:
                break
            self._event.clear()
            try:
                await self._event.wait()
            except BaseException:
                self._close()
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what still runs. Closing twice is fine."""
        self._close()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if not self._closed and self._request is not None:
            self._closed = True
            self._request.abort()
            self._event.set()  # whoever waits learns that it is over

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._close()
