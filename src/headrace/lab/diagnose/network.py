"""How far away the server is: handshakes, and requests that cost it nothing."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.lab.bench.endpoint import Endpoint
from headrace.lab.diagnose.measurements import Network

if TYPE_CHECKING:
    import aiohttp

_HANDSHAKES = 5
_ANSWERS = 12
_TIMEOUT_S = 5.0


async def measure_network(http: aiohttp.ClientSession, endpoint: Endpoint) -> Network:
    """Round trips to a server that has nothing else to do. Never raises for what the server does."""
    for url in _cheap(endpoint):
        await answer_ms(http, endpoint, url)  # opens the connection, and is not counted
        times = [await answer_ms(http, endpoint, url) for _ in range(_ANSWERS)]
        known = [time for time in times if time is not None]
        if len(known) > _ANSWERS // 2:
            return Network(
                connect_ms=await _connect_ms(url),
                answer_ms=round(statistics.median(known), 3),
                path=urlsplit(url).path,
            )
    return Network(connect_ms=await _connect_ms(endpoint.base_url))


def _cheap(endpoint: Endpoint) -> Iterator[str]:
    yield f"{endpoint.base_url.removesuffix('/v1')}/health"
    yield f"{endpoint.base_url}/models"


async def answer_ms(http: aiohttp.ClientSession, endpoint: Endpoint, url: str) -> float | None:
    """One GET; None if the answer is not a success or does not come."""
    import aiohttp

    began = time.perf_counter()
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            asyncio.timeout(_TIMEOUT_S),
            http.get(url, headers=endpoint.headers, allow_redirects=False) as response,
        ):
            await response.read()
            if response.status == 200:
                return (time.perf_counter() - began) * 1000
    return None


async def _connect_ms(url: str) -> float | None:
    """The least time of several TCP handshakes: one round trip, without the server's work."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    times = []
    for _ in range(_HANDSHAKES):
        began = time.perf_counter()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
            times.append((time.perf_counter() - began) * 1000)
            writer.close()
    return round(min(times), 3) if times else None


class Pinger:
    """Use as an async context around a load: how long the cheap request takes meanwhile."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> None:
        self._http = http
        self._endpoint = endpoint
        parts = urlsplit(endpoint.base_url)
        self._url = f"{parts.scheme}://{parts.netloc}{path}" if path else None
        self._times: list[float] = []

    async def __aenter__(self) -> Pinger:
        self._task = asyncio.create_task(self._ping())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _ping(self) -> None:
        while self._url is not None:
            await asyncio.sleep(0.25)
            took = await answer_ms(self._http, self._endpoint, self._url)
            if took is not None:
                self._times.append(took)

    @property
    def answer_ms(self) -> float | None:
        """The median; None if nothing was answered."""
        return round(statistics.median(self._times), 3) if self._times else None
