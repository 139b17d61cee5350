"""One client's connection: what it may take before its request is known, and noticing that it left."""

from __future__ import annotations

import contextlib
from asyncio import Transport
from asyncio.events import TimerHandle
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.errors import InvalidRequestError
from headrace.web.errors import error_body

_FILES_BESIDES = 128  # open files that are no connections: libraries, weights, logs
_FILES_WANTED = 65_536


@dataclass(slots=True)
class Bounds:
    """What all connections of a server share.

    ``head_bytes``: longest request line and headers together. ``timeout_s``: for a connection to send its
    request's head, and to stop sending a body that nobody reads. ``max_connections``: one more closes the
    connection that has been without a request for longest.
    """

    head_bytes: int = 64 * 2**10
    timeout_s: float = 60.0
    max_connections: int = 10_000
    idle: dict[Connection, None] = field(default_factory=dict)  # without a request; longest first


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself reads heads of any size, waits for them for ever, and stops reading
    (so that it notices no disconnect) when a client sends its next request before it has its answer.
    """

    def __init__(self, bounds: Bounds, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._bounds = bounds
        self._timer: TimerHandle | None = None
        self._head_bytes = 0  # of a head that is not complete
        self._refusal: tuple[int, str] | None = None
        self._running: RequestResponseCycle | None = None  # uvicorn's self.cycle is the last, perhaps queued
        self._early = bytearray()  # came while an answer was under way

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A client has come; if it is one too many, the one that has idled longest goes."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections and self._bounds.idle:
            next(iter(self._bounds.idle)).transport.close()
        self._set_idle()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: whatever runs for it learns so."""
        self._disarm()
        self._bounds.idle.pop(self, None)
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse, unless an answer is under way and its request complete: then keep it for later."""
        if self._busy() and not self.cycle.more_body:
            self._early += data
            if len(self._early) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            return
        super().data_received(data)
        if self in self._bounds.idle:
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._head_bytes = 0
        self._arm()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._bounds.head_bytes:
            self._refuse_head()
            raise ValueError("ends the parser's work")
        self._disarm()
        self._head_bytes = 0
        self._bounds.idle.pop(self, None)
        busy = self._busy()
        super().on_headers_complete()
        if busy:
            self.flow.resume_reading()
        else:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """A request's body is complete."""
        self._disarm()
        if not self._busy():  # refused before its body was there
            self._set_idle()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is sent: go on with what was asked meanwhile."""
        following = self.pipeline[-1][0] if self.pipeline else None
        unread = self._running is not None and self._running.more_body
        super().on_response_complete()
        self._running = following
        if following is not None or self.transport.is_closing():
            return
        if unread:  # many a client sends its whole body before it looks at the answer
            self._arm()
            return
        self._set_idle()
        if self._early:
            data, self._early = bytes(self._early), bytearray()
            self.data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of every other error. Replaces uvicorn's plain text."""
        if self.transport.is_closing():
            return
        status, message = self._refusal or (400, "this is not a valid HTTP/1.1 request")
        error = InvalidRequestError(message)
        body = error_body(error)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _set_idle(self) -> None:
        self._bounds.idle.pop(self, None)
        self._bounds.idle[self] = None

    def _refuse_head(self) -> None:
        limit = self._bounds.head_bytes
        self._refusal = 431, f"the request line and headers are over this server's limit of {limit} bytes"
        self.send_400_response("")

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self._bounds.timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._busy():  # half of the next request may wait as long as this answer takes
            return
        if self._head_bytes and self in self._bounds.idle:
            seconds = f"{self._bounds.timeout_s:g} seconds"
            self._refusal = 408, f"the request's headers did not arrive within {seconds}"
            self.send_400_response("")
        self.transport.close()


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many connections that makes possible."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _FILES_WANTED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    elif soft == resource.RLIM_INFINITY:
        soft = _FILES_WANTED
    return max(soft - _FILES_BESIDES, 16)
