"""Scaling of channels: weights are multiplied by what their input is divided by, so that nothing changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.lab.compress.algorithms.rounding import Grid, grid_of, round_to_nearest, split_groups
from headrace.lab.compress.algorithms.statistics import SITES, Inputs
from headrace.lab.compress.quantized import FLOAT8_MAX, Scheme
from headrace.model.architecture import LayerSpec

Weights = dict[str, torch.Tensor]
"""A layer's tensors by name without ``layers.{i}.``, float32."""

_SMALLEST = 1e-4  # of AWQ's scales before they are normalised: channels that saw next to nothing
_TINY = 1e-5
_ALPHAS = 20  # of SmoothQuant that are tried, beside 0


def awq_scale(
    weights: Sequence[torch.Tensor],
    schemes: Sequence[Scheme],
    inputs: Inputs,
    *,
    grid: int,
    layer: LayerSpec,
    site: str,
) -> torch.Tensor:
    """The scale ``[in]`` of the weights' input with which rounding them costs their outputs least.

    AWQ (arXiv 2306.00978): scales are the mean absolute input to a power, of which ``grid`` from 0 below 1
    are tried. The cost is the squared error of the outputs over all rows seen, from their Gram matrix.
    """
    mean = _shared(inputs.mean, layer, site)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(grid):
        scale = mean.pow(step / grid).clamp(min=_SMALLEST)
        scale = scale / (scale.max() * scale.min()).sqrt()
        cost = 0.0
        for weight, scheme in zip(weights, schemes, strict=True):
            rounded = round_to_nearest(weight * scale, scheme)[1] / scale
            cost += output_error(rounded - weight, inputs.gram)
        if cost < least:
            best, least = scale, cost
    return best


def smoothquant_scale(
    weights: Sequence[torch.Tensor], inputs: Inputs, *, alpha: float, layer: LayerSpec, site: str
) -> torch.Tensor:
    """The scale ``[in]`` that divides the range of inputs between them and the weights.

    SmoothQuant (arXiv 2211.10438): ``max|x| ** alpha / max|w| ** (1 - alpha)`` for each channel; 1 for
    channels that are always zero.
    """
    reach = _shared(inputs.largest, layer, site, largest=True)
    heaviest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    heaviest = _shared(heaviest, layer, site, largest=True).clamp(min=_TINY)
    scale = (reach.pow(alpha) / heaviest.pow(1 - alpha)).clamp(min=_TINY)
    return torch.where(reach > 0, scale, torch.ones_like(scale))


def searched_smoothquant_scale(
    weights: Sequence[torch.Tensor],
    schemes: Sequence[Scheme],
    inputs: Inputs,
    *,
    layer: LayerSpec,
    site: str,
) -> torch.Tensor:
    """SmoothQuant's scale with the ``alpha`` by which outputs lose least when inputs and weights are rounded.

    Alphas of 0, 0.05 … 1 are tried on the rows that were kept; the cost is the squared error of the outputs.
    """
    x = torch.cat(inputs.kept)
    wanted = [x @ weight.T for weight in weights]
    best, least = torch.ones_like(inputs.largest), float("inf")
    for step in range(_ALPHAS + 1):
        scale = smoothquant_scale(weights, inputs, alpha=step / _ALPHAS, layer=layer, site=site)
        cost = 0.0
        for weight, scheme, outputs in zip(weights, schemes, wanted, strict=True):
            rounded = round_to_nearest(weight * scale, scheme)[1]
            lost = rounded_inputs(x / scale, scheme) @ rounded.T - outputs
            cost += float(lost.square().sum(dtype=torch.float64))
        if cost < least:
            best, least = scale, cost
    return best


def rounded_inputs(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Inputs ``[rows, in]`` as the scheme has them rounded: with one scale for each row, or not at all."""
    if scheme.input_activations is None:
        return x
    top = FLOAT8_MAX if scheme.kind == "float8" else 127.0
    scale = x.abs().amax(-1, keepdim=True) / top
    codes = x / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = codes.to(torch.float8_e4m3fn).float() if scheme.kind == "float8" else codes.round_()
    return codes * scale


def apply_scale(
    weights: Weights, site: str, scale: torch.Tensor, inputs: Inputs, layer: LayerSpec
) -> list[str]:
    """Divide the output of the site's source by ``scale``, multiply what reads it; names of what changed.

    Norms are rounded to bfloat16, so that they are the same in every type a loader may choose; what the
    rounding changes goes into the scale.
    """
    members = [f"{name}.weight" for name in SITES[site]]
    if site.endswith("norm"):
        norm = weights[f"{site}.weight"]
        divided = (norm / scale).bfloat16().float()
        scale = torch.where((norm != 0) & (divided != 0), norm / divided, scale)
        changed = {f"{site}.weight": divided}
        if f"{site}.bias" in weights:
            changed[f"{site}.bias"] = weights[f"{site}.bias"] / scale
    else:
        rows = _one_group_of_heads(scale, layer) if site == "attention.v" else scale
        changed = {f"{site}.weight": weights[f"{site}.weight"] / rows[:, None]}
        if f"{site}.bias" in weights:
            changed[f"{site}.bias"] = weights[f"{site}.bias"] / rows
    changed |= {name: weights[name] * scale for name in members}
    weights.update(changed)
    inputs.divide(scale)
    return list(changed)


def clipped(weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, grid: int = 20) -> torch.Tensor:
    """The weight with each group's range cut to where rounding costs the group's part of the outputs least.

    AWQ's second search: ranges of 1, 1 - 1/grid … above one half of the largest absolute weight.
    """
    size = scheme.group_size or weight.shape[1]
    groups = split_groups(weight, scheme).transpose(0, 1)  # [groups, out, size]
    count = len(groups)
    part = gram.reshape(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    reach = groups.abs().amax(-1, keepdim=True)
    best, least = reach, torch.full_like(reach, float("inf"))
    for step in range(grid // 2):
        limit = reach * (1 - step / grid)
        cut = groups.clamp(-limit, limit)
        grid_found: Grid = grid_of(cut.amin(-1, keepdim=True), cut.amax(-1, keepdim=True), scheme)
        error = grid_found.snap(cut) - groups
        cost = ((error @ part) * error).sum(-1, keepdim=True)
        better = cost < least
        best, least = torch.where(better, limit, best), torch.where(better, cost, least)
    return groups.clamp(-best, best).transpose(0, 1).reshape(weight.shape)


def output_error(error: torch.Tensor, gram: torch.Tensor) -> float:
    """``|x @ error.T| ** 2`` summed over all rows and outputs, from ``gram = x.T @ x``."""
    return float(((error @ gram) * error).sum(dtype=torch.float64))


def _shared(values: torch.Tensor, layer: LayerSpec, site: str, *, largest: bool = False) -> torch.Tensor:
    """Heads that read the same values (grouped-query attention) must share their scales: one for all."""
    spec = layer.attention
    if site != "attention.v" or spec.heads == spec.kv_heads:
        return values
    heads = values.reshape(spec.kv_heads, -1, spec.head_dim)
    one = heads.amax(1, keepdim=True) if largest else heads.mean(1, keepdim=True)
    return one.expand_as(heads).reshape(values.shape)


def _one_group_of_heads(scale: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """``[heads * head_dim]``, alike for heads that share values, as ``[kv_heads * head_dim]``."""
    spec = layer.attention
    return scale.reshape(spec.kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)
