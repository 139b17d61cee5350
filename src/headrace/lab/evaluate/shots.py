"""Examples before a question: which they are, and in which order, drawn anew for each ordering."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from headrace.errors import ConfigError
from headrace.lab.evaluate.choices import Choice
from headrace.lab.evaluate.questions import Question

HELD_BACK = 20
"""Questions of a generation suite that are examples only, so that no example is ever asked."""


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


One = TypeVar("One", bound=_Identified)


def choices_with_examples(cases: Sequence[Choice], pool: Sequence[Choice], draw: Draw) -> list[Choice]:
    """The cases, each after the right continuations of ``draw.shots`` others."""
    examples = draw.examples(cases, pool)
    return [
        dataclasses.replace(
            case,
            context="".join(f"{one.context}{one.continuations[one.right]}\n\n" for one in others)
            + case.context,
        )
        for case, others in zip(cases, examples, strict=True)
    ]


def questions_with_examples(
    questions: Sequence[Question], pool: Sequence[Question], draw: Draw
) -> list[Question]:
    """The questions, each after ``draw.shots`` others with their solutions."""
    examples = draw.examples(questions, pool)
    return [
        dataclasses.replace(question, examples=tuple((one.prompt, one.solution or "") for one in others))
        for question, others in zip(questions, examples, strict=True)
    ]


def split(questions: Sequence[Question], limit: int | None) -> tuple[list[Question], list[Question]]:
    """The questions to ask, ``limit`` at most, and those that are examples only."""
    asked = max(1, len(questions) - HELD_BACK)
    if limit is not None:
        asked = min(asked, limit)
    return list(questions[:asked]), list(questions[asked:])


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One draw of ``shots`` examples: the same ``seed`` and ``ordering`` draw the same, for every model."""

    shots: int
    seed: int
    ordering: int

    def examples(self, asked: Sequence[One], pool: Sequence[One]) -> list[list[One]]:
        """For each that is asked the first of the shuffled pool, never itself.

        Raises ConfigError if the pool is too small.
        """
        shuffled = random.Random(f"{self.seed} {self.ordering}").sample(list(pool), len(pool))
        found = [[one for one in shuffled if one.id != it.id][: self.shots] for it in asked]
        if any(len(examples) < self.shots for examples in found):
            raise ConfigError(
                f"{self.shots} examples are wanted, there are {min(map(len, found))}: choose fewer --shots."
            )
        return found
