"""The winner against the defaults, measured again: the best of many trials looks better than it is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from headrace.lab.bench import bootstrap
from headrace.lab.bench.bootstrap import Array
from headrace.lab.bench.metrics import Estimate
from headrace.lab.bench.result import Result
from headrace.lab.bench.slices import edges, token_rates
from headrace.lab.bench.slo import SLO
from headrace.lab.tune.switches import Config

PAIRS = 2
_SEED = 30
_REPEATS = 4000


class Confirmed(msgspec.Struct, kw_only=True, frozen=True):
    """``gain``: the value of ``config`` as a multiple of the defaults', with its 95% interval; ``pairs``: the
    same of each pair. None where the defaults have no value to be a multiple of.
    """

    config: Config
    gain: Estimate | None
    pairs: list[float]

    @property
    def better(self) -> bool:
        """Whether the interval lies above the defaults."""
        return self.gain is not None and self.gain.low > 1


def interleaved(
    config: Config, defaults: Config, measure: Callable[[Config, int], Result], told: Callable[[str], None]
) -> tuple[Result, Result]:
    """Defaults, winner, defaults, winner: both as one result of ``PAIRS`` stages each.

    ``measure``: a configuration with the prompts of a seed; both sides of a pair have the same.
    """
    sides: tuple[list[Result], list[Result]] = ([], [])
    for pair in range(PAIRS):
        for side, one in zip(sides, (defaults, config), strict=True):
            told(f"{'defaults' if one is defaults else 'best'}, pair {pair + 1} of {PAIRS}")
            result = measure(one, pair + 1)
            for stage in result.stages:
                stage.label = f"{stage.label}, pair {pair + 1}"
            side.append(result)
    for first, *others in sides:
        for other in others:
            first.stages += other.stages
        first.knee = None
    return sides[0][0], sides[1][0]


def confirmed(config: Config, before: Result, after: Result) -> Confirmed:
    """What the interleaved results say. Intervals by resampling slices of time, both sides alike."""
    rates = [[_rates(result, number) for number in range(PAIRS)] for result in (before, after)]
    means = [[float(one.mean()) for one in side] for side in rates]
    pairs = [round(b / a, 4) for a, b in zip(*means, strict=True) if a > 0]
    x, y = (np.concatenate(side) for side in rates)
    if not float(x.mean()) > 0:
        return Confirmed(config=config, gain=None, pairs=[])
    rng = np.random.default_rng(_SEED)
    x_draws, y_draws = (bootstrap.resampled(side, bootstrap.mean, rng, _REPEATS) for side in (x, y))
    low, high = bootstrap.interval(y_draws / np.maximum(x_draws, 1e-9))
    gain = Estimate(*(round(value, 4) for value in (float(y.mean() / x.mean()), low, high)))
    return Confirmed(config=config, gain=gain, pairs=pairs)


def _rates(result: Result, number: int) -> Array:
    """What the search maximises, in each slice of a stage's window: tokens, or requests that meet the SLO."""
    stage = result.stages[number]
    bounds = edges(stage.window_begin_s, stage.window_begin_s + stage.window_s)
    slo: SLO | None = result.slo
    if slo is None:
        return token_rates(stage.records, bounds)
    met = [record.end_s for record in stage.records if slo.met_by(record)]
    return np.histogram(met, bounds)[0] / np.diff(bounds)
