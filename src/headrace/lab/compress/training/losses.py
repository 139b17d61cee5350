"""What a student is told of a teacher: divergence of logits, and by choice hidden states and the text itself.

Rows of logits are as wide as the vocabulary, so they are made, compared and differentiated a few at a time;
what is kept of each is the gradient of the hidden row that it came from.
Sources: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015 (temperature);
Muralidharan et al., "Compact Language Models via Pruning and Knowledge Distillation", 2024 (terms that heal a
pruned model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from headrace.lab.compress.algorithms.forward import head_logits, head_name
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.training.network import Sequences, narrowed
from headrace.model.architecture import Architecture

_ROWS = 128  # of logits at a time
_COMPARED = 32  # of those, compared at a time: what is between them and their gradient stays in the caches
_LEAST = 1e-7  # probability of all that a list of likeliest tokens leaves out


@dataclass(frozen=True, slots=True)
class Terms:
    """Weights of the terms of the loss, a mean over rows. ``temperature`` divides both models' logits."""

    temperature: float = 1.0
    hidden: float = 0.0
    cross_entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """The teacher's log-probabilities at its temperature: of all tokens ``[rows, vocab]``, or of its
    likeliest ``[rows, k]``, whose ids are ``ids``."""

    log_probs: torch.Tensor
    ids: torch.Tensor | None = None


class Targets(Protocol):
    """What a teacher says of some sequences, row by row."""

    @property
    def streams(self) -> Sequence[torch.Tensor]:
        """Its residual streams after each layer, where hidden states are compared."""
        ...

    def rows(self, start: int, stop: int) -> Distribution:
        """Of rows ``start`` to ``stop``."""
        ...


def divergence(logits: torch.Tensor, teacher: Distribution, temperature: float = 1.0) -> torch.Tensor:
    """KL of the teacher to the student, nats ``[rows]``, both at ``temperature``.

    Where only the likeliest tokens are known, the others count as one: that is at most the whole divergence.
    """
    scaled = logits if temperature == 1.0 else logits / temperature
    found: torch.Tensor = _Divergence.apply(scaled, teacher.log_probs, teacher.ids)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """Nats ``[rows]``, and the gradient by the logits in the same pass: rows as wide as the vocabulary cost
    more to read than to compute.

    The gradient is the difference of both distributions, where only likeliest tokens are known, too: what is
    left out then counts as one token, and its part is dealt out among the student's.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, log_probs: torch.Tensor, ids: torch.Tensor | None
    ) -> torch.Tensor:
        """``logits [rows, vocab]``; ``log_probs`` and ``ids`` of a Distribution."""
        found = torch.empty(len(logits))
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for start in range(0, len(logits), _COMPARED):
            rows = slice(start, start + _COMPARED)
            ours, theirs = logits[rows].float().log_softmax(-1), log_probs[rows]
            compare = _compare if ids is None else partial(_compare_likeliest, ids[rows])
            found[rows] = compare(ours, theirs)
            if gradient is not None:
                gradient[rows] = ours
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """By the logits alone: a teacher learns nothing."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The divergence of each row; log-probabilities ``ours`` become its gradient by the logits."""
    chances = theirs.exp()
    apart: torch.Tensor = torch.linalg.vecdot(chances, theirs - ours)
    torch.sub(ours.exp_(), chances, out=ours)
    return apart


def _compare_likeliest(ids: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The same where ``theirs`` are of tokens ``ids``."""
    known = ours.gather(-1, ids)
    chances = theirs.exp()
    rest, our_rest = _left_out(theirs), _left_out(known)
    apart: torch.Tensor = torch.linalg.vecdot(chances, theirs - known) + rest * (rest.log() - our_rest.log())
    ours.exp_().mul_((1 - rest / our_rest)[:, None]).scatter_(-1, ids, known.exp() - chances)
    return apart


def _left_out(log_probs: torch.Tensor) -> torch.Tensor:
    return (1 - log_probs.exp().sum(-1)).clamp_min(_LEAST)


def backward(
    architecture: Architecture,
    weights: Weights,
    streams: list[torch.Tensor],
    sequences: Sequences,
    targets: Targets,
    terms: Terms,
    rows_in_step: int,
    pairs: Mapping[int, int],
    *,
    bf16: bool = False,
) -> float:
    """Add this part's gradients to those of the step's parameters; its share of the step's mean loss.

    ``streams``: of the student, as :func:`run_layers` gives them. ``pairs``: which of the teacher's layers
    each of the student's is compared with. ``bf16``: the head is multiplied in bfloat16.
    """
    final = streams[-1]
    head = {
        name: tensor.detach().requires_grad_() if tensor.requires_grad else narrowed(tensor, bf16)
        for name, tensor in weights.items()
        if name.startswith(("final_norm.", f"{head_name(architecture)}."))
    }
    cut = final.detach().requires_grad_()
    total = 0.0
    following = _following(sequences)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):  # one for all rows: a cast head is kept
        for start in range(0, len(final), _ROWS):
            rows = slice(start, min(start + _ROWS, len(final)))
            logits = head_logits(architecture, head, cut[rows])
            each = divergence(logits, targets.rows(rows.start, rows.stop), terms.temperature)
            loss = terms.temperature**2 * each.sum()
            if terms.cross_entropy:
                loss = loss + terms.cross_entropy * F.cross_entropy(
                    logits.float(), following[rows], ignore_index=-1, reduction="sum"
                )
            loss = loss / rows_in_step
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    roots: list[torch.Tensor] = [final]
    gradients: list[torch.Tensor | None] = [cut.grad]
    for name, tensor in head.items():
        if tensor.grad is not None:
            roots.append(weights[name])
            gradients.append(tensor.grad)
    if terms.hidden:
        apart = terms.hidden * _hidden(streams, targets.streams, pairs) * len(final) / rows_in_step
        roots.append(apart)
        gradients.append(None)
        total += float(apart.detach())
    torch.autograd.backward(roots, gradients)
    return total


def _hidden(
    streams: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], pairs: Mapping[int, int]
) -> torch.Tensor:
    """Mean squared distance of residual streams over the teacher's mean square, a mean over layers."""
    apart = [
        (streams[ours] - teacher[theirs]).square().mean() / teacher[theirs].square().mean()
        for ours, theirs in pairs.items()
    ]
    return torch.stack(apart).mean()


def _following(sequences: Sequences) -> torch.Tensor:
    """The token behind each row ``[rows]``; -1 at the end of a sequence."""
    return torch.tensor([token for sequence in sequences for token in (*sequence[1:], -1)])
