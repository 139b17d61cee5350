"""What `headrace serve --gateway default` costs beside `headrace serve`: start, memory, first token.

    python benchmarks/embedded_gateway.py [--runs 9] [--requests 300] [--gateway FILE]

Starts both in turn, ``--runs`` times; then runs both at once and asks them in turn for one streamed token.
Prints medians, what the gateway adds, and the median of the differences within the pairs. Measure on a quiet
machine, with the model pulled and its weights packed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLAIN, GATEWAY = "serve", "serve --gateway"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Server:
    """A server that has just been started. ``ready_s``: from then to its readiness."""

    def __init__(self, model: str, options: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", str(self.port), *options]
        command += ["--log-level", "warning"]
        began = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
        )
        while not self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit(f"headrace serve {' '.join(options)} ended with {self.process.returncode}")
            time.sleep(0.002)
        self.ready_s = time.perf_counter() - began

    def _is_ready(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(b"GET /health/readiness HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
        return False

    def private_mib(self) -> float:
        """What it has of its own: shared libraries and the mapped weights are left out."""
        page = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return sum(int(kib) for kib in re.findall(r"^Private_\w+: +(\d+) kB$", page, re.MULTILINE)) / 1024

    def stop(self) -> None:
        """Gone."""
        self.process.terminate()
        self.process.wait()


class Client:
    """One connection that stays open."""

    def __init__(self, server: Server, model: str) -> None:
        self._connection = socket.create_connection(("127.0.0.1", server.port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._model = model

    def first_token_s(self, number: int) -> float:
        """Seconds from asking to the first event with text."""
        body = {"model": self._model, "prompt": f"{number} mills on", "max_tokens": 4, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        began, seen, first = time.perf_counter(), b"", 0.0
        self._connection.sendall(head.encode() + data)
        while not seen.endswith(b"0\r\n\r\n"):
            part = self._connection.recv(65536)
            if not part or b" 200 " not in (seen + part)[:16]:
                raise SystemExit(f"no answer: {(seen + part)[:300]!r}")
            seen += part
            if not first and b'"text"' in seen:
                first = time.perf_counter() - began
        return first


@contextmanager
def both(model: str, options: dict[str, list[str]]) -> Iterator[dict[str, Server]]:
    """A server of each kind."""
    servers = {name: Server(model, given) for name, given in options.items()}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gateway", default="default", help="a file, to measure one with that")
    given = parser.parse_args()
    options: dict[str, list[str]] = {PLAIN: [], GATEWAY: ["--gateway", given.gateway]}
    starts: dict[str, list[float]] = {name: [] for name in options}
    sizes: dict[str, list[float]] = {name: [] for name in options}
    for run in range(given.runs + 1):
        for name in options:
            server = Server(given.model, options[name])
            time.sleep(0.3)  # for what it does once it is ready
            if run:  # the first one fills the caches
                starts[name].append(1000 * server.ready_s)
                sizes[name].append(server.private_mib())
            server.stop()
    times: dict[str, list[float]] = {name: [] for name in options}
    with both(given.model, options) as servers:
        clients = {name: Client(server, given.model) for name, server in servers.items()}
        for number in range(given.requests + 20):
            for name, client in clients.items():
                seconds = client.first_token_s(number)
                if number >= 20:
                    times[name].append(1000 * seconds)
    print(f"{'':<28} {PLAIN:>10} {GATEWAY:>16} {'added':>9} {'in pairs':>9}")
    for what, unit, measured in (
        ("start to readiness", "ms", starts),
        ("memory of its own", "MiB", sizes),
        ("time to first token", "ms", times),
    ):
        one, other = (statistics.median(measured[name]) for name in options)
        pairs = statistics.median(b - a for a, b in zip(measured[PLAIN], measured[GATEWAY], strict=True))
        print(f"{what + ', ' + unit:<28} {one:>10.2f} {other:>16.2f} {other - one:>9.2f} {pairs:>9.2f}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
