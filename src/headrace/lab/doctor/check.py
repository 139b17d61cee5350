"""One line of doctor's report, and the small tools that every look needs."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "slower", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was found. ``cost``: what it costs, ``fix``: what betters it; empty when nothing needs to be."""

    name: str
    status: Status
    finding: str
    fix: str = ""
    cost: str = ""

    def as_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return asdict(self)


def read(path: Path) -> str:
    """A file of ``/proc`` or ``/sys``; empty if it is not there, or not for us."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def number(text: str) -> int | None:
    """A whole number, or None: ``max``, nothing, or what is no number."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 25 else None


def output(command: list[str]) -> str:
    """What a program prints; empty if it is not there, fails to start or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"
