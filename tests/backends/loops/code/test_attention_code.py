"""Tiles of floats and exponentials of rows, against float64; whole steps are tested in test_attention_loops.py."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import compiled

pytestmark = pytest.mark.any_cpu

attention_code = pytest.importorskip(
    "fxq.backends.loops.code.attention_code", reason="needs Numba", exc_type=ImportError
)
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")

many_rows, four_rows, one_row = attention_code.many_rows, attention_code.four_rows, attention_code.one_row
exponentials_of_rows, ROWS_AT_ONCE = attention_code.exponentials_of_rows, attention_code.ROWS_AT_ONCE
exponentials, transpose_floats = attention_code.exponentials, attention_code.transpose_floats
TILE_COLUMNS, LANES = attention_code.TILE_COLUMNS, 16
SIZES = (attention_code.TILE_ROWS, 4, 1)
"""The rows of the tiles."""
SEEDS = st.integers(0, 99)


@compiled("i i i i i i i i")
def product(which, x, by_row, weight, by_depth, depth, out, to_row):
    """A tile of `SIZES[which]` rows."""
    if which == 0:
        many_rows(x, by_row, weight, by_depth, depth, out, to_row)
    elif which == 1:
        four_rows(x, by_row, weight, by_depth, depth, out, to_row)
    else:
        one_row(x, by_row, weight, by_depth, depth, out, to_row)


@compiled("i i i")
def run_exponentials(x, blocks, total):
    exponentials(x, blocks, total)


@compiled("i i i i")
def run_exponentials_of_rows(x, by_row, blocks, totals):
    exponentials_of_rows(x, by_row, blocks, totals)


@compiled("i i i i i")
def run_transpose(x, by_row, factor, out, to_row):
    transpose_floats(x, by_row, factor, out, to_row)


def run(function, *arguments):
    """Call one of them with arrays and counts."""
    function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_tiles_fit_what_the_cpu_can_do():
    assert (SIZES[0], TILE_COLUMNS) == machine_code.KIND.float_tile


# ---- products


def products(which, x, weight, depth):
    """A tile of arrays that may have more columns, and whose result lies among others that stay."""
    rows = SIZES[which]
    out = np.full((rows + 2, TILE_COLUMNS + 3), 77, np.float32)
    run(product, which, x, x.strides[0], weight, weight.strides[0], depth, out[1:, 2:], out.strides[0])
    inside = out[1:-1, 2:-1].copy()
    out[1:-1, 2:-1] = 77
    assert bool((out == 77).all())
    return inside


@settings(deadline=None)
@given(which=st.integers(0, 2), depth=st.integers(0, 70), gaps=st.tuples(*[st.integers(0, 5)] * 2), seed=SEEDS)
def test_products(which, depth, gaps, seed):
    x, weight = normal(seed, SIZES[which], depth + gaps[0]), normal(seed + 1, depth, TILE_COLUMNS + gaps[1])
    outcome = products(which, x, weight, depth)
    x_exact, weight_exact = x[:, :depth].astype(np.float64), weight[:, :TILE_COLUMNS].astype(np.float64)
    assert bool((np.abs(outcome - x_exact @ weight_exact) <= 1e-6 * (np.abs(x_exact) @ np.abs(weight_exact))).all())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_sums_of_integers_are_exact(which):
    random = np.random.default_rng(0)
    x, weight = (random.integers(-100, 100, s).astype(np.float32) for s in ((SIZES[which], 64), (64, TILE_COLUMNS)))
    assert products(which, x, weight, 64).tolist() == (x.astype(int) @ weight.astype(int)).tolist()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(which, value):
    x, weight = np.ones((SIZES[which], 5), np.float32), np.ones((5, TILE_COLUMNS), np.float32)
    x[-1, 2] = weight[3, 7] = value
    outcome = products(which, x, weight, 5)
    wanted = np.full_like(outcome, 5)
    wanted[-1] = wanted[:, 7] = value
    np.testing.assert_array_equal(outcome, wanted)


# ---- exponentials


def exponentials_of(x):
    """Exponentials of floats less their largest, in place, and their sum. Nothing around them changes."""
    memory, total = np.full(len(x) + 2, 77, np.float32), np.full(3, 77, np.float32)
    memory[1:-1] = x
    run(run_exponentials, memory[1:], len(x) // LANES, total[1:])
    assert [memory[0], memory[-1], total[0], total[2]] == [77] * 4
    return memory[1:-1], total[1]


def exact(x):
    """Exponentials in float64; those below 2**-120 are 0."""
    y = np.exp((x - x.max()).astype(np.float64))
    return np.where(y > 2.0**-120, y, 0.0)


@settings(deadline=None)
@given(
    blocks=st.integers(1, 9), wide=st.sampled_from([0, 1e-3, 1, 30, 1e4]), about=st.sampled_from([0, 5.5, -1e4, 1e4]),
    left_out=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_exponentials(blocks, wide, about, left_out, seed):
    """Also of minus infinity, whose exponential is 0."""
    x = normal(seed, LANES * blocks) * np.float32(wide) + np.float32(about)
    if left_out:
        x[np.random.default_rng(seed).random(len(x)) < 0.4] = -math.inf
        x[seed % len(x)] = np.float32(about)
    y, total = exponentials_of(x)
    np.testing.assert_allclose(y, exact(x), rtol=6e-6, atol=2.0**-119)  # a step of an exponent near -120, times ln(2)
    np.testing.assert_allclose(total, exact(x).sum(), rtol=1e-6)


@pytest.mark.parametrize("blocks", [1, 5])
def test_rows_at_once_are_as_one_by_one(blocks):
    """Bit by bit. The memory between two rows does not change."""
    x = np.full((ROWS_AT_ONCE, LANES * blocks + 3), 77, np.float32)
    x[:, :-3] = normal(blocks, ROWS_AT_ONCE, LANES * blocks) * np.float32(9)
    wanted, totals = [exponentials_of(row[:-3]) for row in x], np.empty(ROWS_AT_ONCE, np.float32)
    run_exponentials_of_rows(x.ctypes.data, x.strides[0], blocks, totals.ctypes.data)
    for row, total, (y, of_one) in zip(x, totals, wanted, strict=True):
        np.testing.assert_array_equal(row, [*y, 77, 77, 77])
        assert total == of_one


@pytest.mark.parametrize("lane", range(LANES))
def test_one_of_them_is_the_largest(lane):
    x = np.full(2 * LANES, -math.inf, np.float32)
    x[LANES + lane] = 3e38
    y, total = exponentials_of(x)
    assert total == 1 and y[LANES + lane] == 1 and bool((np.delete(y, LANES + lane) == 0).all())


@pytest.mark.parametrize("value", [0.0, -1e4, 1e4, -1e38])
def test_equal_floats(value):
    y, total = exponentials_of(np.full(48, value, np.float32))
    assert y.tolist() == [1] * 48 and total == 48


@pytest.mark.parametrize("lane", [0, 7, 31])
def test_a_sum_with_what_is_not_a_number(lane):
    x = normal(0, 32)
    x[lane] = math.nan
    y, total = exponentials_of(x)
    assert math.isnan(total) and math.isnan(y[lane])
    others = np.delete(x, lane)
    np.testing.assert_allclose(np.delete(y, lane), exact(others), rtol=1e-6)


# ---- columns of rows


@settings(deadline=None)
@given(gaps=st.tuples(*[st.integers(0, 9)] * 2), factor=st.floats(-3, 3, width=32), seed=SEEDS)
def test_rows_become_columns(gaps, factor, seed):
    x, by = normal(seed, LANES, LANES + gaps[0]), np.array([factor], np.float32)
    out = np.full((LANES + 2, LANES + 2 + gaps[1]), 77, np.float32)
    run(run_transpose, x, x.strides[0], by, out[1:, 1:], out.strides[0])
    wanted = np.full_like(out, 77)
    wanted[1 : LANES + 1, 1 : LANES + 1] = x[:, :LANES].T * by
    assert out.tolist() == wanted.tolist()


def test_columns_of_what_is_not_finite():
    x, out = normal(0, LANES, LANES), np.zeros((LANES, LANES), np.float32)
    x[3, 5], x[15, 0], x[8, 15] = math.nan, math.inf, -math.inf
    run(run_transpose, x, x.strides[0], np.ones(1, np.float32), out, out.strides[0])
    np.testing.assert_array_equal(out, x.T)
