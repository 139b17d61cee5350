"""Did it help? Two measurements, metric by metric, with intervals and a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.lab.bench import bootstrap
from headrace.lab.bench.bootstrap import Array, Statistic
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.records import Record
from headrace.lab.bench.result import Result, ResultError
from headrace.lab.bench.slices import edges, token_rates
from headrace.lab.bench.slo import SLO

Verdict = Literal["better", "worse", "no evidence"]

MIN_EFFECT = 0.03
"""Smallest relative change that a verdict needs: runs of one program differ by as much."""
_FEWEST = 8  # requests of either side below which nothing is said
_CLOCK_MS = 0.1  # what an event loop can't tell apart
_SEED = 20
_REPEATS = 4000  # the tails of a Bonferroni interval lie far out


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one stage. ``low`` and ``high`` bound ``after − before`` at a confidence that allows for
    the number of metrics that are looked at (Bonferroni, 95% in all).
    """

    stage: str
    metric: str
    unit: str
    before: float
    after: float
    low: float
    high: float
    paired: bool
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """The change as a share of before."""
        return (self.after - self.before) / self.before if self.before else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``verdict``: worse if any metric is, else better if any is. ``notes``: what else differs."""

    differences: list[Difference]
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        """Over all metrics."""
        verdicts = {difference.verdict for difference in self.differences}
        return "worse" if "worse" in verdicts else "better" if "better" in verdicts else "no evidence"


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    unit: str
    value: Callable[[Record], float | None]  # of one request; None: has none
    statistic: Statistic
    lower_is_better: bool
    only_answered: bool


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _metrics(with_tokens: bool, slo: SLO | None) -> list[_Metric]:
    found = [
        _Metric(f"{name} {label}", "ms", value, statistic, True, True)
        for name, value in (
            ("TTFT", lambda r: _ms(r.ttft_s)),
            ("TPOT", lambda r: _ms(r.tpot_s)),
            ("E2E", lambda r: _ms(r.e2e_s)),
        )
        for label, statistic in (("p50", bootstrap.percentile(50)), ("p95", bootstrap.percentile(95)))
        if with_tokens or name != "TPOT"
    ]
    found.append(_Metric("failed", "%", lambda r: 100.0 * (not r.ok), bootstrap.mean, True, False))
    if slo is not None:
        found.append(_Metric("SLO met", "%", lambda r: 100.0 * slo.met_by(r), bootstrap.mean, False, False))
    return found


def compare(before: Result, after: Result) -> Comparison:
    """Stage by stage, where both runs have the same. Paired by request when the workload is the same.

    Raises ResultError if no stage can be compared.
    """
    stages = {stage.label: stage for stage in after.stages}
    pairs = [(a, stages[a.label]) for a in before.stages if a.label in stages and a.requests]
    pairs = [(a, b) for a, b in pairs if b.requests]
    if not pairs:
        ours, theirs = (", ".join(s.label for s in r.stages) or "none" for r in (before, after))
        raise ResultError(f"the two runs have no stage in common: {ours} against {theirs}")
    notes = _notes(before, after)
    same_prompts = before.workload.hash == after.workload.hash
    with_tokens = {s.token_source for pair in pairs for s in pair} <= {"usage"} or (
        len({s.token_source for pair in pairs for s in pair}) == 1
    )
    if not with_tokens:
        notes.append("tokens were counted in different ways: TPOT and throughput are left out")
    metrics = _metrics(with_tokens, before.slo if before.slo == after.slo else None)
    confidence = 1 - 0.05 / ((len(metrics) + 1) * len(pairs))
    rng = np.random.default_rng(_SEED)
    found = []
    for a, b in pairs:
        for metric in metrics:
            difference = _difference(a, b, metric, same_prompts, confidence, rng)
            if difference is not None:
                found.append(difference)
        if with_tokens and a.completed and b.completed:
            found.append(_throughput(a, b, confidence, rng))
        if (
            a.cached_share is not None
            and b.cached_share is not None
            and abs(a.cached_share - b.cached_share) > 0.05
        ):
            shares = f"{a.cached_share:.0%} were cached before, {b.cached_share:.0%} after"
            same_server = before.settings.get("serve") == after.settings.get("serve")
            advice = "; restart the server between runs of one seed, or change --seed" if same_server else ""
            notes.append(f"{a.label}: of prompt tokens {shares}{advice}")
    if not found:
        raise ResultError("no metric has values in both runs: every request failed in one of them")
    return Comparison(found, notes)


def _difference(
    a: StageResult, b: StageResult, metric: _Metric, same: bool, confidence: float, rng: np.random.Generator
) -> Difference | None:
    left, right = _values(a, metric), _values(b, metric)
    both = sorted(left.keys() & right.keys())
    paired = same and len(both) >= 0.5 * max(len(left), len(right))
    if paired:
        left, right = {i: left[i] for i in both}, {i: right[i] for i in both}
    if not left or not right:
        return None
    x, y = np.asarray(list(left.values())), np.asarray(list(right.values()))
    return _told(a.label, metric, x, y, paired, confidence, rng)


def _throughput(a: StageResult, b: StageResult, confidence: float, rng: np.random.Generator) -> Difference:
    """Of slices of time, which have no partners in the other run."""
    metric = _Metric("output throughput", "tok/s", lambda record: None, bootstrap.mean, False, False)
    x, y = (token_rates(s.records, edges(s.window_begin_s, s.window_begin_s + s.window_s)) for s in (a, b))
    return _told(a.label, metric, x, y, False, confidence, rng)


def _told(
    stage: str, metric: _Metric, x: Array, y: Array, paired: bool, confidence: float, rng: np.random.Generator
) -> Difference:
    statistic = metric.statistic
    before, after = (float(statistic(values[None])[0]) for values in (x, y))
    if paired:
        draws = _paired(x, y, statistic, rng)
    else:
        draws = bootstrap.resampled(y, statistic, rng, _REPEATS) - bootstrap.resampled(
            x, statistic, rng, _REPEATS
        )
    low, high = bootstrap.interval(draws, confidence)
    verdict = _verdict(metric, before, after, low, high, min(len(x), len(y)))
    return Difference(stage, metric.name, metric.unit, before, after, low, high, paired, verdict)


def _values(stage: StageResult, metric: _Metric) -> dict[int, float]:
    return {
        record.index: value
        for record in stage.records
        if record.counts and (record.ok or not metric.only_answered)
        if (value := metric.value(record)) is not None
    }


def _paired(x: Array, y: Array, statistic: Statistic, rng: np.random.Generator) -> Array:
    """Differences over resamples that take the same requests on both sides."""
    blocks = 16
    parts = []
    for _ in range(blocks):
        picks = rng.integers(len(x), size=(_REPEATS // blocks, len(x)))
        parts.append(statistic(y[picks]) - statistic(x[picks]))
    return np.concatenate(parts)


def _verdict(metric: _Metric, before: float, after: float, low: float, high: float, count: int) -> Verdict:
    change = after - before
    least = 1.0 if metric.unit == "%" else MIN_EFFECT * abs(before)  # of shares: one point in a hundred
    if metric.unit == "ms":
        least = max(least, _CLOCK_MS)
    if count < _FEWEST or low <= 0 <= high or abs(change) < least:
        return "no evidence"
    return "better" if (change < 0) == metric.lower_is_better else "worse"


def _notes(before: Result, after: Result) -> list[str]:
    """What besides the change under test is not the same."""
    pairs = {
        "machine": (f"{before.context.machine}, {before.context.cpu}, {before.context.cores} cores",
                    f"{after.context.machine}, {after.context.cpu}, {after.context.cores} cores"),
        "headrace": (before.context.headrace, after.context.headrace),
        "model": (before.endpoint.model, after.endpoint.model),
        "workload": (f"{before.workload.description} ({before.workload.hash})",
                     f"{after.workload.description} ({after.workload.hash})"),
        "SLO": (str(before.slo or "none"), str(after.slo or "none")),
    }  # fmt: skip
    notes = [f"{name} differs: {old} → {new}" for name, (old, new) in pairs.items() if old != new]
    for name in sorted(before.settings.keys() | after.settings.keys()):
        old, new = before.settings.get(name), after.settings.get(name)
        if old != new and name != "command":
            notes.append(f"{name} differs: {old} → {new}")
    for side, result in (("before", before), ("after", after)):
        notes += [f"{side}: {warning}" for warning in result.warnings]
    return notes
