"""Distributions of lengths in tokens, as an option writes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.errors import ConfigError

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """``fixed``: always ``a``; ``uniform``: from ``a`` to ``b``; ``lognormal``: median ``a``, sigma ``b``."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    b: float = 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """One length, at least 1."""
        if self.kind == "uniform":
            return int(rng.integers(int(self.a), int(self.b) + 1))
        if self.kind == "lognormal":
            drawn = self.a * math.exp(self.b * float(rng.standard_normal()))
            return max(1, round(min(drawn, 8 * self.a, MAX_TOKENS)))
        return int(self.a)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.a:g}"
        return f"{self.kind}:{self.a:g}{'-' if self.kind == 'uniform' else ','}{self.b:g}"


def parse_lengths(text: str, option: str) -> Lengths:
    """``128``, ``uniform:64-256`` or ``lognormal:200,0.6`` (median, sigma). Raises ConfigError."""
    text = text.strip()
    if re.fullmatch(r"\d{1,9}", text):
        found = Lengths("fixed", int(text))
    elif match := re.fullmatch(r"uniform:(\d{1,9})-(\d{1,9})", text):
        found = Lengths("uniform", int(match[1]), int(match[2]))
    elif match := re.fullmatch(r"lognormal:(\d{1,9}),(\d+(?:\.\d+)?)", text):
        found = Lengths("lognormal", int(match[1]), float(match[2]))
    else:
        raise ConfigError(
            f"{option}: {text!r} is no length; write 128, uniform:64-256 or lognormal:200,0.6 (median, sigma)"
        )
    longest = found.b if found.kind == "uniform" else found.a
    if (
        found.a < 1
        or longest < found.a
        or longest > MAX_TOKENS
        or (found.kind == "lognormal" and found.b > 3)
    ):
        raise ConfigError(
            f"{option}: {text!r}: lengths go from 1 to {MAX_TOKENS}, the smaller one first; sigma up to 3"
        )
    return found
