"""What quantisation makes of a linear weight, and the scheme it was asked for: no format, no layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Kind = Literal["int", "float8"]
Activations = Literal["dynamic-token"]
ActOrder = Literal["static", "group"]

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is to be held.

    ``group_size`` counts inputs that share a scale; None: one scale per output. ``symmetric``: the zero point
    is the middle code. ``float8`` is e4m3 with 8 bits, symmetric, one scale per output.
    ``input_activations``: the inputs are quantised too, while running, with one scale per token (int8 or
    float8 as the weight). ``act_order``: the columns that matter most were rounded first; "static" keeps
    groups of neighbours, "group" makes groups in that order, so that the weight needs ``g_idx``.
    """

    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool = True
    kind: Kind = "int"
    input_activations: Activations | None = None
    act_order: ActOrder | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A matrix ``w[n, k] = scale[n, g] * (codes[n, k] - zero[n, g])`` with ``g = g_idx[k]``.

    ``codes``: uint8 ``[out, in]``, each below ``2 ** bits``; of kind "float8" the bits of float8_e4m3fn, and
    ``w = scale * float8``. ``scale``: ``[out, groups]``, float16, or float32 where float16 cannot hold it;
    stored as it is: codes were chosen for it. ``zero``: uint8 ``[out, groups]``, or None for symmetric ones,
    whose zero point is ``2 ** (bits - 1)``. ``g_idx``: int32 ``[in]``, or None for groups of ``group_size``
    neighbours; the last group may be short only where ``group_size`` is None or covers all inputs.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[Any]
    scheme: Scheme
    zero: NDArray[np.uint8] | None = None
    g_idx: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs per group; all of them where there is one scale per output."""
        return self.scheme.group_size or self.codes.shape[1]

    def groups(self) -> NDArray[np.int32]:
        """The group of every input, int32 ``[in]``."""
        if self.g_idx is not None:
            return self.g_idx
        return np.arange(self.codes.shape[1], dtype=np.int32) // np.int32(self.group_size)

    def dequantize(self) -> NDArray[np.float32]:
        """The float32 matrix ``[out, in]`` that every reader of the codes must arrive at."""
        scale = self.scale.astype(np.float32)[:, self.groups()]
        if self.scheme.kind == "float8":
            values: NDArray[np.float32] = self.codes.view(FLOAT8).astype(np.float32)
            return values * scale
        if self.zero is None:
            steps = self.codes.astype(np.float32) - np.float32(1 << (self.scheme.bits - 1))
        else:
            steps = self.codes.astype(np.float32) - self.zero.astype(np.float32)[:, self.groups()]
        return np.asarray(steps * scale, np.float32)

    def size_bytes(self) -> int:
        """Bytes of codes, scales, zero points and group indices, packed."""
        code_bits = self.codes.size * self.scheme.bits
        zero_bits = 0 if self.zero is None else self.zero.size * self.scheme.bits
        index = 0 if self.g_idx is None else self.g_idx.nbytes
        return (code_bits + zero_bits + 7) // 8 + self.scale.nbytes + index
