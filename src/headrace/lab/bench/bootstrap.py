"""Intervals by resampling requests (Efron's percentile bootstrap)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""From samples ``[repeats, n]`` to one value each, ``[repeats]``."""

REPEATS = 1000
_CELLS = 4_000_000  # of one block of resamples, to bound memory


def mean(samples: Array) -> Array:
    """The mean of each row."""
    return np.asarray(samples.mean(axis=1))


def percentile(percent: float) -> Statistic:
    """The statistic that takes a percentile of each row."""
    return lambda samples: np.asarray(np.percentile(samples, percent, axis=1))


def resampled(values: Array, statistic: Statistic, rng: np.random.Generator, repeats: int = REPEATS) -> Array:
    """``statistic`` of ``repeats`` resamples of ``values``, ``[repeats]``."""
    block = max(1, _CELLS // len(values))
    parts = []
    for begin in range(0, repeats, block):
        picks = rng.integers(len(values), size=(min(block, repeats - begin), len(values)))
        parts.append(statistic(values[picks]))
    return np.concatenate(parts)


def interval(draws: Array, confidence: float = 0.95) -> tuple[float, float]:
    """The middle ``confidence`` of what was drawn."""
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, (tail, 100 - tail))
    return float(low), float(high)
