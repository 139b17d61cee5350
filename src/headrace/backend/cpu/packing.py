"""Tensors into the native tile layout (native/kernels.h), independent of the ISA path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelFormatError
from headrace.model.checkpoint import Tensor
from headrace.model.quant_tensor import QuantTensor

U4, U8, BF16, F32, F8 = 0, 1, 2, 3, 4
NO_OFFSETS, MINIMUM, ZERO_POINTS = 0, 1, 2
LANES = 16  # output rows of a tile
DEPTH = 32  # inputs of a quantised tile
_ROW_SCALES = LANES * 4  # bytes that end a tile row where a scale is of a whole row
_F8_SCALE = np.float32(256)  # float8 is read as float16, whose exponent has another bias


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one matrix is packed; mirrors the native struct.

    ``scale_bytes``: 0 without scales. ``offsets``: what lies beside the scales of each group. ``group``: the
    inputs that share a scale; 0: a whole row's.
    """

    kind: int
    scale_bytes: int = 0
    offsets: int = NO_OFFSETS
    group: int = 0
    zero_point: int = 0

    @property
    def dense(self) -> bool:
        """bf16, float32 or float8: multiplied with activations that are not quantised."""
        return self.kind >= BF16

    def known(self) -> bool:
        """Whether some kernel has it."""
        if self.dense:
            scale_bytes = 4 if self.kind == F8 else 0
            return self.kind <= F8 and (self.scale_bytes, self.offsets, self.group) == (scale_bytes, 0, 0)
        grouped = self.group in (DEPTH // 2, DEPTH) and self.scale_bytes in (2, 4)
        by_row = (self.group, self.scale_bytes, self.offsets) == (0, 4, NO_OFFSETS)
        return (
            self.kind >= U4
            and (grouped or by_row)
            and self.offsets in (NO_OFFSETS, MINIMUM, ZERO_POINTS)
            and 0 <= self.zero_point <= 255
        )

    def tile_bytes(self) -> int:
        """Bytes of 16 outputs x 32 inputs."""
        if self.dense:
            return LANES * DEPTH * {F32: 4, BF16: 2}.get(self.kind, 1)
        codes = LANES * DEPTH // (2 if self.kind == U4 else 1)
        if self.group == 0:
            return codes
        scales = LANES * self.scale_bytes
        beside = {MINIMUM: scales, ZERO_POINTS: LANES}.get(self.offsets, 0)
        return codes + (scales + beside) * (DEPTH // self.group)

    def row_bytes(self, k: int) -> int:
        """Bytes of 16 outputs x ``k`` inputs, padding included."""
        row_scales = _ROW_SCALES if self.group == 0 and self.scale_bytes else 0
        inputs = k if self.dense else padded(k)
        if self.kind == BF16:  # in pairs
            inputs += k % 2
        return inputs * self.tile_bytes() // DEPTH + row_scales

    def matrix_bytes(self, n: int, k: int) -> int:
        """Bytes of an ``[n, k]`` matrix, padding included."""
        return -(-n // LANES) * self.row_bytes(k)


def padded(k: int) -> int:
    """``k`` rounded up to a whole number of quantised tiles."""
    return -(-k // DEPTH) * DEPTH


def pack(tensor: Tensor, name: str) -> tuple[WeightFormat, NDArray[np.uint8]]:
    """One linear weight ``[n, k]`` as bytes. Float16 and float32 become bf16 only when that is exact.

    Columns of a QuantTensor stay as they lie; ``order`` is the caller's. Raises ModelFormatError for a group
    size that no kernel has.
    """
    if isinstance(tensor, QuantTensor):
        return _pack_float8(tensor, name) if tensor.float8 else _pack_quantised(tensor, name)
    return _pack_dense(np.ascontiguousarray(tensor))


def _pack_dense(w: NDArray[Any]) -> tuple[WeightFormat, NDArray[np.uint8]]:
    import ml_dtypes  # a start that finds its weights packed does without

    if w.dtype != ml_dtypes.bfloat16:
        w = w.astype(np.float32)
        narrow = w.astype(ml_dtypes.bfloat16)
        if np.array_equal(narrow.astype(np.float32), w):
            w = narrow
    if w.dtype == np.float32:
        return WeightFormat(F32), _dense_tiles(w).reshape(-1).view(np.uint8)
    n, k = w.shape
    w = _pad(w, -(-n // LANES) * LANES, k + k % 2)
    pairs = w.reshape(-1, LANES, w.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return WeightFormat(BF16), np.ascontiguousarray(pairs).reshape(-1).view(np.uint8)


def _dense_tiles(w: NDArray[Any]) -> NDArray[Any]:
    """``[n / 16, k, 16]``, filled up with zeros."""
    n, k = w.shape
    w = _pad(w, -(-n // LANES) * LANES, k)
    return np.ascontiguousarray(w.reshape(-1, LANES, k).transpose(0, 2, 1))


def _pack_float8(w: QuantTensor, name: str) -> tuple[WeightFormat, NDArray[np.uint8]]:
    n, k = w.shape
    if w.scale.shape != (n, 1):
        raise ModelFormatError(f"{name}: float8 weights need one scale a row, not {list(w.scale.shape)}")
    with np.errstate(over="ignore"):
        scale = w.scale.astype(np.float32) * _F8_SCALE
    if not np.isfinite(scale).all():
        raise ModelFormatError(f"{name}: its scales are too large for the kernels")
    codes = _dense_tiles(w.codes).reshape(-1, k * LANES)
    return WeightFormat(F8, scale_bytes=4), _with_row_scales(codes, scale).reshape(-1)


def _with_row_scales(rows: NDArray[np.uint8], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Tile rows ``[n / 16, bytes]``, each followed by its sixteen scales out of ``[n, 1]``."""
    table = _pad(scale, len(rows) * LANES, 1).reshape(len(rows), LANES)
    return np.concatenate([rows, table.view(np.uint8)], axis=1)


def _pack_quantised(w: QuantTensor, name: str) -> tuple[WeightFormat, NDArray[np.uint8]]:
    w = _regroup(w, name)
    n, k = w.shape
    rows, depth = -(-n // LANES) * LANES, padded(k)
    by_row = w.group_size not in (DEPTH // 2, DEPTH)
    scale_type = np.float16 if w.scale.dtype == np.float16 and not by_row else np.float32
    offsets = NO_OFFSETS if w.minimum is None else MINIMUM
    if w.zero_points is not None:
        offsets = ZERO_POINTS
    form = WeightFormat(
        U4 if w.bits <= 4 else U8,  # rarer formats widen
        scale_type().itemsize,
        offsets,
        0 if by_row else w.group_size,
        w.zero_point,
    )
    tiles = np.empty((rows // LANES, depth // DEPTH, form.tile_bytes()), np.uint8)

    codes = _pad(w.codes, rows, depth).reshape(rows // LANES, LANES, depth // DEPTH, DEPTH // 4, 4)
    codes = codes.transpose(0, 2, 3, 1, 4)  # tile row, tile, register of four inputs, lane, byte
    codes = np.ascontiguousarray(codes).reshape(*tiles.shape[:2], 8, 64)
    if form.kind == U4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    at = LANES * DEPTH // (2 if form.kind == U4 else 1)
    tiles[:, :, :at] = codes.reshape(*tiles.shape[:2], at)
    if by_row:
        tile_rows = tiles.reshape(len(tiles), -1)
        return form, _with_row_scales(tile_rows, w.scale.astype(np.float32)).reshape(-1)

    parts = DEPTH // w.group_size
    tables: list[NDArray[Any]] = [w.scale.astype(scale_type)]
    if w.minimum is not None:
        tables.append(w.minimum.astype(scale_type))
    if w.zero_points is not None:
        tables.append(w.zero_points)
    for values in tables:
        table = _pad(values, rows, depth // w.group_size)
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
    """What the kernels have: groups of 16 or 32 (larger repeat their scale) or a whole row with nothing but a
    zero point; beside the scales a zero point, a minimum, or zero points."""
    if (w.minimum is not None and w.zero_point) or not 0 <= w.zero_point <= 255:
        scale = w.scale.astype(np.float32)
        offset = np.float32(0) if w.minimum is None else w.minimum.astype(np.float32)
        minimum = offset - scale * np.float32(w.zero_point)
        w = replace(w, scale=scale, zero_point=0, minimum=minimum)
    plain = w.minimum is None and w.zero_points is None
    if w.group_size in (16, 32) or (plain and w.group_size == w.shape[1]):
        return w
    if w.group_size % (DEPTH // 2) != 0:
        raise ModelFormatError(f"{name}: group size {w.group_size} is not a multiple of 16")
    size = DEPTH // 2 if w.group_size % DEPTH else DEPTH

    def repeated(values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, w.group_size // size, axis=1)

    return replace(
        w,
        scale=repeated(w.scale),
        group_size=size,
        minimum=None if w.minimum is None else repeated(w.minimum),
        zero_points=None if w.zero_points is None else repeated(w.zero_points),
    )
