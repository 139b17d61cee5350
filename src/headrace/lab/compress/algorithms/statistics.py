"""What is kept of the inputs of a layer's linear weights: sums in float32, and by choice a few rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.lab.compress.quantized import FLOAT8_MAX

SITES = {
    "attention_norm": ("attention.q", "attention.k", "attention.v"),
    "attention.v": ("attention.o",),
    "feed_forward_norm": ("feed_forward.gate", "feed_forward.up"),
    "feed_forward.up": ("feed_forward.down",),
}
"""The weights of a layer that share an input, by the norm or weight that makes it, channel by channel."""


KEYS, VALUES = "attention.keys", "attention.values"
"""What a layer puts into a KV cache: keys after their rotation, and values."""


@dataclass(slots=True)
class Inputs:
    """Of one input ``[rows, in]``: how many rows, ``gram = x.T @ x``, and of each channel the sum of absolute
    values and the largest; every ``stride``-th row itself, if it is not 0."""

    rows: int
    gram: torch.Tensor
    total: torch.Tensor
    largest: torch.Tensor
    stride: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of_width(cls, width: int, stride: int = 0) -> Inputs:
        """Nothing seen yet."""
        return cls(0, torch.zeros(width, width), torch.zeros(width), torch.zeros(width), stride)

    def add(self, x: torch.Tensor) -> None:
        """Take rows in."""
        size = x.abs()
        if self.stride:
            self.kept.append(x[-self.rows % self.stride :: self.stride].clone())
        self.rows += len(x)
        self.gram.addmm_(x.T, x)
        self.total += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))

    @property
    def mean(self) -> torch.Tensor:
        """The mean absolute value of each channel."""
        return self.total / max(self.rows, 1)

    def divide(self, scale: torch.Tensor) -> None:
        """As if every row had been divided by ``scale [in]``."""
        self.gram /= scale[:, None] * scale
        self.total /= scale
        self.largest /= scale
        self.kept = [rows / scale for rows in self.kept]


@dataclass(slots=True)
class LayerInputs:
    """The inputs of a layer's sites; :meth:`see` is told what goes into each linear weight.

    ``stride``: of :class:`Inputs`."""

    stride: int = 0
    sites: dict[str, Inputs] = field(default_factory=dict)

    def see(self, name: str, x: torch.Tensor) -> None:
        """``name``: canonical, ``layers.{i}.attention.q``; of weights that share inputs the first counts."""
        part = name.split(".", 2)[2]
        for site, members in SITES.items():
            if part == members[0]:
                if site not in self.sites:
                    self.sites[site] = Inputs.of_width(x.shape[1], self.stride)
                self.sites[site].add(x)


@dataclass(slots=True)
class CacheReach:
    """The largest magnitudes among a layer's keys and values."""

    keys: float = 0.0
    values: float = 0.0

    def see(self, name: str, x: torch.Tensor) -> None:
        """Told of everything, as :meth:`LayerInputs.see` is."""
        if name.endswith(KEYS):
            self.keys = max(self.keys, float(x.abs().max()))
        elif name.endswith(VALUES):
            self.values = max(self.values, float(x.abs().max()))

    def scales(self) -> tuple[float, float]:
        """Of keys and of values: what they are divided by to fit float8; 1 for those that are all zero."""
        return self.keys / FLOAT8_MAX or 1.0, self.values / FLOAT8_MAX or 1.0
