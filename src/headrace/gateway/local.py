"""A server in this very process as an upstream: an ASGI application that is asked without a socket.

What it gives has the parts of :class:`~headrace.gateway.connections.Connections`, and of aiohttp's answers,
that the gateway uses, so that no stage need know where an upstream is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

_AHEAD_BYTES = 2**16  # an answer waits for its reader when it is so far ahead


class LocalServer:
    """An application and the names of its models.

    ``credential``: what it takes as a gateway's, so that it believes whose requests it gets. ``api_key``:
    what it asks its clients for, if it does; where the gateway has no keys of its own, so does that.
    """

    def __init__(
        self, app: ASGIApp, names: tuple[str, ...], credential: str, api_key: str | None = None
    ) -> None:
        self.names = names
        self.credential = credential
        self.api_key = api_key
        self._app = app
        self._answers: dict[asyncio.Task[None], LocalAnswer] = {}

    async def post(self, url: str, *, data: bytes, headers: Mapping[str, str], **_: Any) -> LocalAnswer:
        """The answer, whose head is here. Raises ConnectionResetError if none comes."""
        return await self._ask("POST", url, headers, data)

    async def get(self, url: str, *, headers: Mapping[str, str]) -> LocalAnswer:
        """As :meth:`post`, without a body."""
        return await self._ask("GET", url, headers, b"")

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> LocalAnswer:
        path = urlsplit(url).path
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": None,
            "server": None,
        }
        answer = LocalAnswer(body)
        task = asyncio.create_task(answer.run(self._app, scope))
        self._answers[task] = answer
        task.add_done_callback(self._answers.pop)
        try:
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    async def aclose(self) -> None:
        """Let go of all answers, and wait until nothing works on them."""
        tasks = [*self._answers]
        for answer in self._answers.values():
            answer.close()
        await asyncio.gather(*tasks)


class LocalAnswer:
    """What the application answers to one request; ``content`` is the part of it that is read."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.headers = Headers()
        self._asked: bytes | None = body
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = False  # all of the body has come
        self._ended = False  # the application has returned
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def content(self) -> Self:
        """The body's reader."""
        return self

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Have ``app`` answer. What it raises is for its own log; here the answer is just not whole."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            self._whole = False
        finally:
            self._ended = True
            self._news.set()

    async def begun(self) -> None:
        """Wait for status and headers. Raises ConnectionResetError if they don't come."""
        while not self.status:
            if self._ended:
                raise ConnectionResetError("the server in this process gave no answer")
            await self._next()

    async def readany(self) -> bytes:
        """The next bytes, none at the end. Raises OSError if the answer is cut."""
        while not self._parts:
            if self._whole:
                return b""
            if self._ended or self._closed.is_set():
                raise OSError("the server in this process broke its answer off")
            await self._next()
        return self._take()

    async def read(self, limit: int) -> bytes:
        """The body, up to ``limit`` bytes of it."""
        out = b""
        while len(out) < limit and (part := await self.readany()):
            out += part
        return out[:limit]

    def is_eof(self) -> bool:
        """Whether the body is at its end."""
        return self._whole and not self._parts

    def close(self) -> None:
        """The application learns that nobody listens any more."""
        self._closed.set()
        self._room.set()
        self._news.set()

    def release(self) -> None:
        """As :meth:`close`: there is no connection to be kept."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _take(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._room.set()
        return data

    async def _receive(self) -> Message:
        if self._asked is not None:
            body, self._asked = self._asked, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.headers = Headers(raw=message["headers"])
            self.status = message["status"]
        elif not self._closed.is_set():
            if body := message.get("body"):
                self._parts.append(body)
                self._size += len(body)
            self._whole = not message.get("more_body", False)
        self._news.set()
        if self._closed.is_set():
            await asyncio.sleep(0)  # one that sends on and on has to be told as well
        while self._size > _AHEAD_BYTES and not self._closed.is_set():
            self._room.clear()
            await self._room.wait()
