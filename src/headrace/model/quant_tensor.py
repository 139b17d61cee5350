"""Quantised weights as the readers hand them to a backend: codes and their scales, no layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: one pass through memory however large the matrix


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A matrix ``w[n, k] = scale[n, k // g] * (codes[n, k] - zero_point) + minimum[n, k // g]``.

    ``codes``: uint8 ``[n, k]``, each below ``2 ** bits``. ``scale``: float16 or float32 ``[n, k / g]``.
    ``zero_point``: one integer for the whole tensor. ``minimum``: same shape and dtype as ``scale``, or None.
    ``zero_points``: uint8 of ``scale``'s shape, instead of both, where each group has an integer of its own.
    ``group_size`` divides ``k``.

    ``order``: int32 ``[k]``, or None. Where groups are no neighbours (act-order), columns lie by groups, and
    column ``i`` multiplies input ``order[i]``; ``k`` above then counts columns.

    ``float8``: ``codes`` are the bits of float8 e4m3 numbers, and ``w = scale * number``; 8 bits, one scale a
    row, no zero points.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[Any]
    bits: int
    group_size: int
    zero_point: int = 0
    minimum: NDArray[Any] | None = None
    zero_points: NDArray[np.uint8] | None = None
    order: NDArray[np.int32] | None = None
    float8: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """The float32 matrix ``[n, k]``, computed in float32, columns in the order of the inputs."""
        n, k = self.shape
        groups = k // self.group_size
        codes: NDArray[Any] = self.codes
        if self.float8:
            import ml_dtypes  # only such files pay for the import

            codes = codes.view(ml_dtypes.float8_e4m3fn)
        out = np.empty((n, groups, self.group_size), dtype=np.float32)
        step = max(1, _CHUNK_ELEMENTS // max(k, 1))
        for start in range(0, n, step):
            rows, part = slice(start, start + step), out[start : start + step]
            part[...] = codes[rows].reshape(-1, groups, self.group_size)
            if self.zero_points is None:
                part -= np.float32(self.zero_point)
            else:
                part -= self.zero_points[rows].astype(np.float32)[:, :, None]
            part *= self.scale[rows].astype(np.float32)[:, :, None]
            if self.minimum is not None:
                part += self.minimum[rows].astype(np.float32)[:, :, None]
        flat = out.reshape(n, k)
        if self.order is None:
            return flat
        by_input = np.empty_like(flat)
        by_input[:, self.order] = flat
        return by_input

    def take_rows(self, rows: NDArray[np.intp]) -> QuantTensor:
        """The same tensor with its output rows reordered or selected."""
        return replace(
            self,
            codes=self.codes[rows],
            scale=self.scale[rows],
            minimum=None if self.minimum is None else self.minimum[rows],
            zero_points=None if self.zero_points is None else self.zero_points[rows],
        )
