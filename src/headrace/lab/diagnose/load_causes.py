"""Causes that show under many users: the client, failures, refusals, the KV cache, the batch."""

from __future__ import annotations

import math

from headrace.lab.diagnose.finding import Finding, Findings, ms, throughputs, users
from headrace.lab.diagnose.measurements import Level
from headrace.lab.diagnose.split import running
from headrace.lab.diagnose.switches import Switch, proof, switch

CLIENT_CPU = 0.85  # of a core
CLIENT_LATE = 0.4  # of the time that the client's timers were overdue
_REFUSED = 0.02
_FAILED = 0.05
_GAIN = 1.1  # in throughput, under which a larger batch is not worth a finding


def client(f: Findings) -> Finding | None:
    """The load generator itself can't keep up: all times hold its own delays."""
    watched = [(g.client, "one user", g.server) for g in f.m.gentle if g.client is not None]
    watched += [(lv.client, users(lv.users), lv.server) for lv in f.m.levels]
    if not watched:
        return None
    c, load, s = max(watched, key=lambda w: max(w[0].cpu, w[0].late))
    if c.cpu <= CLIENT_CPU and c.late <= CLIENT_LATE:
        return None
    evidence = [
        f"with {load}, the client used {c.cpu:.0%} of one core",
        f"its timers were overdue {c.late:.0%} of the time, the slowest hundredth by {ms(c.loop_lag_p99_ms)}",
    ]
    if s is not None and s.busy is not None:
        evidence.append(f"the engine was busy {s.busy:.0%} of that time")
    changed = Switch(text="run the client on a machine or core of its own")
    return Finding(
        cause="client",
        title="The client can't keep up; the server may be faster than shown",
        confidence="high" if max(c.cpu, c.late) > 0.6 else "medium",
        evidence=evidence,
        attempt=switch("client", f.engine).text,
        gain="times without the client's own delays; until then every number here is a bound from above",
        factor=1 / max(1 - min(max(c.late, c.cpu), 0.95), 0.05),
        proof=_proof(f, changed, f.top) if f.top is not None else [],
    )


def errors(f: Findings) -> Finding | None:
    """Requests that fail for other reasons than too many of them."""
    worst = max(f.m.levels, key=lambda lv: lv.failed_share, default=None)
    if worst is None or worst.failed_share < _FAILED:
        return None
    kinds = {k: n for k, n in worst.errors.items() if k not in ("rate_limited", "overloaded")}
    return Finding(
        cause="errors",
        title="Requests fail",
        confidence="high",
        evidence=[
            f"with {users(worst.users)}, {worst.failed_share:.0%} of {worst.requests} requests failed",
            *(f"{n} × {kind}: {worst.error_examples.get(kind, '')}" for kind, n in sorted(kinds.items())),
        ],
        attempt="find out why in the server's log before anything else",
        gain=f"the {worst.failed_share:.0%} of requests that fail today",
        factor=1 / max(1 - worst.failed_share, 0.05),
        proof=_proof(f, Switch(text="what makes requests fail"), worst),
    )


def queueing(f: Findings) -> Finding | None:
    """Admission: more requests than the server lets wait, or than an account may send."""
    refusing = [lv for lv in f.m.levels if lv.refused_share > _REFUSED]
    if not refusing:
        return None
    first, worst = refusing[0], max(refusing, key=lambda lv: lv.refused_share)
    limited = worst.errors.get("rate_limited", 0) > worst.errors.get("overloaded", 0)
    kind = "rate_limited" if limited else "overloaded"
    wanted = _power_of_two(2 * worst.users)
    changed = switch("waiting", f.engine, n=wanted)
    evidence = [
        f"with {users(worst.users)}, {worst.refused_share:.0%} of {worst.requests} requests were refused "
        f"({kind}: {worst.error_examples.get(kind, '')})",
        f"it begins with {users(first.users)}",
    ]
    s = worst.server
    if s is not None and s.running_max is not None and s.waiting_max is not None:
        evidence.append(f"at most {s.running_max:g} ran and {s.waiting_max:g} waited at once")
    wait = _wait_ms(f, worst)
    return Finding(
        cause="queueing",
        title="A limit on requests or on the queue refuses users",
        confidence="high",
        evidence=evidence,
        attempt=changed.text,
        gain=f"nobody of {worst.users} users is refused; the last in line waits about {ms(wait)}",
        factor=1 / max(1 - worst.refused_share, 0.05),
        proof=_proof(f, changed, worst),
    )


def _wait_ms(f: Findings, lv: Level) -> float:
    """For the last of the users, who is served when those before are done."""
    tokens = lv.output_tokens or 1.0
    rate = max(f.best.tok_s if f.best is not None else lv.tok_s, 1e-9)
    return 1000 * max(lv.users - running(lv), 0.0) * tokens / rate


def waits(lv: Level, gentle_ttft_ms: float | None) -> float:
    """How many users wait for their turn: the server's word, else what TTFT says of the queue."""
    s = lv.server
    if s is not None and s.waiting_mean is not None:
        long = s.queue_time_mean_ms is not None and s.queue_time_mean_ms > 0.3 * (lv.ttft_ms or math.inf)
        return max(s.waiting_mean, 1.0 if long and (s.waiting_max or 0) >= 1 else 0.0)
    if lv.ttft_ms is None or gentle_ttft_ms is None or lv.e2e_ms is None:
        return 0.0
    queue = max(lv.ttft_ms - 2 * gentle_ttft_ms, 0.0)
    return float(lv.users * queue / lv.e2e_ms)


