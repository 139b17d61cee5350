"""Quantised weights as the readers hand them to a backend: codes and their scales, no layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: one pass through memory however large the matrix


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A matrix ``w[n, k] = scale[n, k // g] * (codes[n, k] - zero_point) + minimum[n, k // g]``.

    ``codes``: uint8 ``[n, k]``, each below ``2 ** bits``. ``scale``: float16 or float32 ``[n, k / g]``.
    ``zero_point``: one integer for the whole tensor. ``minimum``: same shape and dtype as ``scale``, or None.
    ``group_size`` divides ``k``. Per-group integer zero points are expressed as ``minimum = -scale * zero``.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[Any]
    bits: int
    group_size: int
    zero_point: int = 0
    minimum: NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """The float32 matrix ``[n, k]``, computed in float32."""
        n, k = self.shape
        groups = k // self.group_size
        out = np.empty((n, groups, self.group_size), dtype=np.float32)
        step = max(1, _CHUNK_ELEMENTS // max(k, 1))
        for start in range(0, n, step):
            rows, part = slice(start, start + step), out[start : start + step]
            part[...] = self.codes[rows].reshape(-1, groups, self.group_size)
            part -= np.float32(self.zero_point)
            part *= self.scale[rows].astype(np.float32)[:, :, None]
            if self.minimum is not None:
                part += self.minimum[rows].astype(np.float32)[:, :, None]
        return out.reshape(n, k)

    def take_rows(self, rows: NDArray[np.intp]) -> QuantTensor:
        """The same tensor with its output rows reordered or selected."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return QuantTensor(
            self.codes[rows], self.scale[rows], self.bits, self.group_size, self.zero_point, minimum
        )
