"""What was measured, as it is written to the JSON file."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
from workloads import Workload


class Round(msgspec.Struct, kw_only=True):
    """One run. ``first_s``: to the first token; ``primed_s``: again with the same prefix."""

    seconds: float
    first_s: float | None = None
    primed_s: float | None = None


class Value(msgspec.Struct, kw_only=True):
    """The median of ``rounds`` runs, the lowest and the highest."""

    median: float
    low: float
    high: float
    rounds: int


class Measured(msgspec.Struct, kw_only=True):
    """One workload of one variant. ``values`` by name with its unit; the first is the main one.

    ``ratio``: how many times ours of the same precision is as fast (over 1: ours is faster).
    ``share``: of what the machine could do at most. ``note``: what a reader must know of it.
    """

    rounds: list[Round] = []
    values: dict[str, Value]
    weights_bytes: int = 0
    ratio: float | None = None
    share: float | None = None


class Accuracy(msgspec.Struct, kw_only=True):
    """Against float32 weights: mean KL divergence in nats and how often the likeliest token is the same."""

    positions: int
    kl_mean: float
    kl_max: float
    same_top1: float


class Row(msgspec.Struct, kw_only=True):
    """An engine with one format, and all that was measured with it."""

    engine: str
    format: str
    bits: int
    multiplies: str
    made_from: str
    version: str = ""
    weights_bytes: int = 0
    load_s: float | None = None
    greedy_ids: list[int] = []
    greedy_text: str = ""
    accuracy: Accuracy | None = None
    workloads: dict[str, Measured] = {}

    @property
    def name(self) -> str:
        """As options and tables write it."""
        return f"{self.engine}:{self.format}"


class Report(msgspec.Struct, kw_only=True):
    """A whole run. ``problems``: by what they befell, why something was not measured."""

    created: str
    command: str
    machine: dict[str, Any]
    model: str
    threads: int
    settings: dict[str, Any]
    limits: dict[str, Any]
    titles: dict[str, str] = {}
    rows: list[Row] = []
    problems: list[str] = []
    interrupted: bool = False


LOWER_IS_BETTER = ("s", "ms", "MB")


def lower_is_better(name: str) -> bool:
    """Whether a value of this name is a time or a size."""
    return name.rpartition(", ")[2] in LOWER_IS_BETTER


def value_of(samples: list[float]) -> Value:
    """Median and spread."""
    return Value(median=median(samples), low=min(samples), high=max(samples), rounds=len(samples))


def measured(workload: Workload, rounds: list[Round]) -> Measured:
    """The values that are told of a workload, from its runs."""
    seconds = [one.seconds for one in rounds]
    values: dict[str, Value] = {}
    if workload.measure == "decode":
        rates = [
            (workload.output - 1) / (one.seconds - one.first_s) for one in rounds if one.first_s is not None
        ]
        values["decode, tokens/s"] = value_of(rates)
        values["first token, ms"] = value_of([one.first_s * 1e3 for one in rounds if one.first_s is not None])
    elif workload.measure == "prefill":
        values["prefill, tokens/s"] = value_of([workload.prompt / one for one in seconds])
    elif workload.measure == "output":
        tokens = workload.requests * workload.output
        values["output, tokens/s"] = value_of([tokens / one for one in seconds])
    if workload.measure == "seconds":
        values["cold, s"] = value_of(seconds)
        values["primed, s"] = value_of([one.primed_s for one in rounds if one.primed_s is not None])
    else:
        values["end to end, s"] = value_of(seconds)
    return Measured(rounds=rounds, values=values)


def main_value(found: Measured) -> tuple[str, Value]:
    """The first of the values."""
    return next(iter(found.values.items()))


def set_ratios(rows: list[Row], ours: str) -> None:
    """Compare every result with ours of the same precision: the best of them in that workload."""
    for row in rows:
        for key, found in row.workloads.items():
            name, value = main_value(found)
            candidates = [
                main_value(other.workloads[key])[1].median
                for other in rows
                if other.engine == ours and other.bits == row.bits and key in other.workloads
            ]
            if not candidates or value.median <= 0:
                continue
            if lower_is_better(name):
                found.ratio = value.median / min(candidates)
            else:
                found.ratio = max(candidates) / value.median
