"""Whether the client itself is the bottleneck: its CPU and how late its event loop is."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import psutil

_TICK_S = 0.02
CPU_LIMIT = 0.85
LAG_LIMIT_MS = 20.0


class ClientStats(msgspec.Struct, kw_only=True):
    """``cpu``: share of one core; ``loop_lag_*``: how much later than due a timer of the client fired;
    ``late``: share of the time that the client's timers were overdue.
    """

    cpu: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    late: float = 0.0

    @property
    def warning(self) -> str | None:
        """Why the numbers may be the client's, not the server's."""
        if self.cpu > CPU_LIMIT:
            return (
                f"the client used {self.cpu:.0%} of one core: it is the bottleneck, and the server may be "
                "faster than shown; load it from several clients"
            )
        if self.loop_lag_p99_ms > LAG_LIMIT_MS:
            return (
                f"the client's event loop was up to {self.loop_lag_p99_ms:.0f} ms late (p99): times are that "
                "much too long; give the client a core that the server does not use"
            )
        return None


class ClientWatch:
    """Use as an async context around the load; ``stats`` afterwards."""

    async def __aenter__(self) -> ClientWatch:
        self._lags: list[float] = []
        self._process = psutil.Process()
        self._began = time.perf_counter()
        self._cpu = self._seconds()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        share = (self._seconds() - self._cpu) / max(time.perf_counter() - self._began, 1e-9)
        p50, p99 = np.percentile(self._lags, (50, 99)) if self._lags else (0.0, 0.0)
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        self.stats = ClientStats(
            cpu=round(share, 4),
            loop_lag_p50_ms=round(float(p50), 3),
            loop_lag_p99_ms=round(float(p99), 3),
            late=round(min(sum(self._lags) / 1000 / elapsed, 1.0), 4),
        )

    def _seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lags.append(max(time.perf_counter() - due, 0.0) * 1000)
