"""What is packed comes back: every kind of tensor through the kernels that read it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backend.cpu import _native
from headrace.backend.cpu.packing import BF16, F8, F32, U4, U8, WeightFormat, pack, padded
from headrace.errors import ModelFormatError
from headrace.model.quant_tensor import QuantTensor
from tests.backend.cpu_kernels import Matrix, native_format, random_shapes

pytestmark = pytest.mark.native


@st.composite
def quant_tensors(draw: st.DrawFn) -> QuantTensor:
    bits = draw(st.integers(1, 8))
    group = draw(st.sampled_from([16, 32, 48, 64, 96, 128]))
    groups = draw(st.integers(1, max(1, 256 // group)))
    if draw(st.booleans()) and group * groups % 32 == 0:  # one scale a row
        group, groups = group * groups, 1
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale_type = draw(st.sampled_from([np.float16, np.float32]))
    codes = rng.integers(0, 2**bits, (n, group * groups)).astype(np.uint8)
    scale = rng.uniform(-0.1, 0.1, (n, groups)).astype(scale_type)
    offset = draw(st.sampled_from(["minimum", "zero point", "zero points"]))
    if offset == "zero points":
        zero_points = rng.integers(0, 256, (n, groups)).astype(np.uint8)
        return QuantTensor(codes, scale, bits, group, zero_points=zero_points)
    minimum = rng.uniform(-1, 1, (n, groups)).astype(scale_type) if offset == "minimum" else None
    return QuantTensor(codes, scale, bits, group, draw(st.sampled_from([0, 1, 8, 32, 128, 255])), minimum)


@random_shapes
@given(tensor=quant_tensors())
def test_quantised_tensors_come_back(isa: str, tensor: QuantTensor) -> None:
    """Through the embedding kernel exactly, but where minimum and zero point become one; through the matrix
    product of the identity within the rounding of its activations."""
    matrix, dense = Matrix.of(tensor), tensor.dequantize()
    ids = np.arange(len(dense), dtype=np.int32)
    back = matrix.rows(ids, 1.0, isa)
    folded = tensor.minimum is not None and tensor.zero_point != 0
    size = np.abs(tensor.scale.astype(np.float64)).max() * 512 + 1
    np.testing.assert_allclose(back, dense, rtol=0, atol=2e-7 * size if folded else 0)
    product = matrix.times(np.eye(dense.shape[1], dtype=np.float32), isa)
    np.testing.assert_allclose(product.T, dense, rtol=0, atol=1e-6 * size)


@random_shapes
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 70),
    kind=st.sampled_from(["float16", "bfloat16", "float32"]),
    seed=st.integers(0, 99),
)
def test_dense_tensors_come_back_exactly(isa: str, n: int, k: int, kind: str, seed: int) -> None:
    dtype: Any = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    tensor = np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)
    matrix = Matrix.of(tensor)
    np.testing.assert_array_equal(matrix.rows(np.arange(n, dtype=np.int32), 1.0, isa), matrix.dense)
    np.testing.assert_array_equal(matrix.times(np.eye(k, dtype=np.float32), isa).T, matrix.dense)


def test_formats_are_the_narrowest_that_hold_the_tensor() -> None:
    """Twice the bytes are half the speed."""

    def kind(bits: int, group: int) -> int:
        scale = np.ones((2, 128 // group), np.float16)
        return pack(QuantTensor(np.zeros((2, 128), np.uint8), scale, bits, group), "w")[0].kind

    assert [kind(bits, 32) for bits in range(1, 9)] == [U4] * 4 + [U8] * 4
    assert [kind(4, group) for group in (16, 64, 128)] == [U4, U4, U4]
    halves = np.array([[0.5, 1.5, -3]])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert pack(halves.astype(dtype), "w")[0].kind == BF16
    assert pack(np.array([[0.1]], np.float32), "w")[0].kind == F32
    assert pack(np.array([[0.1]], np.float16), "w")[0].kind == F32


@random_shapes
@given(n=st.integers(1, 40), k=st.integers(1, 70), seed=st.integers(0, 99))
def test_float8_comes_back_exactly(isa: str, n: int, k: int, seed: int) -> None:
    """Every number of e4m3, the smallest ones too; its product with a scale is rounded once."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), n * k)).reshape(n, k)
    codes[codes & 0x7F == 0x7F] = 1
    scale = rng.uniform(-2, 2, (n, 1)).astype(np.float32)
    matrix = Matrix.of(QuantTensor(codes, scale, 8, k, float8=True))
    assert matrix.form.kind == F8
    back = matrix.rows(np.arange(n, dtype=np.int32), 1.0, isa)
    np.testing.assert_array_equal(back, matrix.dense)
    np.testing.assert_array_equal(matrix.times(np.eye(k, dtype=np.float32), isa).T, matrix.dense)


def test_float8_scales_beyond_the_kernels_are_refused_by_name() -> None:
    scale = np.full((1, 1), 3e38, np.float32)
    with pytest.raises(ModelFormatError, match=r"layers\.0\.up\.weight.*too large"):
        pack(QuantTensor(np.zeros((1, 8), np.uint8), scale, 8, 8, float8=True), "layers.0.up.weight")


def test_zero_points_that_no_kernel_holds(isa: str) -> None:
    """They become minimums; the program refused them after everything had been packed."""
    for zero_point in (-3, 256, 1000):
        codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 16
        tensor = QuantTensor(codes, np.full((2, 1), 0.5, np.float16), 4, 32, zero_point)
        got = Matrix.of(tensor).rows(np.arange(2, dtype=np.int32), 1.0, isa)
        np.testing.assert_array_equal(got, tensor.dequantize())


@pytest.mark.parametrize("group", [1, 8, 24, 40, 100])
def test_group_sizes_without_a_kernel_are_refused_by_name(group: int) -> None:
    tensor = QuantTensor(np.zeros((2, 2 * group), np.uint8), np.ones((2, 2), np.float16), 4, group)
    with pytest.raises(ModelFormatError, match=rf"layers\.3\.up\.weight.*{group}"):
        pack(tensor, "layers.3.up.weight")


@pytest.mark.parametrize(
    "form",
    [WeightFormat(BF16), WeightFormat(F32), WeightFormat(F8, 4), WeightFormat(U4, 4), WeightFormat(U8, 4)]
    + [
        WeightFormat(kind, size, offsets, group)
        for kind in (U4, U8)
        for size in (2, 4)
        for offsets in (0, 1, 2)
        for group in (16, 32)
    ],
)
def test_both_sides_agree_on_sizes(form: WeightFormat) -> None:
    assert form.known()
    assert form.tile_bytes() == native_format(form).tile_bytes()
    for n, k in ((1, 32), (17, 64), (48, 320)):
        assert form.matrix_bytes(n, k) == native_format(form).matrix_bytes(n, k)
    if form.group:
        assert form.matrix_bytes(17, 64) == 4 * form.tile_bytes()
    assert [padded(k) for k in (1, 31, 32, 33)] == [32, 32, 32, 64]


def test_quantised_rows_have_the_documented_size() -> None:
    assert [_native.quant_row_bytes(k) for k in (32, 64, 576)] == [128, 192, 1472]
