"""Products of few rows with low-bit weights in a compiled loop, against float64."""

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.plain import few_rows, weight_only
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct, chunks_refused, refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.common.timed_calls import threads_set_to
from fxq.quant.packing import Packing

pytestmark = pytest.mark.any_cpu

WIDTHS = (2, 3, 4, 5, 6, 8)
EXACT = {"rtol": 0.0, "atol": 0.0}
LOOPS = loops("few_rows_loops")
needs_numba = pytest.mark.skipif(LOOPS is None, reason="needs Numba")


def stored(outputs, columns, bits, signed, per, with_zero, seed=0):
    """Random weight with scales by group of `per` values, by row ("channel") or for all ("tensor")."""
    torch.manual_seed(seed)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (outputs, columns), dtype=torch.int8 if signed else torch.uint8)
    shape = {"tensor": (), "channel": (outputs,)}.get(per) if isinstance(per, str) else (outputs, -(-columns // per))
    scale = torch.rand(shape) + 0.5
    zero = torch.randint(low, low + 2**bits, shape, dtype=torch.int32) if with_zero else None
    axis, block = {"tensor": (None, None), "channel": (0, None)}.get(per, (1, per))
    return replace(StoredWeight(values, scale, zero, axis, block), **packed(values, bits))


def packed(values, bits):
    """Fields of a `StoredWeight` for these values."""
    packing = Packing(tuple(values.shape[1:]), bits, values.dtype == torch.int8) if bits < 7 else None
    return {"values": values if packing is None else packing.pack(values), "packing": packing}


def product(x, weight, bias=None):
    """Product by float64 arithmetic, and the sum of the magnitudes of its terms, to which rounding is relative."""
    real = weight.floats(weight.empty()).double()
    result = x.double() @ real.T + (0 if bias is None else bias.double())
    terms = StoredWeight.integers(weight, weight.empty()).abs() + 8
    zero = 0 if weight.zero_point is None else weight.zero_point.abs().max()
    scale = weight.scale.max()
    return result, x.double().abs() @ ((terms + zero) * scale).double().T + 1


@needs_numba
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 20), columns=st.integers(32, 300), outputs=st.integers(1, 11), bits=st.sampled_from(WIDTHS),
    signed=st.booleans(), per=st.sampled_from(["tensor", "channel", 12, 16, 32, 48, 64, 128]), with_zero=st.booleans(),
    with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(rows, columns, outputs, bits, signed, per, with_zero, with_bias, seed):
    per = 32 if bits == 8 and per in (12, 16, 48) else per
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    x, bias = torch.randn(rows, columns), torch.randn(outputs) if with_bias else None
    assert refused(weight) is None
    result, magnitude = product(x, weight, bias)
    multiply = FewRowsProduct(LOOPS, weight, bias)
    error = (multiply(x).double() - result).abs()
    assert (error <= 2e-6 * magnitude).all()  # float32 sums of some hundred terms in 16 lanes
    want = weight.floats(weight.empty())
    torch.testing.assert_close(multiply.floats(0, torch.empty_like(want)), want, rtol=1e-6, atol=0)
    arguments, real = integers(rows, columns)
    result, _ = product(real, weight, bias)
    _, magnitude = product(arguments[0].double() * arguments[1] + arguments[2] * arguments[1], weight)
    assert ((multiply.of_integers(*arguments).double() - result).abs() <= 1e-6 * magnitude).all()


@needs_numba
@pytest.mark.parametrize("outputs", [1, 9])
@pytest.mark.parametrize("per", ["tensor", "channel", 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_rows_of_whole_units(bits, per, outputs):
    for columns, rows in ((64, 1), (192, 1), (448, 1), (192, 3)):
        weight, x = stored(outputs, columns, bits, True, per, True), torch.randn(rows, columns)
        product_of_loop = FewRowsProduct(LOOPS, weight, None)
        result, magnitude = product(x, weight)
        assert ((product_of_loop(x).double() - result).abs() <= 2e-6 * magnitude).all()
        arguments, real = integers(rows, columns)
        result, _ = product(real, weight)
        _, magnitude = product(arguments[0].double() * arguments[1] + arguments[2] * arguments[1], weight)
        assert ((product_of_loop.of_integers(*arguments).double() - result).abs() <= 1e-6 * magnitude).all()


@needs_numba
@pytest.mark.parametrize("columns", [65, 71, 127, 129])
def test_an_odd_row_of_4_bit_values_ends_in_padding(columns):
    weight, x = stored(5, columns, 4, True, "channel", False), torch.randn(3, columns)
    weight.values[:, -1] |= -16 & 0xFF  # the padding is not read, whatever it holds
    result, magnitude = product(x, weight)
    assert ((FewRowsProduct(LOOPS, weight, None)(x).double() - result).abs() <= 2e-6 * magnitude).all()


@needs_numba
def test_integers_are_multiplied_without_rounding():
    x = torch.randint(-8, 9, (7, 192)).float()
    forms = ((8, True, "channel"), (8, False, 64), (4, True, 32), (4, False, "channel"), (2, True, 32), (6, True, 64))
    for bits, signed, per in forms:
        weight = stored(9, 192, bits, signed, per, True)
        weight = replace(weight, scale=torch.ones_like(weight.scale))
        torch.testing.assert_close(FewRowsProduct(LOOPS, weight, None)(x), product(x, weight)[0].float(), **EXACT)


@needs_numba
def test_infinity_and_nan_reach_only_their_row():
    weight, x = stored(4, 70, 8, True, "channel", False), torch.randn(5, 70)
    x[1, 69], x[3, 2] = float("nan"), float("inf")
    y = FewRowsProduct(LOOPS, weight, None)(x)
    assert y[1].isnan().all() and not y[3].isfinite().any() and y[[0, 2, 4]].isfinite().all()


@needs_numba
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("form", ["one large value", "tiny", "huge", "zeros", "mixed magnitudes"])
def test_rows_of_any_range(form, bits):
    weight, x = stored(8, 256, bits, True, 64, False), torch.randn(2, 256)
    factor = {"tiny": 2.0**-106, "huge": 2.0**110, "zeros": 0.0}.get(form, 1.0)
    if form == "one large value":
        x[:, 7] = 1e6
    elif form == "mixed magnitudes":
        x *= 2.0 ** torch.randint(-20, 3, x.shape)
    result, magnitude = product(x, weight)
    error = (FewRowsProduct(LOOPS, weight, None)(x * factor).double() - factor * result).abs()
    assert (error <= 1e-6 * factor * magnitude).all()


@needs_numba
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("largest", "error_limit"), [(500.0, 5e-5), (1e3, 5e-6), (1e6, 5e-6)])
def test_a_large_input_of_a_small_weight_does_not_cancel_the_result(bits, rows, largest, error_limit):
    """Its products with integers and with zero points cancel; where that shows, real weights are multiplied instead."""
    weight, x = stored(40, 128, bits, False, "channel", True), torch.randn(rows, 128)
    x[:, 5] = largest
    values = weight.packing.unpack(weight.values)
    values[:, 5] = weight.zero_point.to(torch.uint8)
    weight = replace(weight, **packed(values, bits))
    result, _ = product(x, weight)
    error = (FewRowsProduct(LOOPS, weight, None)(x).double() - result).abs().amax(1)
    assert (error <= error_limit * result.abs().amax(1)).all()


@needs_numba
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_sums_of_large_inputs_do_not_overflow(bits, rows):
    """Integers times such inputs leave the range of float32; their products with the real weights do not."""
    weight, x = stored(9, 256, bits, True, 64, True), 1e36 * torch.randn(rows, 256)
    weight = replace(weight, scale=weight.scale * 2.0**-bits)
    x[rows // 2] *= 1e-36  # a row that needs no care
    result, magnitude = product(x, weight)
    error = (FewRowsProduct(LOOPS, weight, None)(x).double() - result).abs()
    assert (error <= 2e-6 * magnitude).all()


@needs_numba
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_infinity_has_the_results_that_pytorch_computes(bits, rows):
    """It is NaN for weights of 0 only, and leaves other rows alone."""
    weight, x = stored(40, 128, bits, True, 64, True), torch.randn(rows, 128)
    x[rows // 2, 7] = float("inf")
    y, want = FewRowsProduct(LOOPS, weight, None)(x), x @ weight.floats(weight.empty()).T
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y[y.isinf()], want[want.isinf()])
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3, equal_nan=True)  # sums in another order


@needs_numba
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("largest", [1.0, 10.0, 40.0, 55.0, 200.0, 1e5])
@pytest.mark.parametrize("factor", [1.0, 2.0**-98, 2.0**-100])
def test_one_row_has_at_most_a_few_times_the_error_of_float32_sums(bits, largest, factor):
    """One row may be multiplied as digits; the first four of several are multiplied as floats."""
    weight, x = stored(256, 4096, bits, True, 64, False), torch.randn(1, 4096)
    x[:, 7] = largest
    result, _ = product(x, weight)
    multiply = FewRowsProduct(LOOPS, weight, None)
    of_one, of_four = (
        (multiply(factor * x.expand(rows, -1))[0].double() / factor - result[0]).square().mean().sqrt()
        for rows in (1, 4)
    )
    assert of_one <= 6 * of_four


def integers(rows, columns, per_row=True):
    """Random integers, their scales and zero points, and their real values in float64."""
    x, shape = torch.randint(0, 256, (rows, columns), dtype=torch.uint8), (rows, 1) if per_row else ()
    scale, zero = torch.rand(shape) + 0.1, torch.randint(0, 256, shape).float()
    return (x, scale, zero), (x.double() - zero) * scale.double()


@needs_numba
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 20), columns=st.integers(32, 300), outputs=st.integers(1, 11), bits=st.sampled_from(WIDTHS),
    signed=st.booleans(), per=st.sampled_from(["tensor", "channel", 32, 64, 128]), with_zero=st.booleans(),
    with_bias=st.booleans(), per_row=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_integers_of_any_size(
    rows, columns, outputs, bits, signed, per, with_zero, with_bias, per_row, seed
):
    columns = columns if bits != 4 else 2 * columns if per in ("tensor", "channel") else 64 * (columns // 32)
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    bias = torch.randn(outputs) if with_bias else None
    arguments, real = integers(rows, columns, per_row)
    result, _ = product(real, weight, bias)
    _, magnitude = product(arguments[0].double() * arguments[1] + arguments[2] * arguments[1], weight, bias)
    error = (FewRowsProduct(LOOPS, weight, bias).of_integers(*arguments).double() - result).abs()
    assert (error <= 1e-6 * magnitude).all()  # float32 sums of some scaled sums of integers


@needs_numba
def test_the_largest_integers_do_not_saturate():
    x = torch.full((1, 512), 255, dtype=torch.uint8)
    forms = ((8, True, -128), (8, False, 255), (4, True, -8), (4, False, 15), (3, True, -4), (6, False, 63))
    for bits, signed, value in forms:
        weight = stored(6, 512, bits, signed, "channel", False)
        values = torch.full((6, 512), value, dtype=torch.int8 if signed else torch.uint8)
        weight = replace(weight, **packed(values, bits), scale=torch.ones(6))
        for zero in (0.0, 128.0, 255.0):
            y = FewRowsProduct(LOOPS, weight, None).of_integers(x, torch.tensor(1.0), torch.tensor(zero))
            torch.testing.assert_close(y, torch.full((1, 6), 512.0 * value * (255 - zero)), **EXACT)


@needs_numba
def test_a_row_without_a_grid_leaves_others_alone():
    (x, scale, zero), _ = integers(5, 96)
    scale[3] = float("nan")
    y = FewRowsProduct(LOOPS, stored(4, 96, 4, True, "channel", False), None).of_integers(x, scale, zero)
    assert y[3].isnan().all() and y[[0, 1, 2, 4]].isfinite().all()


REFUSED = {
    "float16": (lambda: StoredWeight(torch.ones(4, 64).half(), None), "not stored in integers"),
    "short": (lambda: stored(4, 31, 8, True, "channel", False), "fewer than 32"),
    "short packed": (lambda: stored(4, 31, 4, True, "channel", False), "fewer than 32"),
    "short unpacked": (lambda: stored(4, 31, 3, True, "channel", False), "fewer than 32"),
    "small groups": (lambda: stored(4, 96, 8, True, 16, False), "multiple of 32"),
    "by column": (lambda: StoredWeight(torch.ones(64, 64, dtype=torch.int8), torch.ones(64), None, 1), "by row"),
    "strided": (lambda: StoredWeight(torch.ones(64, 64, dtype=torch.int8).t(), torch.ones(64), None, 0), "contiguous"),
    "meta": (lambda: StoredWeight(torch.ones(4, 64, dtype=torch.int8, device="meta"), torch.ones(4)), "CPU"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(make, reason):
    assert reason in refused(make())


@pytest.mark.parametrize(("columns", "bits", "per"), [(96, 3, 16), (96, 4, 32), (62, 4, "channel"), (128, 4, 24)])
def test_rows_without_whole_chunks_are_for_few_rows_only(columns, bits, per):
    weight = stored(4, columns, bits, True, per, False)
    assert refused(weight) is None and "multiple of 32" in chunks_refused(weight)
    assert chunks_refused(stored(4, 128, bits, True, 32, False)) is None


def quantized(rows, columns=160, **options):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(columns, 37)), torch.randn(rows, columns)
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(optimize="coverage", **options), example_inputs=x)
    assert not qmodel.ledger.where(kind="unverified")
    return qmodel


RECIPES = {
    "int8": {}, "int4": {"bits": 4}, "int3": {"bits": 3}, "int6": {"bits": 6},
    "groups of 32": {"bits": 4, "per": 32}, "int8 groups": {"per": 32},
}  # fmt: skip


@pytest.mark.one_in(6)
@needs_numba
@pytest.mark.parametrize("options", RECIPES.values(), ids=RECIPES)
def test_layers_agree_with_the_product_of_many_rows_from_one_row_on(options, monkeypatch):
    qmodel = quantized(3, columns=192, **options)
    x = torch.randn(MAX_ROWS, 192)
    loop = [qmodel(x[:n]) for n in (1, 2, 5, MAX_ROWS) for _ in range(2)]  # the second call is bound
    monkeypatch.setattr(weight_only, "loops_for", lambda *_: None)
    without_loop = copy.deepcopy(qmodel)
    for y, n in zip(loop, (1, 1, 2, 2, 5, 5, MAX_ROWS, MAX_ROWS), strict=True):
        torch.testing.assert_close(y, without_loop(x[:n]), rtol=1e-4, atol=1e-5)  # sums in another order


@needs_numba
@pytest.mark.parametrize("rows", [2, 40])
def test_a_wrong_loop_is_noticed_whatever_the_rows_of_the_example(rows, monkeypatch):
    call = FewRowsProduct.__call__
    monkeypatch.setattr(FewRowsProduct, "__call__", lambda self, x: call(self, x) * 1.05)
    torch.manual_seed(0)
    recipe = fxq.Recipe.weight_only(optimize="coverage")
    with pytest.warns(UserWarning):
        qmodel = fxq.quantize(nn.Sequential(nn.Linear(96, 37)), recipe, example_inputs=torch.randn(rows, 96))
    assert qmodel.ledger.where(kind="unverified")


@needs_numba
def test_edits_copies_pickles_and_threads():
    qmodel, x = quantized(1), torch.randn(1, 160)
    wanted = qmodel(x)
    for copied in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        torch.testing.assert_close(copied(x), wanted, **EXACT)
    inputs = [torch.randn(1, 160) for _ in range(8)]
    results = [qmodel(row) for row in inputs]
    with ThreadPoolExecutor(8) as pool:
        for y, result in zip(pool.map(lambda i: qmodel(inputs[i % 8]), range(400)), results * 50, strict=True):
            torch.testing.assert_close(y, result, **EXACT)
    (kernel,) = qmodel.fxq_kernels.children()
    with torch.no_grad():
        kernel.weight_scale.mul_(2)
        bias = kernel.bias
        torch.testing.assert_close(qmodel(x) - bias, 2 * (wanted - bias), rtol=1e-5, atol=1e-5)


@needs_numba
def test_a_large_layer_of_one_row_is_priced_below_float():
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(2048, 2048)), "weight_only", example_inputs=torch.randn(1, 2048))
    (entry,) = qmodel.ledger
    assert entry.int8_us < entry.float_us


