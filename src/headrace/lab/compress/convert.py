"""One model in another format: rounded weights keep their codes where they can, floats are rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.format_names import Layout, Rounding, Target
from headrace.lab.compress.formats import check_format, write_checkpoint
from headrace.lab.compress.formats.gguf_blocks import block_type
from headrace.lab.compress.formats.layouts import check_layout
from headrace.lab.compress.formats.write import FloatType
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model import store
from headrace.model.checkpoint import Checkpoint, Dense, as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint
from headrace.model.weights.tensor_shapes import expected_shapes

_FLOATS: dict[str, FloatType] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_GGUF: dict[str, Scheme | None] = {
    "gguf-q4_0": Scheme(4, 32),
    "gguf-q4_1": Scheme(4, 32, symmetric=False),
    "gguf-q8_0": Scheme(8, 32),
    "gguf-f16": None,
}
_FINEST = 16  # no loader has finer groups


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model's linear weights: how many kept their codes, were rounded, or are floats.

    ``rounding``: how those were rounded, in words.
    """

    kept: int
    rounded: int
    floats: int
    rounding: str


def convert(
    model: str,
    target: Target,
    output: Path,
    *,
    rounding: Rounding | None = None,
    group_size: int = 128,
    downloads: store.Progress | None = None,
    progress: store.Progress = lambda what, done, total: None,
) -> Outcome:
    """Write ``model`` as ``target`` into the folder ``output``, which appears complete or not at all.

    ``rounding`` and ``group_size`` (-1: one scale an output) say how floats are rounded for the formats that
    leave it open; by default to 4 bits, symmetric for gptq and compressed-tensors. Embedding and head stay
    floats (in GGUF, Q8_0 beside rounded weights). Raises ConfigError, ModelFormatError, and what resolving
    and opening the model raises.
    """
    path = store.resolve(model, progress=downloads)
    checkpoint = open_checkpoint(path)
    if checkpoint.architecture.encoder is not None:
        raise ConfigError(f"{model} is an encoder: models that generate are converted.")
    scheme = _scheme(target, rounding, group_size, checkpoint)
    form = "gguf" if target in _GGUF else "float" if target in _FLOATS else target
    check_format(form, {}, checkpoint) if form in ("gguf", "float") else _check(form, scheme, checkpoint)
    tensors = _Converted(checkpoint, form, scheme, progress)
    dtype = _FLOATS.get(target)
    try:
        write_checkpoint(output, form, tensors, checkpoint, dtype=dtype)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror or error}. Free space, or choose another place."
        ) from error
    words = "" if scheme is None else _words(scheme)
    return Outcome(tensors.kept, tensors.rounded, tensors.floats, words)


def as_linear(tensor: QuantTensor) -> QuantizedLinear | None:
    """The same weight as writers of formats take it; None where its groups have minimums in floats."""
    if tensor.minimum is not None:
        return None
    group_size = None if tensor.group_size == tensor.shape[1] else tensor.group_size
    if tensor.float8:
        scheme = Scheme(8, None, kind="float8", input_activations="dynamic-token")
        return QuantizedLinear(tensor.codes, tensor.scale, scheme)
    bits: Literal[4, 8] = 4 if tensor.bits <= 4 else 8
    zero = tensor.zero_points
    if zero is None:
        zero = np.full(tensor.scale.shape, tensor.zero_point, np.int64)
    codes, middled = tensor.codes, False
    if tensor.zero_points is None:
        moved = codes.astype(np.int64) + ((1 << (bits - 1)) - tensor.zero_point)
        if moved.min() >= 0 and moved.max() < 1 << bits:
            codes, middled = moved.astype(np.uint8), True
    if not middled and (zero.min() < 0 or zero.max() > 255):
        return None
    codes, g_idx = _by_input(codes, tensor)
    return QuantizedLinear(
        codes,
        tensor.scale,
        Scheme(bits, group_size, symmetric=middled, act_order=None if g_idx is None else "group"),
        zero=None if middled else zero.astype(np.uint8),
        g_idx=g_idx,
    )


def _by_input(
    codes: NDArray[np.uint8], tensor: QuantTensor
) -> tuple[NDArray[np.uint8], NDArray[np.int32] | None]:
    """Codes in the order of the inputs, and the group of each input if they are no neighbours."""
    if tensor.order is None:
        return codes, None
    sorted_codes, codes = codes, np.empty_like(codes)
    codes[:, tensor.order] = sorted_codes
    g_idx = np.empty(len(tensor.order), np.int32)
    g_idx[tensor.order] = np.arange(len(tensor.order), dtype=np.int32) // np.int32(tensor.group_size)
    return codes, g_idx


def widened(linear: QuantizedLinear) -> QuantizedLinear:
    """4-bit integers, with zero points or without, as symmetric ones of 8 bits: the same values."""
    if linear.scheme.kind != "int" or linear.scheme.bits != 4:
        return linear
    zero = np.full(linear.scale.shape, 8, np.uint8) if linear.zero is None else linear.zero
    codes = linear.codes.astype(np.int16) - zero[:, linear.groups()] + 128
    scheme = replace(linear.scheme, bits=8, symmetric=True)
    return replace(linear, codes=codes.astype(np.uint8), scheme=scheme, zero=None)


