"""Draft models: a few of the target's layers, taught what the target says, and measured at its side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from headrace.errors import ConfigError
from headrace.lab.compress.training.distill import Distillation
from headrace.lab.compress.training.drafting import MAX_PROMPTS, measure_drafting
from headrace.lab.compress.training.report import TrainingReport
from headrace.lab.compress.training.sizes import Sizes
from headrace.lab.compress.work import Work


@dataclass(eq=False)
class Draft(Distillation):
    """``layers``: how many of the target's, or which. Prompts that the draft is measured on teach it nothing.

    ``quantization``: how the draft's floats are narrowed when it is loaded, measured so, too.
    """

    kind: ClassVar[Literal["distill", "repair", "draft"]] = "draft"

    spare_prompts: ClassVar[int] = MAX_PROMPTS

    layers: int | list[int] | None = None
    quantization: Literal["int8", "int4"] | None = "int4"
    embeddings: bool = False

    def _open_student(self) -> None:
        count = len(self.teacher.architecture.layers)
        if count < 2:
            raise ConfigError(f"{self.asked.teacher} has one layer: there is no smaller model to make of it.")
        layers = self.layers if self.layers is not None else max(1, count // 8)
        if not 1 <= (layers if isinstance(layers, int) else len(layers)) < count:
            raise ConfigError(
                f"--layers: {layers} must be 1 to {count - 1} of the target's {count} layers, less than all."
            )
        self._sizes = Sizes(layers=layers)
        super()._open_student()
        if not self.asked.generate:
            raise ConfigError("A draft model learns what its target says: --generate must be above 0.")

    def _prompts(self) -> list[list[int]]:
        return self._all_prompts()[1]

    def _held_out_prompts(self) -> list[list[int]]:
        return self._all_prompts()[0]

    def _all_prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Those that are measured on, spread over all, and those that the target answers for its draft."""
        found = self._some_prompts(self.asked.generate + MAX_PROMPTS, chats_only=True)
        room = self.length // 2
        found = [prompt for prompt in found if len(prompt) <= room]
        if len(found) < 4:
            raise ConfigError(
                f"--data {self.asked.data}: {len(found)} prompts of up to {room} tokens are too few to learn "
                "from and to measure on: give at least 4, better some hundred."
            )
        count = min(MAX_PROMPTS, len(found) // 4)
        chosen = {place * len(found) // count for place in range(count)}
        held = [prompt for number, prompt in enumerate(found) if number in chosen]
        return held, [prompt for number, prompt in enumerate(found) if number not in chosen]

    def _store_in(self, work: Work) -> Path | None:
        """What the target says is looked up once: a draft is small, and sees its data several times."""
        return work.path / "logits"

    def _architecture_name(self) -> str:
        assert self._sizes is not None
        count = len(self.teacher.architecture.layers)
        chosen = self._sizes.chosen(self.teacher.architecture)
        return f"layers {', '.join(map(str, chosen))} of {count}"

    def _about_student(self) -> dict[str, Any]:
        return super()._about_student() | {"student": f"{self.asked.teacher}, {self._architecture_name()}"}

    def _measure(self, report: TrainingReport) -> None:
        super()._measure(report)
        report.drafting = measure_drafting(
            self._teacher_path,
            self.output.partial,
            self._held_out_prompts(),
            quantization=self.quantization,
            max_tokens=self.asked.new_tokens,
            max_model_len=min(self.length + self.asked.new_tokens, self.teacher.architecture.max_positions),
            threads=self.asked.threads,
            progress=self.progress,
        )