def test_without_a_loop_weights_are_converted(monkeypatch):
    monkeypatch.setattr(weight_only, "loops_for", lambda *_: None)
    monkeypatch.setattr(few_rows.FewRowsProduct, "__call__", None)
    assert quantized(1)(torch.randn(1, 160)).shape == (1, 37)


@needs_numba
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bits": 8, "per": 16}, "PyTorch converts its weight to floats in each call: its block size of 8-bit values"),
        (
            {"bits": 4, "per": 16},
            f"more than {MAX_ROWS} rows are multiplied by its weight as floats, .* of 32",
        ),
        ({"bits": 4, "per": 32}, "^$"),
    ],
)
def test_the_ledger_says_which_weights_are_converted_and_why(options, why):
    torch.manual_seed(0)
    recipe = fxq.Recipe.weight_only(optimize="coverage", **options)
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(320, 256)), recipe, example_inputs=torch.randn(1, 320))
    (entry,) = qmodel.ledger
    assert re.search(why, entry.reason) and entry.precision == "weight-only"


# ---- several threads


@needs_numba
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("outputs", [5, 50, 333])
@pytest.mark.parametrize("per", ["channel", 16, 64])
def test_threads_compute_the_same_numbers(monkeypatch, bits, rows, outputs, per):
    """Each computes some of the columns, with tiles that begin where those of one thread do."""
    weight = stored(outputs, 192, bits, True, 64 if bits == 8 and per == 16 else per, True)
    loop, x = FewRowsProduct(LOOPS, weight, torch.randn(outputs)), torch.randn(rows, 192)
    alone = loop(x)
    monkeypatch.setattr(few_rows, "_MIN_PART_BYTES", 1)
    calls = []
    monkeypatch.setattr(few_rows, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    for threads in (2, 3, 7):
        with threads_set_to(threads):
            torch.testing.assert_close(loop(x), alone, **EXACT)
    assert calls == [True] * 3
    torch.testing.assert_close(alone.double(), product(x, weight, loop._constants[3])[0], rtol=1e-5, atol=1e-3)


@needs_numba
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_threads_compute_the_same_numbers_of_integers(monkeypatch, bits):
    loop = FewRowsProduct(LOOPS, stored(333, 192, bits, True, 64, True), torch.randn(333))
    arguments, _ = integers(3, 192)
    alone = loop.of_integers(*arguments)
    monkeypatch.setattr(few_rows, "_MIN_PART_BYTES", 1)
    calls = []
    monkeypatch.setattr(few_rows, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    with threads_set_to(3):
        torch.testing.assert_close(loop.of_integers(*arguments), alone, **EXACT)
    assert calls == [True]


@needs_numba
def test_a_small_product_runs_on_one_thread(monkeypatch):
    """And one for which no thread is free."""
    weight = stored(64, 64, 8, True, "channel", False)
    loop, x = FewRowsProduct(LOOPS, weight, None), torch.randn(1, 64)
    alone = loop(x)
    monkeypatch.setattr(few_rows, "run_together", lambda *_: pytest.fail("several threads run it"))
    with threads_set_to(4):
        torch.testing.assert_close(loop(x), alone, **EXACT)
    large = FewRowsProduct(LOOPS, stored(1024, 256, 8, True, "channel", False), None)
    x = torch.randn(1, 256)
    alone = large(x)
    monkeypatch.setattr(few_rows, "run_together", lambda *_: False)
    with threads_set_to(4):
        torch.testing.assert_close(large(x), alone, **EXACT)


@needs_numba
@settings(max_examples=15, deadline=None)
@given(
    columns=st.integers(32, 300), outputs=st.integers(1, 9), bits=st.sampled_from(WIDTHS), signed=st.booleans(),
    per=st.sampled_from(["tensor", "channel", 32, 64, 128]), with_zero=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_weights_as_floats(columns, outputs, bits, signed, per, with_zero, seed):
    columns = columns if bits != 4 else 2 * columns if per in ("tensor", "channel") else 64 * (columns // 32)
    weight = stored(outputs, columns, bits, signed, per, with_zero, seed)
    product, first = FewRowsProduct(LOOPS, weight, None), outputs // 2
    memory = torch.full((outputs - first + 2, columns), 7.0)
    product.floats(first, memory[1:-1])
    expected = weight.floats(weight.empty())[first:]
    torch.testing.assert_close(memory[1:-1], expected, rtol=1e-6, atol=2e-5)  # products up to 200, rounded once less
    assert (memory[[0, -1]] == 7).all()  # nothing else is written


@pytest.mark.one_in(3)
@needs_numba
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_many_rows_in_several_pieces(bits, monkeypatch):
    monkeypatch.setattr(loops("panel_loops"), "IS_FASTER", False)
    monkeypatch.setattr(weight_only, "_COMPILED_PIECE_ELEMENTS", 3 * 64)
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 10).eval(), torch.randn(2, 20, 64)
    qmodel = fxq.quantize(layer, fxq.Recipe.weight_only(bits=bits, backend="x86"), example_inputs=x)
    reference = fxq.quantize(layer, fxq.Recipe.weight_only(bits=bits, backend="reference"), example_inputs=x)
    torch.testing.assert_close(qmodel(x), reference(x), rtol=0, atol=2e-6)  # float32 sums of 64 terms
