"""Clients that play by no rules, on real sockets: slow, endless, greedy, early, gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from headrace.frontend.frontend import Frontend
from headrace.web.connection import Bounds, Connection
from headrace.web.listen import listen
from tests.server.small_server import idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio


def post(body: dict[str, Any] | bytes, *headers: str) -> bytes:
    """A request's bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


SHORT = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


class Served:
    """A server on a socket of its own."""

    def __init__(self, frontend: Frontend, port: int) -> None:
        self.frontend = frontend
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answers(self, sent: bytes, count: int = 1) -> list[tuple[int, bytes]]:
        """Status and body of the answers to what was sent on a new connection."""
        reader, writer = await self.connect()
        writer.write(sent)
        found = [await answer(reader) for _ in range(count)]
        writer.close()
        return found


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Whatever comes until the server closes the connection."""
    async with asyncio.timeout(60):
        return await reader.read()


@asynccontextmanager
async def served(bounds: Bounds | None = None, step_s: float = 0.0, **settings: Any) -> AsyncIterator[Served]:
    frontend = small_frontend(step_s=step_s)
    sock = listen("127.0.0.1", 0, 60.0)
    config = uvicorn.Config(
        small_app(frontend, **settings),
        http=functools.partial(Connection, bounds or Bounds()),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield Served(frontend, sock.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        frontend.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 5000,  # never complete
        b"GET /" + b"a" * 5000,
    ],
)
async def test_a_head_that_is_too_long_is_refused(head: bytes) -> None:
    """uvicorn's parser reads heads of any size: one client could fill the memory."""
    async with served(Bounds(head_bytes=4096)) as server:
        ((status, body),) = await server.answers(head)
        assert status == 431
        assert "4096 bytes" in json.loads(body)["error"]["message"]
        assert (await server.answers(post(SHORT)))[0][0] == 200


async def test_heads_count_anew_for_every_request() -> None:
    """Neither a connection's earlier requests nor its bodies count against a head's limit."""
    async with served(Bounds(head_bytes=4096)) as server:
        one = post(SHORT | {"user": "u" * 3000}, "A: " + "a" * 2000)
        reader, writer = await server.connect()
        for _ in range(5):
            for part in range(0, len(one), 1000):
                writer.write(one[part : part + 1000])
                await writer.drain()
            assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", None), (b"GET /health HT", 408), (b"GET / HTTP/1.1\r\nA:", 408)]
)
async def test_a_head_that_never_comes_is_given_up(sent: bytes, status: int | None) -> None:
    async with served(Bounds(timeout_s=0.1)) as server:
        reader, writer = await server.connect()
        writer.write(sent)
        told = await closed(reader)
        assert told == b"" if status is None else told.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_trickle_of_headers_buys_no_time() -> None:
    """Slowloris: a header now and then kept a connection for ever."""
    loop = asyncio.get_running_loop()
    async with served(Bounds(timeout_s=0.2)) as server:
        # no stream: a write that fails would end it, and what had come before would not be read
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setblocking(False)
            await loop.sock_sendall(connection, b"GET /health HTTP/1.1\r\n")

            async def trickle() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await loop.sock_sendall(connection, b"A: b\r\n")
                        await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            async with asyncio.timeout(60):
                assert (await loop.sock_recv(connection, 65536)).startswith(b"HTTP/1.1 408 ")
            trickling.cancel()


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with served(Bounds(timeout_s=0.1), step_s=0.02) as server:
        ((status, body),) = await server.answers(post(LONG | {"max_tokens": 20}))
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] == 20


async def test_one_connection_too_many_closes_the_one_that_idled_longest() -> None:
    async with served(Bounds(max_connections=8), step_s=0.01) as server:
        busy_reader, busy = await server.connect()
        busy.write(post(LONG | {"max_tokens": 40}))
        await until(lambda: server.frontend.client.stats().num_running_seqs == 1)
        idlers = [await server.connect() for _ in range(30)]
        ((status, _),) = await server.answers(post(SHORT))
        assert status == 200, "others are served"
        assert (await answer(busy_reader))[0] == 200, "who is being answered stays"
        assert await closed(idlers[0][0]) == b""
        assert not idlers[-1][0].at_eof()
        for _, writer in (*idlers, (None, busy)):
            writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as server:
        sent = b"".join(post(SHORT | {"max_tokens": 2 + number}) for number in range(5))
        whole = await server.answers(sent, 5)
        assert [json.loads(body)["usage"]["completion_tokens"] for _, body in whole] == [2, 3, 4, 5, 6]


async def test_requests_that_come_during_an_answer_are_answered_after_it() -> None:
    async with served(step_s=0.005) as server:
        reader, writer = await server.connect()
        writer.write(post(LONG | {"max_tokens": 20}))
        await until(lambda: server.frontend.client.stats().num_running_seqs == 1)
        two = post(SHORT) + post(SHORT | {"max_tokens": 3})
        for part in range(0, len(two), 50):
            writer.write(two[part : part + 50])
            await asyncio.sleep(0)
        counts = [json.loads((await answer(reader))[1])["usage"]["completion_tokens"] for _ in range(3)]
        assert counts == [20, 2, 3]
        writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_leaving_with_a_second_request_in_the_pipe_frees_the_first(together: bool) -> None:
    """uvicorn stops reading then, and so did not see that the client had left."""
    async with served(step_s=0.02) as server:
        _, writer = await server.connect()
        writer.write(post(LONG) + (post(LONG) if together else b""))
        await until(lambda: server.frontend.client.stats().num_running_seqs == 1)
        if not together:
            writer.write(post(LONG))
            await asyncio.sleep(0.02)
        writer.close()
        await until(lambda: idle(server.frontend))
        assert server.frontend.client.stats().generation_tokens < 60


async def test_an_announced_body_that_is_too_long_is_refused_at_once() -> None:
    async with served(max_body_bytes=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        for length in (1001, 10**17, 10**25):
            ((status, _),) = await server.answers(head % length)
            assert status == (413 if length < 2**63 else 400)


async def test_a_body_that_goes_on_after_its_refusal_is_cut_off() -> None:
    """The rest of a refused body is swallowed, for who must send it all to see the answer; not for ever."""
    async with served(Bounds(timeout_s=0.3), max_body_bytes=1000) as server:
        _, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"400\r\n" + b" " * 1024 + b"\r\n"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(60):
                while True:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)


async def test_a_refused_body_that_ends_leaves_the_connection_usable() -> None:
    async with served(Bounds(timeout_s=30.0, head_bytes=4096), max_body_bytes=1000) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(post(b" " * 50_000))
            assert (await answer(reader))[0] == 413
            writer.write(post(SHORT))
            assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, gzip", "x" * 500])
async def test_a_compressed_body_is_refused_by_name(encoding: str) -> None:
    async with served() as server:
        ((status, body),) = await server.answers(post(SHORT, f"Content-Encoding: {encoding}"))
        assert status == 415
        message = json.loads(body)["error"]["message"]
        assert encoding[:40] in message and len(message) < 200
        assert (await server.answers(post(SHORT, "Content-Encoding: identity")))[0][0] == 200


async def test_what_is_no_http_gets_an_error_in_the_common_shape() -> None:
    async with served() as server:
        for garbage in (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 100):
            ((status, body),) = await server.answers(garbage)
            assert status == 400
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
