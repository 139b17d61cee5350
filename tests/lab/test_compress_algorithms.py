"""The algorithms on a small layer, against those of their papers in plain torch: the same values and scales.

The plain versions work on the inputs themselves, token by token and column by column; ours on Gram matrices
and in blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.lab.compress.algorithms.gptq import gptq
from headrace.lab.compress.algorithms.rounding import round_to_nearest
from headrace.lab.compress.algorithms.scaling import (
    apply_scale,
    awq_scale,
    clipped,
    rounded_inputs,
    searched_smoothquant_scale,
    smoothquant_scale,
)
from headrace.lab.compress.algorithms.statistics import Inputs
from headrace.lab.compress.quantized import Kind, QuantizedLinear, Scheme
from headrace.model.architecture import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec

OUT, IN, ROWS = 48, 256, 700
LAYER = LayerSpec(
    AttentionSpec(heads=8, kv_heads=8, head_dim=32, rope=None, scale=1.0),
    FeedForwardSpec(width=IN),
    NormSpec(),
)


def layer_and_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Inputs]:
    """A weight, inputs with correlated and outlying channels, and what is kept of the inputs."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT, IN, generator=draw) * 0.05
    mix = torch.randn(IN, IN, generator=draw) / IN**0.5
    x = torch.randn(ROWS, IN, generator=draw) @ (torch.eye(IN) + mix)
    x *= torch.logspace(-1, 1, IN)[torch.randperm(IN, generator=draw)]
    seen = Inputs.of_width(IN)
    for rows in x.split(100):
        seen.add(rows)
    return weight, x, seen


def plain_grid(group: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of one group of columns ``[out, size]``, the scale as float16 holds it."""
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        scale = 2 * group.abs().amax(1) / top
        return scale.half().float(), torch.full((len(group),), 2.0 ** (scheme.bits - 1))
    low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
    scale = ((high - low) / top).half().float()
    return scale, (-low / scale).round()


def plain_round(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    size = scheme.group_size or IN
    parts = []
    for group in weight.split(size, 1):
        scale, zero = (value[:, None] for value in plain_grid(group, scheme))
        codes = ((group / scale).round() + zero).clamp(0, 2**scheme.bits - 1)
        parts.append((codes - zero) * scale)
    return torch.cat(parts, 1)


def plain_gptq(weight: torch.Tensor, x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Algorithm 1 of arXiv 2210.17323 without its blocks: the values of the codes."""
    w, size = weight.clone().double(), scheme.group_size or IN
    hessian = (x.T @ x).double()
    order = torch.argsort(hessian.diagonal(), descending=True) if scheme.act_order else torch.arange(IN)
    w, hessian = w[:, order], hessian[order][:, order]
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(IN)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    before = [plain_grid(group, scheme) for group in weight.split(size, 1)]
    values = torch.zeros_like(w)
    for column in range(IN):
        if scheme.act_order == "static" or size == IN:
            scale, zero = before[int(order[column]) // size]
        elif column % size == 0:
            scale, zero = plain_grid(w[:, column : column + size].float(), scheme)
        codes = ((w[:, column] / scale).round() + zero).clamp(0, 2**scheme.bits - 1)
        values[:, column] = (codes - zero) * scale
        error = (w[:, column] - values[:, column]) / factor[column, column]
        w[:, column:] -= error[:, None] * factor[column, column:]
    return values[:, torch.argsort(order)].float()


def mostly_equal(ours: torch.Tensor, plain: torch.Tensor, scheme: Scheme) -> None:
    """Equal but where a value lay on the edge between two codes, from which GPTQ goes on differently."""
    step = (plain.abs().amax(1, keepdim=True) * 2 / (2**scheme.bits - 1)).expand_as(plain)
    assert ((ours - plain).abs() < 1e-3 * step).float().mean() > 0.99


SCHEMES = [
    Scheme(4, 32),
    Scheme(4, 64, symmetric=False),
    Scheme(4, None, symmetric=False),
    Scheme(8, 128),
    Scheme(8, None),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_to_nearest(scheme: Scheme) -> None:
    weight, _, _ = layer_and_inputs()
    linear, values = round_to_nearest(weight, scheme)
    assert torch.equal(torch.from_numpy(linear.dequantize()), values)
    mostly_equal(values, plain_round(weight, scheme), scheme)
    assert linear.codes.max() < 2**scheme.bits
    assert (linear.zero is None) == scheme.symmetric
    groups = 1 if scheme.group_size is None else IN // scheme.group_size
    assert linear.scale.shape == (OUT, groups)
    assert linear.scale.dtype == np.float16


@pytest.mark.parametrize(
    "scheme",
    [
        *SCHEMES,
        Scheme(4, 64, symmetric=False, act_order="static"),
        Scheme(4, 32, act_order="group"),
        Scheme(4, None, act_order="static"),
    ],
    ids=str,
)
def test_gptq_rounds_as_its_paper_does(scheme: Scheme) -> None:
    weight, x, seen = layer_and_inputs()
    found = gptq(weight, seen.gram, scheme)
    assert found.notes == ()
    assert torch.equal(torch.from_numpy(found.linear.dequantize()), found.values)
    mostly_equal(found.values, plain_gptq(weight, x, scheme), scheme)
    nearest = round_to_nearest(weight, scheme)[1] if scheme.act_order != "group" else None
    if nearest is not None:
        assert _error(found.values, weight, x) < 0.8 * _error(nearest, weight, x)


def test_gptq_where_the_inputs_say_little() -> None:
    """Channels that are always zero, others that are equal: no factor without damping; then none at all."""
    weight, x, _ = layer_and_inputs()
    x[:, 3] = 0
    x[:, 5:60] = x[:, 4:5]
    seen = Inputs.of_width(IN)
    seen.add(x)
    found = gptq(weight, seen.gram, Scheme(4, 64))
    assert "1 of 256 inputs were always zero" in found.notes
    nearest = round_to_nearest(weight, Scheme(4, 64))[1]
    assert _error(found.values, weight, x) < _error(nearest, weight, x)
    hopeless = gptq(weight, -torch.eye(IN), Scheme(4, 64))  # all inputs zero, and worse
    assert torch.equal(hopeless.values[:, 0], nearest[:, 0])
    upset = seen.gram.clone()
    upset[0, 1] = upset[1, 0] = 1e9
    fallen = gptq(weight, upset, Scheme(4, 64))
    assert any("rounded to nearest" in note for note in fallen.notes)
    assert torch.equal(fallen.values, nearest)


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 64, symmetric=False)], ids=str)
def test_awq_finds_the_scale_that_its_paper_does(scheme: Scheme) -> None:
    weight, x, seen = layer_and_inputs()
    other = weight.flip(0) * 0.7
    best, least = torch.ones(IN), float("inf")
    for ratio in range(20):
        scale = x.abs().mean(0).pow(ratio / 20).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        loss = sum(
            float(((x / scale) @ plain_round(w * scale, scheme).T - x @ w.T).square().sum())
            for w in (weight, other)
        )
        if loss < least:
            best, least = scale, loss
    ours = awq_scale([weight, other], [scheme, scheme], seen, grid=20, layer=LAYER, site="feed_forward_norm")
    torch.testing.assert_close(ours, best, rtol=1e-4, atol=0)
    assert not torch.equal(best, torch.ones(IN))


