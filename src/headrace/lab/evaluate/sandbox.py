"""Running code that a model wrote, in a process that can do no harm, and whether it ran to its end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError, HeadraceError
from headrace.lab.evaluate import sandbox_program

Isolation = Literal["isolated", "unsafe"]
_MIB = 2**20


class SandboxError(HeadraceError):
    """The sandbox itself failed, as opposed to the program in it."""

    code = "sandbox_failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program gets. It may start neither processes nor threads."""

    wall_s: float = 10.0
    memory_bytes: int = 1024 * _MIB  # of address space
    folder_bytes: int = 16 * _MIB
    output_bytes: int = _MIB
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Execution:
    """Whether the program ran to its end, and if not, how it ended."""

    passed: bool
    outcome: str


def execute(program: str, isolation: Isolation, limits: Limits = Limits()) -> Execution:
    """Run a Python program to its end in a fresh interpreter (``-I -S``), with nothing of our environment.

    ``isolated`` (Linux): in mount, process, network and IPC namespaces of its own, without capabilities: no
    network, no other process, no file but the interpreter's and an empty folder in memory. ``unsafe``: with
    the same limits of time, memory, processes, files and output, but it could read what this user can
    read, write where this user can write, and use the network.

    A program has passed if a random token comes back that is printed after its last line: ending early, with
    whatever exit status, is no pass. It protects the machine and the score from mistakes; a program written
    to fool the harness inside its own process could do that. Raises SandboxError if it cannot be isolated.
    """
    token = secrets.token_hex(16)
    body = program.encode("utf-8", "replace")
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
        settings = {
            "size": len(body),
            "isolated": isolation == "isolated",
            "folder": str(Path(folder).resolve()),
            "folder_bytes": limits.folder_bytes,
            "limits": _rlimits(limits),
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", sandbox_program.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, stopped = _talk(
                process, f"{json.dumps(settings)}\n".encode() + body + token.encode(), limits
            )
        finally:
            _kill(process)
    last = output.rpartition(b"\n")[2].decode("utf-8", "replace")
    if stopped is not None:
        return Execution(False, stopped)
    if process.returncode == sandbox_program.REFUSED and last.startswith(f"{token} "):
        raise SandboxError(_why_refused(isolation, last.removeprefix(f"{token} ")))
    if process.returncode == 0 and secrets.compare_digest(last.encode(), token.encode()):
        return Execution(True, "passed")
    if process.returncode < 0:
        return Execution(False, f"killed by signal {-process.returncode}")
    return Execution(False, last if process.returncode == 1 and last else "ended before its last line")


def require(isolation: Isolation) -> None:
    """Run a program that does nothing, to know in time. Raises ConfigError or SandboxError."""
    if sys.platform != "linux":
        raise ConfigError("Code is executed on Linux only; leave the suite humaneval out.")
    found = execute("import collections, math, re, typing", isolation)
    if not found.passed:
        raise SandboxError(f"A program that does nothing fails in the sandbox: {found.outcome}.")


def _why_refused(isolation: Isolation, reason: str) -> str:
    if isolation == "unsafe":
        return f"Code cannot be limited on this machine: {reason}. Run this as a user other than root."
    return (
        f"Code cannot be isolated on this machine: {reason}. That needs Linux 5.12 or later and namespaces, "
        "which many containers forbid. --unsafe-without-isolation runs it with limits alone: it could read "
        "and write your files and use the network."
    )


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "CPU": max(1, round(limits.wall_s)) + 1,
        "AS": limits.memory_bytes,
        "FSIZE": limits.folder_bytes,
        "NOFILE": limits.open_files,
        "CORE": 0,
        "NPROC": 1,
    }


def _talk(process: subprocess.Popen[bytes], told: bytes, limits: Limits) -> tuple[bytes, str | None]:
    """What the process printed, and why it was stopped, if it was."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + limits.wall_s
    output = bytearray()
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(output), "timeout"
            for key, _ in ready.select(left):
                if key.fileobj is process.stdin:
                    try:
                        told = told[os.write(process.stdin.fileno(), told[: 64 * 1024]) :]
                    except BrokenPipeError:
                        told = b""
                    if not told:
                        ready.unregister(process.stdin)
                        process.stdin.close()
                    continue
                more = os.read(process.stdout.fileno(), 64 * 1024)
                if not more:  # whoever could write has ended, or closed it
                    try:
                        process.wait(max(deadline - time.monotonic(), 0.0))
                    except subprocess.TimeoutExpired:
                        return bytes(output), "timeout"
                    return bytes(output), None
                output += more
                if len(output) > limits.output_bytes:
                    return bytes(output), "too much output"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process, all of its group, and its namespaces with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
