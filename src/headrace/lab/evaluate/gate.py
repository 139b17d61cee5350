"""The gate: thresholds that a model must keep to its reference, and which of them it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import ItemsResult, Report
from headrace.lab.evaluate.yaml_file import read_yaml

_ROUNDING = 1e-9  # a drop of exactly the limit, as 0.70 - 0.68, is no failure


class SuiteGate(BaseModel):
    """Of one metric of a suite. ``drop``: how far the mean score may lie below the reference's (0.02 = two
    points of a hundred); ``lost``: how many answers may flip from right to wrong; ``at_least``: a floor."""

    model_config = ConfigDict(extra="forbid")

    metric: str | None = None  # default: the suite's first
    drop: float | None = Field(default=None, ge=0, le=1)
    lost: int | None = Field(default=None, ge=0)
    at_least: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _something(self) -> SuiteGate:
        if self.drop is None and self.lost is None and self.at_least is None:
            raise ValueError("give drop, lost or at_least")
        return self


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
            suite.drop is not None or suite.lost is not None for suite in self.suites.values()
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
        found = result.divergence if isinstance(result, TextResult) else None
        for name, limit in self._text_limits():
            if found is None:
                yield f"perplexity: {name} was not measured"
                continue
            value = {
                "kl_mean": found.kl.value,
                "kl_p99": found.kl_p99,
                "same_top1": found.same_top1.value,
                "ln_ppl_ratio": found.ln_ppl_ratio.value,
            }[name]
            if name == "same_top1":
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
            metric = limits.metric or next(iter(result.metrics))
            if metric not in result.metrics:
                yield f"{name}: has no metric {metric!r}, only {', '.join(result.metrics)}"
                continue
            score = result.metrics[metric].value
            if limits.at_least is not None and not score >= limits.at_least:
                yield f"{name}: {metric} is {score:.3f}, below {limits.at_least:g}"
            if limits.drop is None and limits.lost is None:
                continue
            compared = (result.against or {}).get(metric)
            if compared is None:
                yield f"{name}: was not compared with a reference"
                continue
            drop = -compared.difference.value
            if limits.drop is not None and not drop <= limits.drop + _ROUNDING:
                yield f"{name}: {metric} fell by {drop:.3f}, more than {limits.drop:g}"
            if limits.lost is not None and (compared.lost is None or compared.lost > limits.lost):
                yield f"{name}: {metric} lost {compared.lost} answers, more than {limits.lost}"


def read_gate(path: Path) -> Gate:
    """A gate's YAML file. Raises ConfigError with the line of what is wrong."""
    return read_yaml(path, Gate)
