"""An evaluation: which suites on which models, one after the other, each kept as soon as it is finished."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from headrace import __version__
from headrace.errors import ConfigError
from headrace.lab.evaluate.answers import ask
from headrace.lab.evaluate.choices import CHOICE_SUITES, PACKAGE, VERSION, score_choices
from headrace.lab.evaluate.divergence import (
    DEFAULT_CONTEXT,
    Convention,
    LogProbs,
    TextResult,
    Window,
    measure,
    windows_of,
)
from headrace.lab.evaluate.models import FLOAT32, Models
from headrace.lab.evaluate.questions import GENERATION_SUITES, Question, read_suite
from headrace.lab.evaluate.reference_file import ReferenceFile, about, write
from headrace.lab.evaluate.results import (
    Context,
    ItemsResult,
    Report,
    SuiteRecord,
    differences,
    items_result,
    read_report,
)
from headrace.lab.evaluate.texts import SHAKESPEARE, Text, leading_bos, load_text, tokenise
from headrace.model.store import Progress

PERPLEXITY = "perplexity"
SUITES = (PERPLEXITY, *CHOICE_SUITES, *GENERATION_SUITES)
DEFAULT_SUITES = (PERPLEXITY, "hellaswag", "truthfulqa")
_FLOOR = 0.1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be evaluated. Sizes are in tokens; ``limit`` is questions per suite."""

    model: str
    against: str | None = None  # a model reference, or "float32": the same files on the torch backend
    suites: tuple[str, ...] = DEFAULT_SUITES
    texts: tuple[str, ...] = (SHAKESPEARE,)
    convention: Convention = "windows"
    context_length: int | None = None  # of perplexity; None = the convention's
    tokens: int = 8192
    limit: int | None = None
    seed: int = 0
    quantization: Literal["int8", "int4"] | None = None
    backend: Literal["cpu", "torch"] = "cpu"
    device: str = "cpu"
    threads: int = 0
    endpoint: str | None = None
    reference_logits: Path | None = None


