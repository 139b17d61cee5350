"""The steps of a recipe that leave weights out: single ones, or whole layers, channels and heads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.lab.compress.targets import Targeted

Dimension = Literal["depth", "feed_forward", "heads", "hidden"]
DepthBy = Literal["influence", "kl"]
_GROUPS = (2, 4, 8, 16)  # a block of weights whose errors are spread together is a multiple of these


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Which share of a weight matrix is zero; with ``group``: in every so many neighbouring inputs."""

    share: float
    group: int | None = None

    @property
    def zeros(self) -> int:
        """Zeros in each group."""
        return round(self.share * (self.group or 0))

    def words(self) -> str:
        """As a person says it."""
        if self.group is None:
            return f"{100 * self.share:g}% zero"
        return f"{self.zeros} of {self.group} zero"


class PruneStep(Targeted):
    """Makes weights zero: the smallest (``magnitude``), those that are smallest times the size of their input
    (``wanda``, arXiv 2306.11695), or those that the others make up for best, which they then do
    (``sparsegpt``, arXiv 2301.00774).

    ``sparsity``: the share of zeros. ``pattern`` instead, "N:M": at most N of M neighbouring inputs are not
    zero. ``damping``: of SparseGPT, as of GPTQ.
    """

    step: Literal["prune"]
    method: Literal["magnitude", "wanda", "sparsegpt"] = "wanda"
    sparsity: float | None = Field(default=None, gt=0, lt=1)
    pattern: str | None = None
    damping: float = Field(default=0.01, gt=0, le=1)

    @field_validator("pattern", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        """YAML 1.1 reads 2:4 without quotes as a number to the base 60."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
            return f"{value // 60}:{value % 60}"
        return value

    @model_validator(mode="after")
    def _possible(self) -> PruneStep:
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("a prune step has either sparsity, as 0.5, or pattern, as 2:4")
        if self.pattern is not None:
            found = re.fullmatch(r"(\d{1,2}):(\d{1,2})", self.pattern)
            stay, group = (int(found[1]), int(found[2])) if found else (0, 0)
            if group not in _GROUPS or not 0 < stay < group:
                raise ValueError(
                    f"pattern is N:M, N weights that stay of every M, with M one of "
                    f"{', '.join(map(str, _GROUPS))} and N from 1 below M; not {self.pattern}"
                )
        return self

    def zeros(self) -> Sparsity:
        """How many weights become zero, and where."""
        if self.pattern is None:
            assert self.sparsity is not None
            return Sparsity(self.sparsity)
        stay, group = map(int, self.pattern.split(":"))
        return Sparsity(1 - stay / group, group)


class _ShapeStep(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DepthStep(_ShapeStep):
    """Leaves layers out: those that turn the residual stream least (``influence``, the block influence of
    ShortGPT, arXiv 2403.03853), or those without which the model diverges least (``kl``: each is left out
    alone, and that is measured). ``keep``: the share of layers that stay.
    """

    step: Literal["depth"]
    keep: float = Field(gt=0, lt=1)
    by: DepthBy = "influence"


class WidthStep(_ShapeStep):
    """Leaves out feed-forward channels, heads (query heads with the key and value head that they share) and
    features of the residual stream, those that show least in activations (Minitron, arXiv 2407.14679).

    Shares of each that stay. Counts are rounded: channels and features to multiples of 32.
    """

    step: Literal["width"]
    feed_forward: float = Field(default=1, gt=0, le=1)
    heads: float = Field(default=1, gt=0, le=1)
    hidden: float = Field(default=1, gt=0, le=1)

    @model_validator(mode="after")
    def _less(self) -> WidthStep:
        if self.feed_forward == self.heads == self.hidden == 1:
            raise ValueError("a width step says what share of feed_forward, heads or hidden stays, below 1")
        return self


class SearchStep(_ShapeStep):
    """Finds the shape that diverges least within a budget, of those that differ in ``dimensions``.

    One budget: ``parameters``, the share that stays; ``size_mib``, of all weights in 16 bits; ``latency``,
    the share of the time for one token after the other on this machine, as ``headrace plan`` predicts it from
    what it measures here. ``by``: how layers are chosen.
    """

    step: Literal["search"]
    parameters: float | None = Field(default=None, gt=0, lt=1)
    size_mib: float | None = Field(default=None, gt=0)
    latency: float | None = Field(default=None, gt=0, lt=1)
    dimensions: list[Dimension] = Field(default=["depth", "feed_forward", "heads", "hidden"], min_length=1)
    by: DepthBy = "influence"

    @model_validator(mode="after")
    def _one_budget(self) -> SearchStep:
        if sum(value is not None for value in (self.parameters, self.size_mib, self.latency)) != 1:
            raise ValueError("a search step has one budget: parameters, size_mib or latency")
        return self
