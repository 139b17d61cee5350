"""Which weights become zero: the smallest, those that matter least to an output, those best made up for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.lab.compress.algorithms.columns import BLOCK, prepare, sweep
from headrace.lab.compress.plan import Pruning
from headrace.lab.compress.prune_steps import Sparsity


@dataclass(frozen=True, slots=True)
class Pruned:
    """A weight with its zeros, float32 ``[out, in]``, and what had to be done about it."""

    values: torch.Tensor
    notes: tuple[str, ...] = ()


def prune(weight: torch.Tensor, gram: torch.Tensor | None, pruning: Pruning) -> Pruned:
    """The weight ``[out, in]`` with its least weights zero. ``gram = x.T @ x [in, in]`` of its inputs; None
    only for pruning by magnitude.
    """
    sparsity = pruning.sparsity
    if pruning.method == "magnitude":
        return Pruned(pruned_by_magnitude(weight, sparsity))
    assert gram is not None  # a recipe with other methods is calibrated
    if not bool(torch.isfinite(gram.diagonal()).all()):
        note = "what its inputs amount to exceeds float32: pruned by magnitude"
        return Pruned(pruned_by_magnitude(weight, sparsity), (note,))
    if pruning.method == "wanda":
        return Pruned(pruned_by_input(weight, gram, sparsity))
    prepared = prepare(gram, pruning.damping)
    if prepared.factor is None:
        notes = (*prepared.notes, "its inputs' matrix could not be factored: pruned in the manner of Wanda")
        return Pruned(pruned_by_input(weight, gram, sparsity), notes)
    change = _Zeroing(chosen_zeros(sparsity, prepared.dead))
    return Pruned(sweep(weight, prepared.factor, BLOCK, change), prepared.notes)


def pruned_by_magnitude(weight: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Zero where the weight is among the smallest of the whole matrix, or of its group of neighbours."""
    size = weight.abs()
    if sparsity.group is not None:
        return weight.masked_fill(_least_of_groups(size, sparsity), 0.0)
    return weight.masked_fill(_least(size.flatten(), sparsity.share).view_as(weight), 0.0)


def pruned_by_input(weight: torch.Tensor, gram: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Wanda (arXiv 2306.11695): zero where the absolute weight times the length of its input, over all rows
    seen, is among the smallest of its output, or of its group of neighbours. No weight changes otherwise.
    """
    scores = weight.abs() * gram.diagonal().clamp(min=0).sqrt()
    if sparsity.group is not None:
        return weight.masked_fill(_least_of_groups(scores, sparsity), 0.0)
    count = round(sparsity.share * weight.shape[1])
    places = scores.argsort(dim=1, stable=True)[:, :count]
    return weight.scatter(1, places, 0.0)


class Zeros(Protocol):
    """Which weights of a block of columns become zero; told and asked in the order of a sweep."""

    known: torch.Tensor  # bool [out, columns of the block]: what is decided already

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        """As :meth:`columns.Change.block`."""
        ...

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        """Bool ``[out]``: where column ``at`` of the block becomes zero."""
        ...


def chosen_zeros(sparsity: Sparsity, dead: torch.Tensor) -> Zeros:
    """Chosen in the manner of SparseGPT. ``dead``: inputs that were always zero, whose weights go first."""
    return _Chosen(sparsity, dead)


def zeros_as_they_are(weight: torch.Tensor) -> Zeros:
    """The zeros of the weight, in the order of the sweep."""
    return _Kept(weight == 0)


class _Chosen:
    """The least of each block of columns by ``(w / d) ** 2`` with ``d`` of the factor's diagonal: what it
    costs if the columns behind make up for it. Of a pattern, the least of each group when it is reached.
    """

    def __init__(self, sparsity: Sparsity, dead: torch.Tensor) -> None:
        self._sparsity, self._dead = sparsity, dead
        self._diagonal = torch.empty(0)
        self.known = torch.empty(0, 0, dtype=torch.bool)

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        self._diagonal = diagonal
        if self._sparsity.group is not None:
            self.known = torch.zeros_like(part, dtype=torch.bool)
            return
        scores = self._scores(start, 0, part)
        self.known = _least(scores.flatten(), self._sparsity.share).view_as(scores)

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        group = self._sparsity.group
        if group is not None and at % group == 0:
            scores = self._scores(start, at, part[:, at : at + group])
            self.known[:, at : at + group] = _least_of_groups(scores, self._sparsity)
        return self.known[:, at]

    def _scores(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        count = part.shape[1]
        scores = (part / self._diagonal[at : at + count]).square()
        return scores.masked_fill(self._dead[start + at : start + at + count], 0.0)


class _Kept:
    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask
        self.known = mask

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        self.known = self._mask[:, start : start + part.shape[1]]

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        return self.known[:, at]


class _Zeroing:
    """A sweep that changes nothing but by zeros, and by what makes up for them."""

    def __init__(self, zeros: Zeros) -> None:
        self._zeros = zeros

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        self._zeros.block(start, part, diagonal)

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        return part[:, at].masked_fill(self._zeros.column(start, at, part), 0.0)


def _least(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Where a share of the scores, all in one row, lies that none of the others is below."""
    count = round(share * len(scores))
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[scores.topk(count, largest=False, sorted=False).indices] = True
    return mask


def _least_of_groups(scores: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Where the least of each group of neighbours ``[out, in]`` lie; the first of equal ones."""
    assert sparsity.group is not None
    groups = scores.reshape(len(scores), -1, sparsity.group)
    places = groups.argsort(dim=-1, stable=True)[..., : sparsity.zeros]
    return torch.zeros_like(groups, dtype=torch.bool).scatter(-1, places, True).reshape(scores.shape)
