"""Activations to integers: error within the step, sums exact, nothing non-finite hidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backend.batch import Float32
from headrace.backend.cpu import _native
from tests.backend.cpu_kernels import WIDE, quantise, random_shapes

pytestmark = pytest.mark.native


@st.composite
def activations(draw: st.DrawFn) -> Float32:
    """Rows of unlike magnitudes with outlier channels, zero groups and zero rows among them."""
    rows, width = draw(st.integers(1, 20)), draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-6, 7, (rows, 1)).astype(np.float32)
    if draw(st.booleans()):
        x[:, rng.integers(width)] *= np.float32(draw(st.sampled_from([30, 1000, -50])))
    if draw(st.booleans()):
        x[:, rng.integers(width) // 32 * 32 :][:, :32] = 0
    if draw(st.booleans()):
        x[rng.integers(rows)] = 0
    return x


@random_shapes
@given(x=activations())
def test_error_is_within_half_a_step_and_sums_are_exact(isa: str, x: Float32) -> None:
    """Zero points and minimums are applied through the sums: one off would shift whole outputs."""
    rows = quantise(x, isa)
    groups = np.zeros((len(x), rows.k), np.float32)
    groups[:, : x.shape[1]] = x
    largest = np.abs(groups).reshape(len(x), -1, 32).max(axis=2)
    step = largest.astype(np.float64) / 127 / np.where(rows.wide, WIDE, 1)
    np.testing.assert_allclose(rows.scale, step, rtol=1e-6)
    error = np.abs(rows.values() - groups).reshape(len(x), -1, 32).max(axis=2)
    # The coarse digit is rounded from a product that is itself rounded: a hair more than half a step.
    assert (error <= step * 0.51 + largest * 2e-7).all()
    halves = rows.integers().reshape(len(x), -1, 16).sum(axis=2)
    np.testing.assert_array_equal(rows.sum, halves)
    whole = halves.reshape(len(x), -1, 2).sum(axis=2)
    np.testing.assert_array_equal(rows.scaled_sum, rows.scale * whole.astype(np.float32))
    assert not rows.integers()[:, x.shape[1] :].any()


@random_shapes
@given(x=activations())
def test_paths_agree_in_every_byte(isa: str, x: Float32) -> None:
    np.testing.assert_array_equal(quantise(x, isa).raw, quantise(x, "portable").raw)


@random_shapes
@given(x=activations())
def test_a_row_does_not_depend_on_its_neighbours(isa: str, x: Float32) -> None:
    together = quantise(x, isa).raw
    for row in range(len(x)):
        np.testing.assert_array_equal(quantise(x[row : row + 1], isa).raw[0], together[row])


def test_only_outlier_groups_are_wide(isa: str) -> None:
    """Plain rows must not pay for two bytes; an outlier group must, or its step drowns the row."""
    x = np.random.default_rng(1).uniform(-1, 1, (2, 576)).astype(np.float32)
    x[1, 100] = 60.0
    wide = quantise(x, isa).wide
    assert not wide[0].any()
    assert wide[1].tolist() == [group == 100 // 32 for group in range(18)]


def test_zero_rows(isa: str) -> None:
    rows = quantise(np.zeros((3, 70), np.float32), isa)
    assert not rows.raw.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 33, 69])
def test_what_is_not_finite_surfaces(isa: str, poison: float, at: int) -> None:
    """A NaN that became an ordinary number would be sampled from as if nothing had happened."""
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(np.float32)
    x[1, at] = poison
    rows = quantise(x, isa)
    bad = np.zeros((3, 3), np.bool_)
    bad[1, at // 32] = True
    np.testing.assert_array_equal(np.isnan(rows.scale), bad)
    np.testing.assert_array_equal(np.isnan(rows.scaled_sum), bad)
    np.testing.assert_array_equal(rows.raw[[0, 2]], quantise(x[[0, 2]], isa).raw)


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38, 2.9e-37, 1e-36])
def test_almost_zero_is_not_noise(isa: str, tiny: float) -> None:
    """127 / 1e-38 overflowed: every code became -128, in some paths only."""
    x = np.full((1, 32), tiny, np.float32)
    rows = quantise(x, isa)
    assert (np.abs(rows.values() - x) <= 1e-35).all()
    np.testing.assert_array_equal(rows.raw, quantise(x, "portable").raw)


def test_largest_floats(isa: str) -> None:
    """The squares that find outliers overflow; the groups themselves must not."""
    x = np.full((1, 64), 3e38, np.float32)
    x[0, :32] = -1e30
    np.testing.assert_allclose(quantise(x, isa).values(), x, rtol=0.005)


def test_wrong_shapes_are_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="quantise"):
        _native.quantise(isa, np.zeros((2, 32), np.float32), np.zeros((2, 32), np.uint8))
