"""The second tier of KV blocks: swap against recompute, and time to first token of a prompt that it has.

``python benchmarks/ablations/swap.py [--model smollm2-135m] [--runs 5]``. First a load that does not fit:
more long answers at once than the pool has blocks for, so that sequences are preempted all the time, with and
without ``swap_space``; both engines are loaded at once and take turns. The script fails if answers differ.
Then one long prompt: cold, cached, evicted to the tier, and after a restart, with the file in the system's
memory and without. Medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.memory import block_bytes
from headrace.engine.request import EngineStats
from headrace.model import store
from headrace.model.weights import open_checkpoint


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that nobody has seen before."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


def since(stats: EngineStats, before: EngineStats, name: str) -> int:
    """How far a counter has come."""
    counted: int = getattr(stats, name) - getattr(before, name)
    return counted


def preempted(arguments: argparse.Namespace, each_bytes: int) -> None:
    """Print what a load that does not fit takes, by swap and by recompute."""
    longest = arguments.prompt_tokens + arguments.output_tokens
    blocks = int(arguments.pool * (longest // BLOCK_SIZE + 1))
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "kv_cache_memory_bytes": blocks * each_bytes,
        "max_num_seqs": arguments.requests,
    }
    engines = {
        "recompute": LLM(arguments.model, **settings),
        "swap": LLM(arguments.model, swap_space=arguments.swap_space, **settings),
    }
    params = SamplingParams(max_tokens=arguments.output_tokens, temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    counted: dict[str, list[tuple[int, ...]]] = {name: [] for name in engines}
    names = ("num_preemptions", "preemptions_swapped", "preemptions_recomputed", "batch_tokens", "tier_hits")
    for number in range(-1, arguments.runs):
        prompts = random_prompts(arguments.requests, arguments.prompt_tokens, number)
        answers = []
        for name, llm in engines.items():
            before, started = llm.stats(), time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            answers.append([answer.outputs[0].token_ids for answer in found])
            if number >= 0:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
                counted[name].append(tuple(since(llm.stats(), before, each) for each in names))
        assert answers[0] == answers[1], "swapping has changed an answer"
    print(
        f"{arguments.requests} requests of {arguments.prompt_tokens} + {arguments.output_tokens} tokens on a "
        f"pool for {arguments.pool:g}"
    )
    print(
        f"{'':>12}{'s':>8}{'tok/s':>8}{'preempted':>11}{'swapped':>9}{'recomputed':>12}{'computed':>10}{'read':>7}"
    )
    output_tokens = arguments.requests * arguments.output_tokens
    for name in engines:
        took = statistics.median(seconds[name])
        counts = [statistics.median(column) for column in zip(*counted[name], strict=True)]
        print(
            f"{name:>12}{took:8.2f}{output_tokens / took:8.0f}{counts[0]:11.0f}{counts[1]:9.0f}"
            f"{counts[2]:12.0f}{counts[3]:10.0f}{counts[4]:7.0f}"
        )
    ratios = [slow / fast for slow, fast in zip(seconds["recompute"], seconds["swap"], strict=True)]
    print(f"swap against recompute: {statistics.median(ratios):.2f} times as fast\n", flush=True)
    for llm in engines.values():
        llm.close()


def first_token(arguments: argparse.Namespace, each_bytes: int) -> None:
    """Print the time to the first token of one long prompt, by where its beginning is."""
    length = arguments.prefix_tokens
    params = SamplingParams(max_tokens=1, temperature=0.0)
    blocks = 3 * length // (2 * BLOCK_SIZE) + 2
    times: dict[str, list[float]] = {}

    def ask(llm: LLM, name: str, prompt: list[int]) -> list[int]:
        started = time.perf_counter()
        [answer] = llm.generate([prompt], params, use_tqdm=False)
        times.setdefault(name, []).append(1000 * (time.perf_counter() - started))
        return answer.outputs[0].token_ids

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "blocks.tier"

        def open_llm() -> LLM:
            llm = LLM(
                arguments.model,
                max_model_len=length + BLOCK_SIZE,
                kv_cache_memory_bytes=blocks * each_bytes,
                swap_space=arguments.swap_space,
                kv_tier_path=path,
            )
            ask(llm, "warming up", random_prompts(1, 200, 0)[0])
            return llm

        for number in range(arguments.runs):
            prompt, other = random_prompts(2, length, 100 + number)
            llm = open_llm()
            expected = ask(llm, "cold", prompt)
            assert ask(llm, "in the pool", prompt) == expected
            ask(llm, "another, which evicts it", other)
            assert ask(llm, "evicted to the tier", prompt) == expected
            llm.close()
            for name, prepare in (("after a restart", _leave), ("after a restart, from the disk", _drop)):
                prepare(path)
                llm = open_llm()
                assert ask(llm, name, prompt) == expected
                llm.close()
    cold = statistics.median(times["cold"])
    print(f"time to first token of {length} tokens{'':>6}ms{'cold over it':>16}")
    for name in (
        "cold",
        "in the pool",
        "evicted to the tier",
        "after a restart",
        "after a restart, from the disk",
    ):
        median = statistics.median(times[name])
        print(f"{name:>30}{median:10.1f}{cold / median:16.1f}")


def _leave(path: Path) -> None:
    """The file is where the system has it."""


def _drop(path: Path) -> None:
    """Out of the system's memory, so that it comes from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--pool", type=float, default=5.0, help="requests that the pool has blocks for")
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--swap-space", type=float, default=2.0, help="GiB")
    parser.add_argument("--folder", type=Path, help="where the tier's file goes; default: the system's")
    parser.add_argument("--only", choices=["preemption", "restart"])
    arguments = parser.parse_args()
    each_bytes = block_bytes(open_checkpoint(store.resolve(arguments.model)).architecture)
    parts: dict[str, Callable[[argparse.Namespace, int], None]] = {
        "preemption": preempted,
        "restart": first_token,
    }
    for name, part in parts.items():
        if arguments.only in (None, name):
            part(arguments, each_bytes)


if __name__ == "__main__":
    main()
