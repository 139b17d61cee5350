"""The rows that every view of a measurement shows: the same words and digits in terminal and page."""

from __future__ import annotations

from headrace.lab.bench.compare import Difference
from headrace.lab.bench.metrics import Distribution, StageResult
from headrace.lab.bench.result import Result

COLUMNS = (
    "load",
    "requests",
    "failed",
    "req/s",
    "out tok/s",
    "TTFT p50",
    "TTFT p95",
    "TTFT p99",
    "TPOT p50",
    "TPOT p95",
    "ITL p99",
    "E2E p50",
    "E2E p99",
)
COMPARISON_COLUMNS = ("load", "metric", "before", "after", "change", "interval of the change", "verdict")


def rows(result: Result) -> list[list[str]]:
    """One row a stage, in the order of ``columns(result)``; times carry their unit."""
    return [row(stage) + ([goodput(stage)] if result.slo else []) for stage in result.stages]


def columns(result: Result) -> list[str]:
    """The header of ``rows``."""
    return [*COLUMNS, *(["goodput (SLO met)"] if result.slo else [])]


def row(stage: StageResult) -> list[str]:
    """One stage's cells, in the order of ``COLUMNS``."""
    label = stage.label + (" · saturated" if stage.saturated else "")
    return [
        label,
        str(stage.requests),
        str(sum(stage.errors.values())),
        f"{stage.request_throughput.value:.2f}",
        f"{stage.output_throughput.value:.1f} ± {half_width(stage):.1f}",
        *(_time(stage.ttft, name) for name in ("p50", "p95", "p99")),
        *(_time(stage.tpot, name) for name in ("p50", "p95")),
        _time(stage.itl, "p99"),
        *(_time(stage.e2e, name) for name in ("p50", "p99")),
    ]


def goodput(stage: StageResult) -> str:
    """Requests a second that met the SLO, and their share."""
    if stage.goodput is None or stage.slo_attainment is None:
        return "–"
    return f"{stage.goodput.value:.2f}/s ({stage.slo_attainment.value:.0%})"


def half_width(stage: StageResult) -> float:
    """Half the 95% interval of the output throughput."""
    return (stage.output_throughput.high - stage.output_throughput.low) / 2


def _time(distribution: Distribution | None, name: str) -> str:
    return "–" if distribution is None else duration(getattr(distribution, name))


def duration(ms: float) -> str:
    """Milliseconds with three digits, or seconds."""
    if ms < 10:
        return f"{ms:.2f} ms"
    if ms < 100:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def server_line(stage: StageResult) -> str:
    """What the server said of itself, as one line; empty if it said nothing."""
    server = stage.server
    parts = []
    if server is not None:
        if server.running_mean is not None:
            parts.append(f"{server.running_mean:.1f} running")
        if server.waiting_mean is not None:
            parts.append(f"{server.waiting_mean:.1f} waiting")
        if server.queue_time_mean_ms is not None:
            parts.append(f"queue {duration(server.queue_time_mean_ms)}")
        if server.tokens_per_step is not None:
            parts.append(f"{server.tokens_per_step:.1f} tokens a step")
        if server.kv_usage_max is not None:
            parts.append(f"KV ≤ {server.kv_usage_max:.0%}")
        if server.busy is not None:
            parts.append(f"engine busy {server.busy:.0%}")
        if server.cpu_cores is not None:
            parts.append(f"{server.cpu_cores:.2f} cores")
        if server.device_busy is not None:
            parts.append(f"GPU busy {server.device_busy:.0%}")
        if server.preemptions:
            parts.append(f"{server.preemptions:.0f} preemptions")
    if stage.cached_share is not None:
        parts.append(f"{stage.cached_share:.0%} of prompt tokens cached")
    return " · ".join(parts)


def client_line(stage: StageResult) -> str:
    """How the client itself did."""
    lag = "" if stage.send_lag is None else f"sent {duration(stage.send_lag.p99)} late (p99), "
    loop = f"event loop {duration(stage.client.loop_lag_p99_ms)} late (p99)"
    return f"{lag}{loop}, {stage.client.cpu:.0%} of one core"


def floor_line(result: Result) -> str:
    """What the client adds; empty if it was not measured."""
    floor = result.client_floor
    if floor is None:
        return ""
    return (
        f"client alone, against a no-op server: TTFT {duration(floor.ttft_p50_ms)} "
        f"(p99 {duration(floor.ttft_p99_ms)}), {floor.tpot_p50_ms * 1000:.0f} µs a token"
    )


def findings(result: Result) -> list[str]:
    """Sentences below the table: errors, the knee, the best rate, warnings."""
    found = []
    for stage in result.stages:
        for kind, count in sorted(stage.errors.items()):
            example = stage.error_examples.get(kind)
            found.append(f"{stage.label}: {count} × {kind}{f', such as: {example}' if example else ''}")
    if result.knee is not None:
        found.append(f"knee of the curve (most throughput for its latency): {result.knee}")
    if result.best_rate is not None:
        goal = f"meets {result.slo}" if result.slo else "keeps up without failures"
        found.append(f"highest rate that {goal}: {result.best_rate:.4g} requests/s")
    found += [f"warning: {warning}" for warning in result.warnings]
    if result.interrupted:
        found.append("interrupted: what was measured until then is shown")
    return found


def comparison_row(difference: Difference) -> list[str]:
    """One metric's cells, in the order of ``COMPARISON_COLUMNS``."""
    d, unit = difference, difference.unit
    return [
        d.stage,
        d.metric,
        f"{d.before:.4g} {unit}",
        f"{d.after:.4g} {unit}",
        "" if d.relative is None else f"{d.relative:+.1%}",
        f"{d.low:+.3g} … {d.high:+.3g} {unit}{' (paired)' if d.paired else ''}",
        d.verdict,
    ]
