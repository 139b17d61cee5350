"""The verdict: every cause is asked, and what limits most comes first."""

from __future__ import annotations

import msgspec

from headrace.lab.diagnose import device_causes, load_causes, request_causes
from headrace.lab.diagnose.finding import Finding, Findings, Utilisation, findings_of, users
from headrace.lab.diagnose.measurements import Measurements
from headrace.lab.diagnose.split import Scaling, TPOTSplit, TTFTSplit, prefill_slope

SCHEMA = "headrace-diagnose/1"
_BUSY = 0.8  # utilisation under which there must be a cause

# What makes the other numbers doubtful, or users turn away, comes first, in this order.
_FIRST = (load_causes.client, load_causes.errors, load_causes.queueing)
# Of these, what gains most.
_BY_GAIN = (
    load_causes.kv_full,
    load_causes.batch_too_small,
    device_causes.cpu_bound,
    request_causes.frontend,
    request_causes.network,
)
# What limits the device itself, which it does only when nothing above keeps work from it.
_DEVICE = device_causes.device_bound
_LAST = (device_causes.machine_shared, request_causes.cold_start)


class Diagnosis(msgspec.Struct, kw_only=True):
    """``findings[0]`` is the bottleneck. ``utilisation_cause`` says why it is under 80%, where it is."""

    schema: str = SCHEMA
    target: str
    model: str
    engine: str | None
    findings: list[Finding]
    utilisation: Utilisation | None
    utilisation_cause: str | None
    ttft: TTFTSplit | None
    ttft_loaded: TTFTSplit | None
    tpot: TPOTSplit | None
    scaling: Scaling | None
    prefill_ms_per_token: float | None
    notes: list[str]
    measurements: Measurements


def diagnose(m: Measurements) -> Diagnosis:
    """What ``m`` says. Pure: the same measurements give the same verdict."""
    f = findings_of(m)
    found = [finding for cause in _FIRST if (finding := cause(f)) is not None]
    by_gain = [finding for cause in _BY_GAIN if (finding := cause(f)) is not None]
    found += sorted(by_gain, key=lambda finding: -finding.factor)
    causes = _LAST if found else (_LAST[0], _DEVICE, *_LAST[1:])
    found += [finding for cause in causes if (finding := cause(f)) is not None]
    if not found:
        found.append(_remaining(f))
    return Diagnosis(
        target=m.target,
        model=m.model,
        engine=f.engine,
        findings=found,
        utilisation=f.utilisation,
        utilisation_cause=_why_idle(f, found),
        ttft=f.gentle,
        ttft_loaded=f.hard,
        tpot=f.tpot,
        scaling=f.scaling,
        prefill_ms_per_token=prefill_slope(m),
        notes=_notes(f),
        measurements=m,
    )


def _remaining(f: Findings) -> Finding:
    """Nothing stands out: either the load was too little, or the server keeps its reasons to itself."""
    grew = f.top is not None and f.best is not None and f.top.users == f.best.users and f.top.users > 1
    if grew and f.top is not None:
        return Finding(
            cause="too_little_load",
            title="Too little load to find the limit: more users still brought more",
            confidence="medium",
            evidence=[f"{f.top.tok_s:.0f} tok/s with {users(f.top.users)} was the most, and the last level"],
            attempt="diagnose with more --seconds",
            gain="unknown until the limit is found",
            proof=[],
        )
    return Finding(
        cause="unexplained",
        title="Nothing that was measured explains the limit",
        confidence="low",
        evidence=["no cause stands out; the server shows no metrics, or too few"]
        if f.utilisation is None
        else [f"{f.utilisation.share:.0%} utilisation, and no cause stands out"],
        attempt="let the server show /metrics, or run diagnose on its machine",
        gain="unknown",
        proof=[],
    )


def _why_idle(f: Findings, found: list[Finding]) -> str | None:
    """Why utilisation is under 80%: the first finding that leaves what computes idle."""
    if f.utilisation is None or f.utilisation.share >= _BUSY:
        return None
    idling = (
        "client",
        "errors",
        "queueing",
        "kv_full",
        "batch_too_small",
        "cpu_bound",
        "frontend",
        "network",
    )
    for finding in found:
        if finding.cause in (*idling, "machine_shared", "too_little_load", "unexplained"):
            return finding.title
    if f.top is not None and f.best is not None and f.top.users == f.best.users:
        return "more users still brought more: the load did not fill it"
    s = f.best.server if f.best is not None else None
    if s is not None and s.busy is not None and s.busy < _BUSY:
        return f"the engine is between steps {1 - s.busy:.0%} of the time: HTTP, or too few requests"
    return "threads wait for memory or for each other: more of them would not help"


def _notes(f: Findings) -> list[str]:
    m = f.m
    notes = list(m.notes)
    if m.interrupted:
        notes.append("interrupted: what was measured until then is shown")
    if not m.streaming:
        notes.append("the endpoint does not stream: TTFT and TPOT are unknown, and nothing is split")
    if not m.usage:
        notes.append("the endpoint reports no usage: tokens are counted by chunks, prompts by words")
    if not m.fixed_length:
        notes.append("the endpoint has no ignore_eos: answers may end early, and throughput is less certain")
    if not any(lv.server is not None and lv.server.engine is not None for lv in m.levels):
        notes.append("no /metrics that diagnose can read: queue, batch and KV cache are judged from outside")
    if f.gentle is not None and f.gentle.source == "slope":
        notes.append("prefill and frontend are told apart by prompt length, not by the server's word")
    for lv in m.levels:
        warning = lv.client.warning
        if warning is not None:
            notes.append(f"{users(lv.users)}: {warning}")
    return list(dict.fromkeys(notes))
