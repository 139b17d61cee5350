"""The part of the gateway's file that is about releases."""

from __future__ import annotations

import itertools
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from headrace.gateway.fields import Count, Name, Positive, Strict
from headrace.yaml_file import FieldError

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Version(Strict):
    """One version: a model, and which of its upstreams serve it (all, where none is named)."""

    model: Name
    upstreams: Annotated[frozenset[Name], Field(min_length=1)] | None = None


class Tolerated(Strict):
    """How much worse than the stable version is no regression.

    ``failed`` and ``score`` are differences (of the share of failed requests, and of the mean score);
    ``latency`` is a share of the stable version's percentile.
    """

    failed: Share = 0.01
    latency: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.1
    score: Share = 0.02


class Slo(Strict):
    """Latencies in seconds that are good enough, at the watched percentile. Of those that are named, being
    slower than the stable version is no regression as long as they are kept.
    """

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None


class Canary(Strict):
    """How a candidate takes over: ``steps`` in percent of the requests, the last one all of them.

    A step lasts ``hold_s`` and ``min_requests`` of the candidate's at least. ``percentile``: which one of
    TTFT, TPOT and E2E is watched. ``alpha``: how often a version that is as good may be rolled back, however
    long it is watched. What is not promoted within ``give_up_s`` is rolled back.
    """

    steps: Annotated[tuple[Positive, ...], Field(min_length=1)] = (5, 25, 50, 100)
    hold_s: Positive = 300.0
    min_requests: Count = 100
    percentile: Annotated[float, Field(ge=50, lt=100)] = 95.0
    alpha: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    tolerated: Tolerated = Tolerated()
    slo: Slo = Slo()
    give_up_s: Positive = 86_400.0

    @field_validator("steps")
    @classmethod
    def _grow(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        if any(later <= before for before, later in itertools.pairwise(steps)) or steps[-1] != 100:
            raise ValueError("write growing percentages that end in 100, such as [5, 25, 50, 100]")
        return steps


class Release(Strict):
    """Versions under one name. ``stable``: the one that serves until another was promoted (the first)."""

    versions: Annotated[dict[Name, Version], Field(min_length=1)]
    stable: Name | None = None
    canary: Canary = Canary()

    @model_validator(mode="after")
    def _stable_exists(self) -> Self:
        if self.stable is not None and self.stable not in self.versions:
            versions = ", ".join(self.versions)
            raise FieldError(f"{self.stable} is none of the versions {versions}", "stable")
        return self

    @property
    def first(self) -> str:
        """The version that serves where nothing was promoted yet."""
        return self.stable if self.stable is not None else next(iter(self.versions))
