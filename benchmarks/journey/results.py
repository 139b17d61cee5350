"""What the journey found, and whether it keeps the promise."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.journey.accuracy import Accuracy
from headrace.lab.bench.context import Context
from headrace.lab.bench.metrics import StageResult

SCHEMA = "headrace-journey/1"
COST_TARGET = 0.60
"""Of the cost, that is to be saved."""
LATENCY_TARGET = 5.0
"""How many times lower the latency is to be."""


class StepResult(msgspec.Struct, kw_only=True):
    """One step. Times are medians in milliseconds at equal load (the open loop); ``tokens_per_s``, ``cores``
    (that the server kept busy) and the cost are under full load (the closed loop), prompt tokens not counted.

    ``skipped``: why it was not measured; all else is then None.
    """

    name: str
    why: str
    command: str = ""
    skipped: str | None = None
    cores: float | None = None
    busy: float | None = None
    tokens_per_s: float | None = None
    dollars_per_million: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    full_load_e2e_ms: float | None = None
    cached_share: float | None = None
    failed: int = 0
    accuracy: Accuracy | None = None


class Journey(msgspec.Struct, kw_only=True):
    """The whole run. ``rate``: requests a second of the open loop, that the baseline sustains."""

    schema: str = SCHEMA
    created: str
    context: Context
    versions: dict[str, str]
    model: str
    seed: int
    settings: dict[str, Any]
    users: int
    rate: float | None = None
    price_per_hour: float
    price_source: str
    steps: list[StepResult] = msgspec.field(default_factory=list)
    promises: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def measured(self) -> list[StepResult]:
        """The steps that were."""
        return [step for step in self.steps if step.tokens_per_s is not None]


def fill(step: StepResult, full: StageResult, equal: StageResult | None, price_per_hour: float) -> None:
    """Take a step's numbers from its two loads. A load that answered nothing leaves its numbers out."""
    step.failed = sum(full.errors.values()) + (sum(equal.errors.values()) if equal else 0)
    if full.server is not None:
        step.cores, step.busy = full.server.cpu_cores, full.server.busy
    if full.completed and full.output_throughput.value > 0:
        step.tokens_per_s = full.output_throughput.value
        step.dollars_per_million = price_per_hour / 3600 / step.tokens_per_s * 1e6
        step.full_load_e2e_ms = full.e2e.p50 if full.e2e else None
        step.cached_share = full.cached_share
    if equal is not None and equal.completed:
        step.ttft_ms = equal.ttft.p50 if equal.ttft else None
        step.tpot_ms = equal.tpot.p50 if equal.tpot else None
        step.e2e_ms = equal.e2e.p50 if equal.e2e else None


def promises(steps: list[StepResult]) -> list[str]:
    """What became of −60% cost and five times lower latency, a missed target as missed."""
    if len(steps) < 2:
        return []
    first, last = steps[0], steps[-1]
    found = []
    if first.dollars_per_million and last.dollars_per_million:
        saved = 1 - last.dollars_per_million / first.dollars_per_million
        found.append(
            f"cost: {-saved:+.0%} after all steps (target {-COST_TARGET:+.0%}): "
            f"{'reached' if saved >= COST_TARGET else 'MISSED'}"
        )
    for name, before, after in (
        ("end-to-end latency", first.e2e_ms, last.e2e_ms),
        ("time to first token", first.ttft_ms, last.ttft_ms),
    ):
        if before and after:
            times = before / after
            found.append(
                f"{name} at equal load, p50: {times:.1f} times lower (target {LATENCY_TARGET:g}): "
                f"{'reached' if times >= LATENCY_TARGET else 'MISSED'}"
            )
    return found
