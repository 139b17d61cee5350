"""Paged attention against float64 softmax over the same rounded keys and values, in every kernel path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.backend.batch import BLOCK_SIZE, Float32
from headrace.backend.cpu import _native
from tests.backend.cpu_kernels import POOLS, Float64, bf16, random_shapes

pytestmark = pytest.mark.native


@pytest.fixture(params=POOLS)
def kv(request: pytest.FixtureRequest) -> str:
    """What keys and values are kept in."""
    name: str = request.param
    return name


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 1
    group: int = 3
    head_dim: int = 64
    context: int = 100
    rows: int = 1  # the last tokens of the context ask
    window: int = 0
    softcap: float = 0.0


class Case:
    """A sequence in a pool whose other slots are NaN, its blocks in random order."""

    def __init__(self, shape: Shape, seed: int = 0, kv: str = "bfloat16") -> None:
        rng = np.random.default_rng(seed)
        self.shape = s = shape
        self.heads = s.kv_heads * s.group
        needed = -(-s.context // BLOCK_SIZE)
        self.table = rng.permutation(needed + 3)[:needed].astype(np.int32)
        at = np.arange(s.context)
        self.slots = self.table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        k, v = rng.standard_normal((2, s.context, s.kv_heads, s.head_dim)).astype(np.float32)
        self.pool = POOLS[kv](needed + 3, s.kv_heads, s.head_dim)
        self.k, self.v = self.pool.write(self.slots, k, v)
        # Scores of a few units: the softmax is neither flat nor a single peak.
        scale = 2 / s.head_dim**0.5
        # bf16 values: a path that multiplies bf16 rounds nothing but the weights.
        self.q = bf16((rng.standard_normal((s.rows, self.heads * s.head_dim)) * scale).astype(np.float32))
        self.positions = np.arange(s.context - s.rows, s.context, dtype=np.int32)

    def run(self, isa: str, rows: slice = slice(None)) -> Float32:
        s = self.shape
        q = self.pool.queries(self.q[rows].reshape(-1, self.heads, s.head_dim)).reshape(-1, self.q.shape[1])
        out = np.full_like(q, np.nan)
        arrays = (self.pool.data, self.table, np.ascontiguousarray(self.positions[rows]))
        settings = (s.window, s.softcap)
        _native.attention(isa, q, self.heads, s.kv_heads, *arrays, *settings, out, int8=self.pool.int8)
        return out

    def expected(self) -> Float64:
        s = self.shape
        q = self.q.astype(np.float64).reshape(s.rows, s.kv_heads, s.group, s.head_dim)
        scores = np.einsum("rhgd,chd->rhgc", q, self.k)
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        distance = self.positions[:, None] - np.arange(s.context)
        visible = (distance >= 0) & ((distance < s.window) if s.window else True)
        scores = np.where(visible[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("rhgc,chd->rhgd", weights, self.v).reshape(s.rows, -1)


def assert_right(case: Case, isa: str) -> None:
    """Float32 accuracy, or that of rounded weights: to bf16 where the path does, to 14 bits over int8."""
    tolerance = 3e-6
    if case.pool.int8:
        tolerance = 1e-3
    elif isa in ("avx512_bf16", "avx512_amx"):
        tolerance = 6e-3
    np.testing.assert_allclose(case.run(isa), case.expected(), atol=tolerance, rtol=1e-5)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    context = draw(st.integers(1, 700))
    return Shape(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        head_dim=draw(st.sampled_from([16, 18, 20, 64, 80, 128, 256])),
        context=context,
        rows=draw(st.integers(1, min(20, context))),
        window=draw(st.one_of(st.just(0), st.integers(1, context + 5))),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 50.0])),
    )


@random_shapes
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
@example(Shape(context=1700, rows=18), 1)  # four partitions
@example(Shape(context=1100, rows=20, window=513, head_dim=20), 2)
@example(Shape(group=20, context=300, rows=3), 3)  # more heads than one unit's rows divide
@example(Shape(group=64, context=130, rows=2, head_dim=16), 4)
@example(Shape(context=512, rows=16, window=1), 5)
def test_attention(isa: str, kv: str, shape: Shape, seed: int) -> None:
    """Unused slots and foreign blocks hold NaN: one that is read, even with weight zero, shows."""
    assert_right(Case(shape, seed, kv), isa)


@pytest.mark.parametrize("edge", [16, 128, 512, 1024])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_edges_of_blocks_tiles_and_partitions(isa: str, kv: str, edge: int, step: int) -> None:
    for window in (0, 5, 128, edge):
        shape = Shape(context=edge + step, rows=4, window=window, head_dim=16)
        assert_right(Case(shape, edge, kv), isa)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9, 20])
@pytest.mark.parametrize("window", [0, 40, 200])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, kv: str, group: int, window: int) -> None:
    """However a prompt is chunked, each of its rows must come out in the same bits."""
    shape = Shape(kv_heads=2, group=group, head_dim=20, context=530, rows=20, window=window)
    case = Case(shape, group, kv)
    together = case.run(isa)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 20), slice(19, 20), slice(1, 17)):
        np.testing.assert_array_equal(case.run(isa, rows), together[rows])


@pytest.mark.parametrize("group", [1, 3, 5])
@pytest.mark.parametrize("window", [0, 6])
def test_a_row_sees_nothing_of_what_it_may_not_see(isa: str, kv: str, group: int, window: int) -> None:
    """A weight of zero times NaN is NaN: rows before a poisoned token were poisoned by the rows beside them,
    and so were the cached blocks that other sequences share."""
    case = Case(Shape(group=group, context=140, rows=20, window=window), 1, kv)
    clean = case.run(isa)
    poisoned = 128
    nothing = np.full((1, 1, 64), np.nan, np.float32)
    case.pool.write(case.slots[poisoned : poisoned + 1], nothing, nothing)
    got = case.run(isa)
    sees = (case.positions >= poisoned) & ((case.positions < poisoned + window) if window else True)
    assert np.isnan(got[sees]).all()
    np.testing.assert_array_equal(got[~sees], clean[~sees])
    assert sees.any()
    assert not sees.all()


def test_one_overwhelming_score(isa: str, kv: str) -> None:
    """Softmax of scores hundreds apart: no overflow, and exactly the one value."""
    case = Case(Shape(context=600, rows=2), kv=kv)
    case.q *= 0
    case.q[:, ::64] = 100.0
    case.k[:, 0, 0] = -8
    case.k[77, 0, 0] = 8
    _, v = case.pool.write(case.slots, case.k.astype(np.float32), case.v.astype(np.float32))
    expected = np.tile(v[77, 0], 3)
    np.testing.assert_allclose(case.run(isa), np.stack([expected] * 2), rtol=1e-6)


def test_malformed_calls_are_refused(isa: str, kv: str) -> None:
    case = Case(Shape(), kv=kv)
    out = np.zeros_like(case.q)
    for heads, kv_heads, table, positions in (
        (3, 2, case.table, case.positions),
        (0, 1, case.table, case.positions),
        (3, 1, case.table + 1000, case.positions),
        (3, 1, case.table, case.positions + 1000),
        (3, 1, case.table, -case.positions),
    ):
        with pytest.raises(ValueError, match="attention"):
            arrays = (case.pool.data, table, positions)
            _native.attention(isa, case.q, heads, kv_heads, *arrays, 0, 0.0, out, int8=case.pool.int8)
