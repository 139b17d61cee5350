"""What an evaluation found, as it is written to a file and read back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import ConfigError
from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.statistics import Comparison, Estimate, compare, mean


class Item(BaseModel):
    """One question's scores (1 = right). ``answer`` and ``tokens`` are of generated answers."""

    model_config = ConfigDict(extra="forbid")

    id: str
    scores: dict[str, float]
    answer: str | None = None
    tokens: int | None = None


class ItemsResult(BaseModel):
    """A suite of questions: mean scores by metric and, with a reference, paired comparisons.

    ``output_tokens``: the answers' mean length, and its paired difference to the reference's.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["choice", "generation"]
    metrics: dict[str, Estimate]
    against: dict[str, Comparison] | None = None
    output_tokens: Estimate | None = None
    output_tokens_drift: Estimate | None = None
    notes: list[str] = Field(default_factory=list)
    items: list[Item]
    reference_items: list[Item] | None = None


def items_result(
    kind: Literal["choice", "generation"],
    items: list[Item],
    reference: list[Item] | None,
    *,
    seed: int,
    notes: Sequence[str] = (),
) -> ItemsResult:
    """Means over the items and, with the reference's items in the same order, paired comparisons."""
    names = list(items[0].scores)
    ours = {name: [item.scores[name] for item in items] for name in names}
    result = ItemsResult(
        kind=kind,
        metrics={name: mean(values) for name, values in ours.items()},
        notes=list(notes),
        items=items,
    )
    lengths = [item.tokens for item in items if item.tokens is not None]
    if len(lengths) == len(items):
        result.output_tokens = mean(lengths)
    if reference is not None:
        result.reference_items = reference
        result.against = {
            name: compare(values, [item.scores[name] for item in reference], seed=seed)
            for name, values in ours.items()
        }
        theirs = [item.tokens for item in reference if item.tokens is not None]
        if len(theirs) == len(lengths) == len(items):
            result.output_tokens_drift = mean([a - b for a, b in zip(lengths, theirs, strict=True)])
    return result


class ModelContext(BaseModel):
    """Which model, and how it was run. ``fingerprint`` identifies its files; None behind an endpoint."""

    model_config = ConfigDict(extra="forbid")

    reference: str
    fingerprint: str | None
    tokenizer: str | None
    quantization: str | None
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
