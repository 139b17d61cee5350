"""One trial: a server of its own with a configuration's options, under the user's load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import psutil

from headrace.errors import HeadraceError
from headrace.lab.bench.child import served
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import Distribution, StageResult
from headrace.lab.bench.result import Result
from headrace.lab.bench.run import Asked, Target, measure
from headrace.lab.bench.session import Plan
from headrace.lab.bench.slices import token_rates
from headrace.lab.bench.slo import SLO
from headrace.lab.tune.measurement import PARTS, GoOn, Measurement
from headrace.lab.tune.switches import Config, Dimension, command_line, serve_options


class Progress(Protocol):
    """Somebody who watches a trial."""

    def running(self, load: Load) -> None:
        """Called some times a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What all trials have in common. ``fixed``: arguments of ``headrace serve`` that every server gets.
    ``plan`` has one level, and a window (``duration_s``). ``api_key``: what servers find in the environment.
    """

    model: str
    fixed: Sequence[str]
    asked: Asked
    plan: Plan
    api_key: str | None = None
    timeout_s: float = 120.0
    loop_factory: Callable[[], Any] | None = None

    @property
    def goal(self) -> str:
        """What the value of a measurement is, with its unit."""
        return "output tokens/s" if self.plan.slo is None else "requests/s that meet the SLO"


class Measurer:
    """Measures configurations. ``workload``: what was asked last, in words; empty before."""

    def __init__(self, setup: Setup, dimensions: Sequence[Dimension], progress: Progress) -> None:
        self.workload = ""
        self._setup = setup
        self._dimensions = dimensions
        self._progress = progress

    def __call__(self, config: Config, go_on: GoOn) -> Measurement:
        """A trial. Raises HeadraceError if the server does not come up or answers nothing, KeyboardInterrupt
        on Ctrl-C.
        """
        began = time.monotonic()
        watch = Watch(self._setup.plan, go_on, self._progress)
        result = self._run(config, self._setup.plan, watch)
        [stage] = result.stages
        return _measurement(stage, watch, time.monotonic() - began)

    def result(self, config: Config, seed: int) -> Result:
        """A whole measurement with prompts of its own ``seed``, as bench keeps it."""
        plan = dataclasses.replace(self._setup.plan, seed=seed)
        return self._run(config, plan, Watch(plan, lambda part, value: True, self._progress))

    def _run(self, config: Config, plan: Plan, watch: Watch) -> Result:
        setup = self._setup
        options = serve_options(self._dimensions, config)
        with served(setup.model, [*setup.fixed, *command_line(options)]) as (address, pid):
            watch.pid = pid
            target = Target(
                name=setup.model,
                address=address,
                api_key=setup.api_key,
                timeout_s=setup.timeout_s,
                server_pid=pid,
            )
            with asyncio.Runner(loop_factory=setup.loop_factory) as runner:
                result = runner.run(measure(target, setup.asked, plan, watch, {}))
        if result.interrupted:
            raise KeyboardInterrupt
        if watch.ended is None and not (result.stages and result.stages[0].completed):
            raise HeadraceError(f"no request was answered{_why(result)}")
        if result.stages:
            self.workload = f"{result.stages[0].label}, {result.workload.description}"
        return result


def _why(result: Result) -> str:
    examples = result.stages[0].error_examples if result.stages else {}
    return "".join(f"; {kind}: {said}" for kind, said in examples.items())


class Watch:
    """Looks at the load after each part of its window, and ends it where it is told to."""

    def __init__(self, plan: Plan, go_on: GoOn, progress: Progress) -> None:
        assert plan.duration_s is not None
        self.pid: int | None = None
        self.parts: list[float] = []
        self.ended: tuple[float, float] | None = None  # value and throughput where the trial was ended
        self.memory_bytes: int | None = None
        self._slo = plan.slo
        self._part_s = plan.duration_s / PARTS
        self._go_on = go_on
        self._asked: asyncio.Future[bool] | None = None
        self._so_far = 0.0, 0.0
        self._progress = progress

    def running(self, load: Load) -> None:
        self._progress.running(load)
        if self._asked is not None and self._asked.done():
            go_on, self._asked = self._asked.result(), None
            if not go_on:
                self.ended = self._so_far
                load.interrupt()
        if self.ended is not None or self._asked is not None:
            return
        now = load.now()
        part = len(self.parts) + 1
        if part >= PARTS or now < load.begin_s + part * self._part_s:
            return
        if self.pid is not None:
            self.memory_bytes = max(_memory_bytes(self.pid), self.memory_bytes or 0)
        throughput = throughput_so_far(load, now)
        value = throughput if self._slo is None else goodput_so_far(load, self._slo, now)
        self.parts.append(round(value, 4))
        self._so_far = value, throughput
        # In a thread: the answer may take a disk's time, and the load's clock must not stand still.
        self._asked = asyncio.get_running_loop().run_in_executor(None, self._go_on, part, value)

    def finished(self, result: StageResult) -> None:
        """Nothing to say: the trial is told of as a whole."""


def throughput_so_far(load: Load, now: float) -> float:
    """Output tokens a second since the window began. Requests under way have not told their tokens yet: each
    of their chunks is taken to hold as many as chunks did so far.
    """
    told = [r for r in load.records if r.ok and r.output_tokens and r.chunk_s]
    chunks = sum(len(record.chunk_s) for record in told)
    each = sum(record.output_tokens or 0 for record in told) / chunks if chunks else 1.0
    under_way = [at for record in load.records if not record.end_s for at in record.chunk_s]
    bounds = np.array([load.begin_s, now])
    counted = float(token_rates(load.records, bounds)[0])
    return counted + each * sum(at >= load.begin_s for at in under_way) / (now - load.begin_s)


def goodput_so_far(load: Load, slo: SLO, now: float) -> float:
    """Requests a second that ended since the window began and met the SLO, whenever they were sent."""
    ended = [record for record in load.records if record.end_s and load.begin_s <= record.end_s <= now]
    return sum(slo.met_by(record) for record in ended) / (now - load.begin_s)


def _measurement(stage: StageResult, watch: Watch, seconds: float) -> Measurement:
    whole = watch.ended is None
    throughput = stage.output_throughput.value if watch.ended is None else watch.ended[1]
    goodput = None if stage.goodput is None else stage.goodput.value
    value = watch.ended[0] if watch.ended is not None else throughput if goodput is None else goodput
    return Measurement(
        value=round(value, 4),
        parts=[*watch.parts, round(value, 4)] if whole else watch.parts,
        whole=whole,
        seconds=round(seconds, 3),
        requests=stage.requests,
        failed=sum(stage.errors.values()),
        throughput=round(throughput, 3),
        goodput=goodput,
        slo_attainment=None if stage.slo_attainment is None else stage.slo_attainment.value,
        ttft_p50_ms=_at(stage.ttft, "p50"),
        ttft_p95_ms=_at(stage.ttft, "p95"),
        tpot_p50_ms=_at(stage.tpot, "p50"),
        tpot_p95_ms=_at(stage.tpot, "p95"),
        e2e_p50_ms=_at(stage.e2e, "p50"),
        e2e_p95_ms=_at(stage.e2e, "p95"),
        busy=None if stage.server is None else stage.server.busy,
        cpu_cores=None if stage.server is None else stage.server.cpu_cores,
        memory_bytes=watch.memory_bytes,
    )


def _at(distribution: Distribution | None, name: str) -> float | None:
    return None if distribution is None else float(getattr(distribution, name))


def _memory_bytes(pid: int) -> int:
    """Resident memory of the server's processes."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += one.memory_info().rss
    return total
