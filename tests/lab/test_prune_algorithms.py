"""Pruning on a small layer, against the papers' algorithms in plain torch: the same zeros, the same weights.

The plain versions work on the inputs themselves and on one column after the other, without blocks.
"""

from __future__ import annotations

import pytest
import torch

from headrace.lab.compress.algorithms.gptq import gptq
from headrace.lab.compress.algorithms.pruning import prune
from headrace.lab.compress.algorithms.statistics import Inputs
from headrace.lab.compress.plan import Pruning
from headrace.lab.compress.prune_steps import Sparsity
from headrace.lab.compress.quantized import Scheme

OUT, IN, ROWS = 48, 256, 700
HALF, PAIRS, OCTETS = Sparsity(0.5), Sparsity(0.5, 4), Sparsity(0.5, 8)
KINDS = [HALF, Sparsity(0.7), PAIRS, OCTETS, Sparsity(0.75, 4)]


def layer_and_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, inputs with correlated and outlying channels, and their Gram matrix."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=draw) * 0.05
    mix = torch.randn(IN, IN, generator=draw) / IN**0.5
    x = torch.randn(ROWS, IN, generator=draw) @ (torch.eye(IN) + mix)
    x *= torch.logspace(-1, 1, IN)[torch.randperm(IN, generator=draw)]
    seen = Inputs.of_width(IN)
    for rows in x.split(100):
        seen.add(rows)
    return weight, x, seen.gram


def plain_wanda(weight: torch.Tensor, x: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Listing 1 of arXiv 2306.11695, and its section 4.1 for N:M."""
    metric, pruned = weight.abs() * x.norm(dim=0), weight.clone()
    width = sparsity.group or IN
    for start in range(0, IN, width):
        order = metric[:, start : start + width].argsort(dim=1)
        pruned[:, start : start + width].scatter_(1, order[:, : int(width * sparsity.share)], 0.0)
    return pruned


def plain_sparsegpt(
    weight: torch.Tensor, x: torch.Tensor, sparsity: Sparsity, scheme: Scheme | None = None
) -> torch.Tensor:
    """Algorithm 1 of arXiv 2301.00774, with masks for 128 columns at a time, in float64. With a scheme each
    weight that stays is rounded in the same step (its section 3.5), to symmetric codes, one scale a row."""
    w, hessian = weight.clone().double(), (x.T @ x).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(IN)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    diagonal = factor.diagonal()
    mask = torch.zeros(OUT, IN, dtype=torch.bool)
    if scheme is not None:
        scale = (2 * weight.abs().amax(1) / (2**scheme.bits - 1)).half().double()
    for j in range(IN):
        if sparsity.group is None and j % 128 == 0:
            scores = (w[:, j : j + 128] / diagonal[j : j + 128]) ** 2
            least = scores.flatten().sort().values[int(scores.numel() * sparsity.share)]
            mask[:, j : j + 128] = scores < least
        if sparsity.group is not None and j % sparsity.group == 0:
            ahead = slice(j, j + sparsity.group)
            order = ((w[:, ahead] / diagonal[ahead]) ** 2).argsort(dim=1)
            mask[:, ahead] = mask[:, ahead].scatter(1, order[:, : sparsity.zeros], True)
        value = w[:, j].masked_fill(mask[:, j], 0.0)
        if scheme is not None:
            half = 2 ** (scheme.bits - 1)
            value = (value / scale).round().clamp(-half, half - 1) * scale
        error = (w[:, j] - value) / diagonal[j]
        w[:, j:] -= error[:, None] * factor[j, j:]
        w[:, j] = value
    return w.float()


def error(values: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (values - weight).T).square().sum())


def require_zeros(values: torch.Tensor, sparsity: Sparsity) -> None:
    share = float((values == 0).float().mean())
    assert share == pytest.approx(sparsity.share, abs=0.002)
    if sparsity.group is not None:
        zeros = (values.reshape(OUT, -1, sparsity.group) == 0).sum(-1)
        assert bool((zeros == sparsity.zeros).all())


@pytest.mark.parametrize("sparsity", KINDS, ids=Sparsity.words)
def test_wanda_prunes_as_its_paper_does(sparsity: Sparsity) -> None:
    weight, x, gram = layer_and_inputs()
    found = prune(weight, gram, Pruning("wanda", sparsity, 0.01)).values
    require_zeros(found, sparsity)
    assert ((found == plain_wanda(weight, x, sparsity)).float().mean()) > 0.9995
    stays = found != 0
    assert torch.equal(found[stays], weight[stays])


@pytest.mark.parametrize("sparsity", KINDS, ids=Sparsity.words)
def test_sparsegpt_prunes_as_its_paper_does(sparsity: Sparsity) -> None:
    weight, x, gram = layer_and_inputs()
    found = prune(weight, gram, Pruning("sparsegpt", sparsity, 0.01))
    assert found.notes == ()
    require_zeros(found.values, sparsity)
    plain = plain_sparsegpt(weight, x, sparsity)
    assert ((found.values == 0) == (plain == 0)).float().mean() > 0.999
    close = (found.values - plain).abs() < 1e-3 * weight.abs().max()
    assert close.float().mean() > 0.99
    others = [prune(weight, gram, Pruning(by, sparsity, 0.01)).values for by in ("wanda", "magnitude")]
    ours, wanda, magnitude = (error(values, weight, x) for values in (found.values, *others))
    assert ours < 0.9 * wanda
    assert wanda < 0.7 * magnitude


@pytest.mark.parametrize("sparsity", [HALF, PAIRS], ids=Sparsity.words)
def test_rounding_and_pruning_in_one_sweep(sparsity: Sparsity) -> None:
    """As the paper's joint algorithm; and better than rounding what has been pruned before."""
    weight, x, gram = layer_and_inputs()
    scheme, pruning = Scheme(4, None), Pruning("sparsegpt", sparsity, 0.01)
    found = gptq(weight, gram, scheme, pruning=pruning)
    plain = plain_sparsegpt(weight, x, sparsity, scheme)
    step = 2 * weight.abs().amax(1, keepdim=True) / 15
    assert ((found.values - plain).abs() < 0.01 * step).float().mean() > 0.97
    assert torch.equal(torch.from_numpy(found.linear.dequantize()), found.values)
    assert error(found.values, weight, x) < 1.02 * error(plain, weight, x)
    zeros = found.values == 0
    assert float(zeros.float().mean()) >= sparsity.share - 0.001
    kept = gptq(prune(weight, gram, pruning).values, gram, scheme, pruning=Pruning("wanda", sparsity, 0.01))
    assert error(found.values, weight, x) < error(kept.values, weight, x)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [None, "static", "group"])
