"""What others take: a container's limits (control groups, versions 2 and 1) and the host's other guests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.lab.doctor.check import Check, gib, number, read

CGROUP = Path("/sys/fs/cgroup")
_MIN_MEMORY_BYTES = 2**30
_SAMPLE_S = 0.5
_THROTTLED = 0.01  # shares that are felt
_STOLEN = 0.02


def own_group(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> Path:
    """The folder of this process's control group: below the root for a service of the system, else the root.

    Inside of a container the root is its own; a path that is not there is that of the host.
    """
    for line in read(membership).splitlines():
        if line.startswith("0::/"):  # version 2
            folder = root / line.removeprefix("0::/")
            return folder if folder.is_dir() and ".." not in folder.parts else root
    return root


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    parts = read(cgroup / "cpu.max").split()  # version 2, else version 1
    if not parts:
        parts = [read(cgroup / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota_us, period_us = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def memory(cgroup: Path = CGROUP) -> Check:
    """Memory of the machine, and what of it this process may still take."""
    import psutil

    seen = psutil.virtual_memory()
    free, total = int(seen.available), int(seen.total)
    limit = _first_number(cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes")
    if limit is not None and limit < total:
        used = _first_number(cgroup / "memory.current", cgroup / "memory/memory.usage_in_bytes") or 0
        total, free = limit, min(free, max(limit - used, 0))
    text = f"{gib(free)} free of {gib(total)}"
    killed = _value(read(cgroup / "memory.events"), "oom_kill")
    if killed:
        cost = f"the kernel has killed {killed} processes of this container for their memory"
        fix = "raise the container's memory limit, or lower --kv-cache-memory"
        return Check("memory", "slower", text, fix, cost)
    if free < _MIN_MEMORY_BYTES:
        fix = "free some, or use a smaller model and --kv-cache-memory 128MiB"
        return Check("memory", "slower", text, fix, "few models fit, and fewer sequences at a time")
    return Check("memory", "ok", text)


def throttling(cgroup: Path = CGROUP) -> Check:
    """How often the control group has stopped its processes because their quota was used up."""
    text = read(cgroup / "cpu.stat") or read(cgroup / "cpu/cpu.stat")
    periods, throttled = _value(text, "nr_periods"), _value(text, "nr_throttled")
    stopped_s = (_value(text, "throttled_usec") or 0) / 1e6 or (_value(text, "throttled_time") or 0) / 1e9
    if not periods or throttled is None:
        return Check("throttling", "ok", "no CPU quota")
    share = throttled / periods
    finding = f"{throttled} of {periods} periods ({share:.0%}), {stopped_s:.1f} s in all"
    if share < _THROTTLED:
        return Check("throttling", "ok", finding)
    return Check(
        "throttling",
        "slower",
        finding,
        "raise the container's CPU limit, or give --threads no more than the quota",
        "every stream stands still for the rest of such a period, up to 100 ms: it shows in the p99 of ITL",
    )


def steal(stat: Path = Path("/proc/stat"), wait: Callable[[], None] = lambda: time.sleep(_SAMPLE_S)) -> Check:
    """Time that the host gave to other guests while this machine wanted it: since the start, and now."""
    before = _cpu_times(read(stat))
    if before is None:
        return Check("steal", "ok", "not known here")
    wait()
    after = _cpu_times(read(stat)) or before
    always = before[1] / max(before[0], 1)
    now = (after[1] - before[1]) / max(after[0] - before[0], 1)
    finding = f"{now:.1%} now, {always:.1%} since the start"
    if max(now, always) < _STOLEN:
        return Check("steal", "ok", finding)
    return Check(
        "steal",
        "slower",
        finding,
        "use dedicated cores or another instance type; measure again at another time",
        "other guests take that share of the cores, and one late thread holds up all at a barrier",
    )


def _cpu_times(text: str) -> tuple[int, int] | None:
    """Ticks of all CPUs that were not idle, and of them those that were stolen."""
    fields = text.partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu" or any(number(field) is None for field in fields[1:9]):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(field) for field in fields[1:9])
    return user + nice + system + irq + softirq + stolen, stolen


def _value(text: str, key: str) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return number(value)
    return None


def _first_number(*paths: Path) -> int | None:
    return next((found for path in paths if (found := number(read(path))) is not None), None)
