"""A whole measurement: stages one after the other, the knee, and the search for the highest good rate."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.lab.bench.arrivals import Arrivals
from headrace.lab.bench.client_watch import ClientWatch
from headrace.lab.bench.endpoint import Endpoint
from headrace.lab.bench.load import Load, Stage
from headrace.lab.bench.metrics import StageResult, summarise
from headrace.lab.bench.server_watch import ServerWatch
from headrace.lab.bench.slo import SLO
from headrace.lab.bench.workload import Workload

if TYPE_CHECKING:
    import aiohttp

_LEAST_GAIN = 0.05  # of throughput, that a higher level must bring for the sweep to go on
_CLOSE_ENOUGH = 1.1  # between a rate that meets the SLO and one that does not
_MOST_PROBES = 16
_SEARCH_STAGE = 1000  # number of the search's first stage: its prompts are not the sweep's


class View(Protocol):
    """Somebody who watches."""

    def running(self, load: Load) -> None:
        """Called some times a second."""

    def finished(self, result: StageResult) -> None:
        """A stage is over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``levels``: users (closed) or requests a second (open), in rising order.

    ``find_rate``: search for the highest rate whose requests meet ``slo`` to the share ``attainment``;
    a single level is then where the search begins.
    """

    kind: Literal["closed", "open"]
    levels: tuple[float, ...]
    duration_s: float | None = 15.0
    requests: int | None = None
    warmup_s: float = 2.0
    arrivals: Arrivals = "poisson"
    times: tuple[float, ...] = ()
    slo: SLO | None = None
    attainment: float = 0.9
    find_rate: bool = False
    early_stop: bool = True
    seed: int = 0


class Session:
    """Measures one endpoint. ``stages`` grows while it runs, so that an interrupted run keeps what it has."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoint: Endpoint,
        workload: Workload,
        plan: Plan,
        view: View,
        *,
        server_pid: int | None = None,
        count_tokens: Callable[[str], int] | None = None,
        metrics_every_s: float = 1.0,
    ) -> None:
        self.stages: list[StageResult] = []
        self.best_rate: float | None = None
        self.interrupted = False
        self._http = http
        self._endpoint = endpoint
        self._workload = workload
        self._plan = plan
        self._view = view
        self._pid = server_pid
        self._count_tokens = count_tokens
        self._metrics_every_s = metrics_every_s
        self._load: Load | None = None

    def interrupt(self) -> None:
        """End now, with what was measured so far."""
        self.interrupted = True
        if self._load is not None:
            self._load.interrupt()

    async def run(self) -> None:
        """Everything that the plan asks for."""
        if self._plan.find_rate:
            await self._find_rate()
        else:
            await self._sweep()

    def _stage(self, kind: Literal["closed", "open"], level: float, number: int) -> Stage:
        plan = self._plan
        return Stage(
            kind=kind,
            level=level,
            number=number,
            duration_s=plan.duration_s,
            requests=plan.requests,
            warmup_s=plan.warmup_s,
            arrivals=plan.arrivals,
            times=plan.times,
            seed=plan.seed,
        )

    async def _sweep(self) -> None:
        best = 0.0
        for number, level in enumerate(self._plan.levels):
            if self.interrupted:
                return
            result = await self._measure(self._stage(self._plan.kind, level, number))
            gained = result.output_throughput.value > best * (1 + _LEAST_GAIN)
            best = max(best, result.output_throughput.value)
            full = result.saturated or (self._plan.kind == "closed" and not gained)
            if self._plan.early_stop and (full or not result.completed):
                return

    async def _find_rate(self) -> None:
        """Double until the SLO is missed (or halve until it is met), then bisect between (geometrically)."""
        start = self._plan.levels[0] if self._plan.levels else await self._one_user_rate()
        low, high, rate = 0.0, 0.0, start
        for probe in range(_MOST_PROBES):
            if self.interrupted or rate <= 0:
                return
            result = await self._measure(self._stage("open", round(rate, 4), _SEARCH_STAGE + probe))
            if self.interrupted:
                return
            if self._good(result):
                low = self.best_rate = max(low, result.level)
            else:
                high = result.level
            if low and high and high / low <= _CLOSE_ENOUGH:
                return
            rate = (low * high) ** 0.5 if low and high else low * 2 or high / 2

    async def _one_user_rate(self) -> float:
        short = replace(self._stage("closed", 1, _SEARCH_STAGE - 1), duration_s=5.0, requests=None)
        return (await self._measure(short)).request_throughput.value

    def _good(self, result: StageResult) -> bool:
        if result.saturated or not result.completed:
            return False
        if result.slo_attainment is None:
            return not result.errors
        return result.slo_attainment.value >= self._plan.attainment

    async def _measure(self, stage: Stage) -> StageResult:
        load = Load(self._http, self._endpoint, self._workload, stage, self._count_tokens)
        self._load = load
        client = ClientWatch()
        server = ServerWatch(
            self._http,
            self._endpoint.metrics_url,
            self._endpoint.headers,
            self._pid,
            interval_s=self._metrics_every_s,
        )
        showing = asyncio.create_task(self._show(load))
        # What is there already is not looked at again: a full collection would stop the clock for 80 ms.
        gc.collect()
        gc.freeze()
        try:
            async with server, client:
                await load.run()
        finally:
            gc.unfreeze()
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            self._load = None
        result = summarise(load, self._plan.slo, client.stats, server.stats(), seed=self._plan.seed)
        if result.requests or not self.interrupted:
            self.stages.append(result)
            self._view.finished(result)
        return result

    async def _show(self, load: Load) -> None:
        while True:
            self._view.running(load)
            await asyncio.sleep(0.25)


def knee(stages: list[StageResult]) -> StageResult | None:
    """Where more load costs more latency than it brings throughput: the highest power.

    Power is throughput over response time (Kleinrock 1979, "Power and deterministic rules of thumb for
    probabilistic problems in computer communications"). None with fewer than three stages to choose from.
    """
    fit = [s for s in stages if s.e2e is not None and s.request_throughput.value > 0 and not s.saturated]
    if len(stages) < 3 or not fit:
        return None
    return max(fit, key=lambda s: s.request_throughput.value / s.e2e.mean if s.e2e else 0.0)
