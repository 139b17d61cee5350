"""Grids of codes: scales and zero points of a weight's groups, and the nearest codes on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.errors import ModelFormatError
from headrace.lab.compress.quantized import FLOAT8_MAX, QuantizedLinear, Scheme

_F16_MAX = 65504.0
_F16_SMALLEST_NORMAL = 2.0**-14
_F16_SMALLEST = 2.0**-24


@dataclass(frozen=True, slots=True)
class Grid:
    """Of groups of any shape: float32 ``scale`` with the values that will be stored, and ``zero`` points.

    A group's codes are 0 … ``2 ** bits - 1``, and its values ``scale * (code - zero)``.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    top: int

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest codes, as floats; ``values`` broadcast against the scales."""
        return (values / self.scale).round_().add_(self.zero).clamp_(0, self.top)

    def snap(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the nearest codes."""
        return self.codes(values).sub_(self.zero).mul_(self.scale)


def grid_of(low: torch.Tensor, high: torch.Tensor, scheme: Scheme, wide: bool = False) -> Grid:
    """The grid that covers ``low`` to ``high`` of each group.

    Symmetric: as far to either side, of the middle code. Otherwise zero itself is always on the grid.
    ``wide``: keep scales in float32 (see :func:`needs_wide_scale`), not in float16.
    """
    top = (1 << scheme.bits) - 1
    if scheme.symmetric:
        reach = torch.maximum(low.abs(), high.abs())
        step = reach * (2 / top)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        step = (high - low) / top
    step = _stored(step, wide)
    zero = torch.full_like(step, 1 << (scheme.bits - 1))
    if not scheme.symmetric:
        zero = (-low / step).round().clamp(0, top)
    return Grid(step, zero, top)


def needs_wide_scale(weight: torch.Tensor, scheme: Scheme) -> bool:
    """Whether float16 could not hold the weight's largest scale, or none of them in full precision."""
    largest = float(weight.abs().max()) * 2 / ((1 << scheme.bits) - 1)
    return largest > _F16_MAX or 0 < largest < _F16_SMALLEST_NORMAL


def _stored(step: torch.Tensor, wide: bool) -> torch.Tensor:
    """The steps as they will be read back; those of groups of zeros are 1, which makes their codes zeros."""
    empty = step == 0
    if not wide:
        step = step.half().float().clamp(min=_F16_SMALLEST)
    return torch.where(empty, torch.ones_like(step), step)


def split_groups(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """``[out, in]`` as ``[out, groups, group_size]``; ``group_size`` divides ``in``."""
    return weight.reshape(len(weight), -1, scheme.group_size or weight.shape[1])


def round_to_nearest(weight: torch.Tensor, scheme: Scheme) -> tuple[QuantizedLinear, torch.Tensor]:
    """The weight ``[out, in]`` in nearest codes, and the float32 values that these have."""
    if scheme.kind == "float8":
        return _round_float8(weight, scheme)
    wide = needs_wide_scale(weight, scheme)
    groups = split_groups(weight, scheme)
    grid = grid_of(groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), scheme, wide)
    codes = grid.codes(groups)
    values = (codes - grid.zero).mul_(grid.scale).reshape(weight.shape)
    packed = pack(codes.reshape(weight.shape), grid.scale.squeeze(-1), grid.zero.squeeze(-1), scheme, wide)
    return packed, values


def pack(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: Scheme,
    wide: bool,
    g_idx: torch.Tensor | None = None,
) -> QuantizedLinear:
    """Codes ``[out, in]`` (floats), scales and zero points ``[out, groups]`` in their storage types."""
    return QuantizedLinear(
        codes=codes.to(torch.uint8).numpy(),
        scale=scale.to(torch.float32 if wide else torch.float16).numpy(),
        scheme=scheme,
        zero=None if scheme.symmetric else zero.to(torch.uint8).numpy(),
        g_idx=None if g_idx is None else g_idx.to(torch.int32).numpy(),
    )


def require_finite(name: str, weight: torch.Tensor) -> None:
    """Raise ModelFormatError if the weight holds what cannot be rounded."""
    bad = ~torch.isfinite(weight)
    if bool(bad.any()):
        row = int(bad.flatten(1).any(1).nonzero()[0])
        raise ModelFormatError(
            f"{name} holds NaN or infinite weights (first in row {row}): the checkpoint is damaged, or was "
            "saved in a type too narrow for it."
        )


def _round_float8(weight: torch.Tensor, scheme: Scheme) -> tuple[QuantizedLinear, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / FLOAT8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    narrow = (weight / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    codes: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = narrow.view(torch.uint8).numpy()
    return QuantizedLinear(codes, scale.numpy(), scheme), narrow.float() * scale
