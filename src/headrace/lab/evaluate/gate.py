"""The gate: thresholds that a model must keep to its reference, and which of them it fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import ItemsResult, Report
from headrace.yaml_file import read_yaml

_ROUNDING = 1e-9  # a drop of exactly the limit, as 0.70 - 0.68, is no failure


class SuiteGate(BaseModel):
    """Of one metric of a suite. ``drop``: how far the mean score may lie below the reference's (0.02 = two
    points of a hundred); ``lost``: how many answers may flip from right to wrong; ``at_least``: a floor;
    ``length_drift``: how far the answers' mean length may lie from the reference's, as a share of it."""

    model_config = ConfigDict(extra="forbid")

    metric: str | None = None  # default: the suite's first
    drop: float | None = Field(default=None, ge=0, le=1)
    lost: int | None = Field(default=None, ge=0)
    at_least: float | None = Field(default=None, ge=0, le=1)
    length_drift: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _something(self) -> SuiteGate:
        if self.at_least is None and not self.compares():
            raise ValueError("give drop, lost, at_least or length_drift")
        return self

    def compares(self) -> bool:
        """Whether it needs a reference."""
        return any(limit is not None for limit in (self.drop, self.lost, self.length_drift))


class Gate(BaseModel):
    """Limits on what ``perplexity`` measures against the reference, and on suites by name."""

    model_config = ConfigDict(extra="forbid")

    kl_mean: float | None = Field(default=None, ge=0)  # nats per token, at most
    kl_p99: float | None = Field(default=None, ge=0)
    same_top1: float | None = Field(default=None, ge=0, le=1)  # at least
    ln_ppl_ratio: float | None = None  # at most
    suites: dict[str, SuiteGate] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _something(self) -> Gate:
        if not self.suites and not any(True for _ in self._text_limits()):
            raise ValueError("a gate needs at least one limit")
        return self

    def needs(self) -> set[str]:
        """The suites that must have run."""
        text = {"perplexity"} if any(True for _ in self._text_limits()) else set()
        return text | set(self.suites)

    def needs_reference(self) -> bool:
        """Whether any limit compares with a reference."""
        return any(True for _ in self._text_limits()) or any(
            suite.compares() for suite in self.suites.values()
        )

    def failures(self, report: Report) -> list[str]:
        """One line for each limit that is broken or was not measured: which, the value, and the limit.

        Values are compared as measured; their standard errors are not added or taken off.
        """
        return [*self._text_failures(report), *self._suite_failures(report)]

    def _text_limits(self) -> Iterator[tuple[str, float]]:
        for name in ("kl_mean", "kl_p99", "same_top1", "ln_ppl_ratio"):
            limit = getattr(self, name)
            if limit is not None:
                yield name, limit

    def _text_failures(self, report: Report) -> Iterator[str]:
        record = report.suites.get("perplexity")
        result = record.result if record is not None else None
        values = _text_values(result) if isinstance(result, TextResult) else {}
        for name, limit in self._text_limits():
            value = values.get(name)
            if value is None:
                yield f"perplexity: {name} was not measured"
            elif name == "same_top1":
                if not value >= limit:
                    yield f"perplexity: same_top1 is {value:.4f}, below {limit:g}"
            elif not value <= limit:
                yield f"perplexity: {name} is {value:.5f}, above {limit:g}"

    def _suite_failures(self, report: Report) -> Iterator[str]:
        for name, limits in self.suites.items():
            record = report.suites.get(name)
            result = record.result if record is not None else None
            if not isinstance(result, ItemsResult):
                yield f"{name}: was not measured"
                continue
            if result.not_judged:
                yield f"{name}: {len(result.not_judged)} cases were not judged"
            for failure in _broken(limits, result):
                yield f"{name}: {failure}"


def _text_values(result: TextResult) -> dict[str, float]:
    found = result.divergence
    if found is None:
        ratio = result.loss_ratio
        return {} if ratio is None else {"ln_ppl_ratio": ratio.ln_ppl_ratio.value}
    return {
        "kl_mean": found.kl.value,
        "kl_p99": found.kl_p99,
        "same_top1": found.same_top1.value,
        "ln_ppl_ratio": found.ln_ppl_ratio.value,
    }


def _broken(limits: SuiteGate, result: ItemsResult) -> Iterator[str]:
    metric = limits.metric or next(iter(result.metrics), None)
    if metric not in result.metrics:
        yield f"has no metric {metric!r}, only {', '.join(result.metrics)}" if metric else "has no score"
        return
    score = result.metrics[metric].value
    if limits.at_least is not None and not score >= limits.at_least:
        yield f"{metric} is {score:.3f}, below {limits.at_least:g}"
    if limits.drop is not None or limits.lost is not None:
        compared = (result.against or {}).get(metric)
        if compared is None:
            yield f"{metric} was not compared with a reference"
            return
        drop = -compared.difference.value
        if limits.drop is not None and not drop <= limits.drop + _ROUNDING:
            yield f"{metric} fell by {drop:.3f}, more than {limits.drop:g}"
        if limits.lost is not None and compared.lost is None:
            yield f"{metric} is not right or wrong for each answer, so lost answers cannot be counted"
        elif limits.lost is not None and compared.lost is not None and compared.lost > limits.lost:
            yield f"{metric} lost {compared.lost} answers, more than {limits.lost}"
    if limits.length_drift is not None:
        length, drift = result.output_tokens, result.output_tokens_drift
        if length is None or drift is None:
            yield "the answers' lengths were not compared with a reference's"
            return
        reference = length.value - drift.difference.value
        share = abs(drift.difference.value) / reference if reference else float(drift.difference.value != 0)
        if not share <= limits.length_drift + _ROUNDING:
            longer = "longer" if drift.difference.value > 0 else "shorter"
            yield f"answers are {share:.0%} {longer}, more than {limits.length_drift:.0%}"


DEFAULT = "default"
DEFAULT_GATE = Gate(kl_mean=0.05, same_top1=0.95, ln_ppl_ratio=0.02)
"""What an honest 8-bit model keeps to its float reference with room to spare, and a damaged one does not."""


def named_gate(name: str) -> Gate:
    """The gate ``default``, or the one in a YAML file. Raises ConfigError as :func:`read_gate` does."""
    return DEFAULT_GATE if name == DEFAULT else read_gate(Path(name))


def fallen(failures: Sequence[str]) -> list[str]:
    """The names of the suites of these failures, each once."""
    return list(dict.fromkeys(failure.partition(":")[0] for failure in failures))


def read_gate(path: Path) -> Gate:
    """A gate's YAML file. Raises ConfigError with the line of what is wrong."""
    return read_yaml(path, Gate)
