"""The kernels that encoders add, in every path of this CPU, against float64 and torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

_native: Any = pytest.importorskip("headrace.backend.cpu._native")
pytestmark = pytest.mark.native

ISAS = _native.supported_isas()
WIDTHS = (1, 15, 16, 33, 384)


def noise(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kernels", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_adds_its_bias(kernels: str, width: int) -> None:
    x, weight, bias = 3 + 2 * noise(5, width), noise(width, seed=1), noise(width, seed=2)
    out = np.full_like(x, np.nan)
    _native.norm(kernels, x, weight, 1e-12, True, out, bias)
    want = F.layer_norm(torch.tensor(x), (width,), torch.tensor(weight), torch.tensor(bias), 1e-12)
    if width > 1:
        np.testing.assert_allclose(out, want.numpy(), rtol=0, atol=2e-5)
    unbiased = np.empty_like(x)
    _native.norm(kernels, x, weight, 1e-12, True, unbiased)
    np.testing.assert_array_equal(out, unbiased + bias)


@pytest.mark.parametrize("kernels", ISAS)
@pytest.mark.parametrize(("number", "name"), [(0, "silu"), (1, "gelu_tanh"), (2, "gelu")])
def test_activations_without_a_gate(kernels: str, number: int, name: str) -> None:
    # Whole lines of the axis, both tails, and what lies just beside zero.
    axis = np.concatenate([np.linspace(-30, 30, 6001), np.geomspace(1e-30, 1, 60), [0.0, -0.0, 1e4, -1e4]])
    x = axis.astype(np.float32)[None]
    out = np.full_like(x, np.nan)
    _native.activate(kernels, x, number, out)
    exact = torch.tensor(x).double()
    want = F.silu(exact) if name == "silu" else F.gelu(exact, approximate="tanh" if number == 1 else "none")
    np.testing.assert_allclose(out, want.numpy(), rtol=3e-6, atol=5e-7)


@pytest.mark.parametrize("kernels", ISAS)
def test_an_activation_hides_no_nan(kernels: str) -> None:
    x = np.full((1, 17), np.nan, np.float32)
    for number in range(3):
        out = np.zeros_like(x)
        _native.activate(kernels, x, number, out)
        assert np.isnan(out).all()


@pytest.mark.parametrize("kernels", ISAS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 2, 24)])
@pytest.mark.parametrize("length", [1, 15, 16, 130, 600])
def test_attention_over_the_whole_sequence(
    kernels: str, heads: int, kv_heads: int, head_dim: int, length: int
) -> None:
    q, k, v = (noise(length, n * head_dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    blocks = -(-length // 16)
    kv = np.full((blocks + 1) * 64 * kv_heads * head_dim + 64, 0xFF, np.uint8)  # NaN beyond the sequence
    table = np.random.default_rng(3).permutation(blocks).astype(np.int32)
    positions = np.arange(length, dtype=np.int32)
    slots = table[positions // 16] * 16 + positions % 16
    row = np.concatenate([q, k, v], 1)
    _native.rope(kernels, row, heads, kv_heads, np.zeros((length, 0), np.float32), 1.0, kv, slots)
    out = np.full_like(q, np.nan)
    _native.attention(kernels, q, heads, kv_heads, kv, table, positions, 0, 0.0, out, length=length)

    def split(x: NDArray[np.float32], n: int) -> torch.Tensor:
        return torch.tensor(x).view(length, n, head_dim).transpose(0, 1)

    keys, values = (split(x, kv_heads).bfloat16().float() for x in (k, v))
    want = F.scaled_dot_product_attention(split(q, heads), keys, values, scale=1.0, enable_gqa=True)
    # That path also rounds queries and weights to bfloat16.
    tolerance = 0.05 if kernels in ("avx512_bf16", "avx512_amx") else 2e-5
    np.testing.assert_allclose(out, want.transpose(0, 1).reshape(length, -1).numpy(), rtol=0, atol=tolerance)
    if length > 16:  # one row by itself has the same bits
        alone = np.empty_like(q[:1])
        _native.attention(
            kernels, q[7:8], heads, kv_heads, kv, table, positions[7:8], 0, 0.0, alone, length=length
        )
        assert alone.tobytes() == out[7:8].tobytes()


@pytest.mark.parametrize("kernels", ISAS)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_pooling(kernels: str, mean: bool, normalise: bool, width: int) -> None:
    x = 1 + noise(40, width)
    starts = np.array([0, 1, 4, 40], np.int32)
    out = np.full((3, width), np.nan, np.float32)
    _native.pool(kernels, x, starts, mean, normalise, out)
    parts = [x[a:b].astype(np.float64) for a, b in pairwise(starts)]
    want = np.stack([part.mean(0) if mean else part[0] for part in parts])
    if normalise:
        want /= np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", ISAS)
def test_pooling_nothing_but_zeros_and_nan(kernels: str) -> None:
    x = np.zeros((2, 20), np.float32)
    x[1] = np.nan
    out = np.empty((2, 20), np.float32)
    _native.pool(kernels, x, np.array([0, 1, 2], np.int32), True, True, out)
    assert (out[0] == 0).all()
    assert np.isnan(out[1]).all()
