"""One layer of a recipe: scale channels, prune, cut ranges, round; from the weights and their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.lab.compress.algorithms.gptq import Rounded, gptq
from headrace.lab.compress.algorithms.pruning import prune
from headrace.lab.compress.algorithms.rounding import needs_wide_scale, require_finite, round_to_nearest
from headrace.lab.compress.algorithms.scaling import (
    Weights,
    apply_scale,
    awq_scale,
    clipped,
    output_error,
    searched_smoothquant_scale,
    smoothquant_scale,
)
from headrace.lab.compress.algorithms.statistics import SITES, Inputs, LayerInputs
from headrace.lab.compress.plan import Pruning, Treatment
from headrace.lab.compress.quantized import QuantizedLinear
from headrace.lab.compress.recipe import Recipe
from headrace.model.architecture import LayerSpec

_UNCLIPPED = ("attention.q.weight", "attention.k.weight")
"""What goes into a softmax through a product of two: AWQ leaves their ranges alone."""


@dataclass(slots=True)
class LayerResult:
    """What has become of a layer: its rounded weights, the dense tensors that changed, by name without
    ``layers.{i}.``; notes; the share of zeros of each pruned weight; and, if its inputs are known, the share
    of each weight's output energy that is lost."""

    rounded: dict[str, QuantizedLinear] = field(default_factory=dict)
    changed: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float | None] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)


def compress_layer(
    weights: Weights,
    inputs: LayerInputs | None,
    layer: LayerSpec,
    treatments: dict[str, Treatment],
    prunings: dict[str, Pruning],
    recipe: Recipe,
) -> LayerResult:
    """Apply the recipe. ``weights`` are replaced by the values that the pruned and rounded ones have.

    ``inputs``: None where no step needs to know them. Raises ModelFormatError for weights not finite.
    """
    touched = treatments.keys() | prunings.keys()
    for name in sorted(touched):
        require_finite(name, weights[name])
    result = LayerResult()
    changed: set[str] = set()
    if inputs is not None:
        changed = _scale(weights, inputs, layer, treatments, recipe)
        _remark(inputs, result)
    before = {name: weights[name] for name in touched}
    for site, members in SITES.items():
        seen = None if inputs is None else inputs.sites[site]
        for name in (f"{member}.weight" for member in members):
            pruning = prunings.get(name)
            if pruning is not None and not _jointly(treatments.get(name), pruning):
                pruned = prune(weights[name], None if seen is None else seen.gram, pruning)
                weights[name] = pruned.values
                result.notes += [f"{name}: {note}" for note in pruned.notes]
    if inputs is not None:
        _clip(weights, inputs, treatments)
    for site, members in SITES.items():
        names = [f"{name}.weight" for name in members if f"{name}.weight" in treatments]
        seen = None if inputs is None else inputs.sites[site]
        for name, found in _round(weights, names, treatments, prunings, seen).items():
            result.rounded[name] = found.linear
            result.notes += [f"{name}: {note}" for note in found.notes]
            if needs_wide_scale(weights[name], found.linear.scheme) and found.linear.scheme.kind == "int":
                result.notes.append(f"{name}: float16 cannot hold its scales, float32 does")
            weights[name] = found.values
        for name in (f"{member}.weight" for member in members):
            if name in touched and seen is not None:
                result.errors[name] = _lost(weights[name] - before[name], before[name], seen)
    result.zeros = {name: float((weights[name] == 0).float().mean()) for name in sorted(prunings)}
    dense = (changed | prunings.keys()) - treatments.keys()
    result.changed = {name: weights[name].numpy() for name in sorted(dense)}
    return result


def _jointly(treatment: Treatment | None, pruning: Pruning) -> bool:
    """Whether pruning and rounding are one sweep, in which what stays makes up for both."""
    return treatment is not None and treatment.method == "gptq" and pruning.method == "sparsegpt"


