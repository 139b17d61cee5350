"""What keeping requests costs: the time of a step with 16 streams, with a checkpoint_path and without.

    python benchmarks/checkpoint_overhead.py [--rounds 9] [--streams 16] [--tokens 128] [--model smollm2-135m]

Two engines take turns at the same prompts, so that what the machine does meanwhile meets both. Prints the
median wall time per step of each, and of the rounds' ratios. ``--check`` exits with 1 if the median ratio is
over 1.02. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from headrace import LLM, SamplingParams

MOST = 1.02


def step_ms(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Milliseconds of wall time per step of one batch."""
    before = llm.stats().num_steps
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    spent = time.perf_counter() - began
    return 1000 * spent / (llm.stats().num_steps - before)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    prompts = [f"A story about {number} mills and the river:" for number in range(arguments.streams)]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=1)
    off: list[float] = []
    on: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(arguments.model) as plain,
        LLM(arguments.model, checkpoint_path=folder) as kept,
    ):
        for llm in (plain, kept):
            step_ms(llm, prompts, params)
        for number in range(arguments.rounds):
            first, second = ((plain, off), (kept, on))[:: 1 if number % 2 else -1]
            for llm, found in (first, second):
                found.append(step_ms(llm, prompts, params))
    ratios = [kept_ms / plain_ms for kept_ms, plain_ms in zip(on, off, strict=True)]
    ratio = statistics.median(ratios)
    print(f"without a checkpoint: {statistics.median(off):7.3f} ms per step of {arguments.streams} streams")
    print(f"with one:             {statistics.median(on):7.3f} ms")
    print(f"ratio of a round:     {ratio:7.4f} (from {min(ratios):.4f} to {max(ratios):.4f})")
    if arguments.check and ratio > MOST:
        raise SystemExit(f"the ratio is over {MOST}")


if __name__ == "__main__":
    main()