def _with_zero_points(linear: QuantizedLinear) -> QuantizedLinear:
    """The same values, with a zero point for each group said."""
    if linear.scheme.kind != "int" or linear.zero is not None:
        return linear
    zero = np.full(linear.scale.shape, 1 << (linear.scheme.bits - 1), np.uint8)
    return replace(linear, scheme=replace(linear.scheme, symmetric=False), zero=zero)


@dataclass(eq=False)
class _Converted(Mapping[str, QuantizedLinear | Dense]):
    """The tensors as they will be written, made when they are asked for; counts what it does."""

    checkpoint: Checkpoint
    form: str
    scheme: Scheme | None  # of weights that are rounded here; None: none are
    progress: store.Progress
    kept: int = 0
    rounded: int = 0
    floats: int = 0
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = list(expected_shapes(self.checkpoint.architecture))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        for done, name in enumerate(self._names):
            self.progress("converting", done, len(self._names))
            yield name
        self.progress("converting", len(self._names), len(self._names))

    def __getitem__(self, name: str) -> QuantizedLinear | Dense:
        tensor = self.checkpoint.tensor(name)
        linear = name.startswith("layers.") and len(tensor.shape) == 2
        if not linear or self.scheme is None:
            self.floats += linear
            return as_float32(tensor) if isinstance(tensor, QuantTensor) else tensor
        if isinstance(tensor, QuantTensor) and (found := as_linear(tensor)) is not None:
            for candidate in (found, widened(found), _with_zero_points(found)):
                if self._has_room(name, candidate):
                    self.kept += 1
                    return candidate
        self.rounded += 1
        return _nearest(name, as_float32(tensor), self.scheme)

    def _has_room(self, name: str, linear: QuantizedLinear) -> bool:
        """Whether the format holds exactly these codes and scales."""
        if self.form == "gguf":
            assert self.scheme is not None
            inputs = linear.shape[1]
            wanted, found = block_type(self.scheme, inputs), block_type(linear.scheme, inputs)
            return found is not None and found == wanted and linear.scale.dtype == np.float16
        try:
            check_layout(_layout(self.form), name, linear.scheme, linear.shape)
        except ConfigError:
            return False
        return self.form == "compressed-tensors" or linear.scale.dtype == np.float16


def _layout(form: str) -> Layout:
    layouts: tuple[Layout, ...] = get_args(Layout)
    return next(layout for layout in layouts if layout == form)


def _check(form: str, scheme: Scheme | None, checkpoint: Checkpoint) -> None:
    shapes = expected_shapes(checkpoint.architecture)
    names = [name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2]
    check_format(form, dict.fromkeys(names, scheme) if scheme else {}, checkpoint)


def _nearest(name: str, weight: NDArray[np.float32], scheme: Scheme) -> QuantizedLinear:
    try:
        import torch
    except ImportError:
        raise ConfigError("Rounding weights needs torch: pip install 'headrace[compress]'") from None

    from headrace.lab.compress.algorithms.rounding import require_finite, round_to_nearest

    tensor = torch.from_numpy(np.array(weight))  # the file's own pages cannot be written
    require_finite(name, tensor)
    return round_to_nearest(tensor, scheme)[0]


def _scheme(
    target: Target, rounding: Rounding | None, group_size: int, checkpoint: Checkpoint
) -> Scheme | None:
    if target in _FLOATS or target in _GGUF:
        if rounding is not None:
            raise ConfigError(f"{target} says itself how weights are kept: leave --rounding out.")
        return _GGUF.get(target)
    if rounding in ("w8a8", "fp8") and target != "compressed-tensors":
        raise ConfigError(f"{target} does not hold {rounding}: write compressed-tensors.")
    if rounding == "w8a8":
        return Scheme(8, None, input_activations="dynamic-token")
    if rounding == "fp8":
        return Scheme(8, None, kind="float8", input_activations="dynamic-token")
    size = _fitting(group_size, checkpoint)
    symmetric = target in ("compressed-tensors", "gptq")
    return Scheme(8 if rounding == "int8" else 4, size, symmetric=symmetric)


def _fitting(group_size: int, checkpoint: Checkpoint) -> int | None:
    """The largest group size up to the one asked for that divides the inputs of all weights."""
    if group_size == -1:
        return None
    if group_size < _FINEST:
        raise ConfigError(
            f"--group-size: {group_size} must be -1, for one scale an output, or from {_FINEST} on."
        )
    shapes = expected_shapes(checkpoint.architecture)
    widths = {s[1] for name, s in shapes.items() if name.startswith("layers.") and len(s) == 2}
    size = math.gcd(group_size, *widths)
    if size < _FINEST:
        raise ConfigError(
            f"--group-size: no size from {_FINEST} to {group_size} divides inputs of "
            f"{', '.join(map(str, sorted(widths)))}: use -1, for one scale an output."
        )
    return size


def _words(scheme: Scheme) -> str:
    from headrace.lab.compress.plan import describe

    return describe(scheme)
