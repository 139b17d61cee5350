"""The driver's side of an engine's process: one command, one answer, and no patience with those that hang."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil


class ChildError(Exception):
    """What an engine did wrong: one line."""


class Child:
    """An engine's process, its output in ``log``. It is paused unless it is asked something."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.began = time.perf_counter()
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is the driver's affair
            )
        self._buffer = b""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        """The answer to one command. Raises ChildError; a process that hangs or dies is gone afterwards."""
        self.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(time.monotonic() + timeout_s)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            raise ChildError(f"no answer to {command['do']!r} in {timeout_s:.0f} s: ended") from None
        if not line:
            self.close()
            raise ChildError(f"ended with status {self._process.returncode}: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ChildError(str(found["error"]))
        return found

    def _line(self, deadline: float) -> bytes:
        """One line of its output; empty at its end."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")

    def pause(self) -> None:
        """Take it off the processor: threads of some engines spin while they wait."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """The opposite of :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now: the next answer will tell
                os.killpg(self._process.pid, number)

    def peak_bytes(self) -> int:
        """The most memory that it and its children have had resident, each at its own time."""
        total = 0
        try:
            me = psutil.Process(self._process.pid)
            for process in (me, *me.children(recursive=True)):
                status = Path(f"/proc/{process.pid}/status").read_text()
                for line in status.splitlines():
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1]) * 1024
        except (OSError, psutil.Error):
            pass  # no such files on this system, or it has just ended
        return total

    def close(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        pipes: list[IO[bytes] | None] = [self._process.stdin, self._process.stdout]
        for pipe in pipes:
            if pipe is not None:
                with suppress(BrokenPipeError):  # a command that nobody will read
                    pipe.close()
