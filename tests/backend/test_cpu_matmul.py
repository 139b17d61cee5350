"""Matrix products and embeddings of every packed format, in every kernel path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backend.batch import Float32
from headrace.backend.cpu.packing import F32
from headrace.model.quant_tensor import QuantTensor
from tests.backend.cpu_kernels import (
    FORMATS,
    KINDS,
    WIDE,
    Matrix,
    bf16,
    granule,
    quantise,
    random_shapes,
    random_tensor,
)

pytestmark = pytest.mark.native


@st.composite
def product(draw: st.DrawFn, kind: str) -> tuple[Matrix, Float32]:
    """A matrix with n and k of all sorts, and 1 … 20 rows, some with an outlier channel."""
    n, rows = draw(st.integers(1, 70)), draw(st.integers(1, 20))
    k = draw(st.integers(1, 300 // granule(kind))) * granule(kind)
    seed = draw(st.integers(0, 2**32 - 1))
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    if draw(st.booleans()):
        x[:, seed % k] *= 40
    return Matrix.of(random_tensor(kind, n, k, seed)), x


def seen(matrix: Matrix, x: Float32, isa: str) -> Any:
    """The activations as the kernel sees them, float64 ``[rows, k]``."""
    if matrix.form.dense:
        narrow = isa in ("avx512_bf16", "avx512_amx") and matrix.form.kind != F32
        return (bf16(x) if narrow else x).astype(np.float64)
    return quantise(x, isa).values()[:, : x.shape[1]]


@pytest.mark.parametrize("kind", KINDS)
@random_shapes
@given(data=st.data())
def test_product(isa: str, kind: str, data: st.DataObject) -> None:
    """Only float32 rounding lies between the kernel and float64 over the same integers."""
    matrix, x = data.draw(product(kind))
    activations, weights = seen(matrix, x, isa), matrix.dense.astype(np.float64)
    got = matrix.times(x, isa)
    # A minimum or zero point cancels against its codes: bound by what was added up, not by what came out.
    reach = np.abs(activations) @ np.abs(weights).T
    if matrix.form.offsets:
        reach += 2 * np.abs(activations).sum(axis=1, keepdims=True)
    assert (np.abs(got - activations @ weights.T) <= 2e-6 * reach + 1e-30).all()

    before = np.random.default_rng(0).standard_normal(got.shape).astype(np.float32)
    np.testing.assert_array_equal(matrix.times(x, isa, before), got + before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 96, 224])
def test_bits_depend_neither_on_rows_nor_on_tiles(isa: str, kind: str, k: int) -> None:
    """Rows are computed eight, four, two, one at a time, dense tiles four or one: all must add up alike."""
    tensor = random_tensor(kind, 100, k, 3)
    matrix = Matrix.of(tensor)
    x = np.random.default_rng(4).standard_normal((20, k)).astype(np.float32)
    x[:, 5] *= 40
    together = matrix.times(x, isa)
    for rows in (1, 2, 3, 4, 7, 8, 9, 15):
        for start in (0, 3, 20 - rows):
            part = matrix.times(x[start : start + rows], isa)
            np.testing.assert_array_equal(part, together[start : start + rows])
    for first, last in ((0, 16), (32, 49), (64, 100), (96, 97)):
        rows_of = np.arange(first, last)
        part = tensor.take_rows(rows_of) if isinstance(tensor, QuantTensor) else tensor[rows_of]
        np.testing.assert_array_equal(Matrix.of(part).times(x, isa), together[:, first:last])


@pytest.mark.parametrize("kind", ["f8", "bf16"])
def test_bits_are_those_of_one_row_however_many_stretches_and_rows(isa: str, kind: str) -> None:
    """Float8 is widened once for up to 48 rows; one row multiplies it as it comes."""
    for k in (64, 130, 257):
        matrix = Matrix.of(random_tensor(kind, 84, k, 5))
        x = np.random.default_rng(6).standard_normal((101, k)).astype(np.float32)
        before = np.random.default_rng(7).standard_normal((101, 84)).astype(np.float32)
        together = matrix.times(x, isa, before)
        for row in (0, 46, 47, 48, 49, 95, 96, 100):
            alone = matrix.times(x[row : row + 1], isa, before[row : row + 1])
            np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_in_blocks_of_sixteen(isa: str, kind: str) -> None:
    """Matrix registers take sixteen rows, or at least eight; all bits are those of one row."""
    matrix = Matrix.of(random_tensor(kind, 40, 352, 8))
    x = np.random.default_rng(9).standard_normal((61, 352)).astype(np.float32)
    x[::3, 40] *= 40
    together = matrix.times(x, isa)
    alone = np.concatenate([matrix.times(x[row : row + 1], isa) for row in range(len(x))])
    np.testing.assert_array_equal(together, alone)
    if isa == "avx512_amx":  # integers are exact, and what follows is the same
        np.testing.assert_array_equal(together, matrix.times(x, "avx512"))


@random_shapes
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 0]),
    offset=st.sampled_from(["zero point", "minimum", "zero points"]),
    n=st.integers(1, 40),
    groups=st.integers(1, 6),
    rows=st.integers(1, 20),
    wide=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_integer_arithmetic_is_exact(
    isa: str, bits: int, group: int, offset: str, n: int, groups: int, rows: int, wide: bool, seed: int
) -> None:
    """Scales of one: every float is a small integer, so all paths must give the true result, bit for bit."""
    rng = np.random.default_rng(seed)
    k = 32 * groups
    x = rng.integers(-127, 128, (rows, k))
    x[:, ::32] = 127  # scale 1
    if wide and groups > 4:
        x[:, 32:64] = rng.integers(-1, 2, (rows, 32)) * 32258 + rng.integers(0, 2, (rows, 32))
        x[:, 32] = WIDE * 127
        x = np.clip(x, -WIDE * 127, WIDE * 127)
    largest = 2**bits if bits == 4 or not wide else 16
    codes = rng.integers(0, largest, (n, k)).astype(np.uint8)
    group = group or k
    scale = np.ones((n, k // group), np.float16)
    zero = 8 if offset == "zero point" else 0
    minimum = -rng.integers(0, 4, scale.shape).astype(np.float16) if offset == "minimum" else None
    zero_points = None
    if offset == "zero points":
        zero_points = rng.integers(0, 16, scale.shape).astype(np.uint8)
    tensor = QuantTensor(codes, scale, bits, group, zero, minimum, zero_points)
    floats = x.astype(np.float32)
    np.testing.assert_array_equal(quantise(floats, isa).integers(), x)
    expected = x @ tensor.dequantize().astype(np.int64).T
    assert np.abs(expected).max() < 2**24
    np.testing.assert_array_equal(Matrix.of(tensor).times(floats, isa), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_largest_codes_and_activations(isa: str, kind: str) -> None:
    """255 times 127 twice saturates a 16-bit sum: the 8-bit product of AVX2 must not make one."""
    tensor = random_tensor(kind, 16, 64, 1)
    if isinstance(tensor, QuantTensor):
        tensor.codes[...] = 0x7E if tensor.float8 else 2**tensor.bits - 1
    matrix = Matrix.of(tensor)
    for x in (np.ones((3, 64), np.float32), -np.ones((3, 64), np.float32)):
        expected = seen(matrix, x, isa) @ matrix.dense.T.astype(np.float64)
        np.testing.assert_allclose(matrix.times(x, isa), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@random_shapes
@given(data=st.data())
def test_embedding_rows_are_the_dequantised_ones(isa: str, kind: str, data: st.DataObject) -> None:
    """Exactly: two roundings in the same order, and one for the scale."""
    matrix, _ = data.draw(product(kind))
    vocab = len(matrix.dense)
    ids = np.array(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20)), np.int32)
    scale = np.float32(data.draw(st.sampled_from([1.0, 25.25, 0.1])))
    np.testing.assert_array_equal(matrix.rows(ids, float(scale), isa), matrix.dense[ids] * scale)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "u" in kind])
def test_a_scale_that_is_nan_spoils_its_own_output_only(isa: str, kind: str) -> None:
    """A damaged weight must be seen in the logits, and only where it is."""
    tensor = random_tensor(kind, 20, 64, 1)
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    clean = Matrix.of(tensor).times(x, isa)
    tensor.scale[7, -1] = np.nan
    got = Matrix.of(tensor).times(x, isa)
    assert np.isnan(got[:, 7]).all()
    np.testing.assert_array_equal(np.delete(got, 7, axis=1), np.delete(clean, 7, axis=1))
    poisoned = x.copy()
    poisoned[2, 40] = np.nan
    rows = Matrix.of(random_tensor(kind, 20, 64, 1)).times(poisoned, isa)
    assert np.isnan(rows[2]).all()
    np.testing.assert_array_equal(np.delete(rows, 2, axis=0), np.delete(clean, 2, axis=0))
