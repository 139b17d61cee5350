"""GPTQ: round one input after the other, and let those that follow make up for each error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.lab.compress.algorithms.columns import BLOCK, prepare, sweep
from headrace.lab.compress.algorithms.pruning import (
    Zeros,
    chosen_zeros,
    prune,
    zeros_as_they_are,
)
from headrace.lab.compress.algorithms.rounding import (
    Grid,
    grid_of,
    needs_wide_scale,
    pack,
    round_to_nearest,
    split_groups,
)
from headrace.lab.compress.plan import Pruning
from headrace.lab.compress.quantized import QuantizedLinear, Scheme


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight, its float32 values ``[out, in]``, and what had to be done about it."""

    linear: QuantizedLinear
    values: torch.Tensor
    notes: tuple[str, ...] = ()


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    scheme: Scheme,
    *,
    damping: float = 0.01,
    pruning: Pruning | None = None,
) -> Rounded:
    """Codes for ``weight [out, in]`` that keep ``x @ weight.T`` for inputs with ``gram = x.T @ x [in, in]``.

    The algorithm of Frantar et al. (arXiv 2210.17323): inputs in order, or by falling ``gram`` diagonal with
    ``scheme.act_order``; the error of each, by the inverse's Cholesky factor, is taken off those that follow.
    Scales of a group are set when its first input is reached, from the weights as they are then; with
    "static" order all are set before, so that groups stay neighbours. ``damping`` times the mean of the
    diagonal is added to it; ten and a hundred times as much if the matrix cannot be factored, and then the
    weight is rounded to nearest. Inputs that were always zero are rounded to nearest: nothing is known of
    them.

    With ``pruning``: by SparseGPT in the same sweep, so that the weights that stay make up for both; by other
    methods the weight has been pruned before, and its zeros stay zeros.
    """
    prepared = prepare(gram, damping, largest_first=scheme.act_order is not None)
    if prepared.factor is None:
        notes = (*prepared.notes, "its inputs' matrix could not be factored: rounded to nearest")
        if pruning is not None and pruning.method == "sparsegpt":
            weight = prune(weight, gram, replace(pruning, method="wanda")).values
        return Rounded(*round_to_nearest(weight, scheme), notes)
    order = prepared.order
    zeros: Zeros | None = None
    if pruning is not None and pruning.method == "sparsegpt":
        zeros = chosen_zeros(pruning.sparsity, prepared.dead)
    elif pruning is not None:
        zeros = zeros_as_they_are(weight[:, order])
    change = _Rounding(weight, order, scheme, zeros)
    values = sweep(weight[:, order], prepared.factor, change.block_size, change)
    back = torch.argsort(order)
    return Rounded(change.packed(back), values[:, back], prepared.notes)


class _Rounding:
    """The columns' codes, and the scales of the groups that they are members of."""

    def __init__(
        self, weight: torch.Tensor, order: torch.Tensor, scheme: Scheme, zeros: Zeros | None
    ) -> None:
        rows, size = weight.shape
        group = scheme.group_size or size
        self._scheme, self._group, self._zeros = scheme, group, zeros
        self._wide = needs_wide_scale(weight, scheme)
        self._top = (1 << scheme.bits) - 1
        self._fixed = scheme.act_order == "static" or group == size
        if self._fixed:
            groups = split_groups(weight, scheme)
            grid = grid_of(groups.amin(-1), groups.amax(-1), scheme, self._wide)
            self._scale, self._zero = grid.scale, grid.zero
            self._member = order // group
        else:
            self._scale, self._zero = torch.empty(rows, size // group), torch.empty(rows, size // group)
            self._member = torch.arange(size) // group
        self._codes = torch.empty(rows, size)
        # a group never begins within a block's rest
        self.block_size = BLOCK if self._fixed else group * max(1, BLOCK // group)

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        """Which of the block's weights become zero is known before its scales are."""
        if self._zeros is not None:
            self._zeros.block(start, part, diagonal)

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        """The nearest code's value, or zero, which every grid has."""
        index = int(self._member[start + at])
        here = None if self._zeros is None else self._zeros.column(start, at, part)
        if not self._fixed and (start + at) % self._group == 0:
            ahead = part[:, at : at + self._group]
            if self._zeros is not None:
                ahead = ahead.masked_fill(self._zeros.known[:, at : at + self._group], 0.0)
            grid = grid_of(ahead.amin(1), ahead.amax(1), self._scheme, self._wide)
            self._scale[:, index], self._zero[:, index] = grid.scale, grid.zero
        column = Grid(self._scale[:, index], self._zero[:, index], self._top)
        stays = part[:, at] if here is None else part[:, at].masked_fill(here, 0.0)
        codes = column.codes(stays)
        self._codes[:, start + at] = codes
        return (codes - column.zero) * column.scale

    def packed(self, back: torch.Tensor) -> QuantizedLinear:
        """With the columns in the weight's own order again."""
        g_idx = self._member[back] if self._scheme.act_order == "group" else None
        codes = self._codes[:, back]
        return pack(codes, self._scale, self._zero, self._scheme, self._wide, g_idx)
