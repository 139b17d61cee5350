"""GGUF's tensor types: how many bytes a block takes, and how its bits become codes, scales and minima.

Source of the layouts: the GGUF specification and ggml's block definitions. Every ``unpack`` is exact:
``scale * (code - zero_point) + minimum`` in float32 is what ggml's own dequantisation computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.model.quant_tensor import QuantTensor

Bytes = NDArray[np.uint8]
Unpacked = tuple[Bytes, NDArray[Any], NDArray[Any] | None]
"""Of ``b`` blocks: codes ``[b, block_size]``, scale ``[b, block_size / group_size]``, minimum or None."""

_CHUNK_BYTES = 1 << 20  # packed bytes unpacked at a time: temporaries stay in the cache, memory stays bounded


@dataclass(frozen=True, slots=True)
class GGUFType:
    """A type a tensor can be stored in. ``unpack`` is None for plain floats, whose block is one element."""

    name: str
    block_size: int  # elements
    block_bytes: int
    bits: int = 0
    group_size: int = 0
    zero_point: int = 0
    unpack: Callable[[Bytes], Unpacked] | None = None


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at byte ``at`` of every block, ``[b, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.dtype("<f2"))


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Low nibbles of each ``run`` bytes, then their high nibbles: ``[b, n]`` bytes to ``[b, 2 n]`` codes."""
    count, width = packed.shape
    codes = np.empty((count, width // run, 2, run), dtype=np.uint8)
    runs = packed.reshape(count, width // run, run)
    np.bitwise_and(runs, 0x0F, out=codes[:, :, 0])
    np.right_shift(runs, 4, out=codes[:, :, 1])
    return codes.reshape(count, 2 * width)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32 bits of a 5-bit block's ``qh``, each as 16 or 0: ``[b, 4]`` to ``[b, 32]``."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Unpacked:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    return blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), None  # signed byte + 128


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block, ``[b, 8]`` each.

    Bytes 4 … 15 hold eight 6-bit scales and minima: the first four of each in bytes 0-3 and 4-7, whose top
    two bits complete the nibbles of bytes 8-11 (scales low, minima high) to the last four.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (rest & 0x0F) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 0x3F, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    d, d_min = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return d * scales.astype(np.float32), -(d_min * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Unpacked:
    scale, minimum = _k_scales(blocks)
    return _nibbles(blocks[:, 16:], 32), scale, minimum


def _q5_k(blocks: Bytes) -> Unpacked:
    scale, minimum = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for group in range(8):  # bit g of byte l belongs to element l of group g
        codes[:, group] |= ((high >> group) & 1) << 4
    return codes.reshape(-1, 256), scale, minimum


def _q6_k(blocks: Bytes) -> Unpacked:
    count = blocks.shape[0]
    codes = np.empty((count, 2, 4, 32), dtype=np.uint8)  # halves of 128, quarters of 32
    low = blocks[:, :128].reshape(count, 2, 2, 32)
    high = blocks[:, 128:192].reshape(count, 2, 32)
    for quarter in range(4):
        nibble = (low[:, :, quarter % 2] >> (4 * (quarter // 2))) & 0x0F
        codes[:, :, quarter] = nibble | (((high >> (2 * quarter)) & 3) << 4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    scale = _half(blocks, 208).astype(np.float32) * scales.astype(np.float32)
    return codes.reshape(count, 256), scale, None


TYPES: dict[int, GGUFType] = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    2: GGUFType("Q4_0", 32, 18, bits=4, group_size=32, zero_point=8, unpack=_q4_0),
    3: GGUFType("Q4_1", 32, 20, bits=4, group_size=32, unpack=_q4_1),
    6: GGUFType("Q5_0", 32, 22, bits=5, group_size=32, zero_point=16, unpack=_q5_0),
    7: GGUFType("Q5_1", 32, 24, bits=5, group_size=32, unpack=_q5_1),
    8: GGUFType("Q8_0", 32, 34, bits=8, group_size=32, zero_point=128, unpack=_q8_0),
    12: GGUFType("Q4_K", 256, 144, bits=4, group_size=32, unpack=_q4_k),
    13: GGUFType("Q5_K", 256, 176, bits=5, group_size=32, unpack=_q5_k),
    14: GGUFType("Q6_K", 256, 210, bits=6, group_size=16, zero_point=32, unpack=_q6_k),
    30: GGUFType("BF16", 1, 2),
}
"""The types headrace reads, by their number in the file."""

_OTHER_NAMES = {
    **{
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
    },
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


def unsupported_type(number: int, tensor: str) -> str:
    """Why ``tensor``, stored in a type that is not in ``TYPES``, cannot be read."""
    name = _OTHER_NAMES.get(number, f"unknown type {number}")
    return f"tensor {tensor} is stored as {name}; headrace reads {', '.join(t.name for t in TYPES.values())}"


def read_dense(data: Bytes, kind: GGUFType, shape: tuple[int, ...]) -> NDArray[Any]:
    """A view of ``data`` as floats of ``shape``: float32, float16 or bfloat16."""
    if kind.name == "BF16":
        import ml_dtypes  # only such files pay for the import

        brain: NDArray[Any] = data.view(ml_dtypes.bfloat16)
        return brain.reshape(shape)
    return data.view(np.dtype("<f4" if kind.name == "F32" else "<f2")).reshape(shape)


def read_quantized(data: Bytes, kind: GGUFType, rows: int, columns: int) -> QuantTensor:
    """The matrix ``[rows, columns]`` packed in ``data``, whose size is already checked."""
    assert kind.unpack is not None
    blocks = data.reshape(-1, kind.block_bytes)
    count, groups = blocks.shape[0], kind.block_size // kind.group_size
    step = max(1, _CHUNK_BYTES // kind.block_bytes)
    codes = np.empty((count, kind.block_size), dtype=np.uint8)
    scale: NDArray[Any] | None = None
    minimum: NDArray[Any] | None = None
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        codes[part], part_scale, part_minimum = kind.unpack(blocks[part])
        if scale is None:
            scale = np.empty((count, groups), dtype=part_scale.dtype)
            minimum = None if part_minimum is None else np.empty_like(scale)
        scale[part] = part_scale
        if minimum is not None:
            minimum[part] = part_minimum
    assert scale is not None
    return QuantTensor(
        codes.reshape(rows, columns),
        scale.reshape(rows, -1),
        kind.bits,
        kind.group_size,
        kind.zero_point,
        None if minimum is None else minimum.reshape(rows, -1),
    )
