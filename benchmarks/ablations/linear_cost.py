"""Does cost grow linearly: of a prompt with its tokens, of a step with its sequences and their context?

``python benchmarks/ablations/linear_cost.py [--model smollm2-135m] [--runs 5] [--output linear-cost.png]``,
on a quiet machine. Prints medians and, of each series, the straight line by least squares and how far the
points lie from it, and draws them. Steps of few sequences take the time to read the weights: sequences are
fitted from 8 on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams, SchedulerConfig

STEPS = 24
PROMPTS = (256, 512, 1024, 1536, 2048, 3072, 4096)
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (256, 512, 1024, 2048, 3072, 4096)
SATURATED = 8


@dataclass(frozen=True)
class Series:
    """Milliseconds over what they were measured for, and where the line is fitted from."""

    title: str
    x_label: str
    x: tuple[int, ...]
    milliseconds: tuple[float, ...]
    fitted_from: int = 0

    def line(self) -> tuple[float, float]:
        """Slope and intercept."""
        points = [(x, y) for x, y in zip(self.x, self.milliseconds, strict=True) if x >= self.fitted_from]
        slope, intercept = np.polyfit([x for x, _ in points], [y for _, y in points], 1).tolist()
        return slope, intercept

    def furthest(self) -> float:
        """The largest distance of a fitted point from the line, as a share of the point."""
        slope, intercept = self.line()
        points = zip(self.x, self.milliseconds, strict=True)
        return max(abs(y - slope * x - intercept) / y for x, y in points if x >= self.fitted_from)


class Bench:
    """One model, asked for prompts that no cache has seen."""

    def __init__(self, model: str, runs: int) -> None:
        self._runs = runs
        self._random = random.Random(0)
        self._llm = LLM(
            model_config=ModelConfig(model=model, max_model_len=max(PROMPTS) + STEPS + 8),
            cache_config=CacheConfig(enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(max_num_seqs=max(SEQUENCES)),
        )
        self._seconds(1, 64, 4)  # warms up

    def _seconds(self, sequences: int, tokens: int, output: int) -> float:
        prompts: list[Any] = [
            {"prompt_token_ids": [self._random.randrange(1000, 40000) for _ in range(tokens)]}
            for _ in range(sequences)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def prompt_ms(self, tokens: int) -> float:
        """Until the first token of a prompt."""
        return 1000 * statistics.median(self._seconds(1, tokens, 1) for _ in range(self._runs))

    def step_ms(self, sequences: int, context: int) -> float:
        """A step in which each of the sequences decodes one token, so far into its context."""
        prompt = context - STEPS // 2
        differences = (
            self._seconds(sequences, prompt, STEPS + 1) - self._seconds(sequences, prompt, 1)
            for _ in range(self._runs)
        )
        return 1000 * statistics.median(differences) / STEPS


def draw(series: list[Series], title: str, path: Path) -> None:
    """Write a picture with a panel for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axis, one in zip(figure.subplots(1, len(series)), series, strict=True):
        slope, intercept = one.line()
        ends = np.array([one.fitted_from, max(one.x)], float)
        axis.plot(ends, slope * ends + intercept, color="#8a939b", linewidth=1, label="straight line")
        axis.plot(one.x, one.milliseconds, "o", color="#1769aa", label="measured")
        axis.set_title(one.title, fontsize=10, loc="left")
        axis.set_xlabel(one.x_label)
        axis.set_ylabel("ms")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("linear-cost.png"))
    options = parser.parse_args()
    bench = Bench(options.model, options.runs)
    series = [
        Series("a prompt", "tokens", PROMPTS, tuple(map(bench.prompt_ms, PROMPTS))),
        Series(
            "a step, context 128",
            "sequences",
            SEQUENCES,
            tuple(bench.step_ms(count, 128) for count in SEQUENCES),
            SATURATED,
        ),
        Series(
            "a step of one sequence",
            "context, tokens",
            CONTEXTS,
            tuple(bench.step_ms(1, context) for context in CONTEXTS),
        ),
    ]
    for one in series:
        slope, intercept = one.line()
        points = "  ".join(f"{x}: {y:.2f}" for x, y in zip(one.x, one.milliseconds, strict=True))
        print(f"{one.title} ({one.x_label}: ms)  {points}")
        print(
            f"  {intercept:.2f} ms + {1000 * slope:.2f} us each; at most {one.furthest():.1%} from the line"
        )
    draw(series, options.model, options.output)


if __name__ == "__main__":
    main()
