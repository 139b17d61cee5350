"""What each choice does by itself: an additive fit over all trials, the poor and unfinished ones included."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.lab.tune.switches import Config, Dimension

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Effect:
    """Of a choice instead of its switch's default: ``size`` and its standard error in the units of the fit;
    ``se`` is None where there are not more trials than choices. ``trials``: in how many it was on.
    """

    switch: str
    label: str
    size: float
    se: float | None
    trials: int


def additive(
    dimensions: Sequence[Dimension], configs: Sequence[Config], values: Sequence[float]
) -> list[Effect]:
    """Ordinary least squares of ``values`` on which choices were on, with an intercept for the defaults.

    Only choices that occur have an effect. Standard errors are those of a linear model with one variance;
    interactions between switches and the noise of trials are both in them. Raises ValueError without values.
    """
    if not configs:
        raise ValueError("a fit needs at least one trial")
    seen = [
        (dimension.name, choice.label)
        for dimension in dimensions
        for choice in dimension.choices[1:]
        if any(config[dimension.name] == choice.label for config in configs)
    ]
    on = np.array([[config[name] == label for name, label in seen] for config in configs], np.float64)
    design = np.column_stack([np.ones(len(configs)), on.reshape(len(configs), len(seen))])
    target = np.asarray(values, np.float64)
    inverse = np.linalg.pinv(design.T @ design)
    sizes = inverse @ design.T @ target
    freedom = len(configs) - int(np.linalg.matrix_rank(design))
    errors: list[float | None] = [None] * len(sizes)
    if freedom > 0:
        variance = float(((target - design @ sizes) ** 2).sum()) / freedom
        errors = [math.sqrt(max(variance * float(inverse[k, k]), 0.0)) for k in range(len(sizes))]
    return [
        Effect(name, label, float(sizes[k]), errors[k], int(on[:, k - 1].sum()))
        for k, (name, label) in enumerate(seen, 1)
    ]


def best_first(dimensions: Sequence[Dimension], effects: Sequence[Effect]) -> Iterator[Config]:
    """All configurations of choices whose effect is known, by the sum of their effects, highest first."""
    known = {(effect.switch, effect.label): effect.size for effect in effects}
    ranked = []
    for dimension in dimensions:
        sizes = [(0.0, dimension.choices[0].label)]
        sizes += [
            (known[dimension.name, choice.label], choice.label)
            for choice in dimension.choices[1:]
            if (dimension.name, choice.label) in known
        ]
        ranked.append(sorted(sizes, key=lambda pair: -pair[0]))
    first = (0,) * len(ranked)
    waiting = [(-_sum(ranked, first), first)]
    met = {first}
    while waiting:
        _, at = heapq.heappop(waiting)
        yield {dimension.name: ranked[k][at[k]][1] for k, dimension in enumerate(dimensions)}
        for k in range(len(at)):
            after = (*at[:k], at[k] + 1, *at[k + 1 :])
            if after[k] < len(ranked[k]) and after not in met:
                met.add(after)
                heapq.heappush(waiting, (-_sum(ranked, after), after))


def _sum(ranked: Sequence[Sequence[tuple[float, str]]], at: tuple[int, ...]) -> float:
    return sum(ranked[k][place][0] for k, place in enumerate(at))
