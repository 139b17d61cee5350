"""A server in the gateway's own process, called as an upstream: what a socket would have done is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace.gateway.local import LocalServer

App = Callable[[Scope, Receive, Send], Awaitable[None]]
PIECE = b"x" * 1000
START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/plain; a=b")],
}


def piece(more: bool = True) -> Message:
    return {"type": "http.response.body", "body": PIECE, "more_body": more}


class Recorder:
    """An application that sends ``pieces``, and notes what it sent and whether its client left."""

    def __init__(self, pieces: int) -> None:
        self.pieces, self.sent, self.left, self.body = pieces, 0, False, b""
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.body = scope, (await receive())["body"]
        gone = asyncio.create_task(self._watch(receive))
        await send(START)
        for number in range(self.pieces):
            if self.left:
                return
            await send(piece(number < self.pieces - 1))
            self.sent += 1
        gone.cancel()

    async def _watch(self, receive: Receive) -> None:
        self.left = (await receive())["type"] == "http.disconnect"


def asked(app: App, use: Callable[[LocalServer], Awaitable[None]]) -> None:
    """Run ``use`` with a server of ``app``; nothing works on it afterwards."""

    async def main() -> None:
        server = LocalServer(app, ("m",), "secret")
        async with asyncio.timeout(10):
            await use(server)
            await server.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_what_is_asked_and_answered_arrives_whole() -> None:
    app = Recorder(5)

    async def use(server: LocalServer) -> None:
        answer = await server.post("in-process:/v1/chat", data=b"{}", headers={"X-A": "b"})
        assert (answer.status, answer.content_type, answer.is_eof()) == (200, "text/plain", False)
        assert await answer.content.read(10**6) == PIECE * 5
        assert await answer.content.readany() == b""
        assert answer.is_eof()

    asked(app, use)
    assert (app.scope["method"], app.scope["path"], app.body) == ("POST", "/v1/chat", b"{}")
    assert app.scope["headers"] == [(b"x-a", b"b")]


def test_an_answer_waits_for_its_reader() -> None:
    app = Recorder(10_000)

    async def use(server: LocalServer) -> None:
        answer = await server.get("in-process:/", headers={})
        for _ in range(100):
            await asyncio.sleep(0)
        ahead = app.sent
        assert 0 < ahead < 100, "of 10,000"
        read = len(await answer.content.readany())
        for _ in range(100):
            await asyncio.sleep(0)
        assert ahead < app.sent < 200
        while part := await answer.content.readany():
            read += len(part)
        assert read == 10_000 * len(PIECE)

    asked(app, use)


def test_letting_go_is_a_disconnect() -> None:
    app = Recorder(10_000)

    async def use(server: LocalServer) -> None:
        async with await server.get("in-process:/", headers={}) as answer:
            await answer.content.readany()
        with pytest.raises(OSError, match="broke its answer off"):
            while await answer.content.readany():
                pass

    asked(app, use)
    assert app.left
    assert app.sent < 200


def test_who_is_cancelled_while_waiting_lets_go() -> None:
    left = asyncio.Event()

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def use(server: LocalServer) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await server.get("in-process:/", headers={})
        await left.wait()

    asked(silent, use)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_an_answer_that_breaks_off_is_told(begins: bool, raises: bool) -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        if begins:
            await send(START)
            await send(piece())
        if raises:
            raise RuntimeError("a bug")

    async def use(server: LocalServer) -> None:
        said = "broke its answer off" if begins else "gave no answer"
        with pytest.raises(OSError, match=said):
            answer = await server.get("in-process:/", headers={})
            while await answer.content.readany():
                pass

    asked(breaks, use)
