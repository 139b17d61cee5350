"""What the engine's own Python costs a step: schedule and commit around a runner that computes nothing.

``python benchmarks/step_overhead.py [--sequences 16 32] [--steps 2000]`` prints the median and the 99th
percentile of a step in which every sequence decodes one token.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from headrace.backend.batch import Batch, StepResult
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import SimulatedRunner, simulated_architecture
from headrace.engine.config import SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.request import EngineRequest, SamplingParams


class IdleRunner(SimulatedRunner):
    """Answers every row with the same token, at once."""

    def run(self, batch: Batch) -> StepResult:
        """One token a row."""
        rows = len(batch.logit_rows)
        return StepResult(
            token_ids=np.ones(rows, np.int32),
            logprobs=np.zeros(rows, np.float32),
            top_ids=np.empty((rows, 0), np.int32),
            top_logprobs=np.empty((rows, 0), np.float32),
            failed=np.zeros(rows, np.bool_),
        )


def step_seconds(sequences: int, steps: int) -> list[float]:
    """The duration of each of ``steps`` steps with so many sequences, sorted."""
    length = steps + 200
    settings = RunnerSettings(
        num_blocks=sequences * (length // 16 + 1),
        max_batch_tokens=64 * sequences,
        max_sequences=sequences,
        max_model_len=length,
    )
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=64 * sequences)
    architecture = simulated_architecture(max_positions=length)
    engine = Engine(IdleRunner(architecture, settings), settings, config)
    for number in range(sequences):
        params = SamplingParams(max_tokens=None, ignore_eos=True, seed=number)
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=[number % 64] * 40, params=params))
    for _ in range(20):
        engine.step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    assert engine.stats().num_running_seqs == sequences
    return sorted(seconds)


def main() -> None:
    """Print one line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{'sequences':>9}{'p50 us':>9}{'p99 us':>9}")
    for sequences in arguments.sequences:
        found = step_seconds(sequences, arguments.steps)
        p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
        print(f"{sequences:9}{p50 * 1e6:9.0f}{p99 * 1e6:9.0f}")


if __name__ == "__main__":
    main()
