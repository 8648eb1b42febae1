"""Products of many rows of floats with low-bit weights in a compiled loop, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.plain import column_jobs
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct
from fxq.backends.plain.panel_product import PanelProduct
from fxq.backends.plain.weight_only import WeightOnlyLinear, packing_options
from fxq.common.timed_calls import threads_set_to
from tests.backends.plain.test_few_rows import EXACT, WIDTHS, needs_numba, stored

pytestmark = pytest.mark.any_cpu

LOOPS, PANEL_LOOPS = loops("few_rows_loops"), loops("panel_loops")


def panels(weight, bias=None):
    return PanelProduct(PANEL_LOOPS, FewRowsProduct(LOOPS, weight, bias))


def of_float64(x, weight, bias=None):
    """Product with the dequantized weight in float64, and the sum of the magnitudes of its terms."""
    real = weight.floats(weight.empty()).double()
    added = torch.zeros(len(real)).double() if bias is None else bias.double()
    return x.double() @ real.T + added, x.double().abs() @ real.abs().T + added.abs()


def check(x, weight, bias=None):
    result, magnitude = of_float64(x, weight, bias)
    y = panels(weight, bias)(x)
    # float32: 256 terms are added in turn, then sums of 256 (measured: at most 3e-7); the loop rounds weights once less
    assert ((y.double() - result).abs() <= 2e-6 * magnitude + 1e-5).all()
    return y


def test_the_smallest_number_of_rows_is_that_of_the_smallest_tiles():
    if PANEL_LOOPS is not None:
        assert MAX_ROWS >= PANEL_LOOPS.MIN_ROWS
        tiles = [-(-rows // PANEL_LOOPS.ROWS) for rows in range(400)]
        smallest = PANEL_LOOPS.MIN_ROWS // 2
        assert all(rows // tiles[rows] >= smallest for rows in range(PANEL_LOOPS.MIN_ROWS, 400))


@needs_numba
@settings(max_examples=36, deadline=None)
@given(
    rows=st.integers(MAX_ROWS + 1, 50), columns=st.integers(32, 700), outputs=st.integers(1, 70),
    bits=st.sampled_from(WIDTHS), signed=st.booleans(), per=st.sampled_from(["tensor", "channel", 32, 64, 128]),
    with_zero=st.booleans(), with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(rows, columns, outputs, bits, signed, per, with_zero, with_bias, seed):
    columns = columns if bits != 4 else max(columns, 64) if isinstance(per, str) else 64 * (columns // 32)
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    check(torch.randn(rows, columns), weight, torch.randn(outputs) if with_bias else None)


@needs_numba
@pytest.mark.parametrize("bits", WIDTHS)
def test_blocks_of_rows_and_of_columns(bits):
    """More rows than a block, more columns of the result than panels that are unpacked at once."""
    check(torch.randn(300, 576), stored(150, 576, bits, True, 64, True), torch.randn(150))


@needs_numba
@pytest.mark.parametrize("bits", [4, 8])
def test_a_result_does_not_depend_on_other_rows(bits):
    product, x = panels(stored(40, 640, bits, True, 32, True), torch.randn(40)), torch.randn(250, 640)
    y = product(x)
    for rows in (17, 19, 31, 100, 193):
        torch.testing.assert_close(product(x[-rows:]), y[-rows:], **EXACT)


@needs_numba
def test_rows_of_any_shape_and_layout():
    weight = stored(20, 96, 4, True, "channel", False)
    x = torch.randn(96, 3, 30).permute(2, 1, 0)
    assert check(x, weight).shape == (30, 3, 20)


@needs_numba
def test_a_row_that_is_not_finite_leaves_others_alone():
    x = torch.randn(20, 96)
    x[3, 5], x[8, 95] = float("nan"), float("inf")
    finite = panels(stored(5, 96, 8, True, "channel", False))(x).isfinite().all(1)
    assert finite.tolist() == [k not in (3, 8) for k in range(20)]


@needs_numba
@pytest.mark.parametrize("outputs", [5, 100, 333])
def test_threads_compute_the_same_numbers(outputs, monkeypatch):
    product, x = panels(stored(outputs, 192, 4, True, 32, True), torch.randn(outputs)), torch.randn(19, 192)
    alone, calls = product(x), []
    monkeypatch.setattr(column_jobs, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    for threads in (2, 3, 7):
        with threads_set_to(threads):
            torch.testing.assert_close(product(x), alone, **EXACT)
    assert calls == ([True] * 3 if outputs > 128 else [])  # each thread has 64 columns at least
    monkeypatch.setattr(column_jobs, "run_together", lambda *_: False)  # no thread is free
    with threads_set_to(2):
        torch.testing.assert_close(product(x), alone, **EXACT)


@needs_numba
def test_layers_use_it_for_many_rows_where_it_is_faster(monkeypatch):
    weight = stored(37, 128, 4, True, 32, True)
    layer, unused = (
        WeightOnlyLinear(
            op="linear", settings={}, axis=1, block=32, weight=weight.values, weight_scale=weight.scale,
            weight_zero_point=weight.zero_point, bias=torch.ones(37), **packing_options(weight.packing, [(128,)]),
        )
        for _ in range(2)
    )  # fmt: skip
    x = torch.randn(2, 20, 128)
    result, magnitude = of_float64(x, weight, layer.bias)
    monkeypatch.setattr(loops("split_float_loops"), "IS_FASTER", False)
    monkeypatch.setattr(PANEL_LOOPS, "IS_FASTER", True)
    assert layer.many_rows(x[0, :MAX_ROWS]) is None and layer.many_rows(x[..., :96]) is None
    calls, call = [], PanelProduct.__call__
    monkeypatch.setattr(PanelProduct, "__call__", lambda self, x: calls.append(x.shape) or call(self, x))
    for run in (layer, layer.bind(x)):
        assert ((run(x).double() - result).abs() <= 2e-6 * magnitude).all()
    assert calls == [x.shape] * 2
    monkeypatch.setattr(PANEL_LOOPS, "IS_FASTER", False)
    assert ((unused(x).double() - result).abs() <= 2e-6 * magnitude).all()
    assert len(calls) == 2
