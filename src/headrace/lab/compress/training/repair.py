"""Repair: a quantised model's scales and norms learn to make up for what rounding took."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headrace.errors import ConfigError
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.formats.publish import published
from headrace.lab.compress.training.patch import write_over
from headrace.lab.compress.training.quantized_student import QuantizedStudent
from headrace.lab.compress.training.student import Student, layer_pairs, require_same_vocabulary
from headrace.lab.compress.training.training import Training
from headrace.model.weights import open_checkpoint
from headrace.model.weights.safetensors import SafetensorsCheckpoint


@dataclass(eq=False)
class Repair(Training):
    """``model``: a folder of compressed-tensors, GPTQ or AWQ; the repaired one has its format and its size.

    ``codes``: weights may move to other codes, too.
    Sources: Liu et al., "LLM-QAT" (arXiv 2305.17888); Chen et al., "EfficientQAT" (arXiv 2407.11062), whose
    second phase trains scales alone, end to end.
    """

    kind: ClassVar[Literal["distill", "repair", "draft"]] = "repair"

    model: Path = Path()
    codes: bool = False
    _opened: SafetensorsCheckpoint = field(init=False)

    def _open_student(self) -> None:
        opened = open_checkpoint(self.model)
        if not isinstance(opened, SafetensorsCheckpoint) or not self.model.is_dir():
            raise ConfigError(
                f"{self.model} is no folder of safetensors: repair trains compressed-tensors, GPTQ and AWQ; "
                "repair one of those, then headrace compress convert it to GGUF."
            )
        if not opened.quantised:
            raise ConfigError(f"{self.model} holds no quantised weights: there is nothing to repair.")
        require_same_vocabulary(opened, self.teacher)
        self._opened = opened

    def _sources(self) -> list[Path]:
        return [self.model]

    def _student(self, teacher: Weights) -> tuple[Student, dict[int, int]]:
        student = QuantizedStudent(self._opened, self.codes, teacher if self.codes else None)
        return student, layer_pairs(student.architecture, self.teacher.architecture, None)

    def _write(self, student: Student) -> None:
        assert isinstance(student, QuantizedStudent)
        with published(self.output.partial) as draft:
            write_over(self._opened, student.changed(), draft, codes=self.codes)

    def _about_student(self) -> dict[str, Any]:
        return {
            "student": str(self.model),
            "student_fingerprint": self._opened.fingerprint(),
            "codes": self.codes,
        }