def kv_full(f: Findings) -> Finding | None:
    """Sequences wait for, or lose, blocks of the KV cache."""
    full = [lv for lv in f.m.levels if _kv_full(lv)]
    if not full or f.scaling is None:
        return None
    lv = full[-1]
    s = lv.server
    assert s is not None and s.kv_usage_max is not None
    now = running(lv)
    factor = max(f.scaling.gain(now, lv.users), 1.0)
    times = max(math.ceil(lv.users / now), 2)
    changed = switch("kv", f.engine, n=_kv_size(f, times), tokens=_kv_tokens(lv))
    evidence = [
        f"with {users(lv.users)}, {s.kv_usage_max:.0%} of the KV cache was in use with "
        f"{s.running_max or now:g} sequences running",
        f"{s.waiting_mean or 0:.1f} sequences waited on average"
        + (f", {ms(s.queue_time_mean_ms)} each" if s.queue_time_mean_ms else ""),
    ]
    if s.preemptions:
        evidence.append(f"{s.preemptions:.0f} preemptions: their work was done twice")
    return Finding(
        cause="kv_full",
        title="The KV cache is full" + (" and sequences are preempted" if s.preemptions else ""),
        confidence="high" if s.preemptions or s.kv_usage_max > 0.9 else "medium",
        evidence=evidence,
        attempt=f"{changed.text} ({times} × today's pool)" if not changed.serve else changed.text,
        gain=f"about {factor:.1f} × the throughput if {lv.users} sequences fit {_curve(f)}",
        factor=factor,
        proof=_proof(f, changed, lv),
    )


def _kv_full(lv: Level) -> bool:
    s = lv.server
    if s is None or s.kv_usage_max is None:
        return False
    if s.preemptions:
        return True
    one_more = s.kv_usage_max * (1 + 1 / max(s.running_max or 1.0, 1.0))  # as the others, and one
    return waits(lv, None) >= 0.3 and one_more > 1.0 and s.kv_usage_max > 0.5


def _kv_size(f: Findings, times: int) -> str:
    """Today's pool of a server of our own, and so many times more."""
    import re

    given = re.search(r"--kv-cache-memory[= ]['\"]?(\d+(?:\.\d+)?)\s*([A-Za-z]*)", f.m.serve)
    amount, unit = (float(given[1]), given[2]) if given is not None else (512.0, "MiB")
    return f"{math.ceil(amount * times)}{unit}"


def _kv_tokens(lv: Level) -> int:
    each = (lv.prompt_tokens or 0.0) + (lv.output_tokens or 0.0)
    return math.ceil(lv.users * each / 256) * 256


def batch_too_small(f: Findings) -> Finding | None:
    """A limit on sequences that run at once, while others wait and a larger batch would be faster."""
    lv = f.top
    if lv is None or f.scaling is None or lv.users < 2 or _kv_full(lv):
        return None
    s = lv.server
    alone = f.gentle.total_ms if f.gentle is not None else None
    waiting = waits(lv, alone)
    now = s.running_max if s is not None and s.running_max else running(lv)
    if waiting < 0.5 or now > 0.75 * lv.users or lv.refused_share > 0.2:
        return None
    wanted = _power_of_two(lv.users)
    factor = f.scaling.gain(now, lv.users)
    if factor < (_GAIN if now > 1 else 1.02):
        return None
    changed = switch("batch", f.engine, n=wanted)
    evidence = [
        f"with {users(lv.users)}, {now:.3g} ran at once and {waiting:.1f} waited",
        f"throughput: {throughputs(f)}",
    ]
    if s is not None and s.kv_usage_max is not None:
        evidence.append(f"there is room: at most {s.kv_usage_max:.0%} of the KV cache was in use")
    if f.scaling.measured:
        evidence.append(
            f"a step takes {ms(f.scaling.alone_ms)} for one sequence and {ms(f.scaling.row_ms)} more for each"
        )
    else:
        evidence.append(
            f"a step takes {ms(f.scaling.alone_ms)} for one sequence; by the cost of prefill, each further "
            f"one would add about {ms(f.scaling.row_ms)}"
        )
    return Finding(
        cause="batch_too_small",
        title=f"Too small a batch: {now:.3g} at once, while others wait",
        confidence="high" if s is not None and s.running_max else "medium",
        evidence=evidence,
        attempt=changed.text,
        gain=f"about {factor:.1f} × the throughput with {lv.users} at once {_curve(f)}",
        factor=factor,
        proof=_proof(f, changed, lv),
    )


def _curve(f: Findings) -> str:
    measured = f.scaling is not None and f.scaling.measured
    return "(by the measured batch curve)" if measured else "(estimated from one user's step and prefill)"


def _power_of_two(n: float) -> int:
    return int(2 ** math.ceil(math.log2(max(n, 1))))


def _proof(f: Findings, changed: Switch, lv: Level) -> list[str]:
    return proof(f.m, changed, lv.users, lv.prompt_tokens, lv.output_tokens)
