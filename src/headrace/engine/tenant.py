"""Tenant: whose requests share the engine with others', and what it has been served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.sequence import Sequence


class Tenant:
    """Somebody whose requests share the engine with others' (see ``waiting.py``)."""

    __slots__ = ("admitted_time", "num_sequences", "promised", "served", "waiting", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.served = 0.0  # tokens, each divided by the weight of its time
        self.promised = 0  # tokens of prompts that have blocks and are not computed yet
        self.admitted_time = -math.inf  # when a sequence last got its blocks
        self.num_sequences = 0  # waiting and running
        self.waiting: list[Sequence] = []  # by rank

    @property
    def claimed(self) -> float:
        """What it will have been served once its admitted prompts are computed."""
        return self.served + self.promised / self.weight

    def serve(self, tokens: int) -> None:
        """Count tokens that were computed for this tenant."""
        self.served += tokens / self.weight
