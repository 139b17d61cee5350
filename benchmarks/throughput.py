"""Offline throughput of one model on this machine: single stream, prefill, batches, long context.

    python benchmarks/throughput.py [MODEL] [--runs 3] [--json FILE]

Workloads (greedy, EOS ignored, prefix caching off, random token ids so that nothing is shared):
A 128 in, 128 out, alone; B a 2048-token prompt; C 16 and C32 32 requests at once, 128 in, 128 out; F decoding
at a context of 4096 tokens. Every figure is a median of the runs after one warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams, SchedulerConfig


def tokens(count: int, vocab_size: int, rng: random.Random) -> dict[str, list[int]]:
    """A prompt of random ids."""
    return {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(count)]}


def run(llm: LLM, prompts: list[dict[str, list[int]]], output_tokens: int) -> float:
    """Seconds to generate ``output_tokens`` for every prompt, all submitted at once."""
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == output_tokens for output in outputs)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    llm = LLM(
        model_config=ModelConfig(model=args.model, threads=args.threads, max_model_len=8192),
        cache_config=CacheConfig(enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(max_num_seqs=32),
    )
    capabilities = llm.frontend.client.capabilities
    vocab_size = llm.frontend.client.architecture.vocab_size
    rng = random.Random(0)

    def median(count: int, prompt: int, output: int) -> float:
        times = [
            run(llm, [tokens(prompt, vocab_size, rng) for _ in range(count)], output)
            for _ in range(args.runs + 1)
        ]
        return statistics.median(times[1:])

    first = median(1, 128, 1)
    results = {
        "A single stream, decode tokens/s": 127 / (median(1, 128, 128) - first),
        "A time to first token, ms": first * 1e3,
        "B prefill of 2048, tokens/s": 2048 / median(1, 2048, 1),
        "C 16 at once, output tokens/s": 16 * 128 / median(16, 128, 128),
        "C32 32 at once, output tokens/s": 32 * 128 / median(32, 128, 128),
        "F decode at 4096, tokens/s": 63 / (median(1, 4096, 64) - median(1, 4096, 1)),
    }
    llm.close()
    print(f"{args.model}, {capabilities.isa}, {capabilities.threads} threads, {platform.machine()}")
    for name, value in results.items():
        print(f"{name:36s} {value:9.1f}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "isa": capabilities.isa, **results}, indent=1))


if __name__ == "__main__":
    main()