def _scale(
    weights: Weights,
    inputs: LayerInputs,
    layer: LayerSpec,
    treatments: dict[str, Treatment],
    recipe: Recipe,
) -> set[str]:
    """Both kinds of scaling, where the recipe has them and weights behind them are rounded."""
    changed: set[str] = set()
    for kind in ("smoothquant", "awq"):
        for site, members in SITES.items():
            names = [f"{name}.weight" for name in members if f"{name}.weight" in treatments]
            names = [name for name in names if getattr(treatments[name], kind)]
            if not names:
                continue
            matrices, seen = [weights[name] for name in names], inputs.sites[site]
            schemes = [treatments[name].scheme for name in names]
            if kind == "awq":
                assert recipe.awq is not None
                scale = awq_scale(matrices, schemes, seen, grid=recipe.awq.grid, layer=layer, site=site)
            else:
                assert recipe.smoothquant is not None
                alpha = recipe.smoothquant.alpha
                if alpha is None:
                    scale = searched_smoothquant_scale(matrices, schemes, seen, layer=layer, site=site)
                else:
                    scale = smoothquant_scale(matrices, seen, alpha=alpha, layer=layer, site=site)
            changed.update(apply_scale(weights, site, scale, seen, layer))
    return changed


def _clip(weights: Weights, inputs: LayerInputs, treatments: dict[str, Treatment]) -> None:
    for site, members in SITES.items():
        for name in (f"{member}.weight" for member in members):
            treatment = treatments.get(name)
            if treatment is None or not treatment.clip or treatment.scheme.kind == "float8":
                continue
            if name not in _UNCLIPPED:
                weights[name] = clipped(weights[name], inputs.sites[site].gram, treatment.scheme)


def _round(
    weights: Weights,
    names: Sequence[str],
    treatments: dict[str, Treatment],
    prunings: dict[str, Pruning],
    seen: Inputs | None,
) -> dict[str, Rounded]:
    """The site's weights; those that GPTQ rounds alike are rounded as one, which costs hardly more. But where
    it prunes too, each has its own share of zeros.
    """
    found: dict[str, Rounded] = {}
    alike: dict[Any, list[str]] = {}
    for name in names:
        treatment = treatments[name]
        if treatment.method == "gptq":
            wide = needs_wide_scale(weights[name], treatment.scheme)
            pruning = prunings.get(name)
            alone = name if pruning is not None and _jointly(treatment, pruning) else ""
            alike.setdefault((treatment.scheme, treatment.damping, wide, pruning, alone), []).append(name)
        else:
            found[name] = Rounded(*round_to_nearest(weights[name], treatment.scheme))
    for together in alike.values():
        assert seen is not None  # a recipe with GPTQ is calibrated
        treatment = treatments[together[0]]
        whole = gptq(
            torch.cat([weights[name] for name in together]),
            seen.gram,
            treatment.scheme,
            damping=treatment.damping,
            pruning=prunings.get(together[0]),
        )
        start = 0
        for name in together:
            rows = slice(start, start + len(weights[name]))
            start = rows.stop
            notes = whole.notes if name == together[0] else ()
            found[name] = Rounded(_rows(whole.linear, rows), whole.values[rows], notes)
    return {name: found[name] for name in names}


def _rows(linear: QuantizedLinear, rows: slice) -> QuantizedLinear:
    zero = None if linear.zero is None else linear.zero[rows]
    return QuantizedLinear(linear.codes[rows], linear.scale[rows], linear.scheme, zero, linear.g_idx)


def _remark(inputs: LayerInputs, result: LayerResult) -> None:
    """Channels that are always zero, or that stand out so far that a scale for all would drown the others."""
    for site, seen in inputs.sites.items():
        if not bool(torch.isfinite(seen.gram).all()):
            result.notes.append(
                f"after {site}: channels reach {float(seen.largest.max()):.1e}, and their squares exceed "
                "float32: nothing is searched for, weights are rounded to nearest"
            )
        dead = int((seen.largest == 0).sum())
        if dead:
            result.notes.append(f"after {site}: {dead} of {len(seen.largest)} channels were always zero")
        typical = float(seen.largest.median())
        loud = int((seen.largest > 1000 * typical).sum()) if typical > 0 else 0
        if loud:
            result.notes.append(f"after {site}: {loud} channels reach a thousand times the median channel")


def _lost(error: torch.Tensor, weight: torch.Tensor, seen: Inputs) -> float | None:
    """``|x @ error.T| ** 2 / |x @ weight.T| ** 2`` over all rows seen; None if these are beyond float32."""
    whole = output_error(weight, seen.gram)
    lost = output_error(error, seen.gram) / whole if whole else 0.0
    return lost if math.isfinite(lost) else None
