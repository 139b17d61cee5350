"""The search held against whole grids, by replaying them: made-up ones, and one that was measured.

The search sees nothing of a grid but what its trials answer; its clock is the time that those took. The
measured one is written by ``python benchmarks/tune_grid.py tests/data/tune_grid.json`` on a quiet machine.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.lab.tune.measurement import PARTS, GoOn, Measurement
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import Choice, Config, Dimension
from tests.lab.tune_searching import Silent, measurement

GRID = Path(__file__).parent.parent / "data" / "tune_grid.json"
SHARE_OF_BEST, SHARE_OF_TIME = 0.97, 0.2
SHAPE = {
    "threads": ["2", "1"],
    "seqs": ["32", "8", "2"],
    "batched": ["512", "64", "2048"],
    "drafts": ["off", "ngram"],
    "prefix": ["on", "off"],
}


class Replay:
    """Measures by looking up; ``seconds`` is what that took when it was recorded."""

    def __init__(self, grid: dict[str, Any]) -> None:
        self.dimensions = [
            Dimension(n, tuple(map(Choice, labels))) for n, labels in grid["dimensions"].items()
        ]
        self.seconds = 0.0
        self._points = {_key(point["config"]): point for point in grid["points"]}
        found = [msgspec.convert(point["measurement"], Measurement) for point in grid["points"]]
        self.best = max(measurement.value for measurement in found)
        self.whole_s = sum(measurement.seconds for measurement in found)

    def measure(self, config: Config, go_on: GoOn) -> Measurement:
        point = self._points[_key(config)]
        found = msgspec.convert(point["measurement"], Measurement)
        ends = point["part_s"]
        closing_s = found.seconds - ends[-1] - (ends[-1] - ends[-2])  # after the window: the server stops
        for part in range(1, PARTS):
            if not go_on(part, found.parts[part - 1]):
                found = msgspec.structs.replace(
                    found,
                    value=found.parts[part - 1],
                    parts=found.parts[:part],
                    whole=False,
                    seconds=ends[part - 1] + closing_s,
                )
                break
        self.seconds += found.seconds
        return found

    def value(self, config: Config) -> float:
        return float(self._points[_key(config)]["measurement"]["value"])


def _key(config: Config) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(config.items()))


def made_up(seed: int) -> dict[str, Any]:
    """72 configurations: choices that change the value by 25%, pairs of them by 10% more, trials noisy by 3%
    (their first part by 5%); a trial of 9.5 s of which 3.5 s are the server's start and stop.
    """
    rng = np.random.default_rng((seed, 72))
    alone = {
        (n, label): rng.normal(0, 0.25) * (k > 0) for n, ls in SHAPE.items() for k, label in enumerate(ls)
    }
    pairs = {(one, other): rng.normal(0, 0.1) for one in alone for other in alone if one[0] < other[0]}
    points = []
    for labels in itertools.product(*SHAPE.values()):
        config = dict(zip(SHAPE, labels, strict=True))
        on = [(name, label) for name, label in config.items() if label != SHAPE[name][0]]
        size = sum(alone[one] for one in on) + sum(pairs[a, b] for a in on for b in on if a[0] < b[0])
        parts = [300 * math.exp(size + rng.normal(0, noise)) for noise in (0.05, 0.04, 0.03)]
        found = msgspec.to_builtins(measurement(parts, 9.5))
        points.append({"config": config, "part_s": [5.0, 7.0], "measurement": found})
    return {"dimensions": SHAPE, "points": points}


def recorded() -> dict[str, Any]:
    """The measured grid."""
    if not GRID.exists():
        pytest.skip(f"no grid was measured: python benchmarks/tune_grid.py {GRID}")
    found: dict[str, Any] = json.loads(GRID.read_text())
    return found


def reached(grid: dict[str, Any], seed: int) -> float:
    """The share of the grid's best that a search finds in ``SHARE_OF_TIME`` of the grid's."""
    replay = Replay(grid)
    search = Search(replay.dimensions, replay.measure, Silent(), seed=seed, clock=lambda: replay.seconds)
    search.run(budget_s=SHARE_OF_TIME * replay.whole_s)
    assert search.best is not None
    assert replay.seconds <= SHARE_OF_TIME * replay.whole_s
    return replay.value(search.best.config) / replay.best


def test_the_record_is_a_whole_grid() -> None:
    grid = recorded()
    replay = Replay(grid)
    size = 1
    for dimension in replay.dimensions:
        size *= len(dimension.choices)
    assert size == len(grid["points"]) == len({_key(point["config"]) for point in grid["points"]}) >= 72


@pytest.mark.parametrize("seed", range(10))
def test_the_search_reaches_the_measured_grids_best_in_a_fifth_of_its_time(seed: int) -> None:
    assert reached(recorded(), seed) >= SHARE_OF_BEST


def test_the_search_reaches_the_best_of_nine_in_ten_made_up_grids_in_a_fifth_of_their_time() -> None:
    shares = [reached(made_up(seed), seed) for seed in range(20)]
    assert sum(share >= SHARE_OF_BEST for share in shares) >= 18 and min(shares) > 0.8
