"""Workload H: requests of mixed lengths that arrive when they arrive, over HTTP, with our load generator."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from catalogue import Variant
from child import Child, ChildError
from models import Models, start
from results import Measured, Value

from headrace.lab.bench.result import read

READY_TIMEOUT_S = 600.0
PROMPTS, OUTPUTS = "lognormal:128,0.6", "lognormal:64,0.6"
SLO = "ttft=1s,tpot=50ms"


def title(rate: float) -> str:
    """What is asked."""
    return (
        f"mixed load, {rate:g} requests/s, Poisson arrivals, {PROMPTS} in, {OUTPUTS} out, goodput under {SLO}"
    )


def mixed_load(
    variant: Variant,
    models: Models,
    settings: dict[str, int],
    rate: float,
    duration_s: float,
    log: Path,
) -> Measured:
    """Serve the model, load it, end it. Raises ChildError or Unavailable."""
    path = models.of(variant)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = start(variant, settings["threads"], log)
    result = log.with_name(f"{log.stem}-mixed.json")
    try:
        child.ask(
            READY_TIMEOUT_S,
            do="serve",
            model=str(path),
            format=variant.form.name,
            settings=settings,
            port=port,
        )
        _wait(child, port)
        _load(port, rate, duration_s, result)
    finally:
        child.close()
    stage = read(result).stages[0]
    if stage.ttft is None or stage.tpot is None or stage.goodput is None:
        raise ChildError(f"no request was answered: {stage.errors}")

    def value(number: float) -> Value:
        return Value(median=number, low=number, high=number, rounds=stage.completed)

    failed = stage.requests - stage.completed
    return Measured(
        values={
            "TTFT p99, ms": value(stage.ttft.p99),
            "TTFT p50, ms": value(stage.ttft.p50),
            "TPOT p99, ms": value(stage.tpot.p99),
            "TPOT p50, ms": value(stage.tpot.p50),
            "goodput, requests/s": value(stage.goodput.value),
            "output, tokens/s": value(stage.output_throughput.value),
            "failed, requests": value(failed),
        }
    )


def _wait(child: Child, port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if not child.alive:
            raise ChildError("its server ended while it started")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ChildError(f"its server was not ready in {READY_TIMEOUT_S:.0f} s")


def _load(port: int, rate: float, duration_s: float, result: Path) -> None:
    """Run headrace's own load test in a process of its own."""
    command = [sys.executable, "-m", "headrace.cli", "bench", f"http://127.0.0.1:{port}"]
    command += [
        "--rate",
        f"{rate:g}",
        "--duration",
        f"{duration_s:g}",
        "--route",
        "completions",
        "--seed",
        "1",
    ]
    command += ["--prompt-tokens", PROMPTS, "--output-tokens", OUTPUTS, "--slo", SLO, "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=duration_s + READY_TIMEOUT_S)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ChildError(f"the load test ended with status {done.returncode}: {said[-1][:200]}")
