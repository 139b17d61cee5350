"""TCP proxies in front of real servers, which misbehave as a test tells them, in the midst of answers too."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["none", "half", "noise", "hang", "error", "limit", "nonsense"]
"""What is wrong: streams end in the middle, or go on as noise; nothing moves; every answer is a 500, a 429,
or no HTTP at all.
"""

LIMIT_S = 1  # for how long one that limits wants to be left alone
_CANNED: dict[str, bytes] = {
    "error": b'HTTP/1.1 500 X\r\nContent-Length: 38\r\n\r\n{"error": {"message": "disk is full"}}',
    "limit": b"HTTP/1.1 429 X\r\nRetry-After: %d\r\nContent-Length: 2\r\n\r\n{}" % LIMIT_S,
    "nonsense": b"\x00\x01\x02 what is this?\r\n\r\n",
}


class FaultyProxy:
    """Forwards bytes to ``target``, as far as ``fault`` lets it. ``cuts``: streams that it has broken."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self.fault: Fault = "none"
        self.cut_after_bytes = 1500
        self.cuts = 0
        self.url = ""

    async def listen(self) -> None:
        """Fill in the address."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: asyncio.StreamWriter | None = None
        try:
            up_reader, up = await asyncio.open_connection(self._host, self._port)
            ways = {
                asyncio.ensure_future(self._requests(reader, writer, up)),
                asyncio.ensure_future(self._answers(up_reader, writer)),
            }
            _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in left:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # Python 3.11 reports handlers that end as cancelled
            pass
        finally:
            for end in (writer, up):
                if end is not None:
                    end.close()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(2**16):
            if self.fault in _CANNED:
                writer.write(_CANNED[self.fault])
                await writer.drain()
                return
            await self._unless_hanging()
            up.write(data)
            await up.drain()

    async def _answers(self, up: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        while data := await up.read(2**12):
            await self._unless_hanging()
            if data.startswith(b"HTTP/1.1"):
                sent = 0
            streams = b"\ndata: " in data or data.startswith(b"data: ") or b"\r\ndata: " in data
            if streams and self.fault in ("half", "noise"):
                room = self.cut_after_bytes - sent
                if room < len(data):
                    self.cuts += 1
                    writer.write(data[: max(room, 0)] + b"\xff noise \x00" * (self.fault == "noise"))
                    await writer.drain()
                    return
            sent += len(data)
            writer.write(data)
            await writer.drain()

    async def _unless_hanging(self) -> None:
        if self.fault == "hang":  # what is caught in it stays so
            await asyncio.Event().wait()


class Proxies:
    """Proxies on one event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, target: str) -> FaultyProxy:
        """A proxy in front of the server at this address."""
        proxy = FaultyProxy(target)
        asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result(10)
        return proxy

    def stop(self) -> None:
        """End every connection, then the loop."""
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
