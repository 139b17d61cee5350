"""A finding: one cause, what speaks for it, what to try, what that should gain, and how to prove it."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.lab.diagnose.measurements import Level, Measurements
from headrace.lab.diagnose.split import (
    Scaling,
    TPOTSplit,
    TTFTSplit,
    best_level,
    gentle_split,
    hard_split,
    scaling,
    top_level,
    tpot_split,
)

Cause = Literal[
    "client",
    "errors",
    "queueing",
    "kv_full",
    "batch_too_small",
    "cpu_bound",
    "frontend",
    "network",
    "bandwidth_bound",
    "compute_bound",
    "cold_start",
    "machine_shared",
    "too_little_load",
    "unexplained",
]
Confidence = Literal["high", "medium", "low"]


class Finding(msgspec.Struct, kw_only=True):
    """``factor``: by how much throughput or TTFT improves without this cause; 1 if that is not known.

    ``attempt`` is the next switch to try in the engine's own words, ``proof`` the commands that tell whether
    it helped.
    """

    cause: Cause
    title: str
    confidence: Confidence
    evidence: list[str]
    attempt: str
    gain: str
    factor: float = 1.0
    proof: list[str] = []


class Utilisation(msgspec.Struct, kw_only=True):
    """The share of the time that what computes was busy, at the level with the most throughput.

    ``of``: "device" (NVML), "cores" (the server's CPU of those it may use), "engine" (time in steps), or
    "one core" (of a server whose number of cores is not known).
    """

    share: float
    of: str


class Findings(msgspec.Struct, kw_only=True):
    """What every cause is judged by: the measurements and what follows from them."""

    m: Measurements
    engine: str | None
    gentle: TTFTSplit | None
    hard: TTFTSplit | None
    tpot: TPOTSplit | None
    scaling: Scaling | None
    best: Level | None
    top: Level | None
    utilisation: Utilisation | None


def findings_of(m: Measurements) -> Findings:
    """The splits and the curve of ``m``."""
    best, top = best_level(m), top_level(m)
    first = gentle_split(m)
    loaded = top if top is not None else best
    return Findings(
        m=m,
        engine=_engine(m),
        gentle=first,
        hard=hard_split(m, first, loaded) if loaded is not None else None,
        tpot=tpot_split(m),
        scaling=scaling(m),
        best=best,
        top=top,
        utilisation=_utilisation(best),
    )


def _engine(m: Measurements) -> str | None:
    """By its metrics, or by who the model card says serves it."""
    for server in (*(lv.server for lv in m.levels), *(g.server for g in m.gentle)):
        if server is not None and server.engine is not None:
            return server.engine
    owner = m.owner.lower().replace("_", "")
    names = {"headrace": "headrace", "vllm": "vllm", "llamacpp": "llama.cpp", "tgi": "tgi"}
    return next((engine for name, engine in names.items() if name in owner), None)


def _utilisation(lv: Level | None) -> Utilisation | None:
    s = lv.server if lv is not None else None
    if s is None:
        return None
    if s.device_busy is not None:
        return Utilisation(share=s.device_busy, of="device")
    if s.cpu_cores is not None and s.cores:
        return Utilisation(share=min(s.cpu_cores / s.cores, 1.0), of="cores")
    if s.busy is not None:
        return Utilisation(share=s.busy, of="engine")
    if s.cpu_cores is not None:
        return Utilisation(share=min(s.cpu_cores, 1.0), of="one core")
    return None


def ms(value: float) -> str:
    """Milliseconds as people read them."""
    return (
        f"{value:.2g} ms" if value < 10 else f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"
    )


def users(n: int) -> str:
    """So many users, in words."""
    return f"{n} user{'s' if n != 1 else ''}"


def throughputs(f: Findings) -> str:
    """Of every level, as a list."""
    return ", ".join(f"{lv.tok_s:.0f} tok/s with {users(lv.users)}" for lv in f.m.levels)
