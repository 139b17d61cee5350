"""Microseconds per row of the native sampler, for each kernel path, kind of sampling and vocabulary.

``python benchmarks/sampler.py [--isa avx512] [--rows 32]``. One thread. Logits are either ``peaked`` (a few
leaders over normal noise, as language models give) or ``flat`` (the sampler's hard case for top-p). The time
includes the call from Python, a few microseconds over all rows.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from headrace.backend.batch import Float32, SamplingTable
from headrace.backend.cpu import _native

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "greedy, 5 logprobs": {"temperature": 0, "num_logprobs": 5},
}


def make_logits(shape: str, rows: int, vocab: int) -> Float32:
    """Float32 ``[rows, vocab]``."""
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)
    if shape == "peaked":
        logits *= 3
        logits[:, 100:130] += np.linspace(12, 6, 30, dtype=np.float32)
    return logits


def make_table(kind: dict[str, float], rows: int, vocab: int) -> SamplingTable:
    """``rows`` equal rows that differ in their seeds."""

    def column(name: str, default: float, dtype: type[np.generic]) -> np.ndarray:
        return np.full(rows, kind.get(name, default), dtype)

    none = np.zeros(0, np.int32)
    starts = np.zeros(rows + 1, np.int32)
    return SamplingTable(
        temperature=column("temperature", 1, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1, np.float32),
        min_p=column("min_p", 0, np.float32),
        presence_penalty=column("presence_penalty", 0, np.float32),
        frequency_penalty=column("frequency_penalty", 0, np.float32),
        repetition_penalty=column("repetition_penalty", 1, np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        choice=np.zeros(rows, np.uint32),
        position=np.zeros(rows, np.uint32),
        num_logprobs=column("num_logprobs", -1, np.int32),
        seen_start=starts,
        seen_ids=none,
        seen_counts=none,
        bias_start=starts,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        mask_row=np.full(rows, -1, np.int32),
        masks=np.zeros((0, (vocab + 31) // 32), np.uint32),
    )


def microseconds_per_row(isa: str, kind: dict[str, float], logits: Float32, repeats: int) -> float:
    """The best of ``repeats`` runs over all rows."""
    rows, vocab = logits.shape
    table = make_table(kind, rows, vocab)
    best = float("inf")
    for _ in range(repeats):
        fresh = logits.copy()  # top-k reorders the logits
        start = time.perf_counter()
        _native.sample(fresh, table, isa=isa)
        best = min(best, time.perf_counter() - start)
    return best / rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds per row of the native sampler.")
    parser.add_argument("--isa", choices=_native.supported_isas(), help="one kernel path; default: all")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    paths = [arguments.isa] if arguments.isa else _native.supported_isas()

    print(f"{'µs per row':32}" + "".join(f"{path:>10}" for path in paths))
    for vocab in (49152, 262144):
        for shape in ("peaked", "flat"):
            logits = make_logits(shape, arguments.rows, vocab)
            for name, kind in KINDS.items():
                times = [microseconds_per_row(path, kind, logits, arguments.repeats) for path in paths]
                print(f"{vocab:>6} {shape:6} {name:18}" + "".join(f"{t:10.1f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
