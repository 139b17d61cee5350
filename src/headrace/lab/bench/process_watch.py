"""The server's process and devices, where they are on the client's machine: CPU by thread, GPUs by NVML."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil


def listening_pid(port: int) -> int | None:
    """The process on this machine that listens on a TCP ``port``; None if there is none that we may see."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return int(connection.pid) if connection.pid is not None else None
    return None


def usable_cores(pid: int) -> int | None:
    """Cores that the process may run on."""
    with contextlib.suppress(psutil.Error, AttributeError):
        return len(psutil.Process(pid).cpu_affinity())
    return None


def thread_seconds(pid: int) -> dict[tuple[int, int], float]:
    """(process, thread) to CPU seconds since its start, of ``pid`` and everything it has started."""
    found: dict[tuple[int, int], float] = {}
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            for thread in process.threads():
                found[process.pid, thread.id] = thread.user_time + thread.system_time
    return found


def cpu_seconds(pid: int) -> float:
    """CPU seconds since its start, of ``pid`` and everything it has started."""
    total = 0.0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def machine_seconds() -> float:
    """CPU seconds that all processes of this machine have used since it started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


class Devices:
    """NVIDIA devices of this machine through NVML; nothing where the library or the driver is missing.

    ``pid``: only devices that it or its children use, where NVML tells (in containers it may not). Not run on
    a device yet: experimental.
    """

    def __init__(self, pid: int | None) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml  # of the package nvidia-ml-py

            pynvml.nvmlInit()
            self._nvml = pynvml
            every = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no library, no driver, no permission: all are "no devices"
            return
        family = {process.pid for process in _family(pid)} if pid is not None else {os.getpid()}
        self._handles = [handle for handle in every if self._used_by(handle, family)] or every

    def _used_by(self, handle: Any, family: set[int]) -> bool:
        with contextlib.suppress(self._nvml.NVMLError):
            return any(p.pid in family for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return False

    @property
    def names(self) -> list[str]:
        """What the devices are called."""
        found = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                name = self._nvml.nvmlDeviceGetName(handle)
                found.append(name.decode() if isinstance(name, bytes) else str(name))
        return found

    def sample(self) -> dict[str, float]:
        """``device_busy`` and ``device_memory``: shares of time and of memory, means over the devices."""
        busy, memory = [], []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                busy.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                memory.append(info.used / info.total)
        if not busy or not memory:
            return {}
        return {"device_busy": sum(busy) / len(busy), "device_memory": sum(memory) / len(memory)}

    def close(self) -> None:
        """Let go of the library."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml, self._handles = None, []
