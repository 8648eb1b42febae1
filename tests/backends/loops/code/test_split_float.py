"""Products of many rows of floats with low-bit weights by AMX, against float64; and how floats are split for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct
from fxq.backends.plain.panel_product import PanelProduct
from fxq.backends.plain.split_product import SplitProduct, split_refused
from fxq.backends.plain.weight_only import WeightOnlyLinear, packing_options
from fxq.common.timed_calls import threads_set_to
from fxq.quant.packing import Packing
from tests.backends.plain.test_few_rows import EXACT, WIDTHS, stored
from tests.backends.plain.test_panel_product import of_float64

emitted = pytest.importorskip("tests.support.emitted", reason="needs Numba", exc_type=ImportError)
from fxq.backends.loops.code import amx_code, machine_code, split_float_code  # noqa: E402
from fxq.backends.loops.code.vectors import number  # noqa: E402

pytestmark = pytest.mark.any_cpu

LOOPS, SPLIT_LOOPS = loops("few_rows_loops"), loops("split_float_loops")
needs_amx = pytest.mark.skipif(not machine_code.KIND.has_amx, reason="this kind of CPU has no AMX")
needs_kind = pytest.mark.skipif(not emitted.WITH_AMX, reason="AMX is emulated on CPUs with AVX512-VNNI")


# ---- rows


def row_split():
    return split_float_code.split_row


def terms_of(x, kind):
    """The three bfloat16 numbers of each of up to 32 floats, as float32 (3, 32)."""
    out = np.full((3, 1024), 7, np.uint8)
    emitted.emitted(kind, row_split, None, None, None)(x.ctypes.data, len(x), out.ctypes.data)
    assert (out[:, 64:] == 7).all()
    return (out[:, :64].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@needs_kind
@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32),
    kind=st.sampled_from(emitted.WITH_AMX or [None]),
)
def test_three_terms_are_the_float(values, kind):
    x = np.array(values, np.float32)
    x[np.abs(x) < 1e-30] = 0  # terms below the smallest normal number are 0 for AMX
    terms = terms_of(x, kind)
    assert (terms.astype(np.float64).sum(0)[: len(x)] == x).all() and not terms[:, len(x) :].any()


@needs_kind
def test_what_is_not_finite_is_in_the_first_term():
    x = np.array([np.inf, -np.inf, np.nan, 1e38], np.float32)
    x = np.append(x, np.array([0x7F800001], np.uint32).view(np.float32))  # NaN whose lower bits alone are not 0
    terms = terms_of(x, emitted.WITH_AMX[0])
    assert terms[0, 0] == np.inf and terms[0, 1] == -np.inf and np.isnan(terms[0, [2, 4]]).all()
    assert not terms[1:, [0, 1, 2, 4]].any() and terms[1, 3] != 0


# ---- products


def product_of_tiles(rows):
    def make():
        def code(b, tiles):
            amx_code.configure.emit(b, tiles.state, number(64))
            (split_float_code.two_split_tiles if rows == 2 else split_float_code.one_split_tile).emit(b, tiles)
            amx_code.release.emit(b, tiles.state)

        return machine_code.on_addresses(code)

    return make


def as_bfloat16(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@needs_kind
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", emitted.WITH_AMX, ids=lambda kind: "emulated" if kind.is_played else "own")
def test_products_of_tiles_add_all_terms(kind, rows):
    """Sums of whole numbers are exact: three terms of each number of 64, times 32 columns of a weight."""
    random, steps = np.random.default_rng(0), 2
    x = random.integers(-100, 101, (rows, steps, split_float_code.TERMS, 16, 32))
    weight = random.integers(-256, 257, (steps, split_float_code.PANELS, 16, 16, 2))
    of_x, of_weight = map(as_bfloat16, (x, weight))
    zeros, state = np.zeros(64, np.uint8), np.zeros(amx_code.STATE_BYTES, np.uint8)
    sums = np.full((split_float_code.PANELS, 32, 16), 7, np.float32)
    run = emitted.emitted(kind, product_of_tiles(rows), split_float_code.SplitTiles)
    at_x, at_weight, at_zeros, at_sums, at_state = (
        array.ctypes.data for array in (of_x, of_weight, zeros, sums, state)
    )
    run(at_x, steps * split_float_code.STEP_BYTES, at_weight, steps, at_zeros, at_sums, at_state)
    pairs = x.sum(2).reshape(rows, steps, 16, 16, 2)
    expected = np.einsum("rsmkp,sckjp->crmj", pairs, weight).reshape(split_float_code.PANELS, 16 * rows, 16)
    assert (sums[:, : 16 * rows] == expected).all() and (sums[:, 16 * rows :] == 7).all()


def split(weight, bias=None):
    assert split_refused(weight) is None
    few = FewRowsProduct(LOOPS, weight, bias)
    return SplitProduct(SPLIT_LOOPS, weight, few, PanelProduct(loops("panel_loops"), few))


def check(x, weight, bias=None):
    result, magnitude = of_float64(x, weight, bias)
    y = split(weight, bias)(x)
    assert ((y.double() - result).abs() <= 1e-6 * magnitude + 1e-5).all()  # measured: at most 1e-7
    return y


@needs_amx
@settings(max_examples=36, deadline=None)
@given(
    rows=st.integers(1, 70), columns=st.integers(32, 700), outputs=st.integers(1, 70),
    bits=st.sampled_from(WIDTHS), signed=st.booleans(), per=st.sampled_from(["tensor", "channel", 32, 64, 96, 128]),
    with_zero=st.booleans(), with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(rows, columns, outputs, bits, signed, per, with_zero, with_bias, seed):
    columns = columns if bits != 4 else max(columns, 64) if isinstance(per, str) else 64 * (columns // 32)
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    check(torch.randn(rows, columns), weight, torch.randn(outputs) if with_bias else None)


@needs_amx
def test_sums_of_large_inputs_do_not_overflow():
    """Integers times such inputs leave the range of float32; their products with the real weights do not."""
    weight = stored(9, 128, 6, True, 64, True)
    weight = replace(weight, scale=weight.scale / 64)
    x = 1e36 * torch.randn(20, 128)
    check(x, weight)
    assert not (torch.full((1, 128), 1e36) @ weight.integers(weight.empty()).T).isfinite().all()


@needs_amx
@pytest.mark.parametrize("bits", WIDTHS)
def test_more_rows_columns_and_depth_than_are_in_a_block(bits):
    check(torch.randn(550, 2240), stored(150, 2240, bits, True, 64, True), torch.randn(150))


@needs_amx
def test_a_result_does_not_depend_on_other_rows_or_on_threads():
    product, x = split(stored(333, 640, 4, True, 32, True), torch.randn(333)), torch.randn(250, 640)
    y = product(x)
    for rows, threads in ((17, 1), (31, 2), (193, 3), (250, 7)):
        with threads_set_to(threads):
            torch.testing.assert_close(product(x[-rows:]), y[-rows:], **EXACT)


@needs_amx
def test_a_row_that_is_not_finite_leaves_others_alone():
    x = torch.randn(20, 96)
    x[3, 5], x[8, 95] = float("nan"), float("inf")
    finite = split(stored(5, 96, 8, True, "channel", False))(x).isfinite().all(1)
    assert finite.tolist() == [k not in (3, 8) for k in range(20)]


@needs_amx
def test_rows_of_any_shape_and_layout():
    assert check(torch.randn(96, 3, 30).permute(2, 1, 0), stored(20, 96, 4, True, "channel", False)).shape == (
        30,
        3,
        20,
    )


def test_weights_whose_values_are_no_bfloat16_are_refused():
    weight = stored(5, 96, 8, False, "channel", True)
    assert split_refused(weight) is None
    weight.zero_point[0] = 300
    assert split_refused(weight) == "its values are more than 256 from their zero points"
    fraction = stored(5, 96, 4, True, "channel", False)
    object.__setattr__(fraction, "zero_point", torch.full((5,), 0.5))
    assert split_refused(fraction) == "its zero points are not whole numbers"


@pytest.mark.parametrize(("is_faster", "expected"), [(True, SplitProduct), (False, PanelProduct)])
def test_layers_use_it_where_it_is_faster(is_faster, expected, monkeypatch):
    weight = stored(37, 128, 4, True, 32, True)
    assert isinstance(weight.packing, Packing)
    layer = WeightOnlyLinear(
        op="linear", settings={}, axis=1, block=32, weight=weight.values, weight_scale=weight.scale,
        weight_zero_point=weight.zero_point, **packing_options(weight.packing, [(128,)]),
    )  # fmt: skip
    monkeypatch.setattr(SPLIT_LOOPS, "IS_FASTER", is_faster)
    monkeypatch.setattr(loops("panel_loops"), "IS_FASTER", True)
    assert type(layer.many_rows(torch.randn(MAX_ROWS + 1, 128))) is expected
    assert layer.many_rows(torch.randn(MAX_ROWS, 128)) is None
