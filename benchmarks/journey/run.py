"""Runs the steps: a server each, a closed loop at full load, an open loop at the load that all can bear."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.journey.accuracy import Judge
from benchmarks.journey.chat import write_chat
from benchmarks.journey.results import Journey, StepResult, fill, promises
from benchmarks.journey.steps import BASELINE, Server, Step
from headrace.errors import GenerationError
from headrace.lab.bench import result as bench_result
from headrace.lab.bench.child import running, served
from headrace.lab.bench.endpoint import EndpointError
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.run import Asked, Target, measure
from headrace.lab.bench.session import Plan

SUSTAINED = 0.6
"""Of the requests a second that the baseline answers at full load: the rate of the open loop."""
_FEWEST = 16  # requests of an open loop, if time allows: medians of fewer are luck
_TIMEOUT_S = 300.0  # of a request: a busy machine is slow, not broken
_REQUESTS = 1000  # in the files of prompts: more than any run asks for


@dataclass(frozen=True)
class Sizes:
    """How long, how many: seconds of the closed and open loops and before them, users, tokens to score.

    ``requests``: loads end after so many instead, however long they take.
    """

    closed_s: float = 16.0
    open_s: float = 40.0
    warmup_s: float = 3.0
    users: int = 8
    accuracy_tokens: int = 384
    requests: int | None = None


QUICK = Sizes(warmup_s=0.0, users=3, accuracy_tokens=48, requests=6)


class Runner:
    """Measures steps into ``journey``, and tells ``report`` after each."""

    def __init__(
        self, journey: Journey, folder: Path, sizes: Sizes, judge: Judge, report: Callable[[StepResult], None]
    ) -> None:
        self._journey = journey
        self._folder = folder
        self._sizes = sizes
        self._judge = judge
        self._report = report
        self._dtype = str(journey.settings["dtype"])
        seed = journey.seed
        self._prompts = {
            "full": write_chat(folder / "chat-full-load.jsonl", _REQUESTS, seed),
            "equal": write_chat(folder / "chat-equal-load.jsonl", _REQUESTS, seed + 1),
        }

    def run(self, float_model: Path, steps: list[tuple[Step, Server | str]]) -> None:
        """All steps; Ctrl-C ends early and keeps what there is. A server that fails to start is left out.

        Raises GenerationError if the baseline answers nothing: there is nothing to compare with.
        """
        journey = self._journey
        try:
            settings = [str(float_model), "--dtype", self._dtype]
            command = [sys.executable, "-m", "benchmarks.journey.baseline", *settings]
            child = running(command, "the transformers baseline")
            self._step(BASELINE, None, child, f"model.generate, --dtype {self._dtype}")
            for step, server in steps:
                if journey.interrupted:
                    return
                if isinstance(server, str):
                    self._keep(StepResult(name=step.name, why=step.why, skipped=server))
                    continue
                arguments = server.arguments()
                child = served(str(server.model), arguments)
                command = ["headrace", "serve", server.model.name, *arguments]
                try:
                    self._step(step, server, child, shlex.join(command))
                except EndpointError as error:
                    self._keep(StepResult(name=step.name, why=step.why, skipped=error.message))
        except KeyboardInterrupt:
            journey.interrupted = True

    def _step(
        self, step: Step, server: Server | None, child: AbstractContextManager[tuple[str, int]], command: str
    ) -> None:
        found = StepResult(name=step.name, why=step.why, command=command)
        with child as (address, pid):
            full = self._load(step, "full", address, pid)
            if self._journey.rate is None:
                self._journey.rate = _sustained(full)
            equal = None
            if not self._journey.interrupted:
                equal = self._load(step, "equal", address, pid)
        fill(found, full, equal, self._journey.price_per_hour)
        if not self._journey.interrupted:
            found.accuracy = self._judge.baseline(self._dtype) if server is None else self._judge.of(server)
        self._keep(found)

    def _load(self, step: Step, kind: Literal["full", "equal"], address: str, pid: int) -> StageResult:
        sizes, journey = self._sizes, self._journey
        plan = Plan(
            kind="closed" if kind == "full" else "open",
            levels=(sizes.users,) if kind == "full" else (journey.rate or 1.0,),
            duration_s=None if sizes.requests else sizes.closed_s if kind == "full" else self._open_s(),
            requests=sizes.requests,
            warmup_s=sizes.warmup_s,
            early_stop=False,
            seed=journey.seed,
        )
        asked = Asked(
            prompt_tokens=Lengths("fixed", 1),
            output_tokens=Lengths("fixed", 64),
            prompts=self._prompts[kind],
            ignore_eos=True,
        )
        target = Target(name=step.name, address=address, server_pid=pid, timeout_s=_TIMEOUT_S)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            found = runner.run(measure(target, asked, plan, _Silent(), {"step": step.name}))
        bench_result.write(found, self._folder / f"{step.name.replace(' ', '-')}-{kind}-load.json")
        journey.interrupted = found.interrupted
        if not found.stages:
            raise KeyboardInterrupt
        return found.stages[0]

    def _open_s(self) -> float:
        """Longer, up to twice, where the baseline is so slow that few requests would come."""
        usual = self._sizes.open_s
        return min(max(usual, _FEWEST / (self._journey.rate or 1.0)), 2 * usual)

    def _keep(self, found: StepResult) -> None:
        journey = self._journey
        journey.steps.append(found)
        journey.promises = promises(journey.measured())
        self._report(found)


def _sustained(full: StageResult) -> float:
    """A rate that a server can bear, from its full load."""
    if not full.completed:
        said = "; ".join(full.error_examples.values()) or "no request ended"
        raise GenerationError(f"the baseline answered nothing at full load ({said}): try fewer --users")
    return round(SUSTAINED * full.completed / full.window_s, 3)


class _Silent:
    def running(self, load: Load) -> None:
        """The journey shows whole steps."""

    def finished(self, result: StageResult) -> None:
        """Likewise."""


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def elapsed_since(began: float) -> float:
    """Seconds, rounded for files."""
    return round(time.monotonic() - began, 1)
