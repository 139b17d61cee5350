"""What a training did, as JSON and as a page to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headrace.lab.compress.report import digest
from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import Report as Evaluated

JSON_NAME = "training.json"
PAGE_NAME = "training.md"


class Point(BaseModel):
    """One look at the held-out data; ``loss`` is the mean of the steps before it."""

    model_config = ConfigDict(extra="forbid")

    step: int
    seconds: float
    kl: float
    loss: float | None


class Drafting(BaseModel):
    """A draft model at work for its target, one stream, on prompts that it was not trained on.

    ``accepted_at``: of drafts of ``length`` tokens, the share whose first, second … token was right, with all
    before it. ``speedup``: as it is served, drafts as long as they pay. ``step_share``: a token drafted, in
    steps of the target; ``verify_share``: a step that verifies a draft, likewise. ``pays_from``: how many
    times this target's a step would have to cost for GOAL times the speed, by arithmetic from those; None: no
    cost is enough.
    """

    model_config = ConfigDict(extra="forbid")

    prompts: int
    output_tokens: int
    length: int
    accepted_at: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    step_share: float
    verify_share: float
    pays_from: float | None
    quantization: str | None


GOAL = 1.15
"""What a draft model should make of the speed of one stream."""


class TrainingReport(BaseModel):
    """Written into the folder of the student. ``kl_before`` and ``kl_after``: of the teacher to the student
    on held-out sequences, nats per token; the latter as its file holds it. ``files``: sha256 of others."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["headrace-training/1"] = "headrace-training/1"
    kind: Literal["distill", "repair", "draft"]
    headrace: str
    created: str  # ISO 8601, UTC
    teacher: str
    teacher_fingerprint: str
    student: str
    parameters: int
    trained_parameters: int
    teacher_parameters: int
    data: dict[str, Any]
    settings: dict[str, Any]
    history: list[Point]
    steps: int
    tokens: int
    seconds: float
    stopped: str
    kl_before: float
    kl_after: float
    weights_bytes: int
    evaluation: Evaluated | None = None
    drafting: Drafting | None = None
    files: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        """The result in a few lines."""
        yield (
            f"student: {self.parameters / 1e6:.1f} million parameters of the teacher's "
            f"{self.teacher_parameters / 1e6:.1f}, {self.trained_parameters / 1e6:.1f} of them trained; "
            f"{self.weights_bytes / 2**20:.1f} MiB"
        )
        minutes = self.seconds / 60
        gained = self.kl_before - self.kl_after
        yield (
            f"held-out KL {self.kl_before:.5f} before, {self.kl_after:.5f} after: "
            f"{gained / max(minutes, 1e-9):.5f} nats per token a minute"
        )
        yield (f"trained {self.steps} steps, {self.tokens} tokens, {minutes:.1f} min; ended: {self.stopped}")
        record = None if self.evaluation is None else self.evaluation.suites.get("perplexity")
        text = record.result if record is not None and isinstance(record.result, TextResult) else None
        if text is not None and (found := text.divergence) is not None:
            yield (
                f"on the text: KL {found.kl.value:.5f} nats per token, same top-1 "
                f"{found.same_top1.value:.1%}, perplexity {text.perplexity.value:.3f}, the teacher's "
                f"{found.reference_perplexity.value:.3f}"
            )
        if self.drafting is not None:
            yield from _drafting_lines(self.drafting)

    def page(self) -> str:
        """The report as Markdown."""
        lines = [f"# {self.student}, taught by {self.teacher}", "", *(f"- {line}" for line in self.lines())]
        for title, values in (("data", self.data), ("settings", self.settings)):
            lines.append(f"- {title}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
        lines += ["", "| step | minutes | loss | held-out KL |", "|---:|---:|---:|---:|"]
        for point in self.history:
            loss = "" if point.loss is None else f"{point.loss:.5f}"
            lines.append(f"| {point.step} | {point.seconds / 60:.1f} | {loss} | {point.kl:.5f} |")
        return "\n".join([*lines, ""])

    def write(self, folder: Path) -> None:
        """Put both forms beside the weights."""
        self.files = {path.name: digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / PAGE_NAME).write_text(self.page(), "utf-8")
        (folder / JSON_NAME).write_text(self.model_dump_json(indent=1) + "\n", "utf-8")


def _drafting_lines(found: Drafting) -> Iterator[str]:
    accepted = ", ".join(f"{share:.0%}" for share in found.accepted_at)
    yield (
        f"drafts of {found.length}: right up to the first, second … token in {accepted}; a drafted token "
        f"costs {found.step_share:.0%} of the target's step, a step that verifies {found.verify_share:.0%}"
    )
    verdict = (
        "pays" if found.speedup >= GOAL else "is worth little" if found.speedup >= 1.02 else "does not pay"
    )
    yield (
        f"one stream: {found.tokens_per_second:.1f} tokens/s with drafts, {found.plain_tokens_per_second:.1f}"
        f" without: {found.speedup:.2f} times. On this machine it {verdict}"
    )
    if found.speedup < GOAL:
        if found.pays_from is None:
            yield f"with this acceptance and this cost of verifying, no size of target gives {GOAL:g} times"
        else:
            yield (
                f"by arithmetic, {GOAL:g} times takes a target whose steps cost {found.pays_from:.1f} times "
                "this one's, with the same acceptance"
            )
