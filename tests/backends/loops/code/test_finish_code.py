"""Code that works on 16 floats, against float64. The precision of functions is tested in test_vectors.py."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import compiled
from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

finish_code = pytest.importorskip("fxq.backends.loops.code.finish_code", reason="needs Numba", exc_type=ImportError)
memory_loops = pytest.importorskip("fxq.backends.loops.code.memory_loops")

scale_sums, add_integers, round_floats = finish_code.scale_sums, finish_code.add_integers, finish_code.round_floats
sum_floats, sum_squares, normalize = finish_code.sum_floats, finish_code.sum_squares, finish_code.normalize
apply_function, FUNCTIONS = memory_loops.apply_function, len(memory_loops.FUNCTION_NAMES)
NAMES = (
    *memory_loops.FUNCTION_NAMES, "scale_sums", "add_integers", "round_floats", "sum_floats", "sum_squares",
    "normalize",
)  # fmt: skip


@compiled("i i i i i")
def call(index, a, b, c, d):
    """Call the function with this index in `NAMES`. Slopes, or bounds, of 16 floats are `b`."""
    if index < FUNCTIONS:
        apply_function(index, a, 16, b, b)
    elif index == FUNCTIONS:
        scale_sums(a, b, c, d)
    elif index == FUNCTIONS + 1:
        add_integers(a, b, c)
    elif index == FUNCTIONS + 2:
        round_floats(a, b, c, d)
    elif index == FUNCTIONS + 3:
        sum_floats(a, b, c)
    elif index == FUNCTIONS + 4:
        sum_squares(a, b, c)
    else:
        normalize(a, b, c, d)


def run(name, *arguments):
    """Call the function of this name with arrays and counts."""
    addresses = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    call(NAMES.index(name), *addresses, *[0] * (4 - len(addresses)))


def floats(*values):
    return np.array(values, np.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


SPECIAL = floats(math.nan, math.inf, -math.inf, 3e38, -3e38, -0.0, 0.0, 1e-45, -1e-45, 1, -1, 2.5, -2.5, 6, 7, -7)
SEEDS = st.integers(0, 99)


@pytest.mark.parametrize("name", EXACT)
def test_functions_of_16_floats_in_place(name):
    """And of no others."""
    x = normal(0, 18) * 3
    wanted = EXACT[name](torch.from_numpy(x[1:17]).double()).numpy()
    before = x.copy()
    run(name, x[1:])
    np.testing.assert_allclose(x[1:17], wanted, rtol=1e-6, atol=1e-6)
    assert x[[0, 17]].tolist() == before[[0, 17]].tolist()


@settings(deadline=None)
@given(seed=SEEDS, large=st.booleans())
def test_sums_times_a_scale(seed, large):
    most = 2**31 if large else 2**20
    sums = np.random.default_rng(seed).integers(-most, most, 16).astype(np.int32)
    scale, bias, out = normal(seed, 16) / 2**20, normal(seed + 1, 16), floats(*[5] * 18)
    run("scale_sums", sums, scale, bias, out[1:])
    exact = sums.astype(np.float64) * scale + bias
    np.testing.assert_allclose(out[1:17], exact, rtol=1e-6, atol=1e-6)
    assert out[[0, 17]].tolist() == [5, 5]


def test_integers_are_added_with_their_grid():
    x, integers = normal(0, 16), np.array([0, 1, 127, 128, 254, 255, *range(10, 20)], np.uint8)
    exact = x + (integers.astype(np.float64) * 0.037 - 1.5)
    run("add_integers", x, integers, floats(0.037, -1.5))
    np.testing.assert_allclose(x, exact, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(seed=SEEDS, low=st.integers(0, 100), high=st.integers(100, 255))
def test_floats_are_rounded(seed, low, high):
    """Quarters of the grid, which are exact, so that halves become even."""
    x, out = np.random.default_rng(seed).integers(-2000, 2000, 16).astype(np.float32) / 16, np.zeros(18, np.uint8)
    run("round_floats", x, floats(4, 37), floats(low, high), out[1:])
    assert out[1:17].tolist() == np.clip(np.rint(x * 4 + 37), low, high).tolist() and out[[0, 17]].tolist() == [0, 0]


def test_what_has_no_integer():
    """NaN becomes the lower bound."""
    out = np.zeros(16, np.uint8)
    run("round_floats", SPECIAL, floats(1, 20), floats(15, 250), out)
    assert out.tolist() == [15, 250, 15, 250, 15, 20, 20, 20, 20, 21, 19, 22, 18, 26, 27, 15]


@pytest.mark.parametrize("steep", [0.01, -2.0, 0.0, 1.0])
def test_bends(steep):
    x, slope = SPECIAL.copy(), np.linspace(steep, steep + 1, 16, dtype=np.float32)
    with np.errstate(over="ignore"):
        wanted = np.where(x < 0, x * slope, x)
    run("prelu", x, slope)
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize(("low", "high"), [(0, math.inf), (0, 6), (-1, 1), (-math.inf, 2.5)])
def test_bounds(low, high):
    """NaN stays."""
    x = SPECIAL.copy()
    run("clamp", x, floats(low, high))
    np.testing.assert_array_equal(x, SPECIAL.clip(low, high))


@settings(deadline=None)
@given(blocks=st.integers(0, 20), about=st.floats(-3, 3, width=32), seed=SEEDS)
def test_sums_of_floats(blocks, about, seed):
    x, result = normal(seed, 16 * blocks + 1), floats(9, about, 9)
    exact, squares = x[:-1].astype(np.float64), ((x[:-1].astype(np.float64) - about) ** 2).sum()
    run("sum_floats", x, blocks, result)
    np.testing.assert_allclose(result[0], exact.sum(), rtol=0, atol=1e-6 * np.abs(exact).sum())
    run("sum_squares", x, blocks, result)
    np.testing.assert_allclose(result[0], squares, rtol=1e-6)
    assert result[1:].tolist() == [np.float32(about), 9]


def test_a_sum_of_what_is_not_a_number():
    for name in ("sum_floats", "sum_squares"):
        for k in (0, 15, 31):
            x, result = normal(0, 32), floats(0, 0)
            x[k] = math.nan
            run(name, x, 2, result)
            assert math.isnan(result[0])


def test_norms():
    x, weight, bias = normal(0, 16), normal(1, 16), normal(2, 16)
    exact = (x.astype(np.float64) - 0.75) * 1.5 * weight + bias
    run("normalize", x, floats(1.5, 0.75), weight, bias)
    np.testing.assert_allclose(x, exact, rtol=1e-6, atol=1e-6)
