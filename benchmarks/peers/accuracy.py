"""Whether an engine computes the model: its likeliest tokens, and its distance from float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results import Accuracy

OPENING = "The three longest rivers of Europe are"
"""What the greedy tokens continue."""
GREEDY_TOKENS = 40

TEXT = """Bread dough rises because yeast eats the sugars of the flour and breathes out carbon dioxide, which
the gluten holds in small bubbles. Warm water wakes the yeast sooner, and salt slows it down. A baker who has
the time lets the dough stand in the cold overnight: it rises more slowly, but acids and alcohol form
meanwhile, and they are what a good loaf tastes of. In the oven the bubbles grow once more, until the crust
has set."""
POSITIONS = 32
"""How many of its last positions are compared."""


def compare(reference: NDArray[np.float32], got: NDArray[np.float32]) -> Accuracy:
    """Log-probabilities ``[positions, vocabulary]`` of both. An engine may pad the vocabulary.

    Raises ValueError if the shapes can't belong to the same question.
    """
    if len(reference) != len(got) or got.shape[1] < reference.shape[1]:
        raise ValueError(f"log-probabilities of shape {got.shape}, not {reference.shape}")
    wanted = reference.astype(np.float64)
    told = got[:, : wanted.shape[1]].astype(np.float64)
    kl = (np.exp(wanted) * (wanted - told)).sum(1)
    return Accuracy(
        positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        same_top1=float((wanted.argmax(1) == told.argmax(1)).mean()),
    )


def load(path: Path) -> NDArray[np.float32]:
    """What a runner has written."""
    found: Any = np.load(path, allow_pickle=False)
    return np.asarray(found, np.float32)
