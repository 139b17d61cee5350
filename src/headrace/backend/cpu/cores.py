"""How many threads compute."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut down to the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(cores, int(quota + 0.5))) if quota is not None else cores


def cgroup_quota() -> float | None:
    """CPUs that the cgroup (v2, then v1) grants, or None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return limit / int((folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None
