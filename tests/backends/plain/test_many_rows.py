"""Products of many rows of integers with low-bit weights in a compiled loop, against float64."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.plain import column_jobs
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct
from fxq.backends.plain.many_rows import ManyRowsProduct, many_rows_refused
from fxq.common.timed_calls import threads_set_to
from tests.backends.plain.test_few_rows import EXACT, integers, needs_numba, packed, product, stored

pytestmark = pytest.mark.any_cpu

FEW_LOOPS, MANY_LOOPS = loops("few_rows_loops"), loops("many_rows_loops")


def many(weight, bias=None, arranges=False):
    return ManyRowsProduct(MANY_LOOPS, weight, FewRowsProduct(FEW_LOOPS, weight, bias), arranges)


@needs_numba
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(MAX_ROWS + 1, 40), words=st.integers(8, 40), outputs=st.integers(1, 70),
    form=st.sampled_from([*itertools.product((2, 3, 4, 5, 6), (True, False), (True, False)), (8, True, False)]),
    per=st.sampled_from(["tensor", "channel", 32, 64, 128]), with_bias=st.booleans(), per_row=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(rows, words, outputs, form, per, with_bias, per_row, seed):
    bits, signed, with_zero = form
    columns = 4 * words if bits != 4 else 8 * words if isinstance(per, str) else 64 * (words // 8)
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    bias = torch.randn(outputs) if with_bias else None
    arguments, real = integers(rows, columns, per_row)
    assert many_rows_refused(weight) is None
    result, _ = product(real, weight, bias)
    _, magnitude = product(arguments[0].double() * arguments[1] + arguments[2] * arguments[1], weight, bias)
    error = (many(weight, bias).of_integers(*arguments).double() - result).abs()
    assert (error <= 1e-6 * magnitude).all()  # float32 sums of some scaled sums of integers


@needs_numba
@pytest.mark.parametrize("outputs", [5, 32, 77])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_in_the_order_of_the_loop(outputs, bits):
    """Only one of 8 bits is arranged."""
    weight, bias = stored(outputs, 72, bits, True, "channel", False), torch.randn(outputs)
    arguments, _ = integers(MAX_ROWS + 5, 72, True)
    results = [many(weight, bias, arranges).of_integers(*arguments) for arranges in (False, True)]
    assert torch.equal(*results)


@needs_numba
def test_integers_are_multiplied_without_rounding():
    """Their largest values, too, which would saturate sums of pairs in 16 bits."""
    x, scale = torch.full((MAX_ROWS + 1, 512), 255, dtype=torch.uint8), torch.tensor(1.0)
    for bits, signed, value in ((8, True, -128), (8, True, 127), (4, True, -8), (4, False, 15), (6, False, 63)):
        weight = stored(40, 512, bits, signed, "channel", False)
        values = torch.full((40, 512), value, dtype=torch.int8 if signed else torch.uint8)
        weight = replace(weight, **packed(values, bits), scale=torch.ones(40))
        for zero in (0.0, 128.0, 255.0):
            y = many(weight).of_integers(x, scale, torch.tensor(zero))
            torch.testing.assert_close(y, torch.full((len(x), 40), 512.0 * value * (255 - zero)), **EXACT)


@needs_numba
def test_a_row_without_a_grid_leaves_others_alone():
    (x, scale, zero), _ = integers(20, 96)
    scale[3] = float("nan")
    y = many(stored(4, 96, 4, True, "channel", False)).of_integers(x, scale, zero)
    assert y[3].isnan().all() and y[[k for k in range(20) if k != 3]].isfinite().all()


@needs_numba
@pytest.mark.parametrize("outputs", [5, 100, 333])
def test_threads_compute_the_same_numbers(outputs, monkeypatch):
    loop = many(stored(outputs, 192, 4, True, 32, True), torch.randn(outputs))
    arguments, _ = integers(MAX_ROWS + 3, 192)
    alone, calls = loop.of_integers(*arguments), []
    monkeypatch.setattr(column_jobs, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    for threads in (2, 3, 7):
        with threads_set_to(threads):
            torch.testing.assert_close(loop.of_integers(*arguments), alone, **EXACT)
    assert calls == ([True] * 3 if outputs > 128 else [])  # each thread has 64 columns at least
    monkeypatch.setattr(column_jobs, "run_together", lambda *_: False)  # no thread is free
    with threads_set_to(2):
        torch.testing.assert_close(loop.of_integers(*arguments), alone, **EXACT)


@needs_numba
@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (stored(4, 34, 8, True, "channel", False), "not a multiple of 4"),
        (stored(4, 70, 4, True, "channel", False), "not a multiple of 4"),
        (stored(4, 70, 3, True, "channel", False), "not a multiple of 4"),
        (stored(4, 71, 4, True, "channel", False), "odd number"),
        (stored(4, 64, 8, True, "channel", True), "zero points"),
        (stored(4, 64, 8, False, "channel", False), "zero points"),
        (replace(stored(4, 64, 4, True, 32, True), zero_point=torch.full((4, 2), 8)), "no values of 4 bits"),
        (replace(stored(4, 64, 3, True, 32, True), zero_point=torch.full((4, 2), 4)), "no values of 3 bits"),
        (stored(4, 16, 8, True, "channel", False), "fewer than 32 values"),
    ],
)
def test_refused(weight, why):
    assert why in many_rows_refused(weight)
