"""How long and how fast a student learns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Of one training. It ends after ``steps``, after ``minutes``, or when ``patience`` evaluations in a row
    found no better student. The learning rate rises over the share ``warmup`` of it, then falls as a cosine
    to a tenth. A step sees ``batch_size`` sequences, ``micro_tokens`` at a time. With ``minutes`` the rate
    follows the clock; with ``steps`` alone all is decided by ``seed``.
    """

    learning_rate: float
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    micro_tokens: int = 1024
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluations: int = 10
    patience: int = 4
    checkpoint_minutes: float = 5.0
    seed: int = 0
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError("Training needs an end: give --minutes or --steps.")
        for name in ("learning_rate", "minutes", "clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name.replace('_', '-')}: {value} must be a number above zero.")

    def share(self, step: int, seconds: float) -> float:
        """How much of the training is done, 0 to 1, after so many steps and seconds."""
        done = 0.0
        if self.steps is not None:
            done = step / self.steps
        if self.minutes is not None:
            done = max(done, seconds / (60 * self.minutes))
        return min(done, 1.0)

    def rate(self, step: int, seconds: float) -> float:
        """The learning rate of the step that comes after ``step`` others."""
        share = self.share(step + 1 if self.minutes is None else step, seconds)
        if share < self.warmup:
            return self.learning_rate * max(share / self.warmup, 0.02)
        turn = (share - self.warmup) / (1 - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * turn)) / 2)
