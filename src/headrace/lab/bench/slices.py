"""A stage's window cut into slices of time: what throughput is computed and resampled from.

Requests of equal length would show no spread at all; the server's pace from slice to slice does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.lab.bench.bootstrap import Array
from headrace.lab.bench.records import Record

_FEWEST, _MOST = 10, 120


def edges(begin_s: float, end_s: float) -> Array:
    """About one slice a second, ten at least: their bounds."""
    count = int(np.clip(round(end_s - begin_s), _FEWEST, _MOST))
    return np.linspace(begin_s, end_s, count + 1)


def token_rates(records: Sequence[Record], bounds: Array) -> Array:
    """Output tokens a second in each slice; a request's tokens are spread evenly over its chunks."""
    times: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.output_tokens:
            at = record.chunk_s or [record.end_s]
            times += at
            weights += [record.output_tokens / len(at)] * len(at)
    return np.histogram(times, bounds, weights=weights)[0] / np.diff(bounds)


def completion_rates(records: Sequence[Record], bounds: Array) -> Array:
    """Requests answered to the end, a second, in each slice."""
    return np.histogram([r.end_s for r in records if r.ok], bounds)[0] / np.diff(bounds)
