"""A model in a smaller shape: look at it at work, choose the shape if that is open, choose what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from headrace.lab.compress.algorithms.forward import Rows, embed, load_layer, log_probs, run_layer
from headrace.lab.compress.algorithms.importance import Scores, look, make_cut
from headrace.lab.compress.algorithms.pipeline import SENSITIVITY_TOKENS, some_sequences
from headrace.lab.compress.algorithms.sensitivity import divergence_without
from headrace.lab.compress.budget import budget_of, candidates
from headrace.lab.compress.calibration import Calibration
from headrace.lab.compress.cut import Cut, CutCheckpoint
from headrace.lab.compress.prune_steps import SearchStep
from headrace.lab.compress.recipe import Recipe
from headrace.lab.compress.shape import Shape, asked_shape
from headrace.lab.compress.work import Work
from headrace.model.checkpoint import Checkpoint
from headrace.model.store import Progress

_FIRST_TOKENS = SENSITIVITY_TOKENS // 4
_KEPT = 4  # one of so many candidates is measured again, on more tokens


def choose_cut(
    checkpoint: Checkpoint,
    recipe: Recipe,
    calibration: Calibration,
    work: Work,
    *,
    threads: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Cut, dict[str, Any]]:
    """What stays of the model, and what it was chosen by: ``influence`` or ``divergence`` of each layer, and
    of a search the shapes that were measured last, each with its divergence (``searched``).

    All that takes long is kept in ``work``. Raises ConfigError for a budget that nothing meets, and
    GenerationError for a model whose values are not finite.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        shapes = _candidates(checkpoint, recipe.search, work, threads)
        scores = look(checkpoint, calibration, work, progress)
        about: dict[str, Any] = {"influence": list(scores.influence)}
        cost: Sequence[float] = scores.influence
        if recipe.depth_by == "kl":
            cost = work.value("divergence")
            if cost is None:
                sequences = some_sequences(calibration, SENSITIVITY_TOKENS)
                cost = divergence_without(checkpoint, sequences, progress)
                work.keep_value("divergence", cost)
            about["divergence"] = list(cost)
        if recipe.search is None:
            shape = asked_shape(checkpoint.architecture, recipe.depth, recipe.width)
        else:
            measured = _search(checkpoint, scores, cost, shapes, calibration, work, progress)
            shape = min(measured, key=lambda one: (measured[one], one))
            best_first = sorted(measured.items(), key=lambda two: two[1])
            about["searched"] = [(str(one), kl) for one, kl in best_first]
        return make_cut(checkpoint, scores, cost, shape), about


def _candidates(checkpoint: Checkpoint, step: SearchStep | None, work: Work, threads: int) -> list[Shape]:
    """Of a search, before anything else is done, which takes longer. Kept, because a latency is measured, and
    another run would measure another."""
    if step is None:
        return []
    found = work.value("candidates")
    if found is None:
        budget = budget_of(step, checkpoint.architecture, threads)
        found = [astuple(one) for one in candidates(checkpoint.architecture, step.dimensions, budget)]
        work.keep_value("candidates", found)
    return [Shape(*sizes) for sizes in found]


def _search(
    checkpoint: Checkpoint,
    scores: Scores,
    cost: Sequence[float],
    shapes: Sequence[Shape],
    calibration: Calibration,
    work: Work,
    progress: Progress,
) -> dict[Shape, float]:
    """The divergence of the best shapes: all are measured on a few tokens, the best of them on more."""
    first = _measured(checkpoint, scores, cost, shapes, calibration, _FIRST_TOKENS, work, progress)
    best = sorted(shapes, key=lambda one: (first[one], one))[: max(1, -(-len(shapes) // _KEPT))]
    return _measured(checkpoint, scores, cost, best, calibration, SENSITIVITY_TOKENS, work, progress)


def _measured(
    checkpoint: Checkpoint,
    scores: Scores,
    cost: Sequence[float],
    shapes: Sequence[Shape],
    calibration: Calibration,
    tokens: int,
    work: Work,
    progress: Progress,
) -> dict[Shape, float]:
    sequences = some_sequences(calibration, tokens)
    key = f"searched-{tokens}"
    kept: dict[str, float] = work.value(key) or {}
    own: torch.Tensor | None = None
    found = {}
    for at, shape in enumerate(shapes):
        progress(f"shapes on {tokens} tokens", at, len(shapes))
        if str(shape) not in kept:
            if own is None:
                own = _stream(checkpoint, sequences)
            cut = CutCheckpoint(checkpoint, make_cut(checkpoint, scores, cost, shape))
            kept[str(shape)] = _divergence(checkpoint, own, cut, _stream(cut, sequences))
            work.keep_value(key, kept)
        found[shape] = kept[str(shape)]
    progress(f"shapes on {tokens} tokens", len(shapes), len(shapes))
    return found


def _stream(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The residual stream after all layers."""
    rows = Rows(tuple(map(len, sequences)))
    stream = embed(checkpoint, sequences)
    for index in range(len(checkpoint.architecture.layers)):
        weights = load_layer(checkpoint, index)
        stream = run_layer(checkpoint.architecture, index, weights, stream, rows, None)
    return stream


def _divergence(checkpoint: Checkpoint, own: torch.Tensor, cut: Checkpoint, stream: torch.Tensor) -> float:
    """KL of the model's distributions to those of what is left of it, nats per token."""
    total = 0.0
    pairs = zip(log_probs(checkpoint, [own]), log_probs(cut, [stream]), strict=True)
    for (one,), (other,) in pairs:
        total += float((one.exp() * (one - other)).sum(dtype=torch.float64))
    return max(total, 0.0) / len(own)
