"""Estimates and paired tests against values worked out by hand or by another route."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headrace.lab.evaluate.statistics import bootstrap_interval, compare, mcnemar, mean, perplexity


def test_mean_and_standard_error() -> None:
    found = mean([1, 2, 3, 4])
    assert (found.value, found.n) == (2.5, 4)
    assert found.se == pytest.approx(math.sqrt(5 / 3 / 4))
    assert mean([3.0]).se is None
    with pytest.raises(ValueError, match="at least one"):
        mean([])


def test_perplexity_of_equal_losses_has_no_error() -> None:
    found = perplexity([math.log(7)] * 5)
    assert found.value == pytest.approx(7)
    assert found.se == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (0, 1, 1.0), (0, 5, 2 / 32), (1, 9, 22 / 1024), (5, 5, 1.0), (2, 6, 2 * 37 / 256)],
)
def test_mcnemar(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p)
    assert mcnemar(lost, gained) == pytest.approx(p)


def test_mcnemar_counts_every_way_that_is_no_likelier() -> None:
    """By enumeration: of all outcomes of 9 fair flips, those as lopsided as 2 to 7 or more."""
    outcomes = [sum(flips) for flips in itertools.product((0, 1), repeat=9)]
    extreme = sum(1 for count in outcomes if min(count, 9 - count) <= 2)
    assert mcnemar(7, 2) == pytest.approx(extreme / 2**9)


def test_bootstrap_approaches_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0.3, 2.0, 400)
    low, high = bootstrap_interval(values, seed=3)
    se = values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - 1.96 * se, abs=0.1 * se)
    assert high == pytest.approx(values.mean() + 1.96 * se, abs=0.1 * se)
    assert (low, high) == bootstrap_interval(values, seed=3)


def test_comparison_counts_flips() -> None:
    found = compare([1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1], seed=0)
    assert (found.gained, found.lost) == (1, 2)
    assert found.p_value == pytest.approx(1.0)
    assert found.difference.value == pytest.approx(-1 / 6)
    assert found.low <= found.difference.value <= found.high
    assert compare([0.5, 0.2], [0.4, 0.3], seed=0).p_value is None
    with pytest.raises(ValueError, match="paired"):
        compare([1], [1, 0], seed=0)
