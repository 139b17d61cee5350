"""What the server says of itself under the load: its /metrics page, read once a second."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import psutil

if TYPE_CHECKING:
    import aiohttp

_INTERVAL_S = 1.0
_MAX_PAGE_BYTES = 8 * 2**20
_PREFIXES = ("vllm:", "headrace_", "process_cpu_seconds")

# What is wanted, and the names it goes by: vLLM's (ours serves them too), older ones of vLLM, only ours.
_GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
_COUNTERS = {
    "queue_s": ("vllm:request_queue_time_seconds_sum",),
    "queued": ("vllm:request_queue_time_seconds_count",),
    "looked_up": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "found": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    "steps": ("headrace_step_seconds_count",),
    "step_s": ("headrace_step_seconds_sum",),
    "step_tokens": ("headrace_batch_tokens_sum",),
    "cpu_s": ("process_cpu_seconds_total",),
}


class ServerStats(msgspec.Struct, kw_only=True):
    """The server's side of a stage; None where it says nothing. Shares are of 1.

    ``busy``: share of time in engine steps. ``cpu_cores``: cores that the server's process kept busy.
    """

    running_mean: float | None = None
    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_mean: float | None = None
    kv_usage_max: float | None = None
    queue_time_mean_ms: float | None = None
    prefix_hit_share: float | None = None
    preemptions: float | None = None
    tokens_per_step: float | None = None
    busy: float | None = None
    cpu_cores: float | None = None


def parse_metrics(page: str) -> dict[str, float]:
    """Name to value, summed over labels; only names that bench knows how to read."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(_PREFIXES) and "_bucket" not in line:
            name, _, rest = line.partition("{")
            if rest:
                text = rest.rpartition("}")[2]
            else:
                name, _, text = line.partition(" ")
            with contextlib.suppress(ValueError, IndexError):
                values[name] = values.get(name, 0.0) + float(text.split()[0])
    return values


class ServerWatch:
    """Use as an async context around the load; ``stats()`` afterwards (None if the server says nothing).

    ``pid``: the server's process where it is known, for its CPU.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], pid: int | None
    ) -> None:
        self._session = session
        self._url = url
        self._headers = {k: v for k, v in headers.items() if k == "Authorization"}
        self._pid = pid
        self._samples: list[tuple[float, dict[str, float]]] = []

    async def __aenter__(self) -> ServerWatch:
        await self._sample()
        self._task = asyncio.create_task(self._keep_sampling()) if self._samples else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._sample()

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self._sample()

    async def _sample(self) -> None:
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            async with (
                asyncio.timeout(5),
                self._session.get(self._url, headers=self._headers, allow_redirects=False) as response,
            ):
                page = await response.content.read(_MAX_PAGE_BYTES) if response.status == 200 else b""
                while response.status == 200 and (more := await response.content.read(_MAX_PAGE_BYTES)):
                    page += more
            values = parse_metrics(page.decode())
            if self._pid is not None:
                values["process_cpu_seconds_total"] = _cpu_seconds(self._pid)
            if values:
                self._samples.append((asyncio.get_running_loop().time(), values))

    def stats(self) -> ServerStats | None:
        """The means, maxima and differences of what was sampled."""
        if len(self._samples) < 2:
            return None
        return summarise(self._samples)


def summarise(samples: list[tuple[float, dict[str, float]]]) -> ServerStats:
    """``samples``: time in seconds and values by name, at least two. The first and last are the ends of the
    load and count for differences; gauges are taken between them where there are any samples.
    """
    (begin, first), (end, last) = samples[0], samples[-1]
    inner = [values for _, values in samples[1:-1]] or [last]

    def gauge(key: str) -> list[float]:
        return [v[name] for v in inner for name in _GAUGES[key] if name in v]

    def grown(key: str) -> float | None:
        for name in _COUNTERS[key]:
            if name in last:
                return last[name] - first.get(name, 0.0)
        return None

    def ratio(part: str, whole: str, factor: float = 1.0) -> float | None:
        above, below = grown(part), grown(whole)
        return round(factor * above / below, 4) if above is not None and below else None

    found = ServerStats(preemptions=grown("preemptions"))
    for key in _GAUGES:
        if values := gauge(key):
            setattr(found, f"{key}_mean", round(sum(values) / len(values), 4))
            setattr(found, f"{key}_max", max(values))
    found.queue_time_mean_ms = ratio("queue_s", "queued", 1000)
    found.prefix_hit_share = ratio("found", "looked_up")
    found.tokens_per_step = ratio("step_tokens", "steps")
    elapsed = max(end - begin, 1e-9)
    busy, cpu = grown("step_s"), grown("cpu_s")
    found.busy = None if busy is None else round(min(busy / elapsed, 1.0), 4)
    found.cpu_cores = None if cpu is None else round(cpu / elapsed, 3)
    return found


def _cpu_seconds(pid: int) -> float:
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total
