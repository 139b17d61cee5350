"""What the server says of itself under the load (its /metrics page), and what its machine says of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from headrace.lab.bench import process_watch
from headrace.lab.bench.server_names import COUNTERS, GAUGES, engine_of, parse_metrics

if TYPE_CHECKING:
    import aiohttp

_INTERVAL_S = 1.0
_MAX_PAGE_BYTES = 8 * 2**20
_SAMPLED = ("running", "waiting", "kv_usage")


class ServerStats(msgspec.Struct, kw_only=True):
    """The server's side of a stage; None where nobody says. Shares are of 1.

    ``busy``: share of time in engine steps. ``cpu_cores``: cores that the server's processes kept busy, of
    ``cores`` that they may use; ``busiest_thread`` of them the busiest thread alone. ``others_cores``: cores
    that neither the server nor the client used, but somebody else. ``device_*``: of NVIDIA devices, by NVML.
    ``prefill_time_mean_ms`` is of a request, ``prefill_ms_per_token`` of a prompt's token;
    ``frontend_time_mean_ms``: checking and tokenising a request.
    """

    engine: str | None = None
    running_mean: float | None = None
    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_mean: float | None = None
    kv_usage_max: float | None = None
    queue_time_mean_ms: float | None = None
    prefill_time_mean_ms: float | None = None
    prefill_ms_per_token: float | None = None
    frontend_time_mean_ms: float | None = None
    prefix_hit_share: float | None = None
    preemptions: float | None = None
    tokens_per_step: float | None = None
    busy: float | None = None
    cpu_cores: float | None = None
    cores: float | None = None
    busiest_thread: float | None = None
    others_cores: float | None = None
    device_busy: float | None = None
    device_memory: float | None = None
    device_names: list[str] = []
    load_s: float | None = None


class ServerWatch:
    """Use as an async context around the load; ``stats()`` afterwards (None if nobody says anything).

    ``pid``: the server's process where it is on this machine, for its CPU and its devices.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: dict[str, str],
        pid: int | None,
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._session = session
        self._url = url
        self._headers = {k: v for k, v in headers.items() if k == "Authorization"}
        self._pid = pid
        self._interval_s = interval_s
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._machine: _Machine | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ServerWatch:
        if self._pid is not None:
            self._machine = _Machine(self._pid)
        await self._sample()
        if self._samples:
            self._task = asyncio.create_task(self._keep_sampling())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._sample()
        if self._machine is not None:
            self._machine.end()

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._sample()

    async def _sample(self) -> None:
        values = await self._page()
        if self._machine is not None and self._pid is not None:
            values["process_cpu_seconds_total"] = process_watch.cpu_seconds(self._pid)
            values |= self._machine.devices.sample()
        if values:
            self._samples.append((asyncio.get_running_loop().time(), values))

    async def _page(self) -> dict[str, float]:
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            async with (
                asyncio.timeout(5),
                self._session.get(self._url, headers=self._headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return {}
                page = b""
                while more := await response.content.read(_MAX_PAGE_BYTES - len(page)):
                    page += more
            return parse_metrics(page.decode())
        return {}

    def stats(self) -> ServerStats | None:
        """The means, maxima and differences of what was sampled."""
        if len(self._samples) < 2:
            return None
        found = summarise(self._samples)
        if self._machine is not None:
            self._machine.describe(found)
        return found


class _Machine:
    """The server's process on this machine, between the beginning of the load and its end."""

    def __init__(self, pid: int) -> None:
        self.devices = process_watch.Devices(pid)
        self._names = self.devices.names
        self._pid = pid
        self._cores = process_watch.usable_cores(pid)
        self._begin = self._now()

    def _now(self) -> tuple[float, dict[tuple[int, int], float], float, float]:
        import os
        import time

        own = os.times()
        threads = process_watch.thread_seconds(self._pid)
        return time.perf_counter(), threads, process_watch.machine_seconds(), own.user + own.system

    def end(self) -> None:
        self._end = self._now()
        self.devices.close()

    def describe(self, stats: ServerStats) -> None:
        (began, threads, machine, own), (ended, threads_after, machine_after, own_after) = (
            self._begin,
            self._end,
        )
        elapsed = max(ended - began, 1e-9)
        used = [(after - threads.get(key, 0.0)) / elapsed for key, after in threads_after.items()]
        if used:
            stats.busiest_thread = round(max(used), 3)
            others = (machine_after - machine - (own_after - own)) / elapsed - sum(used)
            stats.others_cores = round(max(others, 0.0), 3)
        if self._cores is not None:
            stats.cores = float(self._cores)
        stats.device_names = self._names


def summarise(samples: list[tuple[float, dict[str, float]]]) -> ServerStats:
    """``samples``: time in seconds and values by name, at least two. The first and last are the ends of the
    load and count for differences; gauges are taken between them where there are any samples.
    """
    (begin, first), (end, last) = samples[0], samples[-1]
    inner = [values for _, values in samples[1:-1]] or [last]

    def gauge(key: str) -> list[float]:
        name = next((name for name in GAUGES.get(key, (key,)) if name in last), None)
        return [v[name] for v in inner if name in v] if name is not None else []

    def grown(key: str) -> float | None:
        for name in COUNTERS[key]:
            if name in last:
                return last[name] - first.get(name, 0.0)
        return None

    def ratio(part: str, whole: str, factor: float = 1.0) -> float | None:
        above, below = grown(part), grown(whole)
        return round(factor * above / below, 4) if above is not None and below else None

    def mean(key: str) -> float | None:
        values = gauge(key)
        return round(sum(values) / len(values), 4) if values else None

    found = ServerStats(engine=engine_of(last), preemptions=grown("preemptions"))
    for key in _SAMPLED:
        setattr(found, f"{key}_mean", mean(key))
        setattr(found, f"{key}_max", max(gauge(key), default=None))
    found.queue_time_mean_ms = ratio("queue_s", "queued", 1000)
    found.prefill_time_mean_ms = ratio("prefill_s", "prefilled", 1000)
    found.prefill_ms_per_token = ratio("prompt_s", "prompt_tokens", 1000)
    found.frontend_time_mean_ms = ratio("frontend_s", "validated", 1000)
    found.prefix_hit_share = ratio("found", "looked_up")
    found.tokens_per_step = ratio("step_tokens", "steps")
    found.cores, found.load_s = mean("cores"), mean("load_s")
    found.device_busy, found.device_memory = mean("device_busy"), mean("device_memory")
    elapsed = max(end - begin, 1e-9)
    busy, cpu = grown("step_s"), grown("cpu_s")
    found.busy = None if busy is None else round(min(busy / elapsed, 1.0), 4)
    found.cpu_cores = None if cpu is None else round(cpu / elapsed, 3)
    return found
