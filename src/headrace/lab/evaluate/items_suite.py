"""Suites of questions: each model answers or scores them all, with and without examples before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.lab.evaluate import humaneval
from headrace.lab.evaluate.answers import ask
from headrace.lab.evaluate.choices import CHOICE_SUITES, PACKAGE, VERSION, score_choices
from headrace.lab.evaluate.judge import Judge
from headrace.lab.evaluate.models import Candidate, Models
from headrace.lab.evaluate.own_suite import OwnSuite
from headrace.lab.evaluate.questions import GENERATION_SUITES, Question
from headrace.lab.evaluate.results import Item, ItemsResult, items_result, orderings_result
from headrace.lab.evaluate.sandbox import Isolation, require
from headrace.lab.evaluate.shots import Draw, choices_with_examples, questions_with_examples, split
from headrace.model.store import Progress

HUMANEVAL = "humaneval"
SHOT_SUITES = (*CHOICE_SUITES, "gsm8k", "arithmetic")
"""Suites whose questions can have examples before them."""
CHOICE_CONTEXT = 1024
"""Tokens of question and answer together; longer questions lose their beginning. Four times with examples."""
_FLOOR = 0.1


@dataclass(frozen=True, slots=True)
class ItemsRunner:
    """Runs suites of questions on the model and, if there is one, its reference.

    ``limit``: questions per suite. ``hold_back``: some questions of generation suites are only examples.
    ``orderings``: draws of examples for each number of them.
    """

    models: Models
    limit: int | None
    seed: int
    hold_back: bool
    orderings: int
    progress: Progress
    downloads: Progress | None

    def choices(self, key: str, name: str, shots: int) -> ItemsResult:
        """Multiple choice. ``key`` is how progress calls it."""
        cases = CHOICE_SUITES[name](progress=self.downloads)
        asked = cases if self.limit is None else cases[: self.limit]
        draws = [choices_with_examples(asked, cases, draw) for draw in self._draws(shots)] or [asked]
        context = CHOICE_CONTEXT * (4 if shots else 1)

        def one(candidate: Candidate, index: int, advance: Callable[[int], None]) -> list[Item]:
            scorer = self.models.continuations(candidate, context)
            return score_choices(draws[index], scorer, candidate.tokenizer(), advance=advance)

        rounds, reference = self._rounds(key, len(draws), len(asked), one)
        if shots:
            return orderings_result("choice", rounds, reference, seed=self.seed)
        first = None if reference is None else reference[0]
        return items_result("choice", rounds[0], first, seed=self.seed)

    def questions(self, key: str, name: str, shots: int) -> ItemsResult:
        """One of the suites that generate."""
        reader = self.models.answerer(self.models.model)
        questions = GENERATION_SUITES[name](self.seed, reader, progress=self.downloads)
        if self.hold_back and name in SHOT_SUITES:
            asked, pool = split(questions, self.limit)
            draws = [questions_with_examples(asked, pool, draw) for draw in self._draws(shots)] or [asked]
        else:
            draws = [questions if self.limit is None else questions[: self.limit]]
        result = self._ask(key, draws, averaged=shots > 0)
        low = [metric for metric, score in result.metrics.items() if score.value < _FLOOR]
        if low and name == "gsm8k":
            result.notes.append(
                f"{' and '.join(low)} near the floor: a model this small cannot show a loss here. "
                "Judge it by KL and by flips."
            )
        return result

    def code(self, isolation: Isolation) -> ItemsResult:
        """HumanEval, its programs executed. Raises SandboxError before anything is asked if it cannot be."""
        require(isolation)
        questions = humaneval.humaneval(isolation, progress=self.downloads)
        return self._ask(HUMANEVAL, [questions if self.limit is None else questions[: self.limit]])

    def own(self, suite: OwnSuite) -> ItemsResult:
        """A suite of the user's."""
        judge = None if suite.judge is None else Judge(suite.judge)
        questions = suite.questions if self.limit is None else suite.questions[: self.limit]
        try:
            result = self._ask(suite.name, [questions], judge)
        finally:
            if judge is not None:
                judge.close()
        if result.not_judged:
            said = next(
                verdict.problem
                for item in [*result.items, *(result.reference_items or [])]
                for verdict in item.judged or []
                if verdict.problem is not None
            )
            result.notes.append(
                f"{len(result.not_judged)} of {len(result.items)} cases were not judged and count nowhere "
                f"({', '.join(result.not_judged)}): {said}"
            )
        return result

    def _ask(
        self, key: str, draws: Sequence[list[Question]], judge: Judge | None = None, *, averaged: bool = False
    ) -> ItemsResult:
        def one(candidate: Candidate, index: int, advance: Callable[[int], None]) -> list[Item]:
            return ask(draws[index], self.models.answerer(candidate), judge, advance=advance)

        rounds, reference = self._rounds(key, len(draws), len(draws[0]), one)
        if averaged:
            return orderings_result("generation", rounds, reference, seed=self.seed)
        first = None if reference is None else reference[0]
        return items_result("generation", rounds[0], first, seed=self.seed)

    def _draws(self, shots: int) -> list[Draw]:
        return [Draw(shots, self.seed, index) for index in range(self.orderings)] if shots else []

    def _rounds(
        self,
        key: str,
        draws: int,
        items: int,
        one: Callable[[Candidate, int, Callable[[int], None]], list[Item]],
    ) -> tuple[list[list[Item]], list[list[Item]] | None]:
        """Every draw by the model, then every draw by the reference: each is loaded once."""
        candidates = [self.models.model]
        if self.models.reference is not None:
            candidates.append(self.models.reference)
        done, total = 0, len(candidates) * draws * items
        self.progress(key, done, total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(key, done, total)

        found = [[one(candidate, index, advance) for index in range(draws)] for candidate in candidates]
        return found[0], found[1] if len(found) > 1 else None


def data_of(name: str) -> str:
    """Where a built-in suite's questions come from."""
    if name == HUMANEVAL:
        return f"{humaneval.PACKAGE} {humaneval.VERSION}"
    return f"{PACKAGE} {VERSION}" if name in CHOICE_SUITES or name == "gsm8k" else "generated"
