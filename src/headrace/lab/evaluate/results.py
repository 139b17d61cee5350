"""What an evaluation found, as it is written to a file and read back."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import ConfigError
from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.statistics import Comparison, Estimate, compare, compare_amounts, mean


class Judgement(BaseModel):
    """What a judge said to one rubric, word for word and in order, and how it was understood.

    ``passed`` is None if it could not be understood or did not come; ``problem`` says why.
    """

    model_config = ConfigDict(extra="forbid")

    rubric: str
    said: list[str]
    score: int | None = None
    passed: bool | None = None
    problem: str | None = None


class Item(BaseModel):
    """One question's scores (1 = right); none if it was not judged. ``answer`` and ``tokens`` are of
    generated answers, ``remark`` says how executed code ended."""

    model_config = ConfigDict(extra="forbid")

    id: str
    scores: dict[str, float]
    answer: str | None = None
    tokens: float | None = None  # a mean where the question was asked several times
    remark: str | None = None
    judged: list[Judgement] | None = None


class Ordering(BaseModel):
    """A suite with one draw of examples before its questions; ``difference`` is paired, to the reference."""

    model_config = ConfigDict(extra="forbid")

    metrics: dict[str, Estimate]
    difference: dict[str, Estimate] | None
    items: list[Item]
    reference_items: list[Item] | None


class Spread(BaseModel):
    """How far a score depends on which examples are shown, over several draws of them.

    ``sd``: the standard deviation between draws, with its standard error ``sd / sqrt(2 (n - 1))`` (of normal
    values); None with one draw. ``low``, ``high``: the lowest and the highest score of a draw.
    """

    model_config = ConfigDict(extra="forbid")

    sd: Estimate | None
    low: float
    high: float


class ItemsResult(BaseModel):
    """A suite of questions: mean scores by metric and, with a reference, paired comparisons.

    ``output_tokens``: the answers' mean length, and its paired difference to the reference's. With examples,
    items are means over ``orderings``, ``spread`` is that of the score, ``spread_against`` that of the
    difference to the reference. ``not_judged``: ids of the cases of which an answer has no score, the
    model's or the reference's.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["choice", "generation", "harness"]
    metrics: dict[str, Estimate]
    against: dict[str, Comparison] | None = None
    output_tokens: Estimate | None = None
    output_tokens_drift: Comparison | None = None
    spread: dict[str, Spread] | None = None
    spread_against: dict[str, Spread] | None = None
    not_judged: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    items: list[Item]
    reference_items: list[Item] | None = None
    orderings: list[Ordering] | None = None


def items_result(
    kind: Literal["choice", "generation", "harness"],
    items: list[Item],
    reference: list[Item] | None,
    *,
    seed: int,
    notes: Sequence[str] = (),
) -> ItemsResult:
    """Means over the items and, with the reference's items in the same order, paired comparisons.

    Items without scores count in no mean, and in no comparison if either side has none.
    """
    scored = [item for item in items if item.scores]
    names = list(scored[0].scores) if scored else []
    result = ItemsResult(
        kind=kind,
        metrics={name: mean([item.scores[name] for item in scored]) for name in names},
        not_judged=[
            item.id
            for index, item in enumerate(items)
            if not item.scores or (reference is not None and not reference[index].scores)
        ],
        notes=list(notes),
        items=items,
    )
    lengths = [item.tokens for item in items if item.tokens is not None]
    if len(lengths) == len(items):
        result.output_tokens = mean(lengths)
    if reference is not None:
        result.reference_items = reference
        pairs = [
            (ours, theirs)
            for ours, theirs in zip(items, reference, strict=True)
            if ours.scores and theirs.scores
        ]
        if pairs:
            result.against = {
                name: compare(
                    [a.scores[name] for a, _ in pairs], [b.scores[name] for _, b in pairs], seed=seed
                )
                for name in names
            }
        theirs = [item.tokens for item in reference if item.tokens is not None]
        if len(theirs) == len(lengths) == len(items):
            result.output_tokens_drift = compare_amounts(lengths, theirs, seed=seed)
    return result


