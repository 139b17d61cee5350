"""The search held against a whole grid that was measured (benchmarks/tune_grid.py), by replaying the record.

The search sees nothing of the grid but what its trials answer; its clock is the recorded time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.lab.tune.measurement import PARTS, GoOn, Measurement
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import Choice, Config, Dimension
from tests.lab.tune_searching import Silent

GRID = Path(__file__).parent.parent / "data" / "tune_grid.json"
SHARE_OF_BEST, SHARE_OF_TIME = 0.97, 0.2


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


def test_the_record_is_a_whole_grid() -> None:
    grid = json.loads(GRID.read_text())
    replay = Replay(grid)
    size = 1
    for dimension in replay.dimensions:
        size *= len(dimension.choices)
    assert size == len(grid["points"]) == len({_key(point["config"]) for point in grid["points"]}) >= 72


@pytest.mark.parametrize("seed", range(10))
def test_the_search_reaches_the_grids_best_in_a_fifth_of_its_time(seed: int) -> None:
    replay = Replay(json.loads(GRID.read_text()))
    search = Search(replay.dimensions, replay.measure, Silent(), seed=seed, clock=lambda: replay.seconds)
    search.run(budget_s=SHARE_OF_TIME * replay.whole_s)
    assert search.best is not None
    assert replay.seconds <= SHARE_OF_TIME * replay.whole_s
    assert replay.value(search.best.config) >= SHARE_OF_BEST * replay.best
