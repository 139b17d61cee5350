"""Measures a whole grid of configurations, so that a search can be held against it without running anything.

``python benchmarks/tune_grid.py grid.json [--seconds 150]`` measures what ``grid.json`` lacks, for so long,
and may be started again until it says that the grid is complete. Every point is a trial as ``headrace tune``
runs it: a server of its own, warm-up, a window in parts; its value after each part, the time up to there and
the whole time are kept. The points are measured in a shuffled order, so that a slow minute of the machine
does not hit one corner. A point is not kept if other programs used the processors meanwhile (``--noisy``
keeps it), and two of those in a row end the run: start it again at a quieter time.
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
    plan=Plan(kind="closed", levels=(12,), duration_s=4.5, warmup_s=0.7, early_stop=False),
)

QUIET_CORES = 0.25


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
        "part_s": clock.part_s,
        "measurement": msgspec.to_builtins(found),
    }


def empty() -> dict[str, Any]:
    """A grid without points."""
    about = context()
    return {
        "goal": SETUP.goal,
        "cpu": about.cpu,
        "cores": about.cores,
        "headrace": about.headrace,
        "dimensions": {d.name: [choice.label for choice in d.choices] for d in DIMENSIONS},
        "points": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--noisy", action="store_true", help="keep points however busy the machine is")
    arguments = parser.parse_args()

    grid = json.loads(arguments.path.read_text()) if arguments.path.exists() else empty()
    known = [point["config"] for point in grid["points"]]
    labels = itertools.product(*(dimension.choices for dimension in DIMENSIONS))
    configs = [{d.name: c.label for d, c in zip(DIMENSIONS, point, strict=True)} for point in labels]
    missing = [config for config in configs if config not in known]
    random.Random(len(known)).shuffle(missing)
    end, noisy = time.monotonic() + arguments.seconds, 0
    while missing and time.monotonic() < end and noisy < 2:
        point = measured(missing[0])
        noisy = noisy + 1 if point["others_cores"] > QUIET_CORES else 0
        value, others = point["measurement"]["value"], point["others_cores"]
        print(f"{value:.1f}, others {others:.2f} cores: {missing[0]}", flush=True)
        if noisy and not arguments.noisy:
            continue
        noisy = 0
        missing.pop(0)
        grid["points"].append(point)
        unfinished = arguments.path.with_suffix(".part")
        unfinished.write_text(json.dumps(grid, indent=1) + "\n")
        unfinished.replace(arguments.path)
    print(f"{len(missing)} points are missing: start it again" if missing else "the grid is complete")


if __name__ == "__main__":
    main()