def orderings_result(
    kind: Literal["choice", "generation"],
    rounds: Sequence[list[Item]],
    reference: Sequence[list[Item]] | None,
    *,
    seed: int,
) -> ItemsResult:
    """As :func:`items_result`, of the same questions asked with several draws of examples before them.

    The standard error is over questions, whose scores are means over the draws; the spread is over draws.
    """
    averaged = _averaged(rounds)
    result = items_result(kind, averaged, None if reference is None else _averaged(reference), seed=seed)
    result.orderings = [
        _ordering(items, None if reference is None else reference[index])
        for index, items in enumerate(rounds)
    ]
    result.spread = {
        name: _spread([one.metrics[name].value for one in result.orderings]) for name in result.metrics
    }
    if reference is not None:
        result.spread_against = {
            name: _spread([one.difference[name].value for one in result.orderings if one.difference])
            for name in result.metrics
        }
    return result


def _ordering(items: list[Item], reference: list[Item] | None) -> Ordering:
    ours = {name: [item.scores[name] for item in items] for name in items[0].scores}
    difference = None
    if reference is not None:
        difference = {
            name: mean([a - item.scores[name] for a, item in zip(values, reference, strict=True)])
            for name, values in ours.items()
        }
    metrics = {name: mean(values) for name, values in ours.items()}
    return Ordering(metrics=metrics, difference=difference, items=items, reference_items=reference)


def _averaged(rounds: Sequence[list[Item]]) -> list[Item]:
    averaged = []
    for same in zip(*rounds, strict=True):
        scores = {name: sum(item.scores[name] for item in same) / len(same) for name in same[0].scores}
        lengths = [item.tokens for item in same if item.tokens is not None]
        tokens = sum(lengths) / len(lengths) if len(lengths) == len(same) else None
        averaged.append(Item(id=same[0].id, scores=scores, tokens=tokens))
    return averaged


def _spread(values: Sequence[float]) -> Spread:
    count = len(values)
    sd = None
    if count > 1:
        value = statistics.stdev(values)
        sd = Estimate(value=value, se=value / math.sqrt(2 * (count - 1)), n=count)
    return Spread(sd=sd, low=min(values), high=max(values))


class ModelContext(BaseModel):
    """Which model, and how it was run. ``fingerprint`` identifies its files; None behind an endpoint."""

    model_config = ConfigDict(extra="forbid")

    reference: str
    fingerprint: str | None
    tokenizer: str | None
    quantization: str | None
    kv_cache_dtype: str = "auto"
    backend: str
    device: str


class Context(BaseModel):
    """Everything that the results depend on beside each suite's own settings, and where they came from."""

    model_config = ConfigDict(extra="forbid")

    headrace: str
    python: str
    numpy: str
    machine: str
    isa: str | None  # kernel path of the cpu backend
    cpus: int
    endpoint: str | None
    model: ModelContext
    against: ModelContext | None
    limit: int | None
    seed: int


class SuiteRecord(BaseModel):
    """One finished suite: with what settings, what it found, and how long it took."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    seconds: float
    result: Annotated[TextResult | ItemsResult, Field(union_mode="left_to_right")]


class Report(BaseModel):
    """A file of results; ``suites`` in the order in which they were finished."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["headrace-eval/1"] = "headrace-eval/1"
    started: str  # ISO 8601, UTC
    context: Context
    suites: dict[str, SuiteRecord] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file; a reader sees the old one or the new one, whole."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(self.model_dump_json(indent=1) + "\n", "utf-8")
        unfinished.replace(path)


def read_report(path: Path) -> Report | None:
    """The report at ``path``, or None if there is none. Raises ConfigError if it is something else."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise ConfigError(
            f"{path} is not a file of `headrace eval` results: name another with --output, or remove it."
        ) from None


def differences(before: Context, now: Context) -> list[str]:
    """What of two contexts is not the same, as ``field: old, now new``."""
    old, new = before.model_dump(), now.model_dump()
    return [f"{key}: {_shown(old[key])}, now {_shown(new[key])}" for key in old if old[key] != new[key]]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
