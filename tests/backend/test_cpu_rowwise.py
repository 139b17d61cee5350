"""Norms, gated units, soft caps, rotation and the KV write against float64, in every kernel path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.backend.batch import Float32
from headrace.backend.cpu import _native
from tests.backend.cpu_kernels import POOLS, Float64, Int8Pool, KVPool, bf16_bits, random_shapes, rotated

pytestmark = pytest.mark.native

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
seeds = st.integers(0, 2**32 - 1)


def norm(x: Float32, weight: Float32, eps: float, layer: bool, isa: str) -> Float32:
    out = np.full_like(x, np.nan)
    _native.norm(isa, x, weight, eps, layer, out)
    return out


@random_shapes
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 700),
    layer=st.booleans(),
    magnitude=st.integers(-6, 6),
    shift=st.sampled_from([0.0, 3.0]),
    seed=seeds,
)
def test_norms(isa: str, rows: int, width: int, layer: bool, magnitude: int, shift: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = ((rng.standard_normal((rows, width)) + shift) * 10.0**magnitude).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    eps = 1e-6
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True) if layer else wide
    factor = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    expected = centred * factor * weight
    got = norm(x, weight, eps, layer, isa)
    # Centring leaves the rounding of what was subtracted, multiplied like the rest.
    slack = 1e-6 * (np.abs(wide).max(axis=1, keepdims=True) * factor if layer else 0) * np.abs(weight)
    assert (np.abs(got - expected) <= 1e-5 * np.abs(expected) + slack + 1e-30).all()
    for row in range(rows):
        np.testing.assert_array_equal(norm(x[row : row + 1], weight, eps, layer, isa)[0], got[row])


@pytest.mark.parametrize("layer", [False, True])
def test_norms_hide_nothing(isa: str, layer: bool) -> None:
    x = np.ones((3, 37), np.float32)
    x[1, 36] = np.nan
    got = norm(x, np.ones(37, np.float32), 1e-6, layer, isa)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


def glu(gate: Float32, up: Float32, activation: str, isa: str) -> Float32:
    out = np.full_like(gate, np.nan)
    both = np.ascontiguousarray(np.concatenate([gate, up], axis=1))
    _native.glu(isa, both, ACTIVATIONS.index(activation), out)
    return out


def activate(x: Float64, activation: str) -> Float64:
    """In float64, by torch."""
    wide = torch.from_numpy(x)
    if activation == "silu":
        return torch.nn.functional.silu(wide).numpy()
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(wide, approximate=approximate).numpy()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@random_shapes
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 200),
    magnitude=st.sampled_from([0.001, 1.0, 8.0, 60.0]),
    seed=seeds,
)
def test_gated_units(isa: str, activation: str, rows: int, width: int, magnitude: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate = (rng.standard_normal((rows, width)) * magnitude).astype(np.float32)
    up = rng.standard_normal((rows, width)).astype(np.float32)
    expected = activate(gate.astype(np.float64), activation) * up
    got = glu(gate, up, activation, isa)
    # 1 + tanh, 1 + erf cancel for negative inputs: absolute error there, of the input's own rounding.
    assert (np.abs(got - expected) <= 3e-7 * np.abs(gate * up) + 1e-6 * np.abs(expected) + 1e-30).all()
    for row in range(rows):
        alone = glu(gate[row : row + 1], up[row : row + 1], activation, isa)
        np.testing.assert_array_equal(alone[0], got[row])


def test_exponential_is_accurate_to_a_few_units_in_the_last_place(isa: str) -> None:
    """Through silu, whose tail is x e^x: every power of two that float32 has."""
    x = np.linspace(-86.9, 86.9, 100_001, dtype=np.float32)[None]
    got = glu(x, np.ones_like(x), "silu", isa)
    expected = activate(x.astype(np.float64), "silu")
    away = x != 0
    assert np.abs(got[away] / expected[away] - 1).max() < 5e-7


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_units_far_out(isa: str, activation: str) -> None:
    """Nothing overflows where the true value does not, and NaN stays NaN."""
    gate = np.array([[-1e30, -1e4, -100, -88.5, -0.0, 0, 88.5, 1e4, 1e30, np.nan]], np.float32)
    got = glu(gate, np.ones_like(gate), activation, isa)[0]
    np.testing.assert_allclose(got[6:9], gate[0, 6:9], rtol=1e-6)
    assert np.abs(got[2:6]).max() < 1e-35
    assert np.isnan(got[9])
    assert np.abs(got[:2]).max() <= 1e-7 * 1e30
    assert np.abs(got[1]) <= 1e-30


@random_shapes
@given(
    count=st.integers(1, 100),
    cap=st.sampled_from([3.0, 30.0, 50.0]),
    magnitude=st.floats(0.01, 10),
    seed=seeds,
)
def test_softcap(isa: str, count: int, cap: float, magnitude: float, seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((1, count)) * cap * magnitude).astype(np.float32)
    got = x.copy()
    _native.softcap(isa, got, cap)
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    np.testing.assert_allclose(got, expected, atol=3e-7 * cap, rtol=0)
    assert (np.abs(got) <= cap).all()


def test_softcap_far_out(isa: str) -> None:
    x = np.array([[1e30, -1e30, np.inf, -np.inf, np.nan, 0]], np.float32)
    _native.softcap(isa, x, 30.0)
    np.testing.assert_array_equal(x, [[30, -30, 30, -30, np.nan, 0]])


@pytest.mark.parametrize("kv", POOLS)
@random_shapes
@given(
    tokens=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([16, 18, 20, 64, 80, 128, 256]),
    part=st.sampled_from([1.0, 0.5, 0.0]),
    scale=st.sampled_from([1.0, 0.125, 0.1]),
    seed=seeds,
)
def test_rotation_and_kv_write(
    isa: str,
    kv: str,
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    part: float,
    scale: float,
    seed: int,
) -> None:
    """Unfused float32 products and sums: equal to numpy's in every bit, and so is what is kept of them.

    Unwritten slots keep what they had: a kernel that spills overwrites a neighbour's cache.
    """
    rng = np.random.default_rng(seed)
    heads, rope_dim = kv_heads * group, int(head_dim * part) // 2 * 2
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    angles = rng.uniform(-math.pi, math.pi, (tokens, rope_dim // 2))
    turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    first, second = (
        qkv[:, : heads + kv_heads, : rope_dim // 2],
        qkv[:, : heads + kv_heads, rope_dim // 2 : rope_dim],
    )
    cos, sin = (part[:, None] for part in np.split(turns, 2, axis=1))
    turned = qkv.copy()
    turned[:, : heads + kv_heads, : rope_dim // 2] = first * cos - second * sin
    turned[:, : heads + kv_heads, rope_dim // 2 : rope_dim] = second * cos + first * sin
    turned[:, :heads] *= np.float32(scale)
    q = POOLS[kv](1, kv_heads, head_dim).queries(turned[:, :heads])
    k = rotated(turned[:, heads : heads + kv_heads]) if kv == "int8" else turned[:, heads : heads + kv_heads]

    blocks = -(-tokens // 16) + 2
    slots = rng.permutation(blocks * 16)[:tokens]
    pool, expected = (POOLS[kv](blocks, kv_heads, head_dim) for _ in range(2))
    expected.write(slots, turned[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])
    got = qkv.reshape(tokens, -1).copy()
    written = (pool.data, slots.astype(np.int32))
    _native.rope(isa, got, heads, kv_heads, turns, scale, *written, int8=pool.int8)
    np.testing.assert_array_equal(
        got.reshape(qkv.shape)[:, : heads + kv_heads], np.concatenate([q, k], axis=1)
    )
    np.testing.assert_array_equal(pool.data, expected.data)


def test_rounding_to_bf16_is_to_nearest_even(isa: str) -> None:
    """Ties both ways, carries into the exponent, overflow, NaN that must not become infinite."""
    bits = np.array(
        [
            *[0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001],
            *[0x7FFFFFFF, 0xFF800001, 0x80000001, 0x00008000, 0x00018000, 0xBF808000, 0, 0x80000000],
        ],
        np.uint32,
    )
    values = bits.view(np.float32)
    pool = KVPool(1, 1, 16)
    row = np.concatenate([np.zeros(16, np.float32), values, values])[None]
    _native.rope(isa, row, 1, 1, np.zeros((1, 0), np.float32), 1.0, pool.data, np.array([5], np.int32))
    slot = np.array([5])
    for written in (pool.keys(slot)[0, 0], pool.values(slot)[0, 0]):
        nan = np.isnan(values)
        np.testing.assert_array_equal(written[~nan], bf16_bits(values)[~nan])
        assert ((written[nan] & 0x7FFF) > 0x7F80).all()


def test_int8_scales_of_hard_vectors(isa: str) -> None:
    """Zeros and next to nothing are zeros; what is not finite makes the scale NaN; ties go to even."""
    rows = np.zeros((6, 3, 18), np.float32)
    rows[1, 1:] = 1e-36
    rows[2, 1:, 3] = np.inf
    rows[3, 1:, 17] = np.nan
    rows[4, 1:, :4] = [127, 0.5, 1.5, -2.5]
    rows[5, 1:, :2] = [3e38, -3e38]
    pool, expected = Int8Pool(1, 1, 18), Int8Pool(1, 1, 18)
    slots = np.array([0, 3, 5, 9, 14, 15])
    k, v = expected.write(slots, rows[:, 1:2], rows[:, 2:])
    nothing = np.zeros((6, 0), np.float32)
    at = slots.astype(np.int32)
    _native.rope(isa, rows.reshape(6, -1).copy(), 1, 1, nothing, 1.0, pool.data, at, int8=True)
    np.testing.assert_array_equal(pool.data, expected.data)
    assert np.isnan(k[2:4]).all()
    assert (v[:2] == 0).all()
    assert v[4, 0, :4].tolist() == [127, 0, 2, -2]
