"""A server that answers at once and computes nothing: what is measured against it is the client itself.

Run as a program, so that it has a process of its own; standard library only, so that it starts at once.
"""

from __future__ import annotations

import asyncio

TOKENS = 16

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WORD = b'data: {"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
_LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % TOKENS
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One chunk a token, each on its own way: the loop turns once in between."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
            await reader.readexactly(int(length or 0))
            writer.write(_HEAD)
            for _ in range(TOKENS):
                writer.write(_chunk(_WORD))
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(_chunk(_LAST) + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        writer.close()


async def main() -> None:
    """Print the port, serve until killed."""
    server = await asyncio.start_server(_connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