def test_awq_clips_as_its_paper_does() -> None:
    scheme = Scheme(4, 64, symmetric=False)
    weight, x, seen = layer_and_inputs()
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) < 0.01] *= 6
    wanted = weight.clone()
    for start in range(0, IN, 64):
        group, inputs = weight[:, start : start + 64], x[:, start : start + 64]
        reach = group.abs().amax(1, keepdim=True)
        best, least = reach, torch.full((OUT,), float("inf"))
        for step in range(10):
            limit = reach * (1 - step / 20)
            scale, zero = (v[:, None] for v in plain_grid(group.clamp(-limit, limit), scheme))
            codes = ((group.clamp(-limit, limit) / scale).round() + zero).clamp(0, 15)
            loss = (inputs @ ((codes - zero) * scale - group).T).square().sum(0)
            best = torch.where((loss < least)[:, None], limit, best)
            least = torch.minimum(least, loss)
        wanted[:, start : start + 64] = group.clamp(-best, best)
    ours = clipped(weight, seen.gram, scheme)
    assert (ours == wanted).float().mean() > 0.999
    assert not torch.equal(ours, weight)


def test_smoothquant_divides_ranges_and_changes_nothing() -> None:
    weight, x, seen = layer_and_inputs()
    other = weight.flip(0)
    scale = smoothquant_scale([weight, other], seen, alpha=0.5, layer=LAYER, site="feed_forward_norm")
    heaviest = torch.maximum(weight.abs().amax(0), other.abs().amax(0))
    torch.testing.assert_close(scale, x.abs().amax(0).sqrt() / heaviest.sqrt())
    norm = torch.rand(IN) + 0.5
    weights = {
        "feed_forward_norm.weight": norm,
        "feed_forward.gate.weight": weight,
        "feed_forward.up.weight": other,
    }
    before = x @ weight.T
    apply_scale(weights, "feed_forward_norm", scale, seen, LAYER)
    after = (x / norm * weights["feed_forward_norm.weight"]) @ weights["feed_forward.gate.weight"].T
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(
        weights["feed_forward_norm.weight"], weights["feed_forward_norm.weight"].bfloat16().float()
    )
    torch.testing.assert_close(seen.largest, (x * weights["feed_forward_norm.weight"] / norm).abs().amax(0))


