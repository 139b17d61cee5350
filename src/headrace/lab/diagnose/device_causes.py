"""Causes in what computes: one busy core of several, memory bandwidth, arithmetic, or other programs."""

from __future__ import annotations

from headrace.lab.diagnose.finding import Finding, Findings, ms, throughputs, users
from headrace.lab.diagnose.measurements import Level
from headrace.lab.diagnose.split import running
from headrace.lab.diagnose.switches import Switch, proof, switch

_ONE_THREAD = 0.7  # of the process's CPU in one thread: two that compute have about half each
_FULL = 0.8  # utilisation from which on a device counts as busy
_OTHERS = 0.25  # of the machine's cores


def cpu_bound(f: Findings) -> Finding | None:
    """One thread computes, or feeds a device, while other cores are idle."""
    lv = f.top
    s = lv.server if lv is not None else None
    if lv is None or s is None or s.cpu_cores is None or s.cpu_cores < 0.1:
        return None
    cores = s.cores
    if cores is not None and cores < 2:
        return None
    if s.device_busy is not None:
        if s.device_busy >= _FULL or (s.busiest_thread or s.cpu_cores) < _FULL:
            return None
        return _host_bound(f, lv, s.busiest_thread or s.cpu_cores, s.device_busy)
    if s.busy is not None and s.busy < 0.6:
        return None  # what computes is idle: it is not what limits
    if s.busiest_thread is not None:
        if s.busiest_thread < _ONE_THREAD * s.cpu_cores:
            return None
    elif not 0.8 <= s.cpu_cores <= 1.2 or cores is None:
        return None
    factor = min(cores, 4.0) if cores is not None else 2.0
    changed = switch("threads", f.engine, n=int(cores) if cores is not None else "more")
    evidence = [f"with {users(lv.users)} the server used {s.cpu_cores:.2f} cores"]
    if cores is not None:
        evidence[0] += f" of {cores:g} that it may use"
    if s.busiest_thread is not None:
        evidence.append(f"one thread did {s.busiest_thread / s.cpu_cores:.0%} of that work")
    if s.busy is not None:
        evidence.append(f"the engine was in steps {s.busy:.0%} of the time")
    return Finding(
        cause="cpu_bound",
        title="CPU-bound on one thread while other cores are idle",
        confidence="high" if s.busiest_thread is not None else "medium",
        evidence=evidence,
        attempt=changed.text,
        gain=f"up to {factor:g} × where arithmetic limits, less where memory does",
        factor=factor,
        proof=_proof(f, changed, lv),
    )


def _host_bound(f: Findings, lv: Level, thread: float, device: float) -> Finding:
    changed = switch("host", f.engine)
    factor = 1 / max(device, 0.1)
    return Finding(
        cause="cpu_bound",
        title="CPU-bound: one thread of the host can't feed the device",
        confidence="high" if thread > 0.9 else "medium",
        evidence=[
            f"with {users(lv.users)} the device was busy {device:.0%} of the time",
            f"the busiest thread of the server used {thread:.0%} of a core",
        ],
        attempt=changed.text,
        gain=f"up to {factor:.1f} × if the device were always busy",
        factor=factor,
        proof=_proof(f, changed, lv),
    )


def machine_shared(f: Findings) -> Finding | None:
    """Other programs use the cores that the server would."""
    lv = f.best
    alone = next((g.server for g in reversed(f.m.gentle) if g.server is not None), None)
    s = lv.server if lv is not None else alone
    if s is None or s.others_cores is None or not s.cores or not s.cpu_cores:
        return None
    if s.others_cores < _OTHERS * s.cores or s.cpu_cores + s.others_cores < 0.7 * s.cores:
        return None
    changed = Switch(text="stop the other programs, or give the server cores of its own (taskset, cpuset)")
    factor = min((s.cpu_cores + s.others_cores) / s.cpu_cores, s.cores)
    return Finding(
        cause="machine_shared",
        title="Other programs use the server's cores",
        confidence="medium",
        evidence=[
            f"with {users(lv.users if lv is not None else 1)}, other programs used {s.others_cores:.2f} "
            f"of {s.cores:g} cores, "
            f"the server {s.cpu_cores:.2f}"
        ],
        attempt=changed.text,
        gain=f"up to {factor:.1f} × if the server had them",
        factor=factor,
        proof=_proof(f, changed, lv) if lv is not None else [],
    )


