"""What is installed and whether it goes together: Python, compiler, extras, torch, Triton, driver, GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.lab.doctor.check import Check, output
from headrace.lab.doctor.processor import cpu_flags

EXTRAS = {
    "gpu": ("torch", "triton"),
    "lab": ("aiohttp", "hdrhistogram", "matplotlib", "optuna"),
    "dev": ("pytest", "openai", "ruff", "mypy"),
}
_SINCE = {"int8": (7, 5), "bf16": (8, 0), "fp8": (8, 9)}  # compute capability whose tensor cores have it
_QUERY = "name,memory.total,driver_version,compute_cap"


@dataclass(frozen=True, slots=True)
class Card:
    """One line of nvidia-smi. ``capability``: (9, 0) for sm_90; None where an old driver does not tell."""

    text: str
    capability: tuple[int, int] | None


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
            lines = output([path, "--version"]).splitlines()
            return Check("compiler", "ok", lines[0] if lines else path)
    return Check("compiler", "ok", "none found; only building from source needs one")


def extra_check(extra: str) -> Callable[[], Check]:
    """A look at an optional extra."""

    def look() -> Check:
        """Which packages of an optional extra are there."""
        found = []
        for package in EXTRAS[extra]:
            version = _version(package)
            if version is not None:
                found.append(f"{package} {version}")
        if len(found) == len(EXTRAS[extra]):
            return Check(f"extra {extra}", "ok", ", ".join(found))
        some = f"only {', '.join(found)}" if found else "not installed"
        return Check(f"extra {extra}", "ok", f"{some}; pip install 'headrace[{extra}]' brings it")

    return look


def cards() -> list[Card]:
    """NVIDIA GPUs by their driver."""
    if not shutil.which("nvidia-smi"):
        return []
    listed = output(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    found = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if not parts[0]:
            continue
        match = re.fullmatch(r"(\d+)\.(\d+)", parts[-1]) if len(parts) == 4 else None
        capability = None if match is None else (int(match[1]), int(match[2]))
        found.append(Card(", ".join(parts[:3]), capability))
    return found


def gpu() -> Check:
    """An NVIDIA GPU, its driver, and a torch that can use them."""
    found = cards()
    if not found:
        if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
            text = "a driver is loaded but nvidia-smi finds no GPU"
            return Check("GPU", "broken", text, "reinstall the driver", "only the CPU computes")
        return Check("GPU", "ok", "none; the cpu backend serves")
    text = "; ".join(card.text for card in found)
    if importlib.util.find_spec("torch") is None:
        fix = "pip install 'headrace[gpu]'"
        return Check("GPU", "slower", f"{text}; torch is not installed", fix, "the GPU stands idle")
    import torch

    return suits_torch(torch, text)


def suits_torch(torch: Any, text: str) -> Check:
    """Whether the installed ``torch`` can use the GPU that ``text`` describes."""
    built_for = torch.version.cuda
    text = f"{text}; torch {torch.__version__}"
    cost = "the GPU stands idle"
    if built_for is None:
        fix = "install a CUDA build of torch"
        return Check("GPU", "slower", f"{text} is built without CUDA", fix, cost)
    if not torch.cuda.is_available():
        fix = f"install a driver for CUDA {built_for} or later, or a torch that suits the driver"
        return Check("GPU", "broken", f"{text} (CUDA {built_for}) cannot use it", fix, cost)
    major, minor = torch.cuda.get_device_capability()
    known = torch.cuda.get_arch_list()
    if f"sm_{major}{minor}" not in known and not any(arch.startswith("compute_") for arch in known):
        fix = f"install a torch that is built for sm_{major}{minor}"
        return Check("GPU", "broken", f"{text} is built for {', '.join(known)} only", fix, cost)
    return Check("GPU", "ok", f"{text}, CUDA {built_for}; use it with --backend torch --device cuda")


def torch_and_triton() -> Check:
    """The installed torch, the Triton that it was built with, and the one that is there."""
    version = _version("torch")
    if version is None:
        return Check("torch", "ok", "not installed; the cpu backend needs none")
    return triton_suits(version, importlib.metadata.requires("torch") or [], _version("triton"))


def triton_suits(torch: str, requires: list[str], triton: str | None) -> Check:
    """Whether Triton ``triton`` is the one that torch names among its requirements."""
    wanted = next(
        (match[1] for line in requires if (match := re.match(r"(?:pytorch-)?triton\s*==\s*([\w.]+)", line))),
        None,
    )
    text = f"torch {torch}, Triton {triton or 'not installed'}"
    if wanted is None or triton == wanted:
        return Check("torch", "ok", text)
    if triton is None:
        return Check("torch", "ok", f"{text} (torch.compile on a GPU would want {wanted})")
    fix = f"pip install triton=={wanted}"
    return Check(
        "torch", "slower", f"{text}; this torch was built with {wanted}", fix, "its kernels may fail"
    )


def precisions(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Which narrow formats are multiplied in hardware: by the CPU, and by each GPU."""
    flags = cpu_flags(cpuinfo)[1]
    by_cpu = {
        "int8": flags & {"avx512_vnni", "avx_vnni", "asimddp", "i8mm"},
        "bf16": flags & {"avx512_bf16", "amx_bf16", "bf16"},
    }
    text = f"CPU: {', '.join(name for name, found in by_cpu.items() if found) or 'neither int8 nor bf16'}"
    for card in cards():
        if card.capability is None:
            continue
        have = [name for name, since in _SINCE.items() if card.capability >= since]
        major, minor = card.capability
        text += f"; {card.text.partition(',')[0]} (sm_{major}{minor}): {', '.join(have) or 'none'}"
        if "fp8" not in have:
            text += ", no fp8"
    return Check("precisions", "ok", text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
