"""A server as a child process, for as long as a measurement takes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import orjson

from headrace.lab.bench.endpoint import EndpointError

_STOP_S = 15.0


@contextmanager
def served(model: str, options: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """``headrace serve model`` on a free port: its address and process id; gone afterwards, also on SIGTERM.

    Raises EndpointError with the server's last words if it does not come up.
    """
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", "0", "--log-level", "warning"]
    with running([*command, *options], f"headrace serve {model}") as server:
        yield server


@contextmanager
def running(command: Sequence[str], name: str) -> Iterator[tuple[str, int]]:
    """Any server that prints its address once it is ready, as :func:`served`; ``name`` is for errors."""
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C ends the measurement, which then ends the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            with _sigterm_exits():
                yield _address(process, log, name), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM unwinds the stack, as Ctrl-C does, so that no server is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _address(process: subprocess.Popen[str], log: IO[bytes], name: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:  # the address is printed once the model is loaded
        if found := re.search(r"http://\S+?:\d+", line):
            return found[0]
    status = process.wait()
    log.seek(max(0, log.seek(0, 2) - 4096))
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    raise EndpointError(f"{name} ended with status {status}: {_said(lines)}")


def _said(lines: list[str]) -> str:
    for line in reversed(lines):
        if line.startswith("headrace: "):
            return line.removeprefix("headrace: ")
    try:
        value = orjson.loads(lines[-1]) if lines else {}
    except orjson.JSONDecodeError:
        return lines[-1]
    return str(value.get("event", value)) if isinstance(value, dict) else lines[-1]
