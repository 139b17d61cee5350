"""One training from checkpoints to folder: data, teacher, steps, files, evaluation, report."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from headrace import __version__
from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.calibration import Calibration, read_calibration, require_apart
from headrace.lab.compress.formats.publish import published
from headrace.lab.compress.training.checkpoints import State, kept_step
from headrace.lab.compress.training.data import (
    SELF,
    Data,
    ask_itself,
    generate,
    read_prompts,
    some_prompts,
    split,
)
from headrace.lab.compress.training.losses import Terms
from headrace.lab.compress.training.output import Output
from headrace.lab.compress.training.report import Point, TrainingReport
from headrace.lab.compress.training.settings import Schedule
from headrace.lab.compress.training.student import Student
from headrace.lab.compress.training.teacher import LiveTeacher, StoredTeacher, Teacher, float_weights, store
from headrace.lab.compress.training.trainer import Trainer
from headrace.lab.compress.work import Work
from headrace.lab.evaluate.evaluation import Evaluation, Settings
from headrace.lab.evaluate.results import Report as Evaluated
from headrace.lab.evaluate.text_suite import PERPLEXITY
from headrace.lab.evaluate.texts import SHAKESPEARE, load_text, tokenise
from headrace.model import store as model_store
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights import open_checkpoint
from headrace.model.weights.tensor_shapes import expected_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A training as the user wants it.

    ``generate``: how many sequences the teacher makes itself, beside ``samples`` of the data. ``top_k``: how
    many of the teacher's likeliest tokens count, None for all; ``store`` keeps them in that folder.
    ``evaluate``: compare the result with the teacher, on text that is not learned from.
    """

    teacher: str
    output: Path
    schedule: Schedule
    terms: Terms = field(default_factory=Terms)
    data: str = "default"
    template: Literal["auto", "off"] = "auto"
    samples: int = 512
    sequence_length: int = 256
    held_out_tokens: int = 2048
    generate: int = 0
    new_tokens: int = 128
    generate_temperature: float = 1.0
    top_k: int | None = None
    store: Path | None = None
    threads: int = 0
    evaluate: bool = True
    texts: tuple[str, ...] = (SHAKESPEARE,)
    tokens: int = 4096