@pytest.mark.parametrize("kind", ["int", "float8"])
def test_the_alpha_that_is_searched_loses_least(kind: Kind) -> None:
    weight, x, _ = layer_and_inputs()
    seen = Inputs.of_width(IN, stride=1)
    seen.add(x)
    scheme = Scheme(8, None, symmetric=True, kind=kind, input_activations="dynamic-token")
    found = searched_smoothquant_scale([weight], [scheme], seen, layer=LAYER, site="feed_forward_norm")

    def lost(scale: torch.Tensor) -> float:
        rounded = round_to_nearest(weight * scale, scheme)[1]
        inputs = x / scale
        step = inputs.abs().amax(1, keepdim=True) / (127 if kind == "int" else 448)
        codes = (inputs / step).round() if kind == "int" else (inputs / step).to(torch.float8_e4m3fn).float()
        return float((codes * step @ rounded.T - x @ weight.T).square().sum())

    tried = [
        smoothquant_scale([weight], seen, alpha=step / 20, layer=LAYER, site="feed_forward_norm")
        for step in range(21)
    ]
    assert lost(found) == pytest.approx(min(map(lost, tried)), rel=1e-4)
    assert any(torch.equal(found, one) for one in tried)


def test_a_row_of_zeros_is_rounded_to_zeros() -> None:
    scheme = Scheme(8, None, symmetric=True, input_activations="dynamic-token")
    x = torch.tensor([[0.0, 0.0], [127.0, 0.6]])
    assert torch.equal(rounded_inputs(x, scheme), torch.tensor([[0.0, 0.0], [127.0, 1.0]]))


def test_the_rows_that_are_kept_do_not_depend_on_how_they_come() -> None:
    _, x, _ = layer_and_inputs()
    seen = Inputs.of_width(IN, stride=7)
    for rows in x.split([1, 5, 94, 300, 300]):
        seen.add(rows)
    assert torch.equal(torch.cat(seen.kept), x[::7])
    seen.divide(torch.full([IN], 2.0))
    assert torch.equal(torch.cat(seen.kept), x[::7] / 2)


def test_heads_that_share_values_share_scales() -> None:
    layer = LayerSpec(
        AttentionSpec(heads=8, kv_heads=2, head_dim=32, rope=None, scale=1.0),
        FeedForwardSpec(width=IN),
        NormSpec(),
    )
    weight, _, seen = layer_and_inputs()
    v = torch.randn(64, IN)
    scale = awq_scale([weight], [Scheme(4, 64)], seen, grid=20, layer=layer, site="attention.v")
    weights = {"attention.v.weight": v, "attention.o.weight": weight}
    values = torch.randn(10, IN)
    mixed = (values @ v.T).view(10, 2, 1, 32).expand(10, 2, 4, 32).reshape(10, IN)
    before = mixed @ weight.T
    apply_scale(weights, "attention.v", scale, seen, layer)
    mixed = (values @ weights["attention.v.weight"].T).view(10, 2, 1, 32).expand(10, 2, 4, 32)
    torch.testing.assert_close(
        mixed.reshape(10, IN) @ weights["attention.o.weight"].T, before, rtol=1e-3, atol=1e-3
    )


def test_float8_is_what_numpy_makes_of_it() -> None:
    weight, _, _ = layer_and_inputs()
    weight[0] = 0
    linear, values = round_to_nearest(weight, Scheme(8, None, kind="float8"))
    assert torch.equal(torch.from_numpy(linear.dequantize()), values)
    assert not values[0].any()
    relative = ((values - weight).abs() / weight.abs())[1:]
    assert relative[weight[1:].abs() > weight[1:].abs().amax(1, keepdim=True) / 64].max() <= 1 / 16 + 1e-6


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 32, symmetric=False), Scheme(8, None)], ids=str)
def test_groups_of_zeros_and_weights_of_any_size(scheme: Scheme) -> None:
    weight, _, _ = layer_and_inputs()
    weight[:, :32] = 0
    weight[1] = 0.25  # all alike, none is zero
    weight[2] = torch.linspace(1, 2, IN)  # none is near zero
    for size in (1.0, 1e-7, 1e7):
        linear, values = round_to_nearest(weight * size, scheme)
        assert np.isfinite(linear.scale).all()
        assert not values[0, :32].any()
        bound = 1.05 * size * (2 if scheme.symmetric else 1) / (2**scheme.bits - 1)
        assert float((values - weight * size)[1:3].abs().max()) <= bound
        assert (linear.scale.dtype == np.float16) == (size == 1.0)


def _error(values: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (values - weight).T).square().sum())


def test_a_linear_says_how_large_it_is() -> None:
    weight, _, _ = layer_and_inputs()
    linear: QuantizedLinear = round_to_nearest(weight, Scheme(4, 128, symmetric=False))[0]
    assert linear.size_bytes() == OUT * IN // 2 + OUT * 2 * 2 + OUT * 2 // 2
    assert linear.size_bytes() < 0.28 * 2 * OUT * IN
