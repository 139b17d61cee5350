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


class KVPool:
    """One layer's KV blocks in bf16 as native kernels lay them out; whatever is not written stays NaN."""

    int8 = False

    def __init__(self, blocks: int, kv_heads: int, head_dim: int) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.data = np.full(blocks * 64 * kv_heads * head_dim + 64, 0xFF, np.uint8)

    def _keys(self) -> NDArray[np.uint16]:
        """A view ``[blocks, kv_heads, head_dim / 2, 16, 2]``."""
        return self._split(0, self.head_dim // 2, 16, 2)

    def _values(self) -> NDArray[np.uint16]:
        """A view ``[blocks, kv_heads, 8, head_dim, 2]``."""
        return self._split(1, 8, self.head_dim, 2)

    def _split(self, which: int, *shape: int) -> NDArray[np.uint16]:
        halves = self.data[:-64].view(np.uint16).reshape(2, self.kv_heads, -1, *shape)
        return halves[which].swapaxes(0, 1)

    def keys(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """bf16 bits ``[slots, kv_heads, head_dim]``."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        return self._keys()[block, :, :, at].reshape(len(slots), self.kv_heads, self.head_dim)

    def values(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """bf16 bits ``[slots, kv_heads, head_dim]``."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        return self._values()[block, :, at // 2, :, at % 2]

    def write(self, slots: NDArray[np.int64], k: Float32, v: Float32) -> tuple[Float64, Float64]:
        """Keep ``k``, ``v [slots, kv_heads, head_dim]``; what they are then."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        self._keys()[block, :, :, at] = bf16_bits(k).reshape(len(slots), self.kv_heads, -1, 2)
        self._values()[block, :, at // 2, :, at % 2] = bf16_bits(v)
        return bf16(k).astype(np.float64), bf16(v).astype(np.float64)

    def queries(self, q: Float32) -> Float32:
        """``q [..., head_dim]`` as attention takes it."""
        return q


class Int8Pool:
    """The same in int8; scales that are not written are NaN."""

    int8 = True

    def __init__(self, blocks: int, kv_heads: int, head_dim: int) -> None:
        keys = np.dtype([("codes", np.uint8, -(-head_dim // 4) * 64), ("scales", np.float32, 16)])
        values = np.dtype([("codes", np.int8, 16 * head_dim), ("scales", np.float32, 16)])
        count = blocks * kv_heads
        split = count * keys.itemsize
        self.data = np.full(split + count * values.itemsize + 64, 0xFF, np.uint8)
        self._keys = self.data[:split].view(keys).reshape(kv_heads, blocks).swapaxes(0, 1)
        self._values = self.data[split:-64].view(values).reshape(kv_heads, blocks).swapaxes(0, 1)
        self.kv_heads, self.head_dim = kv_heads, head_dim

    def write(self, slots: NDArray[np.int64], k: Float32, v: Float32) -> tuple[Float64, Float64]:
        """Keep ``k``, ``v [slots, kv_heads, head_dim]``; what they are then."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        (k_codes, k_scale), (v_codes, v_scale) = _int8(rotated(k)), _int8(v)
        key_codes, value_codes = self._keys["codes"], self._values["codes"]  # views, [blocks, kv_heads, …]
        width = -(-self.head_dim // 4)
        for index, (of, slot) in enumerate(zip(block, at, strict=True)):
            for head in range(self.kv_heads):
                keys = key_codes[of, head].reshape(width, 16, 4)
                codes = keys[:, slot].reshape(-1).copy()  # bytes behind the last feature stay as they were
                codes[: self.head_dim] = k_codes[index, head] + 128
                keys[:, slot] = codes.reshape(width, 4)
                values = value_codes[of, head].reshape(4, self.head_dim, 4)
                values[slot // 4, :, slot % 4] = v_codes[index, head]
        self._keys["scales"][block, :, at] = k_scale[..., 0]
        self._values["scales"][block, :, at] = v_scale[..., 0]
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