@dataclass(eq=False)
class Training(ABC):
    """Opened and checked; :meth:`run` does it. ``note`` gets a line whenever there is something to tell.

    Raises, before anything is computed, what finding and opening the models raises, and ConfigError for what
    does not go together.
    """

    kind: ClassVar[Literal["distill", "repair", "draft"]]
    spare_prompts: ClassVar[int] = 0
    """How many prompts are wanted beside those that are answered."""

    asked: Asked
    progress: model_store.Progress = lambda what, done, total: None
    note: Callable[[str], None] = lambda line: None
    downloads: model_store.Progress | None = None
    teacher: Checkpoint = field(init=False)
    _questions: list[list[int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        asked = self.asked
        self._teacher_path = model_store.resolve(asked.teacher, progress=self.downloads)
        self.teacher = open_checkpoint(self._teacher_path)
        if self.teacher.architecture.encoder is not None:
            raise ConfigError(f"{asked.teacher} is an encoder: models that generate are teachers.")
        if asked.top_k is not None and not 1 <= asked.top_k < self.teacher.architecture.vocab_size:
            raise ConfigError(
                f"--top-k: {asked.top_k} must lie between 1 and the {self.teacher.architecture.vocab_size} "
                "tokens of the vocabulary; leave it out for all of them."
            )
        if asked.data == SELF and (asked.samples or not asked.generate):
            raise ConfigError(f"--data {SELF} are questions: give --samples 0, and --generate for answers.")
        if asked.store is not None and (asked.top_k is None or asked.terms.hidden):
            raise ConfigError("--store keeps likeliest tokens: give --top-k, and no --hidden-weight.")
        self._open_student()
        self.output = Output(asked.output, [self._teacher_path, *self._sources()])

    @abstractmethod
    def _open_student(self) -> None:
        """Find out who learns, as far as that needs no weights. Raises ConfigError for who cannot."""

    @abstractmethod
    def _sources(self) -> list[Path]:
        """Folders that the student is made of, beside the teacher's."""

    @abstractmethod
    def _student(self, teacher: Weights) -> tuple[Student, dict[int, int]]:
        """Who learns, and which of the teacher's layers each of its own is compared with."""

    @abstractmethod
    def _write(self, student: Student) -> None:
        """The student, as it is, into the folder ``output.partial``."""

    @abstractmethod
    def _about_student(self) -> dict[str, Any]:
        """What the student depends on, for the work folder and the report: ``student`` names it."""

    def resumes(self) -> int | None:
        """The step from which a training that was ended early would go on; None: from the beginning."""
        work = Work(self.output.work_path, self._about())
        return kept_step(self.output.work_path) if work.matches() else None

    def run(self) -> TrainingReport:
        """Everything; the folder appears at its place when it is whole. Raises HeadraceError.

        Whatever ends it early, checkpoints are kept beside the output, and the same call goes on from them.
        """
        if self.asked.threads > 0:
            torch.set_num_threads(self.asked.threads)
        self.output.remove_partial()
        with self.output.work(self._about()) as work:
            if self.asked.data == SELF:
                self._questions = self._ask_itself(work)
            data = self._data(work)
            self._require_apart(data)
            weights = float_weights(self.teacher)
            student, pairs = self._student(weights)
            trainer = self._trainer(student, pairs, weights, data, work)
            state = trainer.run()
            student.round()
            after = trainer.kl()
            self.progress("writing", 0, 1)
            self._write(student)
            self.progress("writing", 1, 1)
            report = self._report(student, data, state, after)
            del student, trainer, weights  # what follows loads models of its own
            self._measure(report)
            self.output.place(report)
        return report

    def _measure(self, report: TrainingReport) -> None:
        """What is to be known of the finished folder."""
        if self.asked.evaluate:
            report.evaluation = self._evaluate()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The teacher's."""
        return load_tokenizer(self._teacher_path)

    @property
    def length(self) -> int:
        """Tokens of a sequence, at most."""
        return min(self.asked.sequence_length, self.teacher.architecture.max_positions)

    @cached_property
    def calibration(self) -> Calibration:
        """The texts and conversations, as the teacher's tokens. Raises what reading them raises."""
        asked = self.asked
        return read_calibration(
            asked.data,
            self.tokenizer,
            samples=asked.samples,
            sequence_length=self.length,
            chat_template=asked.template,
            progress=self.downloads,
        )

    def _prompts(self) -> list[list[int]]:
        """What the teacher is asked, if it makes sequences itself."""
        return self._some_prompts(self.asked.generate)

    def _some_prompts(self, count: int, *, chats_only: bool = False) -> list[list[int]]:
        """Up to ``count`` different ones."""
        if self.asked.data == SELF:
            return self._questions[:count]
        found = read_prompts(self.asked.data, self.tokenizer, chats_only=chats_only, progress=self.downloads)
        return some_prompts(found, count)

    def _ask_itself(self, work: Work) -> list[list[int]]:
        """Questions that the teacher makes up, as many as are answered and measured on."""
        found = work.value("questions")
        if found is None:
            found = ask_itself(
                self._teacher_path,
                self.tokenizer,
                self.asked.generate + self.spare_prompts,
                longest=self.length // 2,
                seed=self.asked.schedule.seed,
                threads=self.asked.threads,
                progress=self.progress,
            )
            work.keep_value("questions", found)
        return list(found)

    def _data(self, work: Work) -> Data:
        asked = self.asked
        sequences: list[tuple[int, ...]] = []
        about: dict[str, Any] = {}
        if asked.samples:
            sequences += self.calibration.sequences
            about = {key: self.calibration.about[key] for key in ("source", "chat_template", "bos")}
        if asked.generate:
            made = work.value("generated")
            if made is None:
                made = generate(
                    self._teacher_path,
                    self._prompts(),
                    asked.generate,
                    sequence_length=self.length,
                    new_tokens=asked.new_tokens,
                    temperature=asked.generate_temperature,
                    seed=asked.schedule.seed,
                    threads=asked.threads,
                    progress=self.progress,
                )
                work.keep_value("generated", made)
            sequences += [tuple(one) for one in made]
            about["generated"] = len(made)
        data = split(sequences, about, held_out_tokens=asked.held_out_tokens, seed=asked.schedule.seed)
        self.note(
            f"data: {data.about['sequences']} sequences, {data.about['tokens']} tokens; "
            f"{data.about['held_out_tokens']} tokens held out"
        )
        return data

    def _require_apart(self, data: Data) -> None:
        if self.asked.evaluate:
            text = load_text(self.asked.texts, progress=self.downloads)
            learned = Calibration((*data.sequences, *data.held_out), data.about)
            require_apart(learned, tokenise(text, self.tokenizer, self.asked.tokens))

    def _trainer(
        self, student: Student, pairs: dict[int, int], weights: Weights, data: Data, work: Work
    ) -> Trainer:
        asked = self.asked
        architecture = self.teacher.architecture
        live = LiveTeacher(
            architecture,
            weights,
            data.sequences,
            temperature=asked.terms.temperature,
            top_k=asked.top_k,
            bf16=asked.schedule.bf16,
            hidden=asked.terms.hidden > 0,
        )
        teacher: Teacher = live
        store_in = self._store_in(work)
        if store_in is not None:
            teacher = self._stored(store_in, live, data)
        return Trainer(
            student,
            teacher,
            data.sequences,
            LiveTeacher(architecture, weights, data.held_out),
            data.held_out,
            asked.schedule,
            asked.terms,
            work.path,
            pairs,
            progress=self.progress,
            note=self.note,
        )

    def _store_in(self, work: Work) -> Path | None:
        """Where the teacher's likeliest tokens are kept, if they are."""
        return self.asked.store

    def _stored(self, folder: Path, live: LiveTeacher, data: Data) -> StoredTeacher:
        about = {
            "teacher": self.teacher.fingerprint(),
            "data": data.about["sha256"],
            "top_k": live.top_k,
            "temperature": live.temperature,
            "vocab_size": live.architecture.vocab_size,
        }
        if not folder.exists():
            with published(folder) as draft:
                store(draft, live, about, lambda done, total: self.progress("storing logits", done, total))
            self.note(f"stored: the teacher's {live.top_k} likeliest tokens, in {folder}")
        return StoredTeacher(folder, about, data.sequences)

    def _about(self) -> dict[str, Any]:
        """All that the training depends on."""
        asked = self.asked
        made = {
            "generate": asked.generate,
            "new_tokens": asked.new_tokens,
            "heat": asked.generate_temperature,
        }
        return {
            "headrace": __version__,
            "kind": self.kind,
            "teacher": self.teacher.fingerprint(),
            **self._about_student(),
            "data": self.calibration.fingerprint if asked.samples else _file_state(asked.data),
            "held_out_tokens": asked.held_out_tokens,
            "sequence_length": asked.sequence_length,
            **(made if asked.generate else {}),
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        asked = self.asked
        return {**asdict(asked.schedule), **asdict(asked.terms), "top_k": asked.top_k}

    def _evaluate(self) -> Evaluated:
        """The student against its teacher, as they are served."""
        asked = self.asked
        settings = Settings(
            model=str(self.output.partial),
            against=str(self._teacher_path),
            suites=(PERPLEXITY,),
            texts=asked.texts,
            tokens=asked.tokens,
            threads=asked.threads,
        )
        report = Evaluation(settings, progress=self.progress, downloads=self.downloads).run()
        report.context.model.reference = str(asked.output)
        if report.context.against is not None:
            report.context.against.reference = asked.teacher
        return report

    def _report(self, student: Student, data: Data, state: State, after: float) -> TrainingReport:
        files = [path for path in self.output.partial.iterdir() if path.suffix == ".safetensors"]
        return TrainingReport(
            kind=self.kind,
            headrace=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            teacher=self.asked.teacher,
            teacher_fingerprint=self.teacher.fingerprint(),
            student=str(self._about_student()["student"]),
            parameters=_count(student.architecture),
            trained_parameters=sum(one.numel() for one in student.parameters.values()),
            teacher_parameters=_count(self.teacher.architecture),
            data=data.about,
            settings=json.loads(json.dumps(self._settings())),
            history=[Point(**asdict(one)) for one in state.history],
            steps=state.step,
            tokens=state.tokens,
            seconds=state.seconds,
            stopped=str(state.stopped),
            kl_before=state.history[0].kl,
            kl_after=after,
            weights_bytes=sum(path.stat().st_size for path in files),
        )


def _count(architecture: Any) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(architecture).values())


def _file_state(source: str) -> str:
    """Which file it is, and whether it has changed; ``default`` is always the same."""
    path = Path(source)
    if not path.is_file():
        return source
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
