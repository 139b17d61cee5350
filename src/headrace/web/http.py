"""HTTP below the routes: reading bodies within limits, noticing clients that leave, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import InvalidRequestError, PayloadTooLargeError

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before it had its whole answer."""


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises PayloadTooLargeError if more than ``limit`` bytes are announced or have come,
    whatever the content-length header claims, InvalidRequestError if it is compressed (415) or takes longer
    than ``timeout_s`` (408), and ClientGone if the client leaves meanwhile.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        error = InvalidRequestError(
            f"the request body is compressed ({encoding[:40]!r} in content-encoding); send it as it is"
        )
        error.status, error.code = 415, "unsupported_encoding"
        raise error
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        error = InvalidRequestError(f"the request body did not arrive within {timeout_s:g} seconds")
        error.status, error.code = 408, "request_timeout"
        raise error from None


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is over this server's limit of {limit} bytes")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled, and has ended, before this raises ClientGone.

    ``receive`` must have given the whole body already.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Events(Protocol):
    """What an :class:`EventStream` sends: pieces of its body, and a way to give it up early."""

    def __aiter__(self) -> AsyncGenerator[bytes]: ...

    async def aclose(self) -> None: ...


class EventStream(Response):
    """A server-sent event stream that ends its source as soon as the client leaves or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, *, write_timeout_s: float) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies must not collect the stream
        self._events = events
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; on disconnect or a stalled client, close the source first."""
        try:
            await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events.__aiter__()) as events:
            async for data in events:
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                except TimeoutError:
                    raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
