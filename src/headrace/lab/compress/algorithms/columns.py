"""Weights changed one input after the other, while those that follow make up for each error.

What GPTQ (arXiv 2210.17323) and SparseGPT (arXiv 2301.00774) have in common: by the Cholesky factor of the
inverse of the inputs' matrix, the error of each column is taken off the columns behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

BLOCK = 128  # inputs whose errors are spread together: one large product instead of many small ones
_DAMPINGS = (1.0, 10.0, 100.0)  # times the wanted one, until the matrix can be factored


@dataclass(frozen=True, slots=True)
class Prepared:
    """Of a weight's inputs: the ``order`` in which they are taken, ``dead`` ones that were always zero (in
    that order), the upper Cholesky ``factor`` of the damped inverse, in that order too, or None if there is
    none; ``notes`` say what is unusual."""

    order: torch.Tensor
    dead: torch.Tensor
    factor: torch.Tensor | None
    notes: tuple[str, ...]


class Change(Protocol):
    """What becomes of the columns."""

    def block(self, start: int, part: torch.Tensor, diagonal: torch.Tensor) -> None:
        """Told of a block's columns ``part [out, some]`` as they stand before any of them is changed, and of
        the factor's diagonal."""
        ...

    def column(self, start: int, at: int, part: torch.Tensor) -> torch.Tensor:
        """The value ``[out]`` of column ``at`` of the block, which has taken up the errors before it."""
        ...


def prepare(gram: torch.Tensor, damping: float, *, largest_first: bool = False) -> Prepared:
    """From ``gram = x.T @ x [in, in]``. ``damping`` times the mean of the diagonal is added to it; ten and a
    hundred times as much if the matrix cannot be factored. ``largest_first``: by falling diagonal.
    """
    size = len(gram)
    notes = []
    hessian = gram.clone()
    dead = hessian.diagonal() <= 0
    if bool(dead.any()):
        notes.append(f"{int(dead.sum())} of {size} inputs were always zero")
        hessian.diagonal()[dead] = 1.0
    order = torch.arange(size)
    if largest_first:
        order = torch.argsort(hessian.diagonal().masked_fill(dead, 0.0), descending=True, stable=True)
        hessian = hessian[order][:, order]
    factor, used = _inverse_factor(hessian, damping)
    if factor is not None and used > damping:
        notes.append(f"damping was raised to {used:g}")
    return Prepared(order, dead[order], factor, tuple(notes))


def sweep(weight: torch.Tensor, factor: torch.Tensor, block: int, change: Change) -> torch.Tensor:
    """The values ``[out, in]`` that ``change`` makes of the columns of ``weight``, one after the other.

    ``block``: columns whose errors reach those behind them in one product.
    """
    size = weight.shape[1]
    rest = weight.clone()  # errors are added to what has not had its turn
    values = torch.empty_like(rest)
    for start in range(0, size, block):
        stop = min(start + block, size)
        part, inner = rest[:, start:stop].clone(), factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        change.block(start, part, inner.diagonal())
        for at in range(stop - start):
            value = change.column(start, at, part)
            values[:, start + at] = value
            error = (part[:, at] - value) / inner[at, at]
            part[:, at + 1 :].addr_(error, inner[at, at + 1 :], alpha=-1)
            errors[:, at] = error
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return values


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
