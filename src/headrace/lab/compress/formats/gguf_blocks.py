"""Tensors in GGUF's types. Layouts: the GGUF specification and ggml's block definitions, as in
``model/weights/gguf_types.py``, which reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
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


def block_type(scheme: Scheme, inputs: int) -> BlockType | None:
    """The type that holds weights of a scheme; None: there is none."""
    whole = inputs % BLOCK == 0 and (scheme.group_size or inputs) % BLOCK == 0
    if scheme.kind != "int" or scheme.act_order == "group" or not whole:
        return None
    if scheme.bits == 8:
        return "Q8_0" if scheme.symmetric else None
    return "Q4_0" if scheme.symmetric else "Q4_1"


def no_type(name: str, scheme: Scheme) -> ConfigError:
    """The error about a weight that GGUF has no type for."""
    return ConfigError(
        f"{name}: GGUF has no type for {scheme.kind}{scheme.bits} in groups of "
        f"{scheme.group_size or 'a whole row'}{'' if scheme.symmetric else ' with zero points'}. It holds "
        "4-bit integers, and symmetric ones of 8 bits, in groups of a multiple of 32, without act-order's "
        "groups."
    )


def encode_linear(name: str, linear: QuantizedLinear) -> Encoded:
    """A rounded weight: its codes and scales go into the file as they are, once for every 32 inputs.

    In Q4_1 a zero point becomes a minimum in float16, the one thing that is rounded. Raises ConfigError, with
    ``name``, for what has no type, and scales that float16 cannot hold.
    """
    kind = block_type(linear.scheme, linear.shape[1])
    if kind is None or linear.g_idx is not None:
        raise no_type(name, linear.scheme)
    repeat = linear.group_size // BLOCK
    scale = np.repeat(linear.scale, repeat, axis=1)
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), scale.astype(np.float32)):
        raise ConfigError(f"{name}: its scales need float32, and GGUF has float16: write compressed-tensors.")
    if kind != "Q4_1" or linear.zero is None:
        return _encoded(kind, linear.codes, half, None)
    zero = np.repeat(linear.zero, repeat, axis=1).astype(np.float32)
    return _encoded(kind, linear.codes, half, (-half.astype(np.float32) * zero).astype(np.float16))


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
