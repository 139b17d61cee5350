"""An evaluation: which suites on which models, one after the other, each kept as soon as it is finished."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace import __version__
from headrace.backend.kv_format import KVCacheDtype
from headrace.errors import ConfigError
from headrace.lab.evaluate.choices import CHOICE_SUITES
from headrace.lab.evaluate.divergence import DEFAULT_CONTEXT, Convention, TextResult
from headrace.lab.evaluate.items_suite import HUMANEVAL, SHOT_SUITES, ItemsRunner, data_of
from headrace.lab.evaluate.models import FLOAT32, Models
from headrace.lab.evaluate.own_suite import OwnSuite, read_suite
from headrace.lab.evaluate.questions import GENERATION_SUITES
from headrace.lab.evaluate.results import (
    Context,
    ItemsResult,
    Report,
    SuiteRecord,
    differences,
    read_report,
)
from headrace.lab.evaluate.sandbox import Isolation
from headrace.lab.evaluate.shots import HELD_BACK
from headrace.lab.evaluate.text_suite import PERPLEXITY, score_text
from headrace.lab.evaluate.texts import SHAKESPEARE, load_text
from headrace.model.store import Progress

SUITES = (PERPLEXITY, *CHOICE_SUITES, *GENERATION_SUITES, HUMANEVAL)
DEFAULT_SUITES = (PERPLEXITY, "hellaswag", "truthfulqa")
HARNESS = "harness:"
"""Before a task's name: a suite of lm-eval's."""


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
    kv_cache_dtype: KVCacheDtype = "auto"  # of the model, as its quantization
    backend: Literal["cpu", "torch"] = "cpu"
    device: str = "cpu"
    threads: int = 0
    endpoint: str | None = None
    tokenizer: str | None = None  # of the models behind the endpoint
    reference_logits: Path | None = None
    shots: tuple[int, ...] = (0,)  # examples before a question; each number is a suite of its own
    orderings: int = 3  # draws of examples, for each number of them but 0
    execute_code: Isolation | None = None
    harness_path: Path | None = None  # a folder of lm-eval tasks of the user's own


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
    _own: dict[str, OwnSuite] = field(init=False)  # the user's suites, by their paths

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other, and what finding the models raises."""
        settings = self.settings
        _check(settings)
        self._own = {name: read_suite(Path(name)) for name in settings.suites if _is_file(name)}
        names = list(SUITES)
        for path, own in self._own.items():
            if own.name in names or own.name.startswith(HARNESS):
                raise ConfigError(
                    f"{path}: another suite is called {own.name!r} already; choose another name."
                )
            names.append(own.name)
        self._models = Models(
            settings.model,
            settings.against,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            backend=settings.backend,
            device=settings.device,
            threads=settings.threads,
            endpoint=settings.endpoint,
            tokenizer=settings.tokenizer,
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
        return {job.key for name in self.settings.suites for job in self._jobs(name)} | set(
            self.report.suites
        )

    def run(self) -> Report:
        """All suites, those that need no generation first. Raises what loading and running models raises."""
        try:
            for name in sorted(self.settings.suites, key=_order):
                for job in self._jobs(name):
                    self._run_job(job)
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

    def _run_job(self, job: _Job) -> None:
        settings = job.settings()
        finished = self.report.suites.get(job.key)
        if finished is not None and finished.settings == settings and not _unfinished(finished.result):
            self.reused.append(job.key)
            return
        began = time.monotonic()
        self.report.suites.pop(job.key, None)
        result = job.run()
        self.report.suites[job.key] = SuiteRecord(
            settings=settings, seconds=round(time.monotonic() - began, 2), result=result
        )
        if self.output is not None:
            self.report.write(self.output)

    def _jobs(self, name: str) -> Iterator[_Job]:
        """What a chosen suite comes to: one job, or one for each number of examples."""
        runner = self._runner()
        if name == PERPLEXITY:
            yield _Job(name, self._text_settings, self._text)
        elif name == HUMANEVAL:
            isolation = self.settings.execute_code
            assert isolation is not None  # see _check
            yield _Job(name, lambda: {"data": data_of(name)}, lambda: runner.code(isolation))
        elif name in SHOT_SUITES:
            run = runner.choices if name in CHOICE_SUITES else runner.questions
            for shots in self.settings.shots:
                key = f"{name}-{shots}shot" if shots else name
                yield _Job(key, partial(self._shot_settings, name, shots), partial(run, key, name, shots))
        elif name in GENERATION_SUITES:
            yield _Job(name, lambda: {"data": data_of(name)}, lambda: runner.questions(name, name, 0))
        elif name.startswith(HARNESS):
            yield _Job(name, self._harness_settings, lambda: self._harness(name.removeprefix(HARNESS)))
        else:
            own = self._own[name]
            digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
            yield _Job(own.name, lambda: {"file": Path(name).name, "sha256": digest}, lambda: runner.own(own))

    def _runner(self) -> ItemsRunner:
        settings = self.settings
        return ItemsRunner(
            self._models,
            limit=settings.limit,
            seed=settings.seed,
            hold_back=any(settings.shots),
            orderings=settings.orderings,
            progress=self.progress,
            downloads=self.downloads,
        )

    def _shot_settings(self, name: str, shots: int) -> dict[str, Any]:
        found: dict[str, Any] = {"data": data_of(name)}
        if any(self.settings.shots) and name in GENERATION_SUITES:
            found["held_back"] = HELD_BACK
        if shots:
            found |= {"shots": shots, "orderings": self.settings.orderings}
        return found

    def _text_settings(self) -> dict[str, Any]:
        logits = self.settings.reference_logits
        return {
            "text": load_text(self.settings.texts, progress=self.downloads).name,
            "convention": self.settings.convention,
            "context_length": self._context_length(),
            "tokens": self.settings.tokens,
            "reference_logits": None if logits is None else str(logits.absolute()),
        }

    def _context_length(self) -> int:
        usual = DEFAULT_CONTEXT[self.settings.convention]
        longest = self._models.model.max_positions()
        return self.settings.context_length or (usual if longest is None else min(usual, longest))

    def _text(self) -> TextResult:
        settings = self.settings
        return score_text(
            load_text(settings.texts, progress=self.downloads),
            self._models,
            convention=settings.convention,
            context_length=self._context_length(),
            tokens=settings.tokens,
            reference_logits=settings.reference_logits,
            progress=self.progress,
        )

    def _harness_settings(self) -> dict[str, Any]:
        import importlib.metadata

        path = self.settings.harness_path
        return {
            "lm_eval": importlib.metadata.version("lm_eval"),
            "tasks": None if path is None else str(path.absolute()),
        }

    def _harness(self, task: str) -> ItemsResult:
        from headrace.lab.evaluate.harness import run_task

        settings = self.settings
        return run_task(
            task, self._models, include=settings.harness_path, limit=settings.limit, seed=settings.seed
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """One record of the report: its key, the settings that its result depends on, and how to run it."""

    key: str
    settings: Callable[[], dict[str, Any]]
    run: Callable[[], TextResult | ItemsResult]


def _check(settings: Settings) -> None:
    for name in settings.suites:
        if name not in SUITES and not _is_file(name) and not name.startswith(HARNESS):
            raise ConfigError(
                f"There is no suite {name!r}: choose of {', '.join(SUITES)}, or name a YAML file of your own."
            )
    if not settings.suites:
        raise ConfigError("No suite was chosen.")
    if HUMANEVAL in settings.suites and settings.execute_code is None:
        raise ConfigError(
            "The suite humaneval runs code that the model writes: allow it with --execute-code, or leave the "
            "suite out."
        )
    if any(settings.shots) and not set(settings.suites) & set(SHOT_SUITES):
        raise ConfigError(f"--shots is for the suites {', '.join(SHOT_SUITES)}, none of which was chosen.")
    if settings.endpoint is not None and settings.against == FLOAT32:
        raise ConfigError("With --endpoint, --against names another model of that endpoint.")
    if settings.endpoint is None and settings.tokenizer is not None:
        raise ConfigError("--tokenizer is for models behind an --endpoint; others bring their own.")
    _check_harness(settings)
    if settings.reference_logits is not None and PERPLEXITY not in settings.suites:
        raise ConfigError("--reference-logits is used by the suite perplexity, which was not chosen.")
    logits = settings.reference_logits
    if logits is not None and settings.endpoint is not None:
        raise ConfigError("An endpoint gives no whole distributions, which --reference-logits compares.")
    if logits is not None and settings.against is None and not logits.exists():
        raise ConfigError(f"{logits} does not exist; --against REF says which model's logits to put there.")


def _check_harness(settings: Settings) -> None:
    if not any(name.startswith(HARNESS) for name in settings.suites):
        if settings.harness_path is not None:
            raise ConfigError("--harness-path is for --harness TASKS, and no task was chosen.")
        return
    if settings.endpoint is not None:
        raise ConfigError("--harness runs models in this process; lm-eval itself can ask endpoints.")
    if settings.harness_path is not None and not settings.harness_path.is_dir():
        raise ConfigError(f"{settings.harness_path} is not a folder of tasks.")
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--harness needs lm-eval: pip install 'headrace[harness]'.")


def _is_file(name: str) -> bool:
    return name not in SUITES and name.lower().endswith((".yaml", ".yml"))


def _unfinished(result: TextResult | ItemsResult) -> bool:
    """Cases that no judge judged are asked again."""
    return isinstance(result, ItemsResult) and bool(result.not_judged)


def _isa(settings: Settings) -> str | None:
    if settings.endpoint is not None or settings.backend != "cpu":
        return None
    from headrace.backend.cpu.runner import chosen_isa

    return chosen_isa()


def _order(name: str) -> int:
    """Scoring first: its models and those that generate are not in memory at the same time."""
    return 0 if name == PERPLEXITY else 1 if name in CHOICE_SUITES else 2
