"""A search over measurements that a test makes up, with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.lab.tune.measurement import PARTS, GoOn, Measurement, Trial
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import Choice, Config, Dimension

DIMENSIONS = [
    Dimension("size", tuple(map(Choice, ("32", "8", "64")))),
    Dimension("cache", tuple(map(Choice, ("on", "off")))),
    Dimension("drafts", tuple(map(Choice, ("off", "2", "4")))),
]


class Silent:
    """A view that says nothing."""

    def started(self, number: int, config: Config) -> None:
        """Not shown."""

    def finished(self, trial: Trial, best: Trial | None) -> None:
        """Not shown."""


class World:
    """Measures by ``value``; ``seconds`` is its clock, ``asked`` what was measured."""

    def __init__(self, value: Callable[[Config], float], start_s: float = 1.0, part_s: float = 2.0) -> None:
        self.value = value
        self.start_s, self.part_s = start_s, part_s
        self.seconds = 0.0
        self.asked: list[Config] = []

    def clock(self) -> float:
        return self.seconds

    def measure(self, config: Config, go_on: GoOn) -> Measurement:
        self.asked.append(config)
        value, took, parts = self.value(config), self.start_s, []
        for part in range(1, PARTS + 1):
            took += self.part_s
            parts.append(value)
            if part < PARTS and not go_on(part, value):
                break
        self.seconds += took
        return measurement(parts, took)

    def search(self, dimensions: Sequence[Dimension] = DIMENSIONS, **options: Any) -> Search:
        return Search(dimensions, self.measure, Silent(), clock=self.clock, **options)


def measurement(parts: list[float], seconds: float, **others: Any) -> Measurement:
    """With nothing known but its value, unless ``others`` say so."""
    fields: dict[str, Any] = dict.fromkeys(Measurement.__struct_fields__)
    fields |= {"value": parts[-1], "throughput": parts[-1], "parts": parts, "whole": len(parts) == PARTS}
    fields |= {"seconds": seconds, "requests": 10, "failed": 0}
    return Measurement(**(fields | others))
