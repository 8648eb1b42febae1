"""Functions whose machine code is written out."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from fxq.backends.loops.code.compiler import compiled

pytestmark = pytest.mark.any_cpu

numba = pytest.importorskip("numba")
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")
vectors = pytest.importorskip("fxq.backends.loops.code.vectors")


@machine_code.on_addresses
def weighted(b, first, count, out):
    """first + 2 * count + 4 * that which is at `out`, there."""
    before = vectors.load(b, out, vectors.INT64)
    total = b.add(first, b.add(b.mul(count, vectors.number(2)), b.mul(before, vectors.number(4))))
    vectors.store(b, total, out)


@compiled("i i i64*")
def run(first, count, out):
    out = numba.carray(out, 2)
    weighted(first, count, out.ctypes.data)
    weighted(out=out.ctypes.data + 8, first=count, count=first)


class Span(NamedTuple):
    first: Any
    last: Any


@machine_code.on_addresses
def length(b, span, out):
    vectors.store(b, b.sub(span.last, span.first), out)


@compiled("i i i")
def run_length(first, last, out):
    length(Span(first, last), out)


def test_named_tuples_are_arguments():
    out = np.array([0, 7])
    run_length(3, 2**40, out.ctypes.data)
    assert out.tolist() == [2**40 - 3, 7]


def test_arguments_have_their_order_and_names():
    out = np.array([7, -(2**40)])
    run(3, 5, out.ctypes.data)
    assert out.tolist() == [3 + 2 * 5 + 4 * 7, 5 + 2 * 3 - 4 * 2**40]


def test_it_is_documented():
    assert "that which is at `out`" in weighted.__doc__


def test_a_call_without_an_argument_is_refused():
    with pytest.raises(TypeError, match="missing a required argument: 'out'"):
        numba.njit(lambda first: weighted(first, first))(1)
