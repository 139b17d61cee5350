"""Running a gateway: its sockets, its signals, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable

from headrace.errors import ConfigError, StateError
from headrace.gateway.app import GatewayApp
from headrace.gateway.gateway import Gateway
from headrace.gateway.reload import reload
from headrace.web.connection import Bounds, raise_file_limit
from headrace.web.run import Server, uvicorn_config

_LAST_WORDS_S = 2.0  # for streams that are cut off to send their error event and close
_LOOK_S = 0.05
_ADMIN_CONNECTIONS = 64


def run(
    gateway: Gateway,
    sock: socket.socket,
    *,
    admin: socket.socket | None = None,
    on_ready: Callable[[], None],
    drain_timeout_s: float,
) -> None:
    """Serve on ``sock``, and the admin API on ``admin``, until SIGTERM or SIGINT.

    The first signal drains, a second one exits at once. SIGHUP reads the configuration again. Raises
    ConfigError if the admin API's key is not in the environment.
    """
    # half of the files for clients, half for upstreams
    bounds = Bounds(timeout_s=gateway.config.read_timeout_s, max_connections=raise_file_limit() // 2)
    config = uvicorn_config(GatewayApp(gateway), bounds, gateway.log, last_words_s=_LAST_WORDS_S)
    servers = [(Server(config), sock)]
    if admin is not None:
        servers.append((admin_server(gateway), admin))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_live(gateway, servers, on_ready, drain_timeout_s))


def admin_server(gateway: Gateway) -> Server:
    """A server of the admin API. Raises ConfigError if its key is not in the environment."""
    from headrace.gateway.admin.app import AdminApp

    bounds = Bounds(timeout_s=gateway.config.read_timeout_s, max_connections=_ADMIN_CONNECTIONS)
    return Server(uvicorn_config(AdminApp(gateway), bounds, gateway.log, last_words_s=_LAST_WORDS_S))


def reload_on_hangup(gateway: Gateway) -> None:
    """From now on SIGHUP has the gateway read its configuration again."""
    reloads: set[asyncio.Task[None]] = set()

    async def reload_quietly() -> None:
        with contextlib.suppress(ConfigError, StateError):  # which is logged
            await reload(gateway)

    def on_hangup() -> None:
        task = asyncio.create_task(reload_quietly())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)


async def _live(
    gateway: Gateway,
    servers: list[tuple[Server, socket.socket]],
    on_ready: Callable[[], None],
    drain_timeout_s: float,
) -> None:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        gateway.phase = "draining"
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    reload_on_hangup(gateway)
    async with gateway:
        # Modules are most of what there is, and no garbage: looking through them would hold up all streams.
        gc.collect()
        gc.freeze()
        serving = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in servers]
        on_ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, *serving), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await drain(gateway, drain_timeout_s)
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


async def drain(gateway: Gateway, timeout_s: float) -> None:
    """Wait until nothing is under way; what is then still there is told that it took too long."""
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
