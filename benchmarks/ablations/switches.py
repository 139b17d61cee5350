"""What each switch of the engine gains: the engine as it is, beside the engine with one thing turned off.

``python benchmarks/ablations/switches.py [--model smollm2-135m] [--runs 3] [--only prefix]``, on a quiet
machine. Both engines of a pair are loaded at once and take turns, so that a busy moment of the machine hits
both; medians are compared. Greedy, random token ids that are new in every run, EOS ignored. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headrace import LLM, SamplingParams
from headrace.backend.cpu import _native
from headrace.backend.cpu.cores import usable_cores


@dataclass(frozen=True, slots=True)
class Load:
    """``requests`` at once; the first ``shared`` tokens of their prompts are the same."""

    name: str
    requests: int
    prompt: int
    output: int
    shared: int = 0


ALONE = Load("128 in, 128 out, alone", 1, 128, 128)
PREFILL = Load("a prompt of 2048 tokens", 1, 2048, 1)
MANY = Load("16 at once, 128 in, 128 out", 16, 128, 128)
SHARED = Load("16 at once with 1024 tokens in common, 32 own, 64 out", 16, 1056, 64, shared=1024)


@dataclass(frozen=True, slots=True)
class Switch:
    """``without``: arguments of LLM that turn it off; ``isa``: the kernel path to fall back to."""

    name: str
    loads: tuple[Load, ...]
    without: dict[str, Any] = field(default_factory=dict)
    isa: str = ""


def switches(paths: list[str], cores: int) -> list[Switch]:
    """What can be turned off on a machine with these kernel paths, best first, and so many cores."""
    found = [
        Switch(f"kernels for {paths[0]} instead of {path}", (ALONE, PREFILL, MANY), isa=path)
        for path in paths[1:]
    ]
    if cores > 1:
        found.append(Switch(f"{cores} threads instead of 1", (ALONE, PREFILL, MANY), {"threads": 1}))
    return [
        *found,
        Switch("batching instead of one after the other", (MANY,), {"max_num_seqs": 1}),
        Switch("prefix cache", (SHARED,), {"enable_prefix_caching": False}),
        Switch("512 tokens a step instead of 64", (PREFILL, MANY), {"max_num_batched_tokens": 64}),
    ]


@contextmanager
def kernel_path(isa: str) -> Iterator[None]:
    """Engines that are loaded inside use ``isa``; "" leaves the choice to them."""
    before = os.environ.get("HEADRACE_ISA")
    if isa:
        os.environ["HEADRACE_ISA"] = isa
    try:
        yield
    finally:
        if isa:
            os.environ.pop("HEADRACE_ISA")
            if before is not None:
                os.environ["HEADRACE_ISA"] = before


def opened(model: str, isa: str, arguments: dict[str, Any]) -> LLM:
    """An engine with room for every load."""
    with kernel_path(isa):
        return LLM(model, **{"max_model_len": 4096, "max_num_seqs": 16, **arguments})


def seconds(llm: LLM, load: Load, seed: str) -> float:
    """Of one run; equal seeds ask for the same."""
    rng = random.Random(seed)
    vocab_size = llm.frontend.client.architecture.vocab_size
    prefix = [rng.randrange(vocab_size) for _ in range(load.shared)]
    own = load.prompt - load.shared
    prompts = [
        {"prompt_token_ids": prefix + [rng.randrange(vocab_size) for _ in range(own)]}
        for _ in range(load.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=load.output, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="switches whose names contain this")
    options = parser.parse_args()
    print("| switch | load | off, s | on, s | gain |\n|---|---|---|---|---|")
    for switch in switches(_native.supported_isas(), usable_cores()):
        if options.only not in switch.name:
            continue
        on, off = opened(options.model, "", {}), opened(options.model, switch.isa, switch.without)
        for load in switch.loads:
            taken: dict[str, list[float]] = {"on": [], "off": []}
            for run in range(options.runs + 1):
                for name, llm in (("on", on), ("off", off)):
                    spent = seconds(llm, load, f"{load.name} {run}")
                    if run:  # the first one warms up
                        taken[name].append(spent)
            before, after = median(taken["off"]), median(taken["on"])
            told = f"{before:.2f} | {after:.2f} | {before / after:.2f} ×"
            print(f"| {switch.name} | {load.name} | {told} |", flush=True)
        on.close()
        off.close()


if __name__ == "__main__":
    main()
