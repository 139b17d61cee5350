"""Packed matrices, quantised rows and KV pools as numpy sees them, for tests of single native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Float32
from headrace.backend.cpu import _native
from headrace.backend.cpu.packing import WeightFormat, pack, padded
from headrace.model.quant_tensor import QuantTensor

Float64 = NDArray[np.float64]
WIDE = 254

random_shapes = hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclass(frozen=True)
class QuantRows:
    """Rows as native/kernels.h's QuantRow lays them out, ``k`` padded to whole groups of 32."""

    raw: NDArray[np.uint8]  # [rows, bytes]
    k: int

    def _part(self, offset: int, count: int, dtype: type[Any]) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize
        return np.ascontiguousarray(self.raw[:, offset : offset + count * size]).view(dtype)

    @property
    def coarse(self) -> NDArray[np.int8]:
        return self._part(0, self.k, np.int8)

    @property
    def fine(self) -> NDArray[np.int8]:
        return self._part(self.k, self.k, np.int8)

    @property
    def scale(self) -> Float32:
        return self._part(2 * self.k, self.k // 32, np.float32)

    @property
    def scaled_sum(self) -> Float32:
        return self._part(2 * self.k + self.k // 8, self.k // 32, np.float32)

    @property
    def sum(self) -> NDArray[np.int32]:
        return self._part(2 * self.k + self.k // 4, self.k // 16, np.int32)

    @property
    def wide(self) -> NDArray[np.bool_]:
        words = self._part(2 * self.k + self.k // 2, -(-self.k // 2048), np.uint64)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : self.k // 32] != 0

    def integers(self) -> NDArray[np.int64]:
        """``[rows, k]``: what each group's scale multiplies."""
        wide = np.repeat(self.wide, 32, axis=1)
        coarse = self.coarse.astype(np.int64)
        return np.where(wide, WIDE * coarse + self.fine, coarse)

    def values(self) -> Float64:
        """``[rows, k]`` in float64."""
        return self.integers() * np.repeat(self.scale.astype(np.float64), 32, axis=1)


def quantise(x: Float32, isa: str) -> QuantRows:
    """Float rows ``[rows, width]`` through the native kernel."""
    k = padded(x.shape[1])
    out = np.zeros((len(x), _native.quant_row_bytes(k)), np.uint8)
    _native.quantise(isa, np.ascontiguousarray(x, np.float32), out)
    return QuantRows(out, k)


def native_format(form: WeightFormat) -> Any:
    return _native.WeightFormat(form.kind, form.scale_bytes, form.offsets, form.group, form.zero_point)


@dataclass(frozen=True)
class Matrix:
    """A packed weight and the float32 matrix that it stands for."""

    form: WeightFormat
    raw: NDArray[np.uint8]
    dense: Float32  # [n, k]

    @staticmethod
    def of(tensor: Any) -> Matrix:
        form, raw = pack(tensor, "test")
        dense = tensor.dequantize() if isinstance(tensor, QuantTensor) else tensor.astype(np.float32)
        return Matrix(form, raw, dense)

    def times(self, x: Float32, isa: str, out: Float32 | None = None) -> Float32:
        """``x @ dense.T`` by the native kernel, ``x [rows, k]``; added to ``out`` if there is one."""
        n, k = self.dense.shape
        if self.form.dense:
            rows = np.ascontiguousarray(x, np.float32).view(np.uint8).reshape(len(x), 4 * k)
        else:
            rows = quantise(x, isa).raw
        result = np.full((len(x), n), np.nan, np.float32) if out is None else out.copy()
        _native.matmul(isa, native_format(self.form), self.raw, rows, result, k, out is not None)
        return result

    def rows(self, ids: NDArray[np.int32], scale: float, isa: str) -> Float32:
        """Embedding rows by the native kernel."""
        out = np.full((len(ids), self.dense.shape[1]), np.nan, np.float32)
        form = native_format(self.form)
        _native.embed(isa, form, self.raw, ids.astype(np.int32), len(self.dense), scale, out)
        return out


def random_tensor(kind: str, n: int, k: int, seed: int) -> Any:
    """A weight ``[n, k]`` of one of :data:`FORMATS`."""
    rng = np.random.default_rng(seed)
    if kind in ("bf16", "f32"):
        return rng.standard_normal((n, k)).astype(ml_dtypes.bfloat16 if kind == "bf16" else np.float32)
    if kind == "f8":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80  # NaN to minus zero
        scale = rng.uniform(0.001, 0.1, (n, 1)).astype(np.float32)
        return QuantTensor(codes, scale, 8, k, float8=True)
    bits, group, scale_type, offset = FORMATS[kind]
    group = group or k
    codes = rng.integers(0, 2**bits, (n, k)).astype(np.uint8)
    scale = rng.uniform(0.001, 0.1, (n, k // group)).astype(scale_type)
    if offset == "minimum":
        return QuantTensor(
            codes, scale, bits, group, minimum=-rng.uniform(0, 1, scale.shape).astype(scale_type)
        )
    if offset == "zero points":
        zero_points = rng.integers(0, 2**bits, scale.shape).astype(np.uint8)
        return QuantTensor(codes, scale, bits, group, zero_points=zero_points)
    return QuantTensor(codes, scale, bits, group, 2 ** (bits - 1))


FORMATS: dict[str, tuple[int, int, type[Any], str]] = {
    f"u{bits}-g{group}-{np.dtype(scale).name}-{offset}": (bits, group, scale, offset)
    for bits in (4, 8)
    for group in (32, 16)
    for scale in (np.float16, np.float32)
    for offset in ("minimum", "zero point", "zero points")
}
FORMATS |= {f"u{bits}-rows": (bits, 0, np.float32, "zero point") for bits in (4, 8)}
KINDS = [*FORMATS, "bf16", "f32", "f8"]


def granule(kind: str) -> int:
    """What ``k`` must be a multiple of."""
    return FORMATS[kind][1] or 1 if kind in FORMATS else 1


EXTENT_BLOCKS = 32  # as in native/kernels.h


def head_offsets(
    blocks: int, kv_heads: int, key_bytes: int, value_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where keys and values start in a pool of one layer, in bytes, by block and head."""
    keys, values = np.empty((2, blocks, kv_heads), np.int64)
    for first in range(0, blocks, EXTENT_BLOCKS):
        count = min(EXTENT_BLOCKS, blocks - first)
        start = first * kv_heads * (key_bytes + value_bytes)
        number = np.arange(kv_heads) * count + np.arange(count)[:, None]
        keys[first : first + count] = start + number * key_bytes
        values[first : first + count] = start + kv_heads * count * key_bytes + number * value_bytes
    return keys, values


class KVPool:
    """One layer's KV blocks in bf16 as native kernels lay them out; whatever is not written stays NaN."""

    int8 = False

    def __init__(self, blocks: int, kv_heads: int, head_dim: int) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.data = np.full(blocks * 64 * kv_heads * head_dim + 64, 0xFF, np.uint8)
        self._bits = self.data.view(np.uint16)
        keys, values = head_offsets(blocks, kv_heads, 32 * head_dim, 32 * head_dim)
        slot, feature = np.arange(BLOCK_SIZE)[:, None, None], np.arange(head_dim)
        # [blocks, 16, kv_heads, head_dim]: K is [head_dim / 2][16][2] within a block, V [8][head_dim][2]
        self._keys = keys[:, None, :, None] // 2 + feature // 2 * 32 + slot * 2 + feature % 2
        self._values = values[:, None, :, None] // 2 + (slot // 2 * head_dim + feature) * 2 + slot % 2

    def keys(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """bf16 bits ``[slots, kv_heads, head_dim]``."""
        return self._bits[self._keys[slots // BLOCK_SIZE, slots % BLOCK_SIZE]]

    def values(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """bf16 bits ``[slots, kv_heads, head_dim]``."""
        return self._bits[self._values[slots // BLOCK_SIZE, slots % BLOCK_SIZE]]

    def write(self, slots: NDArray[np.int64], k: Float32, v: Float32) -> tuple[Float64, Float64]:
        """Keep ``k``, ``v [slots, kv_heads, head_dim]``; what they are then."""
        self._bits[self._keys[slots // BLOCK_SIZE, slots % BLOCK_SIZE]] = bf16_bits(k)
        self._bits[self._values[slots // BLOCK_SIZE, slots % BLOCK_SIZE]] = bf16_bits(v)
        return bf16(k).astype(np.float64), bf16(v).astype(np.float64)

    def queries(self, q: Float32) -> Float32:
        """``q [..., head_dim]`` as attention takes it."""
        return q


class Int8Pool:
    """The same in int8; scales that are not written are NaN."""

    int8 = True

    def __init__(self, blocks: int, kv_heads: int, head_dim: int) -> None:
        self._key = np.dtype([("codes", np.uint8, (-(-head_dim // 4), 16, 4)), ("scales", np.float32, 16)])
        self._value = np.dtype([("codes", np.int8, (4, head_dim, 4)), ("scales", np.float32, 16)])
        sizes = (self._key.itemsize, self._value.itemsize)
        self.data = np.full(blocks * kv_heads * sum(sizes) + 64, 0xFF, np.uint8)
        self._keys, self._values = head_offsets(blocks, kv_heads, *sizes)
        self.kv_heads, self.head_dim = kv_heads, head_dim

    def write(self, slots: NDArray[np.int64], k: Float32, v: Float32) -> tuple[Float64, Float64]:
        """Keep ``k``, ``v [slots, kv_heads, head_dim]``; what they are then."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        (k_codes, k_scale), (v_codes, v_scale) = _int8(rotated(k)), _int8(v)
        for index, (of, slot) in enumerate(zip(block, at, strict=True)):
            for head in range(self.kv_heads):
                keys = np.ndarray((), self._key, self.data, self._keys[of, head])
                codes = keys["codes"][:, slot].reshape(-1)  # bytes behind the last feature stay as they were
                codes[: self.head_dim] = k_codes[index, head] + 128
                keys["codes"][:, slot] = codes.reshape(-1, 4)
                keys["scales"][slot] = k_scale[index, head, 0]
                values = np.ndarray((), self._value, self.data, self._values[of, head])
                values["codes"][slot // 4, :, slot % 4] = v_codes[index, head]
                values["scales"][slot] = v_scale[index, head, 0]
        keys_kept = rotated(k_codes * k_scale.astype(np.float64)) / rotation_block(self.head_dim)
        return keys_kept, v_codes * v_scale.astype(np.float64)

    def queries(self, q: Float32) -> Float32:
        """``q [..., head_dim]`` as attention takes it: rotated as the keys are."""
        return rotated(q) / np.float32(rotation_block(self.head_dim))


def rotation_block(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def rotated(x: NDArray[Any]) -> NDArray[Any]:
    """Blocks of the last axis times the Walsh-Hadamard matrix, not normalised, neighbours first."""
    half = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while half < rotation_block(x.shape[-1]):
            pairs = x.reshape(*x.shape[:-1], -1, 2, half)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            x = np.stack([first + second, first - second], -2).reshape(x.shape)
            half *= 2
    return x


def _int8(x: Float32) -> tuple[NDArray[np.int64], Float32]:
    """Codes and scale of each vector along the last axis; not finite: NaN, and -128 where that is NaN."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        largest = np.abs(x).max(-1, keepdims=True)
        counts = largest > np.float32(1e-35)
        inverse = np.where(counts, np.float32(127) / largest, np.float32(0))
        scale = np.where(counts, largest / np.float32(127), np.float32(0)) + (largest - largest)
        codes = np.nan_to_num(np.rint(x * inverse), nan=-128).astype(np.int64)
    return codes, scale


POOLS: dict[str, type[KVPool] | type[Int8Pool]] = {"bfloat16": KVPool, "int8": Int8Pool}


def bf16_bits(x: Float32) -> NDArray[np.uint16]:
    with np.errstate(invalid="ignore"):  # NaN is among what is converted
        return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def bf16(x: Float32) -> Float32:
    """Rounded to bf16 and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)
