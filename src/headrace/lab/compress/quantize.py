"""One compression from checkpoint to folder: preflight, layers, files, evaluation, gate."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace import __version__
from headrace.errors import ConfigError, HeadraceError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.compress.calibration import Calibration, read_calibration
from headrace.lab.compress.formats import check_format, write_checkpoint
from headrace.lab.compress.overlap import require_unseen
from headrace.lab.compress.peak import peak_memory
from headrace.lab.compress.plan import Plan, make_plan
from headrace.lab.compress.recipe import Recipe, named_recipe
from headrace.lab.compress.report import (
    JSON_NAME,
    PAGE_NAME,
    CompressReport,
    Size,
    digest,
    treated_weights,
)
from headrace.lab.compress.reshaped import reshape, stand_in
from headrace.lab.compress.shape import parameters
from headrace.lab.compress.tensors import CompressedTensors
from headrace.lab.compress.work import Work
from headrace.lab.evaluate.evaluation import Evaluation, Settings
from headrace.lab.evaluate.gate import named_gate
from headrace.lab.evaluate.results import Report
from headrace.lab.evaluate.text_suite import PERPLEXITY
from headrace.lab.evaluate.texts import SHAKESPEARE
from headrace.model import store
from headrace.model.weights import open_checkpoint

if TYPE_CHECKING:
    from headrace.lab.compress.algorithms.estimate import Estimate

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Asked:
    """A compression as the user wants it. ``output_format``: None = compressed-tensors if the recipe rounds,
    else float. ``suites``: none = the model is not evaluated."""

    model: str
    recipe: str
    output: Path
    output_format: str | None = None
    calibration: str = "default"
    calibration_template: Literal["auto", "off"] = "auto"
    samples: int = 64
    sequence_length: int = 512
    gate: str | None = None
    suites: tuple[str, ...] = (PERPLEXITY,)
    texts: tuple[str, ...] = (SHAKESPEARE,)
    tokens: int = 4096
    limit: int | None = None
    shots: tuple[int, ...] = (0,)
    backend: Literal["cpu", "torch"] = "cpu"
    speed: bool = False
    threads: int = 0
    overwrite: bool = False


@dataclass(eq=False)
class Quantization:
    """Opened and checked; :meth:`run` does it.

    Raises, before anything is computed, what finding and opening the model raises, and ConfigError for a
    recipe, format, gate or output that will not do.
    """

    asked: Asked
    progress: store.Progress = lambda what, done, total: None
    downloads: store.Progress | None = None
    plan: Plan = field(init=False)
    recipe: Recipe = field(init=False)
    recipe_name: str = field(init=False)
    output_format: str = field(init=False)

    def __post_init__(self) -> None:
        asked = self.asked
        self.recipe_name, self.recipe = named_recipe(asked.recipe)
        self._limits = None if asked.gate is None else named_gate(asked.gate)
        self._require_suites()
        self._path = store.resolve(asked.model, progress=self.downloads)
        self._checkpoint = open_checkpoint(self._path)
        self._left = left = stand_in(self._checkpoint, self.recipe, asked.threads)
        self.plan = _with_padding_told(
            make_plan(left.architecture, self.recipe, self._checkpoint.architecture),
            left.architecture.vocab_size - load_tokenizer(self._path).vocab_size,
        )
        schemes = {name: one.scheme for name, one in self.plan.treatments().items()}
        self.output_format = asked.output_format or ("compressed-tensors" if schemes else "float")
        check_format(self.output_format, schemes, left, kv_scales=self.recipe.kv_cache)
        self._require_zeros()
        if asked.output.name in ("", ".."):
            raise ConfigError(f"--output {asked.output}: name a folder that is to be made.")
        if asked.output.exists() and not asked.overwrite:
            raise ConfigError(f"{asked.output} exists: name another folder with --output, or --overwrite.")
        if asked.output.exists() and not (asked.output / JSON_NAME).is_file():
            raise ConfigError(
                f"{asked.output} is no model that headrace compress wrote: it is not overwritten."
            )
        if asked.output.resolve() in (self._path.resolve(), *self._path.resolve().parents):
            raise ConfigError(f"{asked.output} is or holds the model itself: name another folder.")
        if not asked.output.absolute().parent.is_dir():
            raise ConfigError(f"The folder of {asked.output} does not exist.")

    def _require_zeros(self) -> None:
        """Raise ConfigError where the format would not keep zeros exactly."""
        rounded = self.plan.treatments()
        for name in self.plan.prunings():
            if self.output_format == "gguf" and name in rounded and not rounded[name].scheme.symmetric:
                raise ConfigError(
                    f"{name}: GGUF's Q4_1 rounds the minimum of a group, so that zeros do not stay zeros: "
                    "round with symmetric: true, or write compressed-tensors."
                )

    @cached_property
    def calibration(self) -> Calibration | None:
        """What the model is shown; None if the recipe shows it nothing. Raises what reading it raises."""
        if not self.recipe.calibrated:
            return None
        asked = self.asked
        tokenizer = load_tokenizer(self._path)
        longest = min(asked.sequence_length, self._checkpoint.architecture.max_positions)
        calibration = read_calibration(
            asked.calibration,
            tokenizer,
            samples=asked.samples,
            sequence_length=longest,
            chat_template=asked.calibration_template,
            progress=self.downloads,
        )
        require_unseen(
            calibration,
            tokenizer,
            suites=asked.suites,
            texts=asked.texts,
            tokens=asked.tokens,
            progress=self.downloads,
        )
        return calibration

    def estimate(self) -> Estimate:
        """Time and memory of the computing, before the model is written and evaluated."""
        from headrace.lab.compress.algorithms.estimate import estimate

        tokens = 0 if self.calibration is None else self.calibration.tokens
        architecture = self._checkpoint.architecture
        return estimate(
            architecture, self._left.architecture, self.recipe, self.plan, tokens, self.asked.threads
        )

    def resumes(self) -> int:
        """Layers that an earlier run, ended early, has finished."""
        work = self._work()
        if not work.matches():
            return 0
        return work.finished() or self._looked(work).finished()

    def made(self, report: CompressReport) -> bool:
        """Whether a report is of what :meth:`run` would do: source, recipe, format, comparison …"""
        asked, calibration = self.asked, self.calibration
        return (
            report.source_fingerprint == self._checkpoint.fingerprint()
            and report.recipe == json.loads(self.recipe.model_dump_json())
            and report.calibration == (None if calibration is None else calibration.about)
            and report.output_format == self.output_format
            and (report.gate, report.compared) == (asked.gate, self._comparison())
            and (report.speed is not None or not asked.speed)
        )

    def _comparison(self) -> dict[str, Any]:
        """What the evaluation depends on beside the models."""
        asked = self.asked
        return {
            "suites": list(asked.suites),
            "texts": list(asked.texts),
            "tokens": asked.tokens,
            "limit": asked.limit,
            "shots": list(asked.shots),
            "backend": asked.backend,
        }

    def run(self) -> CompressReport:
        """Everything; the folder appears at its place when it is whole, and only if the gate lets it pass.

        A refused model leaves ``OUTPUT.refused`` with the report alone. Whatever ends a run early, finished
        layers are kept beside the output and found again. Raises HeadraceError.
        """
        try:
            with self._work() as work:
                try:
                    report = self._run(work)
                finally:
                    self._remove_partial()
                if not report.gate_failures:
                    work.remove()
                return report
        except OSError as error:
            kept = (
                f" What is finished is kept in {self._work_path.name}: the same command goes on from there."
            )
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise ConfigError(f"{self.asked.output} cannot be written: {why}.{kept}") from None

    def _run(self, work: Work) -> CompressReport:
        began, earlier = time.monotonic(), work.finished()
        asked = self.asked
        left, reshaped = self._checkpoint, None
        if self.recipe.reshapes:
            assert self.calibration is not None  # such a recipe is calibrated
            with self._looked(work) as looked:
                left, reshaped = reshape(
                    self._checkpoint,
                    self.recipe,
                    self.calibration,
                    looked,
                    threads=asked.threads,
                    progress=self.progress,
                )
        if self.plan.treatments() or self.plan.prunings():
            from headrace.lab.compress.algorithms.pipeline import run

            run(
                left,
                self.recipe,
                self.plan,
                self.calibration,
                work,
                threads=asked.threads,
                progress=self.progress,
            )
        self._remove_partial()
        self.progress("writing", 0, 1)
        tensors = CompressedTensors(left, work)
        remarks = [work.remarks(index) for index in range(work.finished())]
        kv_scales = [tuple(each["kv_scales"]) for each in remarks if each["kv_scales"] is not None]
        write_checkpoint(self._partial, self.output_format, tensors, left, kv_scales=kv_scales)
        self.progress("writing", 1, 1)
        seconds = time.monotonic() - began + sum(each["seconds"] for each in remarks[:earlier])
        report = self._report(work, seconds)
        report.kv_scales = kv_scales or None
        report.reshaped = reshaped
        if reshaped is not None or self.plan.treatments():
            self._require_smaller(report.size)
        if asked.suites:
            report.evaluation = self._evaluate()
            if self._limits is not None:
                report.gate_failures = self._limits.failures(report.evaluation)
        if asked.speed:
            from headrace.lab.compress.speed import measure_speed

            report.source_speed = measure_speed(self._path, threads=asked.threads)
            report.speed = measure_speed(self._partial, threads=asked.threads)
        self._place(report)
        return report

    def _looked(self, work: Work) -> Work:
        """What the model was seen to do before its shape was changed, and what was chosen by it."""
        return Work(work.path / "shape", {"of": "shape"})

    def _remove_partial(self) -> None:
        """The folder that is not whole, and what a killed run left of the draft of one."""
        for path in self._partial.parent.glob(f"*{self._partial.name}*"):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def refused(self) -> Path:
        """Where the report of a refused model goes."""
        return self.asked.output.with_name(f"{self.asked.output.name}.refused")

    @property
    def _partial(self) -> Path:
        return self.asked.output.with_name(f".{self.asked.output.name}.partial")

    @property
    def _work_path(self) -> Path:
        return self.asked.output.with_name(f".{self.asked.output.name}.work")

    def _work(self) -> Work:
        calibration = self.calibration
        about = {
            "headrace": __version__,
            "model": self._checkpoint.fingerprint(),
            "recipe": self.recipe.model_dump(),
            "calibration": None if calibration is None else calibration.fingerprint,
        }
        return Work(self._work_path, about)

    def _require_suites(self) -> None:
        asked, limits = self.asked, self._limits
        if limits is None:
            return
        missing = {name for name in limits.needs() if name.partition("-")[0] not in asked.suites}
        if missing:
            raise ConfigError(f"{asked.gate} has limits on {', '.join(sorted(missing))}: add --suite for it.")

    def _evaluate(self) -> Report:
        """The compressed model against its source, on the same backend."""
        asked = self.asked
        settings = Settings(
            model=str(self._partial),
            against=str(self._path),
            suites=asked.suites,
            texts=asked.texts,
            tokens=asked.tokens,
            limit=asked.limit,
            shots=asked.shots,
            backend=asked.backend,
            threads=asked.threads,
        )
        report = Evaluation(settings, progress=self.progress, downloads=self.downloads).run()
        report.context.model.reference = str(asked.output)
        if report.context.against is not None:
            report.context.against.reference = asked.model
        return report

    def _report(self, work: Work, seconds: float) -> CompressReport:
        treated, notes, rounded_share = treated_weights(work)
        calibration = self.calibration
        size = Size(
            weights=_weights_bytes([self._partial]),
            source_weights=_weights_bytes([self._path]),
            source_16_bit=2 * parameters(self._checkpoint.architecture),
            rounded_share=rounded_share,
        )
        if size.weights > size.source_weights:
            notes.append(
                f"the source's files have {size.source_weights / 2**20:.1f} MiB only: its weights have few "
                "bits already"
            )
        return CompressReport(
            headrace=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self.asked.model,
            source_fingerprint=self._checkpoint.fingerprint(),
            recipe_name=self.recipe_name,
            recipe=json.loads(self.recipe.model_dump_json()),
            calibration=None if calibration is None else calibration.about,
            output_format=self.output_format,
            tensors=treated,
            notes=[*self.plan.notes, *notes],
            sensitivity=work.value("sensitivity"),
            seconds=seconds,
            peak_memory_bytes=peak_memory(),
            size=size,
            gate=self.asked.gate,
            compared=self._comparison(),
        )

    def _require_smaller(self, size: Size) -> None:
        if size.weights > max(size.source_weights, size.source_16_bit):
            raise HeadraceError(
                f"The compressed weights have {size.weights} bytes, the model has {size.source_weights}, in "
                f"16 bits {size.source_16_bit}: this recipe makes it larger. Use larger groups or fewer bits."
            )

    def _place(self, report: CompressReport) -> None:
        """Put the folder, or of a refused model the report, where the user asked for it."""
        folder = self._partial
        if report.gate_failures:
            shutil.rmtree(folder)
            folder.mkdir()
        report.files = {path.name: digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / PAGE_NAME).write_text(report.page(), "utf-8")
        (folder / JSON_NAME).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
        target = self.refused if report.gate_failures else self.asked.output
        if report.gate_failures or self.asked.overwrite:
            _remove(target)
        folder.rename(target)
        if not report.gate_failures:
            _remove(self.refused)


def _weights_bytes(paths: Sequence[Path]) -> int:
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)


def _with_padding_told(plan: Plan, rows: int) -> Plan:
    if rows <= 0:
        return plan
    note = f"vocabulary: {rows} rows behind the tokenizer's tokens are padding, and stay"
    return replace(plan, notes=(*plan.notes, note))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
