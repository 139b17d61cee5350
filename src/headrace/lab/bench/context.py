"""Where a measurement was made: without it, a number says nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from headrace import __version__


class Context(msgspec.Struct, kw_only=True):
    """The client's machine and programs; for a server on the same machine, the server's as well.

    ``load_average``: running processes of the last minute before the measurement, ``None`` where unknown.
    """

    machine: str
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    headrace: str
    packages: dict[str, str]
    load_average: float | None


def context() -> Context:
    """Of this machine, now."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Context(
        machine=platform.node() or "unnamed",
        cpu=_cpu_model(),
        cores=usable,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        headrace=__version__,
        packages={name: metadata.version(name) for name in ("aiohttp", "hdrhistogram", "numpy", "uvloop")},
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
