"""GPTQ: round one input after the other, and let those that follow make up for each error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.lab.compress.algorithms.rounding import (
    Grid,
    grid_of,
    needs_wide_scale,
    pack,
    round_to_nearest,
    split_groups,
)
from headrace.lab.compress.quantized import QuantizedLinear, Scheme

_BLOCK = 128  # inputs whose errors are spread together: one large product instead of many small ones
_DAMPINGS = (1.0, 10.0, 100.0)  # times the wanted one, until the matrix can be factored


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight, its float32 values ``[out, in]``, and what had to be done about it."""

    linear: QuantizedLinear
    values: torch.Tensor
    notes: tuple[str, ...] = ()


def gptq(weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, *, damping: float = 0.01) -> Rounded:
    """Codes for ``weight [out, in]`` that keep ``x @ weight.T`` for inputs with ``gram = x.T @ x [in, in]``.

    The algorithm of Frantar et al. (arXiv 2210.17323): inputs in order, or by falling ``gram`` diagonal with
    ``scheme.act_order``; the error of each, by the inverse's Cholesky factor, is taken off those that follow.
    Scales of a group are set when its first input is reached, from the weights as they are then; with
    "static" order all are set before, so that groups stay neighbours. ``damping`` times the mean of the
    diagonal is added to it; ten and a hundred times as much if the matrix cannot be factored, and then the
    weight is rounded to nearest. Inputs that were always zero are rounded to nearest: nothing is known of
    them.
    """
    size = weight.shape[1]
    notes = []
    hessian = gram.clone()
    dead = hessian.diagonal() <= 0
    if bool(dead.any()):
        notes.append(f"{int(dead.sum())} of {size} inputs were always zero")
        hessian.diagonal()[dead] = 1.0
    order = torch.arange(size)
    if scheme.act_order is not None:
        order = torch.argsort(hessian.diagonal().masked_fill(dead, 0.0), descending=True, stable=True)
        hessian = hessian[order][:, order]
    factor, used = _inverse_factor(hessian, damping)
    if factor is None:
        notes.append("its inputs' matrix could not be factored: rounded to nearest")
        linear, values = round_to_nearest(weight, scheme)
        return Rounded(linear, values, tuple(notes))
    if used > damping:
        notes.append(f"damping was raised to {used:g}")
    linear, values = _rounded(weight, factor, order, scheme)
    return Rounded(linear, values, tuple(notes))


def _inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor | None, float]:
    """The upper Cholesky factor of the damped inverse, and the damping that it took."""
    mean = float(hessian.diagonal().mean())
    for times in _DAMPINGS:
        damped = hessian.clone()
        damped.diagonal().add_(times * damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not int(failed) and bool(torch.isfinite(upper).all()):
            return upper, times * damping
    return None, damping


def _rounded(
    weight: torch.Tensor, factor: torch.Tensor, order: torch.Tensor, scheme: Scheme
) -> tuple[QuantizedLinear, torch.Tensor]:
    rows, size = weight.shape
    group = scheme.group_size or size
    wide = needs_wide_scale(weight, scheme)
    rest = weight[:, order].clone()  # in order of rounding; errors are added to what is not yet rounded
    fixed = scheme.act_order == "static" or group == size
    if fixed:
        groups = split_groups(weight, scheme)
        grid = grid_of(groups.amin(-1), groups.amax(-1), scheme, wide)
        scale, zero = grid.scale, grid.zero
        member = order // group
    else:
        scale, zero = torch.empty(rows, size // group), torch.empty(rows, size // group)
        member = torch.arange(size) // group
    codes = torch.empty_like(rest)
    values = torch.empty_like(rest)
    top = (1 << scheme.bits) - 1
    block = _BLOCK if fixed else group * max(1, _BLOCK // group)  # a group never begins within a block's rest
    for start in range(0, size, block):
        stop = min(start + block, size)
        part, inner = rest[:, start:stop].clone(), factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        for at in range(stop - start):
            index = int(member[start + at])
            if not fixed and (start + at) % group == 0:
                ahead = part[:, at : at + group]
                grid = grid_of(ahead.amin(1), ahead.amax(1), scheme, wide)
                scale[:, index], zero[:, index] = grid.scale, grid.zero
            column = Grid(scale[:, index], zero[:, index], top)
            codes[:, start + at] = column.codes(part[:, at])
            value = (codes[:, start + at] - column.zero) * column.scale
            values[:, start + at] = value
            error = (part[:, at] - value) / inner[at, at]
            part[:, at + 1 :].addr_(error, inner[at, at + 1 :], alpha=-1)
            errors[:, at] = error
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    back = torch.argsort(order)
    g_idx = member[back] if scheme.act_order == "group" else None
    return pack(codes[:, back], scale, zero, scheme, wide, g_idx), values[:, back]