def device_bound(f: Findings) -> Finding | None:
    """What computes is busy: with streaming weights, or with arithmetic."""
    lv, split = f.best, f.tpot
    if lv is None or split is None or f.scaling is None or lv.tpot_ms is None:
        return None
    u = f.utilisation
    if u is not None and u.of != "engine" and u.share < _FULL:
        s = lv.server
        if s is None or s.busy is None or s.busy < _FULL:
            return None
    n = running(lv)
    share = split.alone_ms / split.total_ms if split.total_ms else 1.0
    evidence = [
        f"a step takes {ms(split.alone_ms)} for one sequence and {ms(split.total_ms)} with {n:.3g} "
        f"({users(lv.users)})",
        f"throughput: {throughputs(f)}",
    ]
    if u is not None:
        evidence.append(f"{of_what(u.of)} {u.share:.0%} busy")
    if share > 0.5:
        return _bandwidth(f, lv, n, evidence)
    return _compute(f, lv, n, evidence)


def _bandwidth(f: Findings, lv: Level, n: float, evidence: list[str]) -> Finding:
    assert f.scaling is not None
    narrow = f.m.narrow_weights
    what = "speculation" if narrow or n > 4 else "weights"
    changed = switch(what, f.engine, n="int8")
    hw = f.m.hardware
    if hw is not None and f.tpot is not None:
        floor = 1000 * hw.weight_bytes / hw.read_bytes_s
        evidence.append(
            f"reading its {hw.weight_bytes / 1e6:.0f} MB of weights takes at least {ms(floor)} at the "
            f"{hw.read_bytes_s / 1e9:.1f} GB/s of this machine: {floor / f.tpot.alone_ms:.0%} of a step"
        )
    wider = f.scaling.gain(n, 2 * n)
    factor = 2.0 if what == "weights" else 1.3
    gain = (
        "half the bytes, up to 2 × per user"
        if what == "weights"
        else "as many tokens a step more as drafts are accepted; 1.3 × is usual where answers repeat prompts"
    )
    return Finding(
        cause="bandwidth_bound",
        title="Bound by memory bandwidth: steps mostly stream the weights",
        confidence="medium" if hw is None else "high",
        evidence=evidence,
        attempt=changed.text,
        gain=f"{gain}; twice as many users would bring {wider:.1f} × the throughput",
        factor=factor,
        proof=_proof(f, changed, lv),
    )


def _compute(f: Findings, lv: Level, n: float, evidence: list[str]) -> Finding:
    assert f.scaling is not None
    s = f.scaling
    work = s.alone_ms + (n - 1) * s.row_ms + s.prefill_ms
    prefill = min(n * s.prefill_ms / work, 1.0) if work > 0 else 0.0
    evidence.append(f"prefill is about {prefill:.0%} of the work: prefix caching saves what prompts share")
    changed = switch("more", f.engine)
    hw = f.m.hardware
    if hw is not None and lv.prompt_tokens and lv.output_tokens:
        fresh = lv.prompt_tokens * (1 - (lv.cached_share or 0.0)) / lv.output_tokens
        used = hw.macs_per_token * lv.tok_s * (1 + fresh) / hw.int8_macs_s
        evidence.append(
            f"{hw.threads} threads do {hw.int8_macs_s / 1e9:.0f} G multiply-accumulates a second in int8; "
            f"the layers used {used:.0%} of that"
        )
    return Finding(
        cause="compute_bound",
        title="Bound by arithmetic: each further sequence costs as much as it brings",
        confidence="medium",
        evidence=evidence,
        attempt=changed.text,
        gain=f"2 × with twice the hardware; up to {1 / max(1 - prefill, 0.2):.1f} × where prompts share all",
        factor=1.0,
        proof=_proof(f, changed, lv),
    )


def of_what(what: str) -> str:
    """The subject of "… 50% busy", by ``Utilisation.of``."""
    names = {"device": "the device was", "cores": "the server's cores were", "engine": "the engine was"}
    return names.get(what, "one core was")


def _proof(f: Findings, changed: Switch, lv: Level) -> list[str]:
    return proof(f.m, changed, lv.users, lv.prompt_tokens, lv.output_tokens)
