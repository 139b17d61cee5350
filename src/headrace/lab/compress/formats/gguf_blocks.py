"""Tensors in GGUF's types. Layouts: the GGUF specification and ggml's block definitions, as in
``model/weights/gguf_types.py``, which reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.quantized import QuantizedLinear
from headrace.model.checkpoint import Dense
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.load_quantization import quantize

BlockType = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK = 32  # elements

_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as it will lie in the file; ``shape`` is row-major."""

    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def number(self) -> int:
        """The type's number in GGUF."""
        return _NUMBERS[self.type]


def encode_dense(name: str, values: Dense, kind: Literal["F32", "F16", "BF16"]) -> Encoded:
    """Floats. Raises ConfigError, with ``name``, for those that float16 does not reach."""
    import ml_dtypes

    dtype: Any = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values.astype(np.float32).astype(dtype))
    if kind == "F16" and not np.isfinite(narrow.astype(np.float32)).all():
        raise ConfigError(f"{name} has weights beyond float16: write another format.")
    return Encoded(kind, values.shape, narrow.reshape(-1).view(np.uint8))


def encode_embedding(name: str, values: Dense) -> Encoded:
    """A table in Q8_0, to nearest; in float16 where rows are no whole blocks, or scales need float32."""
    rounded = quantize(values.astype(np.float32), "int8", name=name)
    if isinstance(rounded, QuantTensor) and rounded.scale.dtype == np.float16:
        return _encoded("Q8_0", rounded.codes, rounded.scale, None)
    return encode_dense(name, values, "F16")


def encode_linear(name: str, linear: QuantizedLinear, kind: BlockType) -> Encoded:
    """A rounded weight. Its codes and scales go into the file as they are; groups of more than 32 repeat their
    scale. In Q4_1 a zero point becomes a minimum in float16, the one thing that is rounded. 4-bit codes may go
    into Q8_0. What has no exact place in ``kind`` goes into Q8_0 if that has one. Raises ConfigError if none.
    """
    found = _blocks(linear, kind) or _blocks(linear, "Q8_0")
    if found is None:
        raise ConfigError(
            f"{name}: groups of {linear.group_size} with {linear.scale.dtype} scales of "
            f"{linear.scheme.kind}{linear.scheme.bits} have no GGUF type: use groups of a multiple of 32, "
            "symmetric if 8 bits, without act-order's groups, or write compressed-tensors."
        )
    return found


def _blocks(linear: QuantizedLinear, kind: BlockType) -> Encoded | None:
    """The weight in blocks of ``kind``, or None if they cannot hold it."""
    out, inputs = linear.shape
    scheme = linear.scheme
    whole = inputs % BLOCK == 0 and linear.group_size % BLOCK == 0
    if scheme.kind != "int" or linear.g_idx is not None or not whole:
        return None
    repeat = linear.group_size // BLOCK
    scale = np.repeat(linear.scale, repeat, axis=1)[:, : inputs // BLOCK]
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), scale.astype(np.float32)):
        return None
    zero = np.full(scale.shape, 1 << (scheme.bits - 1), np.uint8)
    if linear.zero is not None:
        zero = np.repeat(linear.zero, repeat, axis=1)[:, : inputs // BLOCK]
    if kind == "Q8_0":
        if scheme.bits == 8 and linear.zero is not None:
            return None
        by_input = np.repeat(zero, BLOCK, axis=1)
        signed = linear.codes.astype(np.int16) - by_input
        return _encoded("Q8_0", (signed + 128).astype(np.uint8), half, None)
    if scheme.bits != 4 or (kind == "Q4_0" and linear.zero is not None):
        return None
    if kind == "Q4_0":
        return _encoded("Q4_0", linear.codes, half, None)
    return _encoded("Q4_1", linear.codes, half, -(half.astype(np.float32) * zero).astype(np.float16))


def _encoded(
    kind: BlockType, codes: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16] | None
) -> Encoded:
    """``codes [out, in]`` (of Q8_0 128 too large), ``scale`` and ``minimum [out, in / 32]`` as blocks."""
    out, inputs = codes.shape
    head = 2 if minimum is None else 4
    width = head + (BLOCK if kind == "Q8_0" else BLOCK // 2)
    blocks = np.empty((out, inputs // BLOCK, width), np.uint8)
    blocks[:, :, :2] = scale[:, :, None].view(np.uint8)
    if minimum is not None:
        blocks[:, :, 2:4] = minimum[:, :, None].view(np.uint8)
    for start in range(0, out, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        part = codes[rows].reshape(-1, inputs // BLOCK, BLOCK)
        if kind == "Q8_0":
            blocks[rows, :, head:] = part ^ np.uint8(0x80)
        else:  # the first sixteen in the low nibbles
            blocks[rows, :, head:] = part[:, :, :16] | (part[:, :, 16:] << np.uint8(4))
    return Encoded(kind, (out, inputs), blocks.reshape(-1))
