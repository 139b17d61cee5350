"""Running a gateway: its socket, its signals, and draining."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.gateway.app import GatewayApp
from headrace.gateway.gateway import Gateway
from headrace.web.connection import Bounds, raise_file_limit
from headrace.web.run import Server, uvicorn_config

if TYPE_CHECKING:
    import uvicorn

_LAST_WORDS_S = 2.0  # for streams that are cut off to send their error event and close
_LOOK_S = 0.05


def run(
    gateway: Gateway, sock: socket.socket, *, on_ready: Callable[[], None], drain_timeout_s: float
) -> None:
    """Serve on ``sock`` until SIGTERM or SIGINT. The first signal drains, a second one exits at once."""
    # half of the files for clients, half for upstreams
    bounds = Bounds(timeout_s=gateway.config.read_timeout_s, max_connections=raise_file_limit() // 2)
    config = uvicorn_config(GatewayApp(gateway), bounds, gateway.log, last_words_s=_LAST_WORDS_S)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_live(gateway, config, sock, on_ready, drain_timeout_s))


async def _live(
    gateway: Gateway,
    config: uvicorn.Config,
    sock: socket.socket,
    on_ready: Callable[[], None],
    drain_timeout_s: float,
) -> None:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        gateway.phase = "draining"
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    server = Server(config)
    async with gateway:
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        on_ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await _drain(gateway, drain_timeout_s)
        server.should_exit = True
        await serving


async def _drain(gateway: Gateway, timeout_s: float) -> None:
    gateway.log.info("draining", in_flight=len(gateway.live), timeout_s=timeout_s)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while gateway.live and loop.time() < deadline:
        await asyncio.sleep(_LOOK_S)
    if gateway.live:
        gateway.log.warning("drain timeout: aborting requests", in_flight=len(gateway.live))
        for context in gateway.live:
            context.cut_short()
        await asyncio.sleep(_LOOK_S)
