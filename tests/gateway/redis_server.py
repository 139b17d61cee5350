"""Debian's redis-server in a process of its own, and stores of either kind for tests that run on both."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace.gateway.store import Store
from headrace.gateway.stores.redis import RedisStore
from headrace.gateway.stores.sqlite import SqliteStore

Kind = Literal["sqlite", "redis"]
KINDS: tuple[Kind, ...] = "sqlite", "redis"
_DATABASES = 4096
_START_S = 20.0
_TRIES = 5


class RunningRedis:
    """A server on a free port of the loopback, which keeps what it is told in its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._numbers = itertools.count()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had if it ran before."""
        for _ in range(_TRIES):
            port = self.port or _free_port()
            where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(self._folder))
            kept = ("--save", "", "--appendonly", "yes", "--databases", str(_DATABASES))
            self.process = subprocess.Popen(
                ["redis-server", *where, *kept, *self._options], stdout=subprocess.DEVNULL
            )
            if self._is_up(port):
                self.port = port
                return
            self.stop()
        raise AssertionError(f"redis-server does not start; its folder is {self._folder}")

    def _is_up(self, port: int) -> bool:
        deadline = time.monotonic() + _START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.sendall(b"PING\r\n")
                if sock.recv(100).startswith((b"+PONG", b"-NOAUTH")):
                    return True
            time.sleep(0.01)
        return False

    def url(self) -> str:
        """The address of an empty database."""
        return f"redis://127.0.0.1:{self.port}/{next(self._numbers) % _DATABASES}"

    def stop(self) -> None:
        """Gone, as by a power cut but for what lies on the disk."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def need_redis() -> None:
    """Skip where there is no redis-server and none can be installed; .ci/run installs it."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs Debian's redis-server: apt-get install redis-server")


@dataclass(frozen=True)
class Place:
    """Where state lies: a folder, or a database of a Redis. Every store that is made of it has the same."""

    folder: Path
    url: str | None = None

    def store(self, clock: Callable[[], float] | None = None) -> Store:
        """A store that is not open yet, as one more gateway would have it."""
        if self.url is not None:
            return RedisStore(self.url, None, clock)
        return SqliteStore(self.folder) if clock is None else SqliteStore(self.folder, clock)

    @contextlib.asynccontextmanager
    async def opened(self, clock: Callable[[], float] | None = None) -> Any:
        """A store that is open."""
        store = self.store(clock)
        await store.open()
        try:
            yield store
        finally:
            await store.aclose()

    @property
    def config(self) -> dict[str, Any]:
        """What a gateway's file says of it."""
        return {} if self.url is None else {"store": self.url}


def place(kind: Kind, folder: Path, server: Callable[[], RunningRedis]) -> Place:
    """A new and empty one; ``server`` is asked only where it is needed."""
    return Place(folder, server().url() if kind == "redis" else None)


@contextlib.contextmanager
def redis(folder: Path, *options: str) -> Iterator[RunningRedis]:
    """A server of one's own."""
    need_redis()
    server = RunningRedis(folder, *options)
    try:
        yield server
    finally:
        server.stop()
