"""What is asked of every engine: equal token ids, fixed lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` at once of ``prompt`` tokens in, ``output`` tokens out, the first ``shared`` in common.

    ``measure``: what is told of it: the ``decode`` rate after the first token, the ``prefill`` rate, the
    ``output`` rate of everything, or the ``seconds`` that it takes (then with the prefix cold and primed).
    ``all_forms``: measured with every format, not with leaders only. ``large``: with the 1B shape.
    """

    key: str
    title: str
    requests: int
    prompt: int
    output: int
    measure: str
    shared: int = 0
    all_forms: bool = False
    large: bool = False

    @property
    def unit(self) -> str:
        """Of its main value."""
        return "s" if self.measure == "seconds" else f"{self.measure} tokens/s"


GENERATED = (
    Workload("A", "single stream, 128 in, 128 out", 1, 128, 128, "decode", all_forms=True),
    Workload("B", "prefill of a 2048-token prompt", 1, 2048, 1, "prefill", all_forms=True),
    Workload("C", "16 at once, 128 in, 128 out", 16, 128, 128, "output", all_forms=True),
    Workload("C32", "32 at once, 128 in, 128 out", 32, 128, 128, "output"),
    Workload(
        "E", "16 at once, 1024 tokens shared and 32 own in, 64 out", 16, 1056, 64, "seconds", shared=1024
    ),
    Workload("F", "decoding 64 tokens at a context of 4096", 1, 4096, 64, "decode"),
    Workload("G", "1B shape, single stream, 128 in, 32 out", 1, 128, 32, "decode", large=True),
    Workload("G16", "1B shape, 16 at once, 32 in, 16 out", 16, 32, 16, "output", large=True),
)
COLD_START, MIXED = "D", "H"
KEYS = (*(workload.key for workload in GENERATED), COLD_START, MIXED)

QUICK = {"B": (512, 1), "C": (32, 16), "C32": (32, 8), "E": (288, 8), "F": (1024, 16), "A": (32, 32)}
"""Prompt and output lengths of ``--quick``."""


def quickened(workload: Workload) -> Workload:
    """Shorter, to see that everything runs; its numbers say little."""
    if workload.key not in QUICK:
        return workload
    prompt, output = QUICK[workload.key]
    title = f"{workload.title} (shortened to {prompt} in, {output} out)"
    return replace(
        workload, prompt=prompt, output=output, shared=prompt - 32 if workload.shared else 0, title=title
    )


def prompts(workload: Workload, vocab_size: int, number: int, *, again: bool = False) -> list[list[int]]:
    """The prompts of round ``number``: other ones in every round, so that no cache has seen them.

    ``again``: the prefix of the same round, other own tokens behind it.
    """
    rng = random.Random(f"{workload.key} {number}")
    low = min(256, vocab_size // 2)  # control tokens stand first
    prefix = [rng.randrange(low, vocab_size) for _ in range(workload.shared)]
    own = random.Random(f"{workload.key} {number} {again}")
    count = workload.prompt - workload.shared
    return [
        [*prefix, *(own.randrange(low, vocab_size) for _ in range(count))] for _ in range(workload.requests)
    ]
