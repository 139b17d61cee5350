"""Narrowing float weights while they are loaded: round to nearest, groups of 32 along K, no calibration."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, ModelFormatError
from headrace.model.checkpoint import Dense, Tensor
from headrace.model.quant_tensor import QuantTensor

Quantization = Literal["int8", "int4", "int4-all"]
"""``int4-all``: embeddings and head, too, for who drafts: its errors cost time, never an answer."""

GROUP_SIZE = 32
_CHUNK_ELEMENTS = 1 << 20  # float32 working set per pass: 4 MiB, whatever the size of the tensor
_F16_MAX = 65504.0
_F16_SMALLEST_NORMAL = 2.0**-14
_EMBEDDINGS = ("embed.weight", "head.weight")


def narrow(name: str, tensor: Tensor, quantization: Quantization | None) -> Tensor:
    """A checkpoint's tensor as ``quantization`` wants it held; what is quantised already stays as it is.

    Norms and biases keep their type. The embedding and the output head go below int8 with ``int4-all`` only:
    their errors reach every logit undamped, and they are read one row, or one pass, per token.
    """
    if quantization is None or isinstance(tensor, QuantTensor) or tensor.ndim != 2:
        return tensor
    if quantization == "int4-all":
        return quantize(tensor, "int4", name=name)
    return quantize(tensor, "int8" if name in _EMBEDDINGS else quantization, name=name)


def quantize(dense: Dense, quantization: Literal["int8", "int4"], *, name: str = "the weight") -> Tensor:
    """Round a float matrix ``[n, k]`` to the nearest codes, in groups of 32 along ``k``.

    ``int8`` is symmetric (zero point 128, codes 1 … 255); ``int4`` has a minimum per group. Scales are
    float16, or float32 where float16 cannot hold the tensor's range. Codes are chosen for the scale as
    stored, so its own rounding costs nothing. A tensor that is no matrix, or whose ``k`` is not a multiple
    of 32, is returned as it came.

    Raises ModelFormatError, with ``name``, for weights that are not finite; ConfigError for an unknown
    ``quantization``.
    """
    if quantization not in ("int8", "int4"):
        raise ConfigError(f"Unknown quantization {quantization!r}: it can be int8 or int4.")
    if dense.ndim != 2 or dense.shape[0] == 0 or dense.shape[1] == 0 or dense.shape[1] % GROUP_SIZE:
        return dense
    low, high = _group_ranges(dense, name)
    largest = np.maximum(np.abs(low), np.abs(high))
    if quantization == "int8":
        step = np.divide(largest, 127, dtype=np.float32)
        scale = step.astype(_scale_type(step))
        codes = _round(dense, scale, np.zeros_like(scale), offset=128, lowest=1, highest=255)
        return QuantTensor(codes, scale, bits=8, group_size=GROUP_SIZE, zero_point=128)
    step = np.divide(high - low, 15, dtype=np.float32)
    dtype = _scale_type(np.maximum(step, largest))
    scale, minimum = step.astype(dtype), low.astype(dtype)
    codes = _round(dense, scale, minimum, offset=0, lowest=0, highest=15)
    return QuantTensor(codes, scale, bits=4, group_size=GROUP_SIZE, minimum=minimum)


def _row_chunks(shape: tuple[int, ...]) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // shape[1])
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def _group_ranges(dense: Dense, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Smallest and largest weight of each group, ``[n, k / 32]`` each; refuses what is not finite."""
    n, k = dense.shape
    low = np.empty((n, k // GROUP_SIZE), dtype=np.float32)
    high = np.empty_like(low)
    for rows in _row_chunks(dense.shape):
        groups = np.asarray(dense[rows], dtype=np.float32).reshape(-1, k // GROUP_SIZE, GROUP_SIZE)
        groups.min(axis=2, out=low[rows])
        groups.max(axis=2, out=high[rows])
    with np.errstate(over="ignore", invalid="ignore"):
        sane = np.isfinite(high - low).all(axis=1)  # NaN and infinities survive min and max
    if not sane.all():
        raise ModelFormatError(
            f"{name} holds NaN, infinite or absurdly large weights (first in row {int(np.argmin(sane))}): "
            "it cannot be quantised. The checkpoint is damaged, or was saved in a type too narrow for it."
        )
    return low, high


def _scale_type(scale: NDArray[np.float32]) -> np.dtype[Any]:
    """float16 if it holds the largest of these in full precision, or if all are zero."""
    largest = float(scale.max())
    fits = largest == 0.0 or _F16_SMALLEST_NORMAL <= largest <= _F16_MAX
    return np.dtype(np.float16 if fits else np.float32)


def _round(
    dense: Dense, scale: NDArray[Any], minimum: NDArray[Any], *, offset: int, lowest: int, highest: int
) -> NDArray[np.uint8]:
    """The codes whose value ``scale * (code - offset) + minimum`` is nearest to each weight."""
    n, k = dense.shape
    codes = np.empty((n, k), dtype=np.uint8)
    for rows in _row_chunks(dense.shape):
        groups = np.asarray(dense[rows], dtype=np.float32).reshape(-1, k // GROUP_SIZE, GROUP_SIZE)
        step = scale[rows].astype(np.float32)[:, :, None]
        base = minimum[rows].astype(np.float32)[:, :, None]
        step[step == 0] = np.inf  # all weights alike (or the scale underflowed): any code gives the same
        exact = (groups - base) / step + np.float32(offset)
        codes[rows] = np.clip(np.rint(exact), lowest, highest).reshape(-1, k)
    return codes
