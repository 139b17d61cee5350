"""Tensors into the native tile layout (native/kernels.h), independent of the ISA path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelFormatError
from headrace.model.checkpoint import Tensor
from headrace.model.quant_tensor import QuantTensor

U4, U8, BF16, F32 = 0, 1, 2, 3
LANES = 16  # output rows of a tile
DEPTH = 32  # inputs of a quantised tile


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one matrix is packed; mirrors the native struct. ``group`` and ``scale_bytes`` are 0 if dense."""

    kind: int
    scale_bytes: int = 0
    has_minimum: int = 0
    group: int = 0
    zero_point: int = 0

    @property
    def dense(self) -> bool:
        """No scales: bf16 or float32, multiplied with float32 activations."""
        return self.kind >= BF16

    def known(self) -> bool:
        """Whether some kernel has it."""
        if self.dense:
            return self.kind <= F32
        return (
            self.kind >= U4
            and self.scale_bytes in (2, 4)
            and self.has_minimum in (0, 1)
            and self.group in ((DEPTH,) if self.kind == U4 else (DEPTH // 2, DEPTH))
            and 0 <= self.zero_point <= 255
        )

    def tile_bytes(self) -> int:
        """Bytes of 16 outputs x 32 inputs."""
        if self.dense:
            return LANES * DEPTH * (4 if self.kind == F32 else 2)
        codes = LANES * DEPTH // (2 if self.kind == U4 else 1)
        return codes + LANES * self.scale_bytes * (DEPTH // self.group) * (2 if self.has_minimum else 1)

    def matrix_bytes(self, n: int, k: int) -> int:
        """Bytes of an ``[n, k]`` matrix, padding included."""
        tiles = -(-n // LANES)
        if self.dense:
            return tiles * LANES * k * (4 if self.kind == F32 else 2)
        return tiles * (padded(k) // DEPTH) * self.tile_bytes()


def padded(k: int) -> int:
    """``k`` rounded up to a whole number of quantised tiles."""
    return -(-k // DEPTH) * DEPTH


def pack(tensor: Tensor, name: str) -> tuple[WeightFormat, NDArray[np.uint8]]:
    """One linear weight ``[n, k]`` as bytes. Float16 and float32 become bf16 only when that is exact.

    Raises ModelFormatError for a group size that no kernel has.
    """
    if isinstance(tensor, QuantTensor):
        return _pack_quantised(tensor, name)
    return _pack_dense(np.ascontiguousarray(tensor))


def _pack_dense(w: NDArray[Any]) -> tuple[WeightFormat, NDArray[np.uint8]]:
    if w.dtype != ml_dtypes.bfloat16:
        w = w.astype(np.float32)
        narrow = w.astype(ml_dtypes.bfloat16)
        if np.array_equal(narrow.astype(np.float32), w):
            w = narrow
    n, k = w.shape
    rows = -(-n // LANES) * LANES
    if rows != n:
        w = np.concatenate([w, np.zeros((rows - n, k), w.dtype)])
    tiles = np.ascontiguousarray(w.reshape(rows // LANES, LANES, k).transpose(0, 2, 1))
    return WeightFormat(F32 if w.dtype == np.float32 else BF16), tiles.reshape(-1).view(np.uint8)


def _pack_quantised(w: QuantTensor, name: str) -> tuple[WeightFormat, NDArray[np.uint8]]:
    w = _regroup(w, name)
    n, k = w.shape
    rows, depth = -(-n // LANES) * LANES, padded(k)
    kind = U4 if w.bits <= 4 and w.group_size == DEPTH else U8  # rarer formats widen
    scale_type = np.float16 if w.scale.dtype == np.float16 else np.float32
    form = WeightFormat(kind, scale_type().itemsize, int(w.minimum is not None), w.group_size, w.zero_point)
    tiles = np.empty((rows // LANES, depth // DEPTH, form.tile_bytes()), np.uint8)

    codes = _pad(w.codes, rows, depth).reshape(rows // LANES, LANES, depth // DEPTH, DEPTH // 4, 4)
    codes = codes.transpose(0, 2, 3, 1, 4)  # tile row, tile, register of four inputs, lane, byte
    codes = np.ascontiguousarray(codes).reshape(*tiles.shape[:2], 8, 64)
    if kind == U4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    at = LANES * DEPTH // (2 if kind == U4 else 1)
    tiles[:, :, :at] = codes.reshape(*tiles.shape[:2], at)

    parts = DEPTH // w.group_size
    scales = [w.scale] if w.minimum is None else [w.scale, w.minimum]
    for values in scales:
        table: NDArray[Any] = _pad(values.astype(scale_type), rows, depth // w.group_size)
        table = table.reshape(rows // LANES, LANES, depth // DEPTH, parts).transpose(0, 2, 3, 1)
        raw = np.ascontiguousarray(table).view(np.uint8).reshape(*tiles.shape[:2], -1)
        tiles[:, :, at : at + raw.shape[2]] = raw
        at += raw.shape[2]
    return form, tiles.reshape(-1)


def _pad(a: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    if a.shape == (rows, columns):
        return a
    out = np.zeros((rows, columns), a.dtype)
    out[: a.shape[0], : a.shape[1]] = a
    return out


def _regroup(w: QuantTensor, name: str) -> QuantTensor:
    """What the kernels have: groups of 16 or 32 (larger repeat their scale), a zero point or a minimum."""
    if (w.minimum is not None and w.zero_point) or not 0 <= w.zero_point <= 255:
        scale = w.scale.astype(np.float32)
        offset = np.float32(0) if w.minimum is None else w.minimum.astype(np.float32)
        minimum = offset - scale * np.float32(w.zero_point)
        w = QuantTensor(w.codes, scale, w.bits, w.group_size, 0, minimum)
    if w.group_size in (16, 32):
        return w
    if w.group_size % DEPTH != 0:
        raise ModelFormatError(f"{name}: group size {w.group_size} is not 16 or a multiple of 32")
    repeat = w.group_size // DEPTH
    scale = np.repeat(w.scale, repeat, axis=1)
    wide = None if w.minimum is None else np.repeat(w.minimum, repeat, axis=1)
    return QuantTensor(w.codes, scale, w.bits, DEPTH, w.zero_point, wide)
