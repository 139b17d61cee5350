"""When requests of an open loop arrive: times that the server's slowness can't move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

Arrivals = Literal["poisson", "uniform", "burst"]
BURST = 8
"""Requests that a burst brings at once."""


def arrivals(kind: Arrivals, rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Seconds since the beginning, without end, ``rate`` a second in the long run.

    ``poisson``: independent exponential gaps, not rescaled to hit the rate exactly; ``uniform``: equal gaps;
    ``burst``: ``BURST`` requests at once, at Poisson times.
    """
    at = 0.0
    while True:
        if kind == "uniform":
            yield at
            at += 1 / rate
        elif kind == "poisson":
            at += float(rng.exponential(1 / rate))
            yield at
        else:
            at += float(rng.exponential(BURST / rate))
            for _ in range(BURST):
                yield at