def test_zeros_stay_zeros_in_any_order_of_rounding(symmetric: bool, act_order: str | None) -> None:
    weight, _, gram = layer_and_inputs()
    scheme = Scheme(4, 32, symmetric=symmetric, act_order=act_order)  # type: ignore[arg-type]
    pruning = Pruning("wanda", PAIRS, 0.01)
    pruned = prune(weight, gram, pruning).values
    values = torch.from_numpy(gptq(pruned, gram, scheme, pruning=pruning).linear.dequantize())
    assert not values[pruned == 0].any()
    assert float((values == 0).float().mean()) < 0.62


@pytest.mark.parametrize("sparsity", [HALF, PAIRS], ids=Sparsity.words)
def test_magnitude_needs_no_inputs(sparsity: Sparsity) -> None:
    weight, _, _ = layer_and_inputs()
    found = prune(weight, None, Pruning("magnitude", sparsity, 0.01)).values
    require_zeros(found, sparsity)
    if sparsity.group is None:
        assert weight[found == 0].abs().max() <= weight[found != 0].abs().min()


def test_inputs_that_say_little() -> None:
    """Those that were always zero go first; without a factor SparseGPT prunes as Wanda; or by magnitude."""
    weight, x, _ = layer_and_inputs()
    x[:, 3] = 0
    pruning = Pruning("sparsegpt", HALF, 0.01)
    found = prune(weight, x.T @ x, pruning)
    assert found.notes == ("1 of 256 inputs were always zero",)
    assert not found.values[:, 3].any()
    upset = x.T @ x
    upset[0, 1] = upset[1, 0] = 1e9
    fallen = prune(weight, upset, pruning)
    assert "in the manner of Wanda" in fallen.notes[-1]
    assert torch.equal(fallen.values, prune(weight, upset, Pruning("wanda", HALF, 0.01)).values)
    rounded = gptq(weight, upset, Scheme(4, 64), pruning=pruning)
    assert not rounded.values[fallen.values == 0].any()
    endless = torch.full_like(upset, float("inf"))
    assert "pruned by magnitude" in prune(weight, endless, pruning).notes[-1]
