"""What keys and values in int8 give and cost: memory, decoding speed, and the distance from float32.

``python benchmarks/ablations/kv_format.py [--model smollm2-135m] [--runs 7] [--quick]``, on a quiet machine.

Speed: steps of decoding, of one sequence at a long context and of sixteen. Both formats are loaded at once
and take turns, so that a busy moment of the machine hits both; medians are compared.

Distance: all positions of texts made of our own sentences. Per position: the KL divergence of float32 to the
format, and whether the likeliest token is the same. Once with all else in float32 (torch: what the format
itself costs), once as served (cpu: the rounding of activations is in it). ``headrace eval MODEL --against
float32 --kv-cache-dtype int8`` does the latter on texts of yours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.backend import open_runner
from headrace.backend.batch import BLOCK_SIZE, Batch, Float32, SamplingTable
from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import RunnerSettings
from headrace.engine.memory import block_bytes
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model import store
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights import open_checkpoint

FORMATS: tuple[KVCacheDtype, ...] = ("bfloat16", "int8")
SENTENCES = [
    "The history of the lighthouse begins with open fires that were lit on hilltops.",
    "To bake bread at home you need flour, water, salt, yeast and a good deal of patience.",
    "In a right triangle the square of the hypotenuse equals the sum of the squares of both legs.",
    "Once upon a time a fox and a crow lived in the same wood and could not stand each other.",
    "The parliament voted on Tuesday to change the law on fishing in the northern lakes.",
    "Photosynthesis is the process by which plants turn light, water and carbon dioxide into sugar.",
    "Dear Sir or Madam, I am writing to complain about the delivery of two broken chairs.",
    "A function that calls itself needs a case in which it does not, or it will never end.",
    "Our train left Vienna at seven in the morning and reached the coast long after midnight.",
    "Copper conducts heat and electricity well, which is why cables and pans are made of it.",
]


def decode_batch(sequences: int, context: int, groups: int, vocab: int) -> Batch:
    """A token each for sequences that have ``context`` tokens by then; blocks in random order."""
    rng = np.random.default_rng(1)
    blocks = -(-context // BLOCK_SIZE)
    table = rng.permutation(sequences * blocks).reshape(sequences, blocks).astype(np.int32)
    slots = (table[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE).astype(np.int32)
    return Batch(
        token_ids=rng.integers(0, vocab, sequences).astype(np.int32),
        positions=np.full(sequences, context - 1, np.int32),
        query_start=np.arange(sequences + 1, dtype=np.int32),
        context_len=np.full(sequences, context, np.int32),
        slot_mapping=(slots,) * groups,
        block_tables=(table,) * groups,
        logit_rows=np.arange(sequences, dtype=np.int32),
        sampling=SamplingTable.greedy(sequences),
    )


def sequence_batch(token_ids: Sequence[int], groups: int) -> Batch:
    """One whole sequence, all logits wanted."""
    count = len(token_ids)
    positions = np.arange(count, dtype=np.int32)
    table = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None]
    return Batch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=positions,
        query_start=np.array([0, count], np.int32),
        context_len=np.array([count], np.int32),
        slot_mapping=(positions,) * groups,
        block_tables=(table,) * groups,
        logit_rows=np.arange(count, dtype=np.int32),
        sampling=SamplingTable.greedy(count),
    )


def speed(checkpoint: Checkpoint, sequences: int, context: int, runs: int, seconds: float) -> None:
    """Print tokens a second of both formats. The KV cache holds zeros: what it holds changes no time."""
    architecture = checkpoint.architecture
    blocks = sequences * -(-context // BLOCK_SIZE)
    settings = RunnerSettings(
        num_blocks=blocks, max_batch_tokens=sequences, max_sequences=sequences, max_model_len=context
    )
    runners = {
        name: open_runner(checkpoint, "cpu", replace(settings, kv_cache_dtype=name)) for name in FORMATS
    }
    batch = decode_batch(sequences, context, len(architecture.kv_groups), architecture.vocab_size)
    rates: dict[str, list[float]] = {name: [] for name in FORMATS}
    for run in range(runs + 1):
        for name, runner in runners.items():
            runner.run(batch)  # the other's memory is in the caches
            steps, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < seconds:
                runner.run(batch)
                steps += 1
            if run:  # the first one warms up
                rates[name].append(steps * sequences / elapsed)
    for runner in runners.values():
        runner.close()
    wide, narrow = (statistics.median(rates[name]) for name in FORMATS)
    print(
        f"{sequences:9}{context:9}{wide:12.1f}{narrow:9.1f}{narrow / wide:12.2f}",
        flush=True,
    )


class Distance:
    """What a format's logits are away from float32's, position by position."""

    def __init__(self) -> None:
        self.divergence: list[Float32] = []
        self.same: list[np.ndarray[Any, Any]] = []

    def add(self, reference: Float32, got: Float32) -> None:
        """Logits ``[rows, vocab]`` of both."""
        a, b = _log_softmax(reference), _log_softmax(got)
        self.divergence.append((np.exp(a) * (a - b)).sum(1))
        self.same.append(a.argmax(1) == b.argmax(1))

    def __str__(self) -> str:
        kl, same = np.concatenate(self.divergence), np.concatenate(self.same)
        error = kl.std() / len(kl) ** 0.5
        spread = same.std() / len(same) ** 0.5
        return (
            f"KL {kl.mean():.6f} ± {error:.6f}, p99 {np.quantile(kl, 0.99):.4f}, "
            f"same top-1 {same.mean():.2%} ± {spread:.2%} of {len(kl)} positions"
        )


def _log_softmax(logits: Float32) -> np.ndarray[Any, np.dtype[np.float64]]:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    return wide


def distances(checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> None:
    """Print the distance of every format on both backends from float32."""
    length = max(map(len, texts))
    settings = RunnerSettings(
        num_blocks=-(-length // BLOCK_SIZE),
        max_batch_tokens=length,
        max_sequences=1,
        max_model_len=length,
        max_logit_rows=length,
    )
    groups = len(checkpoint.architecture.kv_groups)
    reference: Any = open_runner(checkpoint, "torch", settings)
    asked: dict[str, Any] = {
        f"{backend:6}{name}": open_runner(checkpoint, backend, replace(settings, kv_cache_dtype=name))
        for backend in ("torch", "cpu")
        for name in FORMATS
    }
    found = {name: Distance() for name in asked}
    for tokens in texts:
        batch = sequence_batch(tokens, groups)
        expected = reference.logits(batch)
        for name, runner in asked.items():
            found[name].add(expected, runner.logits(batch))
    for name, distance in found.items():
        print(f"{name:16}{distance}", flush=True)


def main() -> None:
    """Print memory, speeds and distances of both formats."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter texts and runs")
    arguments = parser.parse_args()
    path = store.resolve(arguments.model)
    checkpoint = open_checkpoint(path)
    architecture = checkpoint.architecture
    for name in FORMATS:
        print(f"{name:9}{block_bytes(architecture, name) / BLOCK_SIZE:9.0f} bytes a token")

    print(
        f"\n{'sequences':>9}{'context':>9}{'bfloat16':>12}{'int8':>9}{'int8/bf16':>12}  tokens/s of decoding"
    )
    runs, seconds = (3, 0.5) if arguments.quick else (arguments.runs, 1.0)
    for sequences, context in ((1, 128), (1, 4096), (16, 256), (16, 1024), (16, 4096)):
        if context <= architecture.max_positions:
            speed(checkpoint, sequences, context, runs, seconds)

    print("\nfrom float32:")
    tokenizer = load_tokenizer(path)
    count = 3 if arguments.quick else len(SENTENCES)
    texts = [" ".join(SENTENCES[i:] + SENTENCES[:i]) for i in range(count)]
    distances(checkpoint, [tokenizer.encode(text) for text in texts])


if __name__ == "__main__":
    main()
