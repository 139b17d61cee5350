"""Narrowing float weights at load time: how wrong a weight may become, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, ModelFormatError
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.load_quantization import narrow, quantize

LEVELS = {"int8": 127, "int4": 15}


def quantized(dense: np.ndarray, quantization: str) -> QuantTensor:
    tensor = quantize(dense, quantization)  # type: ignore[arg-type]
    assert isinstance(tensor, QuantTensor)
    return tensor


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 20),
    groups=st.integers(1, 5),
    scale=st.sampled_from([1e-30, 1e-7, 1e-3, 0.02, 1.0, 300.0, 1e6, 1e30]),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_no_weight_moves_by_more_than_half_a_step(
    quantization: str, seed: int, rows: int, groups: int, scale: float, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    dense = ((rng.normal(size=(rows, groups * 32)) + shift) * scale).astype(np.float32)
    tensor = quantized(dense, quantization)
    grouped = dense.reshape(rows, groups, 32).astype(np.float64)
    extent = np.abs(grouped).max(2) if quantization == "int8" else grouped.max(2) - grouped.min(2)
    half_step = extent / LEVELS[quantization] / 2
    rounding = np.abs(grouped).max(2) * 2.0**-10  # of a float16 scale and minimum
    subnormal = np.abs(grouped).max() * 2.0**-17  # a group far smaller than the tensor's largest
    error = np.abs(tensor.dequantize().reshape(rows, groups, 32) - grouped).max(2)
    assert (error <= half_step * 1.001 + rounding + subnormal).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_form(quantization: str) -> None:
    dense = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    tensor = quantized(dense, quantization)
    assert tensor.shape == (7, 96)
    assert tensor.group_size == 32
    assert tensor.scale.shape == (7, 3)
    assert tensor.scale.dtype == np.float16
    if quantization == "int8":
        assert (tensor.bits, tensor.zero_point, tensor.minimum) == (8, 128, None)
        assert tensor.codes.min() >= 1  # symmetric: -128 is never used
    else:
        assert (tensor.bits, tensor.zero_point) == (4, 0)
        assert tensor.minimum is not None
        assert tensor.minimum.dtype == np.float16
        assert tensor.codes.max() <= 15


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_every_float_type_is_taken(quantization: str, dtype: type) -> None:
    dense = np.random.default_rng(1).normal(size=(4, 64)).astype(dtype)
    expected = quantized(dense.astype(np.float32), quantization)
    np.testing.assert_array_equal(quantized(dense, quantization).codes, expected.codes)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_exactly_representable_stays_exact(quantization: str) -> None:
    zeros = np.zeros((2, 32), np.float32)
    np.testing.assert_array_equal(quantized(zeros, quantization).dequantize(), zeros)
    ramp = (np.arange(64, dtype=np.float32).reshape(2, 32) % 16) * 0.25  # 16 levels
    if quantization == "int4":
        np.testing.assert_array_equal(quantized(ramp - 1, quantization).dequantize(), ramp - 1)
    constant = np.full((2, 32), -2.0, np.float32)
    np.testing.assert_allclose(quantized(constant, quantization).dequantize(), constant, rtol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_scales_leave_float16_where_its_range_ends(quantization: str) -> None:
    dense = np.random.default_rng(2).normal(size=(2, 64)).astype(np.float32)
    for factor in (1e8, 1e-8):
        tensor = quantized(dense * np.float32(factor), quantization)
        assert tensor.scale.dtype == np.float32
        half_step = 0.51 * (dense.max() - dense.min()) / LEVELS[quantization]
        np.testing.assert_allclose(tensor.dequantize() / np.float32(factor), dense, rtol=0, atol=half_step)


@pytest.mark.parametrize("shape", [(5, 48), (64,), (2, 2, 32), (0, 32), (3, 0)])
def test_shapes_without_whole_groups_stay_dense(shape: tuple[int, ...]) -> None:
    dense = np.ones(shape, np.float32)
    assert quantize(dense, "int8") is dense
    assert quantize(dense, "int4") is dense


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(quantization: str, value: float) -> None:
    dense = np.zeros((9, 64), np.float32)
    dense[5, 40] = value
    with pytest.raises(ModelFormatError, match=r"layers\.0\.attention\.q\.weight holds NaN.*row 5"):
        quantize(dense, quantization, name="layers.0.attention.q.weight")  # type: ignore[arg-type]


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'int3'.*int8 or int4"):
        quantize(np.zeros((1, 32), np.float32), "int3")  # type: ignore[arg-type]


def test_chunks_meet_without_a_seam() -> None:
    dense = np.random.default_rng(3).normal(size=(3000, 512)).astype(np.float32)  # more than one chunk
    whole = quantized(dense, "int4")
    for rows in (slice(0, 10), slice(2040, 2060), slice(2990, 3000)):
        np.testing.assert_array_equal(quantized(dense[rows], "int4").codes, whole.codes[rows])


def test_embeddings_and_heads_stay_at_eight_bits_but_for_who_drafts() -> None:
    dense = np.random.default_rng(4).normal(size=(64, 64)).astype(np.float32)

    def bits(name: str, tensor: np.ndarray) -> int | None:
        narrowed = narrow(name, tensor, "int4")
        return narrowed.bits if isinstance(narrowed, QuantTensor) else None

    for name in ("embed.weight", "head.weight"):
        drafting = narrow(name, dense, "int4-all")
        assert isinstance(drafting, QuantTensor) and drafting.bits == 4
    assert bits("embed.weight", dense) == 8
    assert bits("head.weight", dense) == 8
    assert bits("layers.0.feed_forward.up.weight", dense) == 4
    assert bits("layers.0.attention_norm.weight", dense[0]) is None
    assert narrow("layers.0.attention.q.weight", dense, None) is dense
    stored = quantized(dense, "int8")
    assert narrow("layers.0.attention.q.weight", stored, "int4") is stored
