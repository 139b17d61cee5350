"""The CPU: its instructions, the kernels that use them, cores, clocks, and which memory is near to them."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.lab.doctor.check import Check, number, read
from headrace.lab.doctor.containers import CGROUP, cpu_quota

_FEATURES = {  # what /proc/cpuinfo calls them: x86, then ARM
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "asimddp": "NEON dot product",
    "i8mm": "NEON i8mm",
    "sve": "SVE",
}
_ON_DEMAND_DRIVERS = ("intel_pstate", "amd-pstate-epp")  # whose "powersave" raises the clock under load
SYSTEM = Path("/sys/devices/system")


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """The CPU's name and the vector instructions that matter here."""
    model, flags = cpu_flags(cpuinfo)
    found = [plain for flag, plain in _FEATURES.items() if flag in flags]
    text = f"{model}: {', '.join(found) or 'no vector instructions that headrace knows'}"
    if "sse2" in flags and "avx2" not in flags:
        return Check(
            "CPU",
            "slower",
            text,
            "use a CPU with AVX2 or AVX-512, or a GPU",
            "matrices are multiplied by portable code, several times slower",
        )
    return Check("CPU", "ok", text)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """The CPU's name, and its features as the kernel names them."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    text = read(cpuinfo)
    if not text and platform.machine() == "arm64":  # Apple's, which all have it
        flags.add("asimd")
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    return model, flags


def kernels() -> Check:
    """Which of the native kernels' paths this process uses, of those that it could."""
    try:
        from headrace.backend.cpu._native import supported_isas
    except ImportError as error:
        return Check(
            "kernels",
            "broken",
            f"the native module does not load: {error}",
            "install headrace again (from source this needs a C++17 compiler)",
            "the cpu backend cannot run",
        )
    possible: list[str] = list(supported_isas())  # best first
    from headrace.backend.cpu.runner import chosen_isa

    try:
        isa = chosen_isa()
    except HeadraceError as error:
        return Check("kernels", "broken", error.message, "unset HEADRACE_ISA", "no model loads")
    text = f"{isa}, of {', '.join(possible)}"
    if isa != possible[0]:
        fix = f"unset HEADRACE_ISA to use {possible[0]}"
        return Check("kernels", "slower", text, fix, "fewer multiplications a second than this CPU can do")
    return Check("kernels", "ok", text)


def cores(cgroup: Path = CGROUP) -> Check:
    """Cores of the machine, of this process, and what a container's quota leaves of them."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = cpu_quota(cgroup)
    text = f"{usable} of {total} usable"
    if quota is not None:
        text += f", quota {quota:g}"
    if quota is not None and quota < usable:
        fix = f"start headrace with --threads {max(int(quota), 1)}, or raise the container's CPU limit"
        cost = "more threads than the quota pays for are stopped together, in the middle of a step"
        return Check("cores", "slower", text, fix, cost)
    if usable == 1:
        cost = "text, HTTP and the engine take turns, and prefill has one core's speed"
        return Check("cores", "slower", text, "give the process more cores", cost)
    return Check("cores", "ok", text)


def frequency(system: Path = SYSTEM) -> Check:
    """Whether the cores may run as fast as they can."""
    folders = sorted(system.glob("cpu/cpu[0-9]*/cpufreq"))
    governors = {read(folder / "scaling_governor").strip() for folder in folders} - {""}
    if not governors:
        return Check("frequency", "ok", "not ours to set (usual for a virtual machine)")
    driver = read(folders[0] / "scaling_driver").strip()
    highest = max(number(read(folder / "cpuinfo_max_freq")) or 0 for folder in folders)
    allowed = max(number(read(folder / "scaling_max_freq")) or 0 for folder in folders)
    text = f"governor {', '.join(sorted(governors))}" + (
        f", up to {highest / 1e6:.2f} GHz" if highest else ""
    )
    fix = "cpupower frequency-set -g performance"
    if governors & {"powersave", "conservative"} and driver not in _ON_DEMAND_DRIVERS:
        cost = "cores stay near their lowest clock: everything that computes takes longer by as much"
        return Check("frequency", "slower", text, fix, cost)
    if 0 < allowed < highest:
        text += f", limited to {allowed / 1e6:.2f} GHz"
        fix = f"cpupower frequency-set -u {highest}"
        cost = f"up to {1 - allowed / highest:.0%} of prefill speed"
        return Check("frequency", "slower", text, fix, cost)
    return Check("frequency", "ok", text)


def numa(system: Path = SYSTEM, affinity: set[int] | None = None) -> Check:
    """Nodes of memory, and whether the cores in ``affinity`` (default: this process's) lie in several."""
    nodes = {
        folder.name: cores_of
        for folder in sorted(system.glob("node/node[0-9]*"))
        if (cores_of := _cpu_list(read(folder / "cpulist")))
    }
    if affinity is None:
        usable = hasattr(os, "sched_getaffinity")
        affinity = os.sched_getaffinity(0) if usable else set(range(os.cpu_count() or 1))
    if len(nodes) < 2:
        return Check("NUMA", "ok", "one node: all memory is equally near")
    used = [name for name, cores_of in nodes.items() if cores_of & affinity]
    text = f"{len(nodes)} nodes, cores of {len(used)} in use"
    if len(used) < 2:
        return Check("NUMA", "ok", text)
    first = used[0].removeprefix("node")
    return Check(
        "NUMA",
        "slower",
        text,
        f"one server a node: numactl --cpunodebind={first} --membind={first} headrace serve …",
        "threads read weights from the other node's memory at about half of its bandwidth",
    )


def _cpu_list(text: str) -> set[int]:
    """``0-3,8`` as a set; empty for what is no such list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return set()
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
