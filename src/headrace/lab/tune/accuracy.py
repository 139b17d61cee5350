"""The accuracy gate: a choice that can change answers is compared with the model as shipped, once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.evaluation import Evaluation, Settings
from headrace.lab.evaluate.gate import Gate
from headrace.lab.tune.switches import Choice, Dimension
from headrace.model.store import Progress


class Judged(msgspec.Struct, kw_only=True, frozen=True):
    """What the gate found of a choice; ``failures`` are the limits that it broke, none if it passed."""

    switch: str
    label: str
    kl_mean: float | None
    same_top1: float | None
    failures: list[str]

    def __str__(self) -> str:
        numbers = ""
        if self.kl_mean is not None and self.same_top1 is not None:
            numbers = f" (KL {self.kl_mean:.4f} nats a token, same top-1 {self.same_top1:.1%})"
        verdict = f"refused: {'; '.join(self.failures)}" if self.failures else "passed"
        return f"{self.switch}={self.label} {verdict}{numbers}"


@dataclasses.dataclass(frozen=True, slots=True)
class AccuracyGate:
    """``settings`` are the model's, without any choice. What was evaluated is kept in ``folder`` and not done
    again.
    """

    limits: Gate
    settings: Settings
    folder: Path
    downloads: Progress | None = None

    def judge(self, dimension: Dimension, choice: Choice) -> Judged:
        """Evaluate the choice against the model as shipped. Raises what an evaluation raises."""
        settings = dataclasses.replace(
            self.settings,
            against=self.settings.model,
            suites=tuple(sorted(self.limits.needs())),
            **choice.evaluated_as,
        )
        name = re.sub(r"[^\w-]+", "-", f"accuracy-{dimension.name}-{choice.label}")
        evaluation = Evaluation(settings, output=self.folder / f"{name}.json", downloads=self.downloads)
        report = evaluation.run()
        text = report.suites.get("perplexity")
        found = text.result.divergence if text is not None and isinstance(text.result, TextResult) else None
        return Judged(
            switch=dimension.name,
            label=choice.label,
            kl_mean=None if found is None else found.kl.value,
            same_top1=None if found is None else found.same_top1.value,
            failures=self.limits.failures(report),
        )


def passing(
    dimensions: Sequence[Dimension], gate: AccuracyGate, told: Callable[[Judged], None]
) -> list[Dimension]:
    """The dimensions without the choices that the gate refuses; those with one choice left are gone."""
    found = []
    for dimension in dimensions:
        kept = []
        for choice in dimension.choices:
            if choice.evaluated_as:
                judged = gate.judge(dimension, choice)
                told(judged)
                if judged.failures:
                    continue
            kept.append(choice)
        if len(kept) > 1:
            found.append(Dimension(dimension.name, tuple(kept)))
    return found
