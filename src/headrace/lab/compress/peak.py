"""How much memory this process has held at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Resident bytes at the peak, files that are mapped included.

    Linux keeps two such numbers. The one of getrusage begins, in a process that another one started, with
    what that one had; the one in ``/proc`` does not.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
