"""What `headrace bench` itself costs: 200 requests/s against a server that only streams.

Run it in a clone with the lab extra installed, on a quiet machine: ``python benchmarks/bench_overhead.py``.
The client is kept to one core and the server to another, where there are two. The server sends the first
token after 20 ms and one more every 10 ms; what TTFT and TPOT show beyond that is the client's and the
network's. The bar: p99 of the client's lag, in sending and in its event loop, under 5 ms. Exit status 1 if
it is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.run import Asked, Target, measure
from headrace.lab.bench.session import Plan

SERVER = Path(__file__).parent.parent / "tests" / "lab" / "streaming_server.py"
FIRST_MS, GAP_MS = 20.0, 10.0
BAR_MS = 5.0


class _Silent:
    def running(self, load: Load) -> None:
        """Nothing to show."""

    def finished(self, result: StageResult) -> None:
        """Printed at the end."""


def _cores() -> tuple[set[int], set[int]] | None:
    """One core for the client and the others for the server; None where cores can't be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def main() -> int:
    """Print the figures; 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer, one chunk each")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    import uvloop

    command = [sys.executable, str(SERVER), "--first", str(FIRST_MS / 1000), "--gap", str(GAP_MS / 1000)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        cores = _cores()
        if cores is not None:
            os.sched_setaffinity(server.pid, cores[1])
            os.sched_setaffinity(0, cores[0])
        plan = Plan(kind="open", levels=(options.rate,), duration_s=options.seconds)
        asked = Asked(prompt_tokens=Lengths("fixed", 128), output_tokens=Lengths("fixed", options.tokens))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            [stage] = runner.run(
                measure(Target(name=address, address=address), asked, plan, _Silent(), {})
            ).stages
    finally:
        server.terminate()
        server.wait()
    return _print(stage)


def _print(stage: StageResult) -> int:
    assert stage.send_lag and stage.ttft and stage.tpot
    lag = max(stage.send_lag.p99, stage.client.loop_lag_p99_ms)
    sent, loop = stage.send_lag, stage.client
    rows = {
        "requests": f"{stage.requests} at {stage.level:g}/s, {sum(stage.errors.values())} failed",
        "send lag p50 / p99 / max": f"{_ms(sent.p50)} / {_ms(sent.p99)} / {_ms(sent.max)}",
        "event loop lag p50 / p99": f"{_ms(loop.loop_lag_p50_ms)} / {_ms(loop.loop_lag_p99_ms)}",
        "client CPU": f"{loop.cpu:.0%} of one core",
        "TTFT beyond the server's p50": _ms(stage.ttft.p50 - FIRST_MS),
        "TTFT beyond the server's p99": _ms(stage.ttft.p99 - FIRST_MS),
        "TPOT beyond the server's p50": _ms(stage.tpot.p50 - GAP_MS),
        "load average before": f"{os.getloadavg()[0]:.2f} on {os.cpu_count()} cores",
    }
    for name, value in rows.items():
        print(f"{name:36} {value}")
    met = lag < BAR_MS
    print(f"{'bar: client lag p99 < 5 ms':36} {'met' if met else 'MISSED'} ({_ms(lag)})")
    return 0 if met else 1


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
