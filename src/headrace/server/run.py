"""Running a server: its socket, its signals, loading behind open doors, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.engine.memory import trim_memory
from headrace.errors import HeadraceError
from headrace.server.app import build_app
from headrace.server.state import ServerState
from headrace.web.connection import Bounds, raise_file_limit
from headrace.web.run import Server, uvicorn_config

if TYPE_CHECKING:
    import uvicorn

    from headrace.engine.journal import Journal
    from headrace.frontend.frontend import Frontend

_LAST_WORDS_S = 2.0  # for aborted streams to send their error event and close


class Front(Protocol):
    """An ASGI application that stands before the server's own on its port, such as a gateway.

    It is opened when the model is loaded, before requests are taken. ``drain``: no new requests.
    ``drained`` waits for those under way, and ends them when ``timeout_s`` has passed.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def open(self) -> None: ...

    def drain(self) -> None: ...

    async def drained(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


def run(
    state: ServerState,
    sock: socket.socket,
    loading: Future[Frontend],
    *,
    on_ready: Callable[[Frontend], None],
    drain_timeout_s: float,
    front: Callable[[ASGIApp], Front] | None = None,
) -> None:
    """Serve on ``sock`` until SIGTERM or SIGINT, from now on: health answers while ``loading`` runs.

    The first signal drains: no new requests, running ones get ``drain_timeout_s``. A second one exits at
    once. ``front`` makes what stands before the application. Raises what loading raises.
    """
    app = build_app(state)
    before = None if front is None else front(app)
    bounds = Bounds(timeout_s=state.settings.read_timeout_s, max_connections=raise_file_limit())
    config = uvicorn_config(before or app, bounds, state.log, last_words_s=_LAST_WORDS_S)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_Life(state, config, loading, on_ready, drain_timeout_s, before).live(sock))


def _warm_up(frontend: Frontend) -> None:
    """Compile the chat template now: the first chat should not pay for it, nor readiness wait for it."""
    with contextlib.suppress(HeadraceError):  # a base model has none
        frontend.encode_chat([{"role": "user", "content": "Hello!"}])


class _Life:
    """One server process from its first connection to its last."""

    def __init__(
        self,
        state: ServerState,
        config: uvicorn.Config,
        loading: Future[Frontend],
        on_ready: Callable[[Frontend], None],
        drain_timeout_s: float,
        front: Front | None,
    ) -> None:
        self._state = state
        self._front = front
        self._server = Server(config)
        self._loading = loading
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._stop = asyncio.Event()
        self._syncing: asyncio.Task[None] | None = None  # the loop itself keeps only a weak reference

    async def live(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if hasattr(signal, "SIGUSR1"):
            loop.add_signal_handler(signal.SIGUSR1, self._checkpoint)
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await self._load(stopping)
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopping.cancel()
            self._server.should_exit = True
            await serving
            if self._front is not None:
                await self._front.close()
            if self._state.loaded is not None:
                await asyncio.to_thread(self._state.loaded.client.close)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        (self._front or self._state).drain()
        self._stop.set()

    async def _load(self, stopping: asyncio.Task[bool]) -> None:
        loading = asyncio.wrap_future(self._loading)
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():  # told to stop first; the loader's daemon thread ends with the process
            loading.cancel()
            return
        frontend = loading.result()
        if self._front is not None and not self._stop.is_set():
            await self._front.open()  # first: it may know who is not to be let in
        self._state.ready(frontend)
        if self._state.resumed is not None and not self._stop.is_set():
            self._state.resumed.start()
        if not self._stop.is_set():
            self._on_ready(frontend)
            await asyncio.to_thread(_warm_up, frontend)
            gc.collect()
            trim_memory()

    def _checkpoint(self) -> None:
        """Have the disk hold what requests have had, where they are kept."""
        frontend = self._state.loaded
        if frontend is not None and frontend.journal is not None:
            self._syncing = asyncio.create_task(self._sync(frontend.journal))

    async def _sync(self, journal: Journal) -> None:
        try:
            await asyncio.to_thread(journal.sync)
        except HeadraceError as error:
            self._state.log.error("checkpoint failed", error=error.message)
        else:
            self._state.log.info("checkpoint", requests=journal.stats().num_requests)

    async def _drain(self) -> None:
        if self._front is not None:
            await self._front.drained(self._drain_timeout_s)
            self._state.drain()
        in_flight = self._state.in_flight
        self._state.log.info("draining", in_flight=in_flight, timeout_s=self._drain_timeout_s)
        try:
            await asyncio.wait_for(self._state.idle(), self._drain_timeout_s)
        except TimeoutError:
            self._state.log.warning("drain timeout: aborting requests", in_flight=self._state.in_flight)
            if self._state.loaded is not None:
                await asyncio.to_thread(self._state.loaded.client.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.idle(), _LAST_WORDS_S)
