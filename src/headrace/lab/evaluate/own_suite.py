"""A suite of the user's own: a YAML file of prompts and of what their answers must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.lab.evaluate.checks import Check
from headrace.lab.evaluate.judge import JudgeSettings
from headrace.lab.evaluate.questions import Outcome, Question
from headrace.yaml_file import read_yaml


class Case(BaseModel):
    """One question of a user's suite: the answer must pass every check."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    prompt: str = Field(min_length=1)
    system: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    checks: list[Check] = Field(min_length=1)


class SuiteFile(BaseModel):
    """A user's suite. ``system`` and ``max_tokens`` hold for cases that do not say otherwise; ``judge`` is
    who is asked by checks of that name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    system: str | None = None
    max_tokens: int = Field(default=128, ge=1)
    judge: JudgeSettings | None = None
    cases: list[Case] = Field(min_length=1)

    @model_validator(mode="after")
    def _judged(self) -> SuiteFile:
        for number, case in enumerate(self.cases):
            if self.judge is None and any(check.judge is not None for check in case.checks):
                raise ValueError(
                    f"cases.{number} has a check of a judge: say who that is with `judge: {{endpoint: …, "
                    "model: …}` beside `cases`"
                )
        return self


@dataclass(frozen=True, slots=True)
class OwnSuite:
    """A suite as it was read. ``judge``: who is asked about rubrics, if there are any."""

    name: str
    questions: list[Question]
    judge: JudgeSettings | None


def read_suite(path: Path) -> OwnSuite:
    """A user's YAML suite; the metric is ``pass``. Raises ConfigError with the line of what is wrong."""
    suite = read_yaml(path, SuiteFile)
    questions = [
        Question(
            case.id or f"{suite.name}-{number}",
            case.prompt,
            case.max_tokens or suite.max_tokens,
            _all_pass(case.checks),
            suite.system if case.system is None else case.system,
            rubrics=tuple(check.judge for check in case.checks if check.judge is not None),
        )
        for number, case in enumerate(suite.cases, 1)
    ]
    return OwnSuite(suite.name, questions, suite.judge)


def _all_pass(checks: Sequence[Check]) -> Callable[[str], Outcome]:
    return lambda answer: Outcome({"pass": float(all(check.passes(answer) for check in checks))})
