"""Starting and driving the installed program from outside."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from headrace.cli import main
from tests import http

COMMAND = [sys.executable, "-m", "headrace.cli"]
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
"""Each core has a worker with tests: an engine that has a thread on each would mostly wait for them."""


class RunningServer:
    """A ``headrace serve`` process; ``url`` is where it answers."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, log: Path | None = None) -> None:
        self._log = log.open("wb") if log is not None else None
        if BESIDE_OTHERS and not any(each.startswith("--threads") for each in arguments):
            arguments = (*arguments, "--threads", "1")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log if self._log is not None else subprocess.DEVNULL,
            env=os.environ | (env or {}),
            text=True,
        )
        assert self.process.stdout is not None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        self.output: list[str] = []
        self.url = ""
        self.ready_s = 0.0  # after its start

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait for the printed address and the curl below it."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith("curl") for line in self.output):
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            assert line, f"the server ended with {self.process.wait()}"
            self.output.append(line)
        self.ready_s = time.monotonic() - self.started
        found = re.search(r"http://[^ /]+", self.output[0])
        assert found is not None
        self.url = found[0]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def metric(self, name: str) -> float:
        """A metric's value, its labels left out."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """The values of several metrics at one moment."""
        page, values = http.get(f"{self.url}/metrics").text, []
        for name in names:
            found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
            assert found is not None, name
            values.append(float(found[1]))
        return values

    def idle(self) -> bool:
        """Nothing runs or waits, and all blocks are free."""
        running, waiting, free, total = self.metrics(
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "headrace_kv_blocks_free",
            "headrace_kv_blocks_total",
        )
        return (running, waiting) == (0, 0) and free == total

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until it is."""
        deadline = time.monotonic() + timeout_s
        while not self.idle():
            assert time.monotonic() < deadline, http.get(f"{self.url}/metrics").text
            time.sleep(0.01)


@contextmanager
def serving(
    *arguments: str, env: dict[str, str] | None = None, log: Path | None = None
) -> Iterator[RunningServer]:
    """A server that is ready, and gone afterwards whatever happened."""
    server = RunningServer(*arguments, "--port", "0", env=env, log=log)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def run(
    *arguments: str, text: str | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``headrace arguments`` to its end; ``text`` is its standard input."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (env or {}),
        check=False,
    )


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: for commands that the docs' tests, say, run in one of their own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["headrace", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
