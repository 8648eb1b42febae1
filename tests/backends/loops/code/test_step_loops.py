"""Sigmoid and tanh of the compiled steps; the steps themselves are tested in x86/test_recurrent_loop.py."""

import numpy as np
import pytest

step_loops = pytest.importorskip("fxq.backends.loops.code.step_loops", reason="needs Numba", exc_type=ImportError)
X = np.concatenate([np.linspace(-20, 20, 40001), np.linspace(-1e-3, 1e-3, 2001), [-1e30, -100, 100, 1e30]])


def both(function, exact):
    """Of float32, one after the other, and in float64."""
    values = X.astype(np.float32)
    return np.array([function(x) for x in values]), exact(values.astype(np.float64))


@pytest.mark.parametrize(
    ("function", "exact"),
    [(step_loops._sigmoid, lambda x: 0.5 * (1 + np.tanh(x / 2))), (step_loops._tanh, np.tanh)],
    ids=["sigmoid", "tanh"],
)
def test_near_float64(function, exact):
    result, wanted = both(function, exact)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=3e-7)


def test_tanh_near_zero():
    """A small state is rounded on a grid as small, so that its digits count."""
    x = np.concatenate([np.linspace(-1, 1, 2001), 10.0 ** np.arange(-30, 0)]).astype(np.float32)
    result, wanted = np.array([step_loops._tanh(value) for value in x]), np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [step_loops._sigmoid, step_loops._tanh], ids=["sigmoid", "tanh"])
def test_what_is_not_a_number_stays_that(function):
    assert np.isnan(function(np.float32(np.nan)))
