"""Distillation: a smaller model of floats learns from a larger one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headrace.errors import ConfigError
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.formats import check_format, write_checkpoint
from headrace.lab.compress.formats.config_json import config_of
from headrace.lab.compress.training.sizes import Sizes
from headrace.lab.compress.training.student import (
    FloatStudent,
    Student,
    StudentTensors,
    copied_weights,
    layer_pairs,
    new_weights,
    of_layers,
    require_same_vocabulary,
)
from headrace.lab.compress.training.teacher import float_weights
from headrace.lab.compress.training.training import Training
from headrace.model import store
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights import open_checkpoint
from headrace.yaml_file import read_yaml


@dataclass(eq=False)
class Distillation(Training):
    """``student``: a model, or a YAML file of :class:`Sizes`. ``embeddings``: train them and the head."""

    kind: ClassVar[Literal["distill", "repair", "draft"]] = "distill"

    student: str = ""
    embeddings: bool = True
    _sizes: Sizes | None = field(init=False, default=None)
    _opened: Checkpoint | None = field(init=False, default=None)

    def _open_student(self) -> None:
        if self._sizes is None and Path(self.student).suffix.lower() in (".yaml", ".yml"):
            self._sizes = read_yaml(Path(self.student), Sizes)
        elif self._sizes is None:
            self._opened = open_checkpoint(store.resolve(self.student, progress=self.downloads))
            require_same_vocabulary(self._opened, self.teacher)
        architecture = self._architecture()
        if architecture.encoder is not None:
            raise ConfigError(f"{self.student} is an encoder: models that generate are students.")
        check_format("float", {}, self.teacher)
        config_of(architecture)
        same = architecture.hidden_size == self.teacher.architecture.hidden_size
        if self.asked.terms.hidden and not same:
            raise ConfigError(
                f"--hidden-weight compares hidden states, and the student has {architecture.hidden_size} of "
                f"them where the teacher has {self.teacher.architecture.hidden_size}: leave it out."
            )
        if not self.embeddings and self._is_new:
            raise ConfigError(
                "--freeze-embeddings: these sizes make new embeddings, which have to be trained."
            )

    def _sources(self) -> list[Path]:
        return [] if self._opened is None else [self._opened.path]

    @property
    def _is_new(self) -> bool:
        return self._sizes is not None and not self._sizes.copies

    def _architecture(self) -> Architecture:
        if self._opened is not None:
            return self._opened.architecture
        assert self._sizes is not None
        teacher = self.teacher.architecture
        if self._sizes.copies:
            return of_layers(teacher, self._sizes.chosen(teacher))
        return self._sizes.architecture(teacher)

    def _student(self, teacher: Weights) -> tuple[Student, dict[int, int]]:
        taught = self.teacher.architecture
        chosen = None
        if self._opened is not None:
            architecture, tensors = self._opened.architecture, float_weights(self._opened)
        elif self._is_new:
            architecture = self._architecture()
            tensors = new_weights(architecture, self.asked.schedule.seed)
        else:
            assert self._sizes is not None
            chosen = self._sizes.chosen(taught)
            architecture = of_layers(taught, chosen)
            tensors = copied_weights(taught, teacher, chosen)
        student = FloatStudent(architecture, tensors, embeddings=self.embeddings)
        return student, layer_pairs(architecture, taught, chosen)

    def _write(self, student: Student) -> None:
        write_checkpoint(
            self.output.partial,
            "float",
            StudentTensors(student.architecture, student.weights()),
            self.teacher,
            architecture=student.architecture,
        )

    def _about_student(self) -> dict[str, Any]:
        if self._opened is not None:
            made: dict[str, Any] = {"student_fingerprint": self._opened.fingerprint()}
        else:
            assert self._sizes is not None
            made = {"sizes": self._sizes.model_dump(exclude_none=True)}
        return {"student": self.student, "embeddings": self.embeddings, **made}
