"""A quantised linear of a safetensors checkpoint: its tensors, checked, and the QuantTensor they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelFormatError
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.safetensors_file import READABLE, Entry, SafetensorsFile

FLOATS = tuple(READABLE)
INTEGERS = ("I32", "I64")
_FINEST = 16  # inputs: no kernel has finer groups


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer: its name, ``(out, in)`` of its weight, its tensors by the last part of their names."""

    name: str
    shape: tuple[int, int]
    parts: Mapping[str, tuple[SafetensorsFile, Entry]]

    def entry(self, part: str) -> Entry:
        """The description of a tensor. Raises ModelFormatError if it is missing."""
        if part not in self.parts:
            raise ModelFormatError(f"The checkpoint has no tensor '{self.name}.{part}'.")
        return self.parts[part][1]

    def expect(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise ModelFormatError unless there is such a tensor, of one of the dtypes and of this shape."""
        found = self.entry(part)
        if found.dtype not in dtypes:
            raise self.wrong(part, f"is {found.dtype}, but must be {' or '.join(dtypes)}")
        if found.shape != shape:
            out, inputs = self.shape
            raise self.wrong(
                part,
                f"is {list(found.shape)}, where a quantised weight of [{out}, {inputs}] has {list(shape)}",
            )

    def wrong(self, part: str, problem: str) -> ModelFormatError:
        """An error about one of the tensors, for the caller to raise."""
        return ModelFormatError(f"Tensor '{self.name}.{part}' {problem}.")

    def read(self, part: str) -> NDArray[Any]:
        """A tensor's values: a read-only view of the file; float8 as its bits."""
        file, _ = self.parts[part]
        return file.read(f"{self.name}.{part}")


class Method(Protocol):
    """One way of keeping quantised linears."""

    ignored: frozenset[str]
    """Last parts of the names of tensors that running the network does not need."""

    def check(self, module: Module) -> tuple[str, ...]:
        """The parts that make the weight, the codes first; none if the weight is stored plainly.

        Raises ModelFormatError if they are not what the configuration and the layer's shape call for.
        """
        ...

    def read(self, module: Module) -> QuantTensor:
        """The weight of a module that was checked. Raises ModelFormatError for values that make no weight."""
        ...


def assemble(
    module: Module,
    codes: NDArray[np.uint8],
    scale: NDArray[Any],
    *,
    bits: int,
    zero: NDArray[np.uint8] | int,
    group_size: int,
    groups: NDArray[np.int32] | None = None,
    scale_part: str,
    float8: bool = False,
) -> QuantTensor:
    """A QuantTensor out of codes ``[n, k]`` in the order of the inputs and scales ``[n, groups]``.

    ``zero``: zero points as ``scale``, or the one of all. ``groups``: the group of each input ``[k]``, or
    None for ``group_size`` neighbours each. Scales become float16 where that is exact, else float32. Raises
    ModelFormatError for scales that are not finite, and groups that do not exist or are too fine.
    """
    inputs = codes.shape[1]
    held = _exact(module, scale, scale_part)
    zero_point, zero_points = (zero, None) if isinstance(zero, int) else _zero_points(zero)
    if groups is None:
        groups = np.arange(inputs, dtype=np.int32) // np.int32(group_size)
    order, step, kept = _regular(module, groups, scale.shape[1])
    if not np.array_equal(kept, np.arange(scale.shape[1])):
        held = held[:, kept]
        zero_points = None if zero_points is None else zero_points[:, kept]
    if order is not None:
        codes = codes[:, order]
    return QuantTensor(
        np.ascontiguousarray(codes),
        held,
        bits,
        step,
        zero_point,
        zero_points=zero_points,
        order=order,
        float8=float8,
    )


def read_groups(module: Module, part: str) -> NDArray[np.int32] | None:
    """The group of each input, or None where the tensor is absent or was never filled (all of it is -1).

    Raises ModelFormatError for negative or absurd ones.
    """
    if part not in module.parts:
        return None
    values = module.read(part)
    if values.size and (values == -1).all():
        return None
    if values.size and (values.min() < 0 or values.max() >= values.size):
        raise module.wrong(part, f"names groups from {values.min()} to {values.max()}")
    return values.astype(np.int32)


def group_count(inputs: int, group_size: int) -> int:
    """Groups that cover ``inputs``; the last may be short."""
    return -(-inputs // group_size)


def _regular(
    module: Module, groups: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32] | None, int, NDArray[np.int32]]:
    """Columns sorted by group: their order (None: as the inputs), the largest step in which groups come, and
    the group of every step."""
    if groups.size and groups.max() >= count:
        raise ModelFormatError(
            f"{module.name}: inputs belong to group {groups.max()}, but there are scales for {count} only."
        )
    order = np.argsort(groups, kind="stable").astype(np.int32)
    by_group = groups[order]
    edges = np.flatnonzero(np.diff(by_group)) + 1
    step = math.gcd(len(groups), *edges.tolist())
    if step % _FINEST and step < len(groups):
        raise ModelFormatError(
            f"{module.name}: its groups have edges at multiples of {step} inputs; multiples of {_FINEST} are "
            "supported."
        )
    in_order = np.array_equal(order, np.arange(len(order)))
    return None if in_order else order, step, by_group[::step]


def _exact(module: Module, scale: NDArray[Any], part: str) -> NDArray[Any]:
    wide = scale.astype(np.float32)
    if not np.isfinite(wide).all():
        raise module.wrong(part, "holds scales that are NaN or infinite")
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), wide) else wide


def _zero_points(zero: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8] | None]:
    first = int(zero.flat[0])
    if (zero == first).all():  # a symmetric checkpoint, mostly: the kernels hold one number
        return first, None
    return 0, np.ascontiguousarray(zero)
