"""Estimates with their standard errors, and comparisons of two models on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

BOOTSTRAP_DRAWS = 10_000
_BLOCK = 2**22  # resampled items held at a time


class Estimate(BaseModel):
    """A mean over ``n`` items and its standard error; None with fewer than two items."""

    model_config = ConfigDict(extra="forbid")

    value: float
    se: float | None
    n: int


class Comparison(BaseModel):
    """A model against a reference, item by item.

    ``difference``: model minus reference, with the paired standard error; ``low``, ``high``: its 95 %
    percentile bootstrap interval. ``gained``/``lost``: items that only the model / only the reference has
    right (scores of 0 and 1), the flips; ``p_value``: McNemar's exact test that they are equally likely.
    """

    model_config = ConfigDict(extra="forbid")

    difference: Estimate
    low: float
    high: float
    gained: int | None
    lost: int | None
    p_value: float | None


def mean(values: ArrayLike) -> Estimate:
    """Mean and standard error (sample standard deviation over root n). Raises ValueError without values."""
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise ValueError("a mean needs at least one value")
    se = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else None
    return Estimate(value=float(array.mean()), se=se, n=array.size)


def perplexity(log_losses: ArrayLike) -> Estimate:
    """exp of the mean negative log-probability; the standard error by the delta method."""
    loss = mean(log_losses)
    value = math.exp(min(loss.value, 700.0))  # beyond, a float64 overflows
    return Estimate(value=value, se=None if loss.se is None else value * loss.se, n=loss.n)


def compare(model: Sequence[float], reference: Sequence[float], *, seed: int) -> Comparison:
    """Paired comparison of two models' scores on the same items, in the same order.

    Raises ValueError if the lengths differ or there are no items.
    """
    if len(model) != len(reference):
        raise ValueError(f"{len(model)} scores cannot be paired with {len(reference)}")
    ours, theirs = np.asarray(model, np.float64), np.asarray(reference, np.float64)
    differences = ours - theirs
    low, high = bootstrap_interval(differences, seed=seed)
    gained = lost = p_value = None
    if np.isin(np.concatenate([ours, theirs]), (0.0, 1.0)).all():
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        p_value = mcnemar(gained, lost)
    return Comparison(
        difference=mean(differences), low=low, high=high, gained=gained, lost=lost, p_value=p_value
    )


def compare_amounts(model: Sequence[float], reference: Sequence[float], *, seed: int) -> Comparison:
    """As :func:`compare`, of quantities such as lengths, which are neither right nor wrong: no flips."""
    differences = np.asarray(model, np.float64) - np.asarray(reference, np.float64)
    low, high = bootstrap_interval(differences, seed=seed)
    return Comparison(difference=mean(differences), low=low, high=high, gained=None, lost=None, p_value=None)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: of ``gained + lost`` flips, are both directions equally likely?

    The p-value of a binomial test with probability 1/2 (McNemar 1947; the exact form).
    """
    flips = gained + lost
    tail = sum(math.comb(flips, k) for k in range(min(gained, lost) + 1))
    return min(1.0, float(2 * tail / 2**flips))


def bootstrap_interval(
    values: NDArray[np.float64], *, seed: int, draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean (Efron 1979), items drawn with replacement."""
    random = np.random.default_rng(seed)
    step = max(1, _BLOCK // len(values))
    means = [
        values[random.integers(0, len(values), (min(step, draws - done), len(values)))].mean(axis=1)
        for done in range(0, draws, step)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
