"""What a compression did, as JSON that is its manifest as well, and as a page to read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import ConfigError
from headrace.lab.compress.plan import describe
from headrace.lab.compress.quantized import QuantizedLinear
from headrace.lab.compress.reshaped import Reshaped
from headrace.lab.compress.speed import Speed
from headrace.lab.compress.work import Work
from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import ItemsResult
from headrace.lab.evaluate.results import Report as Evaluated

JSON_NAME = "compress.json"
PAGE_NAME = "compress.md"
_WORST = 5


class Treated(BaseModel):
    """One weight that was pruned or rounded: how it is held, its share of zeros if it was pruned, and the
    share of its output's energy that was lost on the calibration."""

    model_config = ConfigDict(extra="forbid")

    name: str
    shape: tuple[int, ...]
    scheme: str
    size_bytes: int
    lost: float | None = None
    zeros: float | None = None


class Size(BaseModel):
    """Bytes. ``rounded_share``: of the rounded weights, what they take of their size in 16 bits; 1 if none
    is rounded."""

    model_config = ConfigDict(extra="forbid")

    weights: int
    source_weights: int  # of the source's files
    source_16_bit: int  # of the source's tensors, had they 16 bits each
    rounded_share: float


class CompressReport(BaseModel):
    """Written into the folder of the compressed model. ``compared``: how it was
    evaluated; ``files``: sha256 of each of the others there."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["headrace-compress/1"] = "headrace-compress/1"
    headrace: str
    created: str  # ISO 8601, UTC
    model: str
    source_fingerprint: str
    recipe_name: str
    recipe: dict[str, Any]
    calibration: dict[str, Any] | None
    output_format: str
    tensors: list[Treated]
    reshaped: Reshaped | None = None
    notes: list[str]
    sensitivity: list[float] | None = None
    kv_scales: list[tuple[float, float]] | None = None  # of each layer's keys and values, float8
    seconds: float
    peak_memory_bytes: int
    size: Size
    compared: dict[str, Any]
    evaluation: Evaluated | None = None
    speed: Speed | None = None
    source_speed: Speed | None = None
    gate: str | None = None
    gate_failures: list[str] = []
    files: dict[str, str] = {}

    def text(self) -> TextResult | None:
        """What was measured on text, if it was."""
        record = None if self.evaluation is None else self.evaluation.suites.get("perplexity")
        return record.result if record is not None and isinstance(record.result, TextResult) else None

    def lines(self) -> Iterator[str]:
        """The result in a few lines."""
        mib = 2**20
        share = self.size.weights / self.size.source_16_bit
        rounded = f" ({self.size.rounded_share:.0%} of the weights that were rounded)"
        yield (
            f"size: {self.size.weights / mib:.1f} MiB of weights, {share:.0%} of the model in 16 bits"
            f"{rounded if self.size.rounded_share < 1 else ''}"
        )
        if self.reshaped is not None:
            yield self.reshaped.words()
        if pruned := [(one.zeros, math.prod(one.shape)) for one in self.tensors if one.zeros is not None]:
            zeros = sum(share * count for share, count in pruned) / sum(count for _, count in pruned)
            yield f"zeros: {zeros:.1%} of the {len(pruned)} weights that were pruned"
        found = None if (text := self.text()) is None else text.divergence
        if text is not None and found is not None:
            yield (
                f"KL {found.kl.value:.5f} nats per token (p99 {found.kl_p99:.4f}), same top-1 "
                f"{found.same_top1.value:.1%}, perplexity {text.perplexity.value:.3f} after "
                f"{found.reference_perplexity.value:.3f}"
            )
        if self.evaluation is not None:
            yield from _suite_lines(self.evaluation)
        for title, speed in (("speed", self.speed), ("speed of the source", self.source_speed)):
            if speed is not None:
                yield (
                    f"{title}: loads in {speed.load_s:.1f} s, first token after {speed.ttft_ms:.0f} ms, then "
                    f"{speed.tpot_ms:.1f} ms each; {speed.tokens_per_second:.0f} tokens/s in 8 streams; "
                    f"{speed.memory_bytes / mib:.0f} MiB of memory"
                )
        yield f"took {self.seconds:.0f} s, {self.peak_memory_bytes / mib:.0f} MiB of memory at the peak"

    def page(self) -> str:
        """The report as Markdown."""
        lines = [f"# {self.model}, {self.recipe_name}", ""]
        lines += [f"- {line}" for line in self.lines()]
        if self.gate is not None:
            passed = "passed" if not self.gate_failures else "refused"
            lines += [f"- gate {self.gate}: {passed}", *(f"  - {line}" for line in self.gate_failures)]
        if self.calibration is not None:
            about = ", ".join(f"{key} {value}" for key, value in self.calibration.items())
            lines += [f"- calibration: {about}"]
        lines += [f"- {note}" for note in self.notes]
        worst = sorted((one for one in self.tensors if one.lost), key=lambda one: -(one.lost or 0))[:_WORST]
        if worst:
            lines += ["", "| weights that lost most | of | lost of the output |", "|---|---|---|"]
            lines += [f"| {one.name} | {one.scheme} | {one.lost:.2%} |" for one in worst]
        return "\n".join([*lines, ""])


def _suite_lines(report: Evaluated) -> Iterator[str]:
    """Of each suite of questions the scores, the answers that flipped, and how long answers became."""
    for name, record in report.suites.items():
        if not isinstance(record.result, ItemsResult):
            continue
        for metric, score in record.result.metrics.items():
            line = f"{name}: {metric} {score.value:.3f} ± {score.se or 0:.3f} of {score.n}"
            compared = (record.result.against or {}).get(metric)
            if compared is not None:
                line += f", {compared.difference.value:+.3f} ± {compared.difference.se or 0:.3f}"
                if compared.gained is not None:
                    line += f"; {compared.gained} gained, {compared.lost} lost"
            yield line
        length, drift = record.result.output_tokens, record.result.output_tokens_drift
        if length is not None and drift is not None:
            yield f"{name}: answers of {length.value:.0f} tokens, {drift.difference.value:+.1f}"


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_report(folder: Path) -> CompressReport:
    """Of a compressed model. Raises ConfigError if there is none."""
    path = folder / JSON_NAME
    try:
        return CompressReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise ConfigError(f"{folder} holds no {JSON_NAME} of headrace compress.") from None


def treated_weights(work: Work) -> tuple[list[Treated], list[str], float]:
    """What became of the weights of finished layers, the notes on them, and the ``rounded_share``."""
    treated, notes = [], []
    plain_bytes, rounded_bytes = 0, 0
    for index in range(work.finished()):
        kept, remarks = work.layer(index)
        notes += remarks["notes"]
        for name, tensor in kept.items():
            size, scheme = 2 * math.prod(tensor.shape), "not rounded"
            if isinstance(tensor, QuantizedLinear):
                plain_bytes += size
                size, scheme = tensor.size_bytes(), describe(tensor.scheme)
                rounded_bytes += size
            elif name not in remarks["zeros"]:
                continue  # it was scaled for others to be rounded better
            treated.append(
                Treated(
                    name=name,
                    shape=tensor.shape,
                    scheme=scheme,
                    size_bytes=size,
                    lost=remarks["errors"].get(name),
                    zeros=remarks["zeros"].get(name),
                )
            )
    return treated, notes, rounded_bytes / plain_bytes if plain_bytes else 1.0
