"""What Python costs between two steps: from the end of one native step to the beginning of the next.

    python benchmarks/step_overhead.py [--sequences 1 16 32] [--steps 200] [--model REF]

Every sequence decodes one token a step; its news go to a sink, as they do to a stream of the server's, and
``--gather 16`` has them told 16 tokens at a time, as ``LLM.generate`` does. Without ``--model`` nothing is
computed: *warm* steps take no time at all, and before *cold* ones as much memory is read as a step reads
weights, so that Python finds its code and data outside of the caches, as it does behind a real step. With it
the model decodes on the cpu backend, and its steps are told, too. Medians, 90th percentiles in parentheses.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backend.batch import Batch, StepResult
from headrace.backend.cpu.runner import CpuRunner
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import SimulatedRunner, simulated_architecture
from headrace.engine.build import build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams
from headrace.engine.thread_client import ThreadClient
from headrace.model import store

WEIGHTS_BYTES = 96 << 20
PROMPT = 24
SKIPPED = 20  # steps of a run: prompts, and the first tokens


class Stamps:
    """When steps begin and end, in seconds."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def between(self) -> list[float]:
        """From each step's end to the next one's begin, sorted."""
        pairs = zip(self.ends[SKIPPED:-2], self.begins[SKIPPED + 1 :], strict=False)
        return sorted(begin - end for end, begin in pairs)

    def steps(self) -> list[float]:
        """From each step's begin to its end, sorted."""
        return sorted(
            end - begin for begin, end in zip(self.begins[SKIPPED:-2], self.ends[SKIPPED:], strict=False)
        )


class IdleRunner(SimulatedRunner):
    """Answers every row with the same token, after reading ``memory``."""

    def __init__(self, memory: bytes, stamps: Stamps, *args: Any) -> None:
        super().__init__(*args)
        self._memory = memory
        self._stamps = stamps

    def run(self, batch: Batch) -> StepResult:
        """One token a row."""
        self._stamps.begins.append(time.perf_counter())
        rows = len(batch.logit_rows)
        result = StepResult(
            token_ids=np.ones(rows, np.int32),
            logprobs=np.zeros(rows, np.float32),
            top_ids=np.empty((rows, 0), np.int32),
            top_logprobs=np.empty((rows, 0), np.float32),
            failed=np.zeros(rows, np.bool_),
        )
        self._memory.find(b"\1")
        self._stamps.ends.append(time.perf_counter())
        return result


class StampedProgram:
    """The native program of a CpuRunner; its calls are the steps."""

    def __init__(self, program: Any, stamps: Stamps) -> None:
        self._program = program
        self._stamps = stamps

    def run(self, *arrays: Any) -> None:
        """One step."""
        self._stamps.begins.append(time.perf_counter())
        self._program.run(*arrays)
        self._stamps.ends.append(time.perf_counter())


def idle_engine(sequences: int, length: int, memory: bytes, stamps: Stamps) -> Engine:
    """An engine that computes nothing."""
    settings = RunnerSettings(
        num_blocks=sequences * (length // 16 + 2),
        max_batch_tokens=64 * sequences,
        max_sequences=sequences,
        max_model_len=length,
    )
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=64 * sequences)
    architecture = simulated_architecture(max_positions=length)
    return Engine(IdleRunner(memory, stamps, architecture, settings), settings, config)


def model_engine(path: Path, sequences: int, length: int, stamps: Stamps) -> Engine:
    """An engine that runs a model."""
    model = ModelConfig(model=str(path), max_model_len=length)
    engine = build_engine(path, model, CacheConfig(), SchedulerConfig(max_num_seqs=sequences))
    runner: Any = engine.runner
    assert isinstance(runner, CpuRunner)
    runner._program = StampedProgram(runner._program, stamps)
    return engine


def decode(engine: Engine, sequences: int, steps: int, gather: int) -> None:
    """Have so many sequences decode so many tokens each."""
    client = ThreadClient(engine)
    ended = threading.Semaphore(0)

    def sink(outputs: list[EngineOutput]) -> None:
        if outputs[-1].finish_reason is not None:
            ended.release()

    vocab_size = client.architecture.vocab_size
    for number in range(sequences):
        params = SamplingParams(max_tokens=steps, ignore_eos=True, seed=number)
        # Prompts of several lengths: sequences seldom need their next blocks in the same step.
        prompt = [number % vocab_size] * (PROMPT + number)
        request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, gather=gather)
        client.submit(request, sink)
    for _ in range(sequences):
        ended.acquire()
    client.close()


def shown(seconds: list[float]) -> str:
    """Microseconds: the median, and the 90th percentile."""
    p50, p90 = seconds[len(seconds) // 2], seconds[len(seconds) * 9 // 10]
    return f"{p50 * 1e6:8.0f} ({p90 * 1e6:.0f})"


def main() -> None:
    """Print one line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gather", type=int, default=1)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    path = None if arguments.model is None else store.resolve(arguments.model)
    columns = ["warm, us", "cold, us"] if path is None else ["between, us", "steps, us"]
    print(f"{'sequences':>9}" + "".join(f"{column:>20}" for column in columns))
    for sequences in arguments.sequences:
        length = PROMPT + sequences + arguments.steps
        if path is None:
            cells = []
            for size in (1, WEIGHTS_BYTES):
                stamps = Stamps()
                engine = idle_engine(sequences, length, b"\2" * size, stamps)
                decode(engine, sequences, arguments.steps, arguments.gather)
                cells.append(shown(stamps.between()))
        else:
            stamps = Stamps()
            engine = model_engine(path, sequences, length, stamps)
            decode(engine, sequences, arguments.steps, arguments.gather)
            cells = [shown(stamps.between()), shown(stamps.steps())]
        print(f"{sequences:9}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
