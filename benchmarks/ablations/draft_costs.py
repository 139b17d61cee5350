"""What a draft model must get right to pay: measured steps of a target and of drafts, no training.

``python benchmarks/ablations/draft_costs.py [--targets smollm2-135m …] [--drafts 4:int8 4:int4 2:int4]``. A
draft ``4:int4`` has 4 of the layers of ``--draft-of``, narrowed as it would be when it is loaded: what it
costs does not depend on what it has learned, so the weights need no training. Targets may be of another
vocabulary: only their steps are timed, of one row and of the rows that verify a draft.

Models take turns, so that a busy moment of the machine hits each, and the lower quartile counts, as whatever
else runs only adds. From it follows how often a drafted token must be right, each by itself, for ``--goal``
times the speed of one stream, and, with ``--accepted 0.6 0.4 0.3`` (the share of drafts whose first, second …
token was right), what speed such a draft gives each target.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.backend import open_runner
from headrace.backend.batch import BLOCK_SIZE, Batch, SamplingTable
from headrace.backend.runner import Runner, RunnerSettings
from headrace.lab.compress.training.drafting import Costs
from headrace.lab.compress.training.sizes import spread
from headrace.model import store
from headrace.model.checkpoint import Checkpoint, Tensor, as_float32
from headrace.model.weights import open_checkpoint
from headrace.model.weights.load_quantization import Quantization, narrow
from headrace.model.weights.tensor_shapes import expected_shapes

LENGTHS = (1, 2, 3, 4)
"""Tokens of a draft."""
CONTEXT = 256
NARROWED: dict[str, Quantization] = {"int8": "int8", "int4": "int4-all"}
"""What a draft's ``quantization`` does to it while it is loaded."""
IN_A_ROW = 8
"""Steps of one model before the next has its turn."""


class FewLayers:
    """Some layers of a checkpoint, made floats and narrowed as a draft is. Implements Checkpoint."""

    def __init__(self, checkpoint: Checkpoint, layers: int, quantization: Quantization) -> None:
        self._checkpoint = checkpoint
        self._layers = spread(len(checkpoint.architecture.layers), layers)
        self._quantization = quantization
        chosen = tuple(checkpoint.architecture.layers[index] for index in self._layers)
        self.path = checkpoint.path
        self.architecture = replace(checkpoint.architecture, layers=chosen)

    def names(self) -> tuple[str, ...]:
        """See Checkpoint."""
        return tuple(expected_shapes(self.architecture))

    def tensor(self, name: str) -> Tensor:
        """See Checkpoint."""
        source = name
        if name.startswith("layers."):
            _, place, rest = name.split(".", 2)
            source = f"layers.{self._layers[int(place)]}.{rest}"
        return narrow(name, as_float32(self._checkpoint.tensor(source)), self._quantization)

    def fingerprint(self) -> str:
        """See Checkpoint."""
        return f"{self._checkpoint.fingerprint()} layers {self._layers} {self._quantization}"


@dataclass(frozen=True, slots=True)
class Timed:
    """A model, and how many rows its steps have; ``seconds`` gets each one's."""

    name: str
    runner: Runner
    batch: Batch
    seconds: list[float]


def opened(checkpoint: Checkpoint) -> Runner:
    """A runner for one sequence."""
    settings = RunnerSettings(
        num_blocks=CONTEXT // BLOCK_SIZE + 1,
        max_batch_tokens=CONTEXT,
        max_sequences=1,
        max_model_len=CONTEXT + BLOCK_SIZE,
        max_logit_rows=1 + max(LENGTHS),
    )
    return open_runner(checkpoint, "cpu", settings)


