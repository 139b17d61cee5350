"""What a search found, as its file keeps it and its tables show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.lab.bench.context import Context
from headrace.lab.bench.table import duration
from headrace.lab.tune.accuracy import Judged
from headrace.lab.tune.confirm import Confirmed
from headrace.lab.tune.effects import Effect, additive
from headrace.lab.tune.measurement import Measurement, Trial
from headrace.lab.tune.switches import Choice, Dimension, changes

SCHEMA = "headrace-tune/1"


class Outcome(msgspec.Struct, kw_only=True):
    """A search so far. ``about``: what it depends on; ``switches``: the choices of each, the default first;
    ``goal``: what ``value`` is. ``serve``: options that every server got. ``best``: number of the best trial.
    ``chosen``: the configuration of best.yaml, as serve options; ``chosen_why`` says why this one.
    """

    schema: str = SCHEMA
    created: str
    about: dict[str, Any]
    context: Context
    workload: str
    slo: str | None
    goal: str
    switches: dict[str, list[str]]
    serve: dict[str, Any]
    judged: list[Judged]
    trials: list[Trial]
    best: int | None
    confirmed: Confirmed | None
    chosen: dict[str, Any]
    chosen_why: str
    interrupted: bool
    seconds: float

    @property
    def dimensions(self) -> list[Dimension]:
        """The switches by their labels, without what they turn into."""
        return [Dimension(name, tuple(map(Choice, labels))) for name, labels in self.switches.items()]


TRIAL_COLUMNS = (
    "#",
    "configuration",
    "tok/s",
    "TTFT p50",
    "TTFT p95",
    "TPOT p50",
    "TPOT p95",
    "busy",
    "memory",
)


def trial_columns(outcome: Outcome) -> list[str]:
    """The header of ``trial_rows``."""
    return [*TRIAL_COLUMNS, *(["goodput (SLO met)"] if outcome.slo else []), ""]


def trial_rows(outcome: Outcome) -> list[list[str]]:
    """One row a trial, best first, then the ended ones, then the failed ones."""
    order = {"measured": 0, "pruned": 1, "failed": 2}
    ranked = sorted(outcome.trials, key=lambda t: (order[t.state], -_value(t), t.number))
    return [_trial_row(outcome, trial) for trial in ranked]


def _value(trial: Trial) -> float:
    return 0.0 if trial.measurement is None else trial.measurement.value


def _trial_row(outcome: Outcome, trial: Trial) -> list[str]:
    name = changes(outcome.dimensions, trial.config)
    found = trial.measurement
    if found is None:
        empty = [""] * (len(trial_columns(outcome)) - 3)
        return [str(trial.number), name, *empty, f"failed: {trial.error}"]
    cells = [
        str(trial.number),
        name,
        f"{found.throughput:.1f}",
        *(_time(ms) for ms in (found.ttft_p50_ms, found.ttft_p95_ms, found.tpot_p50_ms, found.tpot_p95_ms)),
        "–" if found.busy is None else f"{found.busy:.0%}",
        "–" if found.memory_bytes is None else f"{found.memory_bytes / 2**20:.0f} MiB",
    ]
    if outcome.slo:
        met = "–" if found.slo_attainment is None else f"{found.slo_attainment:.0%}"
        cells.append("–" if found.goodput is None else f"{found.goodput:.2f}/s ({met})")
    notes = []
    if trial.number == outcome.best:
        notes.append("best")
    if not found.whole:
        notes.append(f"ended after part {len(found.parts)}")
    if found.failed:
        notes.append(f"{found.failed} requests failed")
    return [*cells, ", ".join(notes)]


def _time(ms: float | None) -> str:
    return "–" if ms is None else duration(ms)


_METRICS: dict[str, Callable[[Measurement], float | None]] = {
    "throughput": lambda m: _log(m.throughput),
    "TTFT p50": lambda m: _log(m.ttft_p50_ms),
    "TPOT p50": lambda m: _log(m.tpot_p50_ms),
}


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


def effect_columns(outcome: Outcome) -> list[str]:
    """The header of ``effect_rows``."""
    return ["switch", "choice", *_METRICS, *(["SLO met"] if outcome.slo else []), "trials"]


def effect_rows(outcome: Outcome) -> list[list[str]]:
    """One row a choice that was tried, against its switch's default: the change of each metric in percent
    (of the share that meets the SLO: in points), ± its standard error.
    """
    metrics = dict(_METRICS)
    if outcome.slo:
        metrics["SLO met"] = lambda m: m.slo_attainment
    fits = {name: _fit(outcome, metric) for name, metric in metrics.items()}
    rows = []
    for dimension in outcome.dimensions:
        for choice in dimension.choices[1:]:
            found = {name: fit.get((dimension.name, choice.label)) for name, fit in fits.items()}
            trials = max((effect.trials for effect in found.values() if effect is not None), default=0)
            if trials:
                cells = [_change(effect, name == "SLO met") for name, effect in found.items()]
                rows.append([dimension.name, choice.label, *cells, str(trials)])
    return rows


def _fit(outcome: Outcome, metric: Callable[[Measurement], float | None]) -> Mapping[tuple[str, str], Effect]:
    found = [
        (trial.config, value)
        for trial in outcome.trials
        if trial.measurement is not None and (value := metric(trial.measurement)) is not None
    ]
    if not found:
        return {}
    configs, values = zip(*found, strict=True)
    return {(e.switch, e.label): e for e in additive(outcome.dimensions, configs, values)}


def _change(effect: Effect | None, points: bool) -> str:
    if effect is None:
        return "–"
    if points:
        error = "" if effect.se is None else f" ± {100 * effect.se:.0f}"
        return f"{100 * effect.size:+.0f}{error} points"
    factor = math.exp(effect.size)
    error = "" if effect.se is None else f" ± {100 * factor * effect.se:.0f}"
    return f"{100 * (factor - 1):+.0f}{error}%"


def in_words(trial: Trial) -> str:
    """What a trial measured, on one line."""
    found = trial.measurement
    if found is None:
        return trial.error
    times = {"TTFT p95": found.ttft_p95_ms, "TPOT p95": found.tpot_p95_ms}
    parts = [f"{found.throughput:.1f} output tokens/s"]
    if found.goodput is not None and found.slo_attainment is not None:
        parts.append(f"{found.goodput:.2f} requests/s meet the SLO ({found.slo_attainment:.0%})")
    parts += [f"{name} {duration(ms)}" for name, ms in times.items() if ms is not None]
    parts += [] if found.busy is None else [f"engine busy {found.busy:.0%}"]
    parts += [] if found.memory_bytes is None else [f"{found.memory_bytes / 2**20:.0f} MiB"]
    return ", ".join(parts)


def headline(outcome: Outcome) -> str:
    """What came of it, in one sentence."""
    best = next((trial for trial in outcome.trials if trial.number == outcome.best), None)
    if best is None or best.measurement is None:
        return "nothing was measured to the end"
    name = changes(outcome.dimensions, best.config)
    measured = sum(trial.state != "failed" for trial in outcome.trials)
    if name == "defaults":
        others = "no other configuration was tried" if measured == 1 else f"the best of {measured} tried"
        return f"the defaults serve this workload best: {others}"
    confirmed = outcome.confirmed
    if confirmed is None:
        return f"{name} measured best, and was not measured again against the defaults"
    if confirmed.gain is None:
        return f"{name}: the defaults have no {outcome.goal} to compare with"
    gain = confirmed.gain
    interval = f"{gain.value:.2f} × the defaults' {outcome.goal} (95%: {gain.low:.2f} … {gain.high:.2f})"
    if confirmed.better:
        return f"{name}: {interval}"
    return f"no evidence that anything beats the defaults: the best trial, {name}, has {interval}"


def notes(outcome: Outcome) -> list[str]:
    """What has to be said beside the tables."""
    found = [str(judged) for judged in outcome.judged]
    if outcome.slo and not any(_value(trial) > 0 for trial in outcome.trials):
        found.append(f"no configuration meets {outcome.slo}: trials are ranked by throughput")
    if outcome.interrupted:
        found.append("interrupted: the same command goes on from here")
    return found
