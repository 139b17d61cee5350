"""What doctor looks at: each check finds something out and says how to better it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import HeadraceError

Status = Literal["ok", "slower", "broken"]

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
_EXTRAS = {
    "gpu": ("torch", "triton"),
    "lab": ("aiohttp", "hdrhistogram", "matplotlib"),
    "dev": ("pytest", "openai", "ruff", "mypy"),
}
_CGROUP = Path("/sys/fs/cgroup")
_MIN_DISK_BYTES = 2 * 2**30
_MIN_MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``fix`` says what would make it better; empty when nothing needs to be."""

    name: str
    status: Status
    finding: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return asdict(self)


def checks() -> Iterator[Check]:
    """All checks, one by one; a check that fails itself is a broken line, not a crash."""
    looks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("CPU", cpu),
        ("kernels", kernels),
        ("cores", cores),
        ("memory", memory),
        ("cache", cache),
        ("Python", python),
        ("compiler", compiler),
        *((f"extra {name}", _extra_check(name)) for name in _EXTRAS),
        ("GPU", gpu),
    )
    for name, look in looks:
        try:
            yield look()
        except Exception as error:
            yield Check(name, "broken", f"could not be checked: {error}", "please report this")


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """The CPU's name and the vector instructions that matter here."""
    model, flags = _names(cpuinfo)
    found = [plain for flag, plain in _FEATURES.items() if flag in flags]
    text = f"{model}: {', '.join(found) or 'no vector instructions that headrace knows'}"
    if "sse2" in flags and "avx2" not in flags:
        return Check("CPU", "slower", text, "use a CPU with AVX2 or AVX-512, or a GPU")
    return Check("CPU", "ok", text)


def _names(cpuinfo: Path) -> tuple[str, set[str]]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    text = _read(cpuinfo)
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
        )
    possible: list[str] = list(supported_isas())  # best first
    from headrace.backend.cpu.runner import chosen_isa

    try:
        isa = chosen_isa()
    except HeadraceError as error:
        return Check("kernels", "broken", error.message, "unset HEADRACE_ISA")
    text = f"{isa}, of {', '.join(possible)}"
    if isa != possible[0]:
        return Check("kernels", "slower", text, f"unset HEADRACE_ISA to use {possible[0]}")
    return Check("kernels", "ok", text)


def cores(cgroup: Path = _CGROUP) -> Check:
    """Cores of the machine, of this process, and what a container's quota leaves of them."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = _cgroup_cpus(cgroup)
    text = f"{usable} of {total} usable"
    if quota is not None:
        text += f", quota {quota:g}"
    if quota is not None and quota < usable:
        fix = f"start headrace with --threads {max(int(quota), 1)}, or raise the container's CPU limit"
        return Check("cores", "slower", text, fix)
    if usable == 1:
        return Check("cores", "slower", text, "give the process more cores")
    return Check("cores", "ok", text)


def _cgroup_cpus(cgroup: Path) -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    parts = _read(cgroup / "cpu.max").split()  # version 2, else version 1
    if not parts:
        parts = [_read(cgroup / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota_us, period_us = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def memory(cgroup: Path = _CGROUP) -> Check:
    """Memory of the machine, and what of it this process may still take."""
    import psutil

    seen = psutil.virtual_memory()
    free, total = int(seen.available), int(seen.total)
    limit = _first_number(cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes")
    if limit is not None and limit < total:
        used = _first_number(cgroup / "memory.current", cgroup / "memory/memory.usage_in_bytes") or 0
        total, free = limit, min(free, max(limit - used, 0))
    text = f"{_gib(free)} free of {_gib(total)}"
    if free < _MIN_MEMORY_BYTES:
        return Check(
            "memory", "slower", text, "free some, or use a smaller model and --kv-cache-memory 128MiB"
        )
    return Check("memory", "ok", text)


def cache() -> Check:
    """The folder for models and packed weights: writable, and with room."""
    from headrace.paths import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions alone do not tell: read-only mounts, quotas
            pass
    except OSError as error:
        fix = "make it writable, or set HEADRACE_CACHE to a folder that is"
        return Check("cache", "broken", f"{folder} cannot be written: {error.strerror}", fix)
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {_gib(free)} free"
    if free < _MIN_DISK_BYTES:
        return Check("cache", "slower", text, "free some space, or set HEADRACE_CACHE to a larger disk")
    return Check("cache", "ok", text)


def python() -> Check:
    """The interpreter."""
    text = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.platform(terse=True)}"
    )
    return Check("Python", "ok", text)


def compiler() -> Check:
    """A C++ compiler, which only building from source needs."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++", "cl"):
        path = shutil.which(name) if name else None
        if path is not None:
            lines = _output([path, "--version"]).splitlines()
            return Check("compiler", "ok", lines[0] if lines else path)
    return Check("compiler", "ok", "none found; only building from source needs one")


def _extra_check(extra: str) -> Callable[[], Check]:
    def look() -> Check:
        """Which packages of an optional extra are there."""
        found = []
        for package in _EXTRAS[extra]:
            try:
                found.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                continue
        if len(found) == len(_EXTRAS[extra]):
            return Check(f"extra {extra}", "ok", ", ".join(found))
        some = f"only {', '.join(found)}" if found else "not installed"
        return Check(f"extra {extra}", "ok", f"{some}; pip install 'headrace[{extra}]' brings it")

    return look


def gpu() -> Check:
    """An NVIDIA GPU, its driver, and a torch that can use them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = _output(query) if shutil.which("nvidia-smi") else ""
    cards = [line.strip() for line in listed.splitlines() if line.strip()]
    if not cards:
        if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
            return Check(
                "GPU", "broken", "a driver is loaded but nvidia-smi finds no GPU", "reinstall the driver"
            )
        return Check("GPU", "ok", "none; the cpu backend serves")
    text = "; ".join(cards)
    if importlib.util.find_spec("torch") is None:
        return Check("GPU", "slower", f"{text}; torch is not installed", "pip install 'headrace[gpu]'")
    import torch

    return suits_torch(torch, text)


def suits_torch(torch: Any, text: str) -> Check:
    """Whether the installed ``torch`` can use the GPU that ``text`` describes."""
    built_for = torch.version.cuda
    text = f"{text}; torch {torch.__version__}"
    if built_for is None:
        return Check("GPU", "slower", f"{text} is built without CUDA", "install a CUDA build of torch")
    if not torch.cuda.is_available():
        fix = f"install a driver for CUDA {built_for} or later, or a torch that suits the driver"
        return Check("GPU", "broken", f"{text} (CUDA {built_for}) cannot use it", fix)
    major, minor = torch.cuda.get_device_capability()
    known = torch.cuda.get_arch_list()
    if f"sm_{major}{minor}" not in known and not any(arch.startswith("compute_") for arch in known):
        fix = f"install a torch that is built for sm_{major}{minor}"
        return Check("GPU", "broken", f"{text} is built for {', '.join(known)} only", fix)
    return Check("GPU", "ok", f"{text}, CUDA {built_for}; use it with --backend torch --device cuda")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        if (text := _read(path).strip()).isdigit():
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