def step(runner: Runner, rows: int, groups: int) -> Batch:
    """One sequence with its last token and a draft behind it, ``rows`` in all, each of which is sampled."""
    positions = np.arange(CONTEXT - rows, CONTEXT, dtype=np.int32)
    blocks = np.arange(CONTEXT // BLOCK_SIZE, dtype=np.int32)[None]
    return Batch(
        token_ids=np.arange(100, 100 + rows, dtype=np.int32),
        positions=positions,
        query_start=np.array([0, rows], np.int32),
        context_len=np.array([CONTEXT], np.int32),
        slot_mapping=(positions,) * groups,
        block_tables=(blocks,) * groups,
        logit_rows=np.arange(rows, dtype=np.int32),
        sampling=SamplingTable.greedy(rows),
    )


def quartile(seconds: list[float]) -> float:
    """The lower one."""
    return statistics.quantiles(seconds, n=4)[0]


def needed(costs: list[Costs], goal: float) -> str:
    """How often a drafted token must be right, whatever came before it, with drafts of the best length."""
    for percent in range(1, 101):
        share = percent / 100
        chances = [share**place for place in LENGTHS]
        if best(costs, chances)[0] >= goal:
            return f"{percent}%"
    return "no share"


def best(costs: list[Costs], accepted_at: list[float]) -> tuple[float, int]:
    """The highest speed, in those without drafts, and the length of draft that gives it; 0: none does."""
    found = [(1.0, 0)]
    for length, cost in zip(LENGTHS, costs, strict=True):
        if length <= len(accepted_at):
            tokens = 1 + sum(accepted_at[:length])
            found.append((tokens / (cost.verifying + length * cost.drafted), length))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--draft-of", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["4:int8", "4:int4", "2:int4"], metavar="LAYERS:BITS")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--goal", type=float, default=1.15)
    parser.add_argument("--accepted", type=float, nargs="+")
    arguments = parser.parse_args()

    rows = (1, *(length + 1 for length in LENGTHS))
    targets: dict[str, list[Timed]] = {}
    for reference in arguments.targets:
        checkpoint = open_checkpoint(store.resolve(reference))
        runner, groups = opened(checkpoint), len(checkpoint.architecture.kv_groups)
        name = Path(reference).stem
        targets[name] = [Timed(name, runner, step(runner, count, groups), []) for count in rows]
    source = open_checkpoint(store.resolve(arguments.draft_of))
    drafts: list[Timed] = []
    for text in arguments.drafts:
        layers, _, bits = text.partition(":")
        narrowed = NARROWED.get(bits)
        if (
            narrowed is None
            or not layers.isdigit()
            or not 1 <= int(layers) <= len(source.architecture.layers)
        ):
            parser.error(
                f"--drafts: {text!r} must be a number of the model's layers and int8 or int4: 4:int4"
            )
        runner = opened(FewLayers(source, int(layers), narrowed))
        drafts.append(Timed(text, runner, step(runner, 1, len(source.architecture.kv_groups)), []))
    everything = [*(timed for steps in targets.values() for timed in steps), *drafts]
    for turn in range(1 + arguments.steps // IN_A_ROW):
        for timed in everything:
            for number in range(1 + IN_A_ROW):
                began = time.perf_counter()
                timed.runner.run(timed.batch)
                if turn and number:  # the first ones touch memory and wake threads
                    timed.seconds.append(time.perf_counter() - began)

    print(f"{'target':24}{'step, ms':>10}" + "".join(f"{count} rows".rjust(9) for count in rows[1:]))
    times = {name: [quartile(one.seconds) for one in steps] for name, steps in targets.items()}
    for name, seconds in times.items():
        shares = "".join(f"{second / seconds[0]:9.2f}" for second in seconds[1:])
        print(f"{name:24}{seconds[0] * 1e3:10.2f}{shares}")
    print()
    wanted = f"for {arguments.goal:g} x"
    print(f"{'target':24}{'draft':10}{'step, ms':>10}{'of a step':>11}{wanted:>12}")
    for name, seconds in times.items():
        for draft in drafts:
            cost = quartile(draft.seconds)
            costs = [Costs(cost / seconds[0], second / seconds[0]) for second in seconds[1:]]
            line = f"{name:24}{draft.name:10}{cost * 1e3:10.2f}{cost / seconds[0]:11.2f}"
            line += f"{needed(costs, arguments.goal):>12}"
            if arguments.accepted:
                speed, length = best(costs, arguments.accepted)
                line += f"  {speed:.2f} x with drafts of {length}"
            print(line)


if __name__ == "__main__":
    main()
