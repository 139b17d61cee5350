"""Cold start: process start to what a user waits for, with a warm page cache and packed-weight cache.

    python benchmarks/cold_start.py [--runs 7] [--model smollm2-135m] [--beside ../other/src]

Prints the median, the fastest and the slowest of ``--runs`` fresh processes for ``import headrace``, for
``LLM(...)`` to its first token, and for ``headrace serve`` to ``/health/readiness`` 200, beside the time that
the interpreter itself takes, and the most memory that each has had resident until then, what it has touched
of the KV pool included. ``--beside`` measures another source tree in turns with this one. ``--check`` exits
with 1 if a median is over its bar. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Measured = tuple[float, int]
"""Seconds, and the most bytes resident; 0 where the system does not tell."""

BARS = {"import headrace": 0.15, "LLM to first token": 0.45, "serve to readiness": 1.2}

# As an installed package has them: some shells turn compiled modules off, and compiling ours takes 0.1 s.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

_FIRST_TOKEN = """
import sys
from headrace import LLM, SamplingParams
params = SamplingParams(max_tokens=1, temperature=0)
LLM(sys.argv[1]).generate(["The capital of France is"], params, use_tqdm=False)
print("token", flush=True)
sys.stdin.read()
"""


def until_printed(environment: dict[str, str], *arguments: str) -> Measured:
    """From process start to its first line of output; then it is told to end."""
    began = time.perf_counter()
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        spent = time.perf_counter() - began
        if not line:
            raise SystemExit(f"{arguments}: ended without a word")
        return spent, _peak_bytes(process.pid)


def until_ready(environment: dict[str, str], model: str) -> Measured:
    """From process start to readiness, asked for every 5 ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", str(port)]
    began = time.perf_counter()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"headrace serve ended with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began, _peak_bytes(process.pid)
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(
                b"GET /health/readiness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # no such files on this system, or it has ended
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def measures(environment: dict[str, str], model: str) -> dict[str, Callable[[], Measured]]:
    """What is measured, by name."""
    wait = "import sys; print(flush=True); sys.stdin.read()"
    return {
        "python -c pass": lambda: until_printed(environment, "-c", wait),
        "import headrace": lambda: until_printed(environment, "-c", f"import headrace; {wait}"),
        "LLM to first token": lambda: until_printed(environment, "-c", _FIRST_TOKEN, model),
        "serve to readiness": lambda: until_ready(environment, model),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--beside", type=Path, help="the src folder of another checkout")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a median is over its bar")
    options = parser.parse_args()
    sides = {"": measures(ENVIRONMENT, options.model)}
    if options.beside is not None:
        elsewhere = {**ENVIRONMENT, "PYTHONPATH": str(options.beside.resolve())}
        sides["beside: "] = measures(elsewhere, options.model)
    print(f"{options.runs} runs each; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<28} {'median':>8} {'fastest':>8} {'slowest':>8} {'bar':>8} {'peak':>9}")
    over = False
    for name in sides[""]:
        found: dict[str, list[Measured]] = {side: [] for side in sides}
        for run in range(options.runs + 1):
            for side, of_side in sides.items():
                one = of_side[name]()
                if run:  # the first one fills the caches
                    found[side].append(one)
        for side, runs in found.items():
            times = [seconds for seconds, _ in runs]
            median, bar = statistics.median(times), BARS.get(name)
            peak = statistics.median(size for _, size in runs) / 1e6
            if not side:
                over |= bar is not None and median > bar
            cells = [f"{seconds:>6.3f} s" for seconds in (median, min(times), max(times))]
            cells += [f"{bar:>6.3f} s" if bar else 8 * " ", f"{peak:>6.1f} MB"]
            print(f"{side + name:<28} " + " ".join(cells), flush=True)
    if options.check and over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
