"""Cold start: process start to what a user waits for, with a warm page cache and packed-weight cache.

    python benchmarks/cold_start.py [--runs 7] [--model smollm2-135m]

Prints the median, the fastest and the slowest of ``--runs`` fresh processes for ``import headrace``, for
``LLM(...)`` to its first token, and for ``headrace serve`` to ``/health/readiness`` 200, beside the time that
the interpreter itself takes. ``--check`` exits with 1 if a median is over its bar. Measure on a quiet
machine.
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

BARS = {"import headrace": 0.15, "LLM to first token": 0.6, "serve to readiness": 1.2}

# As an installed package has them: some shells turn compiled modules off, and compiling ours takes 0.1 s.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

_FIRST_TOKEN = """
import sys
from headrace import LLM, SamplingParams
params = SamplingParams(max_tokens=1, temperature=0)
LLM(sys.argv[1]).generate(["The capital of France is"], params, use_tqdm=False)
print("token", flush=True)
"""


def until_printed(*arguments: str) -> float:
    """Seconds from process start to its first line of output."""
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        spent = time.perf_counter() - began
        if not line:
            raise SystemExit(f"{arguments}: ended without a word")
    return spent


def until_ready(model: str) -> float:
    """Seconds from process start to readiness, asked for every 5 ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", str(port)]
    began = time.perf_counter()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=ENVIRONMENT)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"headrace serve ended with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a median is over its bar")
    options = parser.parse_args()
    measured: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: until_printed("-c", "print()"),
        "import headrace": lambda: until_printed("-c", "import headrace; print()"),
        "LLM to first token": lambda: until_printed("-c", _FIRST_TOKEN, options.model),
        "serve to readiness": lambda: until_ready(options.model),
    }
    print(f"{options.runs} runs each; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<20} {'median':>8} {'fastest':>8} {'slowest':>8} {'bar':>8}")
    over = False
    for name, measure in measured.items():
        measure()  # fills the caches
        times = [measure() for _ in range(options.runs)]
        median, bar = statistics.median(times), BARS.get(name)
        over |= bar is not None and median > bar
        cells = [median, min(times), max(times), *([bar] if bar else [])]
        print(f"{name:<20} " + " ".join(f"{seconds:>6.3f} s" for seconds in cells), flush=True)
    if options.check and over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
