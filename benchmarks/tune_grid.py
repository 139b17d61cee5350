"""Measures a whole grid of configurations, so that a search can be held against it without running anything.

``python benchmarks/tune_grid.py grid.json [--seconds 150]`` measures what ``grid.json`` lacks, for so long,
and may be started again until it says that the grid is complete. Every point is a trial as ``headrace tune``
runs it: a server of its own, warm-up, a window in parts; its value after each part, the time up to there and
the whole time are kept. The points are measured in a shuffled order, so that a slow minute of the machine
does not hit one corner, and those during which other programs used the processors are measured again, up to
three times; the quietest one stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headrace.lab.bench.context import context
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.run import Asked
from headrace.lab.bench.session import Plan
from headrace.lab.tune.switches import Choice, Config, Dimension
from headrace.lab.tune.trial import Measurer, Setup

DIMENSIONS = [
    Dimension("threads", (Choice("2 (all)"), Choice("1", {"threads": 1}))),
    Dimension(
        "max-num-seqs",
        (Choice("32"), Choice("8", {"max-num-seqs": 8}), Choice("2", {"max-num-seqs": 2})),
    ),
    Dimension(
        "max-num-batched-tokens",
        (
            Choice("512"),
            Choice("64", {"max-num-batched-tokens": 64}),
            Choice("2048", {"max-num-batched-tokens": 2048}),
        ),
    ),
    Dimension(
        "speculative-config",
        (Choice("off"), Choice("ngram", {"speculative-config": '{"method": "ngram"}'})),
    ),
    Dimension("prefix-caching", (Choice("on"), Choice("off", {"prefix-caching": False}))),
]
SETUP = Setup(
    model="smollm2-135m",
    fixed=(),
    asked=Asked(prompt_tokens=Lengths("fixed", 96), output_tokens=Lengths("fixed", 32), shared_prefix=0.5),
    plan=Plan(kind="closed", levels=(12,), duration_s=6.0, warmup_s=1.0, early_stop=False),
)

QUIET_CORES = 0.25
TRIES = 3


class _Clock:
    """When each part of a trial was over."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.part_s: list[float] = []

    def running(self, load: Load) -> None:
        """Nothing to show."""

    def go_on(self, part: int, value: float) -> bool:
        """Always."""
        self.part_s.append(round(time.monotonic() - self.began, 3))
        return True


def busy_s() -> tuple[float, float]:
    """Processor seconds of the whole machine, and of this process with the servers that it has ended."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    everything = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return everything, own.user + own.system + own.children_user + own.children_system


def measured(config: Config) -> dict[str, Any]:
    """A point of the grid; ``others_cores``: what other programs took of the processors meanwhile."""
    clock = _Clock()
    everything, own = busy_s()
    found = Measurer(SETUP, DIMENSIONS, clock)(config, clock.go_on)
    everything, own = (now - then for now, then in zip(busy_s(), (everything, own), strict=True))
    return {
        "config": config,
        "others_cores": round(max(everything - own, 0.0) / found.seconds, 3),
        "tries": 1,
        "part_s": clock.part_s,
        "measurement": msgspec.to_builtins(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()

    about = context()
    grid: dict[str, Any] = {
        "goal": SETUP.goal,
        "cpu": about.cpu,
        "cores": about.cores,
        "headrace": about.headrace,
        "dimensions": {d.name: [choice.label for choice in d.choices] for d in DIMENSIONS},
        "points": [],
    }
    if arguments.path.exists():
        grid = json.loads(arguments.path.read_text())
    labels = itertools.product(*(dimension.choices for dimension in DIMENSIONS))
    configs = [{d.name: c.label for d, c in zip(DIMENSIONS, point, strict=True)} for point in labels]
    random.Random(7).shuffle(configs)
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end and (config := _next(configs, grid["points"])) is not None:
        point = measured(config)
        earlier = next((p for p in grid["points"] if p["config"] == config), None)
        if earlier is not None:
            grid["points"].remove(earlier)
            tries = earlier["tries"] + 1
            point = min(point, earlier, key=lambda p: p["others_cores"]) | {"tries": tries}
        grid["points"].append(point)
        unfinished = arguments.path.with_suffix(".part")
        unfinished.write_text(json.dumps(grid, indent=1) + "\n")
        unfinished.replace(arguments.path)
        value, others = point["measurement"]["value"], point["others_cores"]
        print(
            f"{len(grid['points'])}/{len(configs)} {value:.1f}, others {others:.2f} cores, {config}",
            flush=True,
        )
    missing = len(configs) - len(grid["points"])
    again = sum(_noisy(point) for point in grid["points"])
    print(
        f"{missing} points are missing, {again} are to be measured again" if missing + again else "complete"
    )


def _noisy(point: dict[str, Any]) -> bool:
    return bool(point["others_cores"] > QUIET_CORES and point["tries"] < TRIES)


def _next(configs: list[Config], points: list[dict[str, Any]]) -> Config | None:
    """One that is missing, else one to measure again: those that were tried least and came first."""
    known = [point["config"] for point in points]
    noisy = sorted((p for p in points if _noisy(p)), key=lambda point: point["tries"])
    return next((config for config in configs if config not in known), noisy[0]["config"] if noisy else None)


if __name__ == "__main__":
    main()