@dataclass(slots=True)
class Evaluation:
    """Run it with :meth:`run`; ``report`` holds what is finished, whatever happens.

    ``output`` is written after every suite; what it holds already of the same evaluation is not run again.
    ``progress`` is told the suite, items done, and items in all; ``downloads`` of what is fetched.
    """

    settings: Settings
    output: Path | None = None
    progress: Progress = lambda suite, done, total: None
    downloads: Progress | None = None
    overwrite: bool = False
    report: Report = field(init=False)
    reused: list[str] = field(init=False, default_factory=list)
    _models: Models = field(init=False)
    _own: dict[str, tuple[str, list[Question]]] = field(init=False)  # the user's suites, by their paths

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other, and what finding the models raises."""
        settings = self.settings
        _check(settings)
        self._own = {name: read_suite(Path(name)) for name in settings.suites if name not in SUITES}
        names = list(SUITES)
        for path, (own, _) in self._own.items():
            if own in names:
                raise ConfigError(f"{path}: another suite is called {own!r} already; choose another name.")
            names.append(own)
        self._models = Models(
            settings.model,
            settings.against,
            quantization=settings.quantization,
            backend=settings.backend,
            device=settings.device,
            threads=settings.threads,
            endpoint=settings.endpoint,
            downloads=self.downloads,
        )
        context = Context(
            headrace=__version__,
            python=platform.python_version(),
            numpy=np.__version__,
            machine=f"{platform.system()} {platform.machine()}",
            isa=_isa(settings),
            cpus=os.cpu_count() or 1,
            endpoint=settings.endpoint,
            model=self._models.model.context(),
            against=None if self._models.reference is None else self._models.reference.context(),
            limit=settings.limit,
            seed=settings.seed,
        )
        self.report = self._begin(context)

    def suites(self) -> set[str]:
        """The names of all suites that the report will hold, those of an earlier run included."""
        chosen = {name for name in self.settings.suites if name in SUITES}
        return chosen | {own for own, _ in self._own.values()} | set(self.report.suites)

    def run(self) -> Report:
        """All suites, those that need no generation first. Raises what loading and running models raises."""
        try:
            for name in sorted(self.settings.suites, key=_order):
                self._run_suite(name)
        finally:
            self._models.close()
        return self.report

    def _begin(self, context: Context) -> Report:
        found = None if self.output is None or self.overwrite else read_report(self.output)
        if found is not None:
            if differing := differences(found.context, context):
                raise ConfigError(
                    f"{self.output} holds another evaluation ({'; '.join(differing)}): name another file "
                    "with --output, or give --overwrite."
                )
            return found
        return Report(started=datetime.now(UTC).isoformat(timespec="seconds"), context=context)

    def _run_suite(self, name: str) -> None:
        key, settings, run = self._prepare(name)
        finished = self.report.suites.get(key)
        if finished is not None and finished.settings == settings:
            self.reused.append(key)
            return
        began = time.monotonic()
        self.report.suites.pop(key, None)
        result = run()
        self.report.suites[key] = SuiteRecord(
            settings=settings, seconds=round(time.monotonic() - began, 2), result=result
        )
        if self.output is not None:
            self.report.write(self.output)

    def _prepare(self, name: str) -> tuple[str, dict[str, Any], Callable[[], TextResult | ItemsResult]]:
        """The suite's name in the report, the settings that its result depends on, and how to run it."""
        if name == PERPLEXITY:
            text = load_text(self.settings.texts, progress=self.downloads)
            convention = self.settings.convention
            usual = min(DEFAULT_CONTEXT[convention], self._models.model.max_positions())
            context_length = self.settings.context_length or usual
            settings = {
                "text": text.name,
                "convention": convention,
                "context_length": context_length,
                "tokens": self.settings.tokens,
                "reference_logits": _identity(self.settings.reference_logits),
            }
            return name, settings, lambda: self._perplexity(text, context_length)
        if name in CHOICE_SUITES:
            return name, {"data": f"{PACKAGE} {VERSION}"}, lambda: self._choices(name)
        if name in GENERATION_SUITES:
            return (
                name,
                {"data": f"{PACKAGE} {VERSION}" if name == "gsm8k" else "generated"},
                lambda: self._questions(name),
            )
        own, questions = self._own[name]
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
        return own, {"file": Path(name).name, "sha256": digest}, lambda: self._ask(own, questions)

    def _perplexity(self, text: Text, context_length: int) -> TextResult:
        settings, models = self.settings, self._models
        tokenizer = models.model.tokenizer()
        if models.reference is not None:
            models.require_same_tokenizer()
        token_ids = tokenise(text, tokenizer, settings.tokens)
        windows = windows_of(token_ids, settings.convention, context_length, leading_bos(tokenizer))
        scored = sum(window.scored for window in windows)
        model = models.scorer(models.model, context_length)
        reference: LogProbs | None = None
        named = None if models.reference is None else models.reference.identity()
        if settings.reference_logits is not None:
            reference = file = self._reference_file(settings.reference_logits, windows, context_length)
            named = file.about.reference
        elif models.reference is not None:
            reference = models.scorer(models.reference, context_length)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(PERPLEXITY, done, scored)

        perplexity, divergence = measure(windows, model, reference, advance=advance)
        return TextResult(
            convention=settings.convention,
            context_length=context_length,
            tokenizer=tokenizer.fingerprint,
            windows=len(windows),
            perplexity=perplexity,
            reference=named,
            divergence=divergence,
        )

    def _reference_file(self, path: Path, windows: list[Window], context_length: int) -> ReferenceFile:
        """The file of the reference's logits, which is written first if it does not exist."""
        models = self._models
        wanted = about(
            windows,
            tokenizer=models.model.tokenizer().fingerprint,
            vocab_size=models.model.vocab_size(),
            reference="" if models.reference is None else models.reference.identity(),
        )
        if not path.exists():
            assert models.reference is not None  # see _check
            done = 0
            scorer = models.scorer(models.reference, context_length)
            for rows in write(path, wanted, windows, scorer):
                done += rows
                self.progress("reference logits", done, wanted.rows)
        found = ReferenceFile(path)
        found.require(wanted, path, any_reference=models.reference is None)
        return found

    def _choices(self, name: str) -> ItemsResult:
        cases = self._limited(CHOICE_SUITES[name](progress=self.downloads))
        models = self._models
        rounds = [models.model] + ([] if models.reference is None else [models.reference])
        found = []
        for index, one in enumerate(rounds):
            advance = self._advance(name, index * len(cases), len(rounds) * len(cases))
            scorer = models.scorer(one, CHOICE_CONTEXT)
            found.append(score_choices(cases, scorer, one.tokenizer(), advance=advance))
        return items_result("choice", found[0], found[1] if len(found) > 1 else None, seed=self.settings.seed)

    def _questions(self, name: str) -> ItemsResult:
        reader = self._models.answerer(self._models.model)
        questions = GENERATION_SUITES[name](self.settings.seed, reader, progress=self.downloads)
        return self._ask(name, questions)

    def _ask(self, name: str, questions: list[Question]) -> ItemsResult:
        questions = self._limited(questions)
        models = self._models
        rounds = [models.model] + ([] if models.reference is None else [models.reference])
        found = []
        for index, one in enumerate(rounds):
            advance = self._advance(name, index * len(questions), len(rounds) * len(questions))
            found.append(ask(questions, models.answerer(one), advance=advance))
        result = items_result(
            "generation", found[0], found[1] if len(found) > 1 else None, seed=self.settings.seed
        )
        low = [metric for metric, score in result.metrics.items() if score.value < _FLOOR]
        if low and name == "gsm8k":
            result.notes.append(
                f"{' and '.join(low)} near the floor: a model this small cannot show a loss here. "
                "Judge it by KL and by flips."
            )
        return result

    def _limited(self, items: list[T]) -> list[T]:
        return items if self.settings.limit is None else items[: self.settings.limit]

    def _advance(self, name: str, before: int, total: int) -> Callable[[int], None]:
        done = before
        self.progress(name, done, total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(name, done, total)

        return advance


CHOICE_CONTEXT = 1024
"""Tokens of question and answer together; longer questions lose their beginning."""


def _check(settings: Settings) -> None:
    for name in settings.suites:
        if name not in SUITES and not name.lower().endswith((".yaml", ".yml")):
            raise ConfigError(
                f"There is no suite {name!r}: choose of {', '.join(SUITES)}, or name a YAML file of your own."
            )
    if not settings.suites:
        raise ConfigError("No suite was chosen.")
    if settings.endpoint is not None:
        scored = [name for name in settings.suites if name == PERPLEXITY or name in CHOICE_SUITES]
        if scored:
            raise ConfigError(
                f"An endpoint gives no log-probabilities of given text, which {', '.join(scored)} need: "
                f"choose --suite of {', '.join(GENERATION_SUITES)}, or a YAML file of your own."
            )
        if settings.against == FLOAT32:
            raise ConfigError("With --endpoint, --against names another model of that endpoint.")
    if settings.reference_logits is not None and PERPLEXITY not in settings.suites:
        raise ConfigError("--reference-logits is used by the suite perplexity, which was not chosen.")
    logits = settings.reference_logits
    if logits is not None and settings.against is None and not logits.exists():
        raise ConfigError(f"{logits} does not exist; --against REF says which model's logits to put there.")


def _isa(settings: Settings) -> str | None:
    if settings.endpoint is not None or settings.backend != "cpu":
        return None
    from headrace.backend.cpu.runner import chosen_isa

    return chosen_isa()


def _order(name: str) -> int:
    """Scoring first: its models and those that generate are not in memory at the same time."""
    return 0 if name == PERPLEXITY else 1 if name in CHOICE_SUITES else 2


def _identity(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
