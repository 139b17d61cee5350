"""A server that does nothing but stream: what is measured against it is the client itself.

Raw asyncio, standard library only. ``python streaming_server.py --first 0.02 --gap 0.01`` prints its address.
Tests give ``Streamer`` a ``behaviour`` that writes something else than a decent answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Behaviour = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request: its ``path`` and ``body``, and ways to answer it."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.path = path
        self.headers = headers
        self.raw_body = body
        self.body: dict[str, Any] = json.loads(body) if body else {}
        self.writer = writer

    @property
    def max_tokens(self) -> int:
        """How many tokens the client wants."""
        return int(self.body.get("max_tokens") or self.body.get("max_completion_tokens") or 1)

    async def whole(self, status: int, body: bytes, kind: str = "application/json", extra: str = "") -> None:
        """An answer of known length."""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def error(self, status: int, message: str) -> None:
        """An error in OpenAI's form."""
        await self.whole(status, json.dumps({"error": {"message": message}}).encode())

    def begin(self, kind: str = "text/event-stream") -> None:
        """The head of a stream."""
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    async def send(self, data: bytes) -> None:
        """One HTTP chunk of any bytes."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        """The end of a stream."""
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def events(self, pieces: list[str], *, usage: bool = True, tokens: int | None = None) -> list[bytes]:
        """The events of a decent chat answer."""
        chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if usage:
            chunks.append({"choices": [], "usage": self.usage(tokens if tokens is not None else len(pieces))})
        return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]

    def usage(self, tokens: int) -> dict[str, int]:
        """One token a word of the prompt."""
        texts = [m["content"] for m in self.body.get("messages", [])] or [self.body.get("prompt", "")]
        parts = [text if isinstance(text, str) else " ".join(part["text"] for part in text) for text in texts]
        prompt = sum(len(text.split()) for text in parts)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


class Streamer:
    """The server. ``first_s`` and ``gap_s``: delays before the first and each further token."""

    def __init__(self, first_s: float = 0.0, gap_s: float = 0.0, behaviour: Behaviour | None = None) -> None:
        self.first_s = first_s
        self.gap_s = gap_s
        self.behaviour = behaviour or self.decent
        self.asked: list[Exchange] = []
        self.pages: dict[str, tuple[int, bytes, str]] = {}  # what else can be got, by its path
        self.models = (200, b'{"object": "list", "data": [{"id": "noop"}]}', "application/json")

    async def listen(self, port: int = 0) -> tuple[asyncio.Server, int]:
        """Serve; the server and its port."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=1024)
        return server, server.sockets[0].getsockname()[1]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                exchange = Exchange(first.split()[1], headers, body, writer)
                if first.startswith("POST"):
                    self.asked.append(exchange)
                    await self.behaviour(exchange)
                elif exchange.path in self.pages:
                    await exchange.whole(*self.pages[exchange.path])
                elif exchange.path.endswith("/models"):
                    await exchange.whole(*self.models)
                else:
                    await exchange.whole(404, b"{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def decent(self, exchange: Exchange) -> None:
        """As many one-word tokens as were asked for, on time however long sending takes."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self.first_s
        exchange.begin()
        role, *events = exchange.events(["word "] * exchange.max_tokens)
        await exchange.send(role)
        for number, event in enumerate(events):
            if number < exchange.max_tokens:
                await asyncio.sleep(max(due - loop.time(), 0.0))
                due += self.gap_s
            await exchange.send(event)
        await exchange.end()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.0)
    options = parser.parse_args()
    server, port = await Streamer(options.first, options.gap).listen(options.port)
    print(f"http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
