"""Linear layers with dynamic activations and weights of 4 bits or with scales per block, against float64."""

import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct
from fxq.backends.plain.many_rows import ManyRowsProduct
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.dynamic_linear import DynamicLinear
from tests.support.machine import needs_x86

pytestmark = needs_x86
needs_numba = pytest.mark.skipif(loops("few_rows_loops") is None, reason="needs Numba")
WEIGHTS = {
    "int4 per channel": fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax"),
    "int4 blocks": fxq.TensorSpec(bits=4, signed=True, symmetric=True, per=32, observer="mse"),
    "uint4 affine blocks": fxq.Recipe.weight_only(bits=4, per=64).config.weight,
    "int8 blocks": fxq.TensorSpec(signed=True, symmetric=True, per=32, observer="minmax"),
    "uint2 affine blocks": fxq.Recipe.weight_only(bits=2, per=64).config.weight,
    "int6 blocks": fxq.TensorSpec(bits=6, signed=True, symmetric=True, per=32, observer="minmax"),
    "int3": fxq.TensorSpec(bits=3, signed=True, symmetric=True, per=32, observer="mse"),
    "uint8 affine": fxq.TensorSpec(per="channel", observer="minmax"),
}


def quantized(weight, rows=3, post=(), columns=128, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 37), *post).eval()
    recipe = fxq.Recipe.dynamic(weight=weight, optimize="coverage", backend="x86", **options)
    return fxq.quantize(model, recipe, example_inputs=torch.randn(rows, columns))


def real_weight(kernel):
    stored = kernel.stored_weight()
    return stored.floats(stored.empty()).double()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("post", [(), (nn.ReLU(),), (nn.GELU(),), (nn.GELU("tanh"),)], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_layers_of_few_and_of_many_rows(weight, post):
    qmodel = quantized(weight, post=post)
    assert not qmodel.ledger.where(kind="unverified")
    (kernel,) = (module for module in qmodel.modules() if isinstance(module, DynamicLinear))
    for rows in (1, 5, MAX_ROWS, MAX_ROWS + 1):
        x = torch.randn(rows, 128)
        low, high = x.amin(1, keepdim=True).clamp(max=0).double(), x.amax(1, keepdim=True).clamp(min=0).double()
        scale = (high / 254 - low / 254).float().double()  # a grid per row leaves one of 255 steps free
        zero = (-low / scale).ceil()
        real = ((x / scale).round() + zero).clamp(0, 255).sub(zero).mul(scale)
        wanted = nn.Sequential(*post)(real @ real_weight(kernel).T + kernel.bias)
        for _ in range(2):  # the second call is bound
            error = (qmodel(x) - wanted).abs()
            # a value between two integers may go to either: one step of one or two of 128 inputs
            assert (error <= 2 * scale * real_weight(kernel).abs().max() + 1e-5).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_few_rows_and_many_agree(weight):
    (kernel,) = (module for module in quantized(weight).modules() if isinstance(module, DynamicLinear))
    x = torch.randint(0, 256, (MAX_ROWS + 4, 128), dtype=torch.uint8)
    scale, zero = torch.rand(len(x), 1) + 0.1, torch.randint(0, 256, (len(x), 1)).float()
    many = kernel(x, scale, zero)
    wanted = (x.double() - zero) * scale.double() @ real_weight(kernel).T + kernel.bias
    torch.testing.assert_close(many.double(), wanted, rtol=1e-4, atol=1e-3)  # float32 sums of values up to 100
    for rows in (1, 4, MAX_ROWS):
        few = kernel(x[:rows], scale[:rows], zero[:rows])
        torch.testing.assert_close(few.double(), wanted[:rows], rtol=1e-4, atol=1e-3)  # likewise
        one_grid = kernel(x[:rows], scale[0, 0], zero[0, 0])
        wanted_of_one = (x[:rows].double() - zero[0]) * scale[0].double() @ real_weight(kernel).T + kernel.bias
        torch.testing.assert_close(one_grid.double(), wanted_of_one, rtol=1e-4, atol=1e-3)  # likewise


def test_4_bits_are_stored_two_to_a_byte_and_saved_so(tmp_path):
    qmodel, x = quantized(WEIGHTS["int4 blocks"]), torch.randn(2, 128)
    (kernel,) = (module for module in qmodel.modules() if isinstance(module, DynamicLinear))
    assert kernel.weight.dtype == torch.uint8 and kernel.weight.shape == (37, 64)
    qmodel.save(tmp_path / "m.fxq")
    for copied in (fxq.load(tmp_path / "m.fxq"), copy.deepcopy(qmodel)):
        torch.testing.assert_close(copied(x), qmodel(x), rtol=0, atol=0)


def test_a_symmetric_grid_has_its_zero_point_in_the_kernel():
    activation = fxq.TensorSpec(per="row", range="dynamic", symmetric=True)
    qmodel = quantized(WEIGHTS["int4 blocks"], activation=activation)
    (kernel,) = (module for module in qmodel.modules() if isinstance(module, DynamicLinear))
    x, scale = torch.randint(0, 256, (20, 128), dtype=torch.uint8), torch.rand(20, 1)
    wanted = (x.double() - 128) * scale.double() @ real_weight(kernel).T + kernel.bias
    for rows in (2, 20):
        y = kernel(x[:rows], scale[:rows])
        torch.testing.assert_close(y.double(), wanted[:rows], rtol=1e-4, atol=1e-3)  # float32 sums


@pytest.mark.one_in(4)
@needs_numba
@pytest.mark.parametrize(("rows", "most"), [(2, 16), (40, 16), (8, 4), (40, 4)])
@pytest.mark.parametrize(
    ("product", "weight"),
    [(FewRowsProduct, None), (FewRowsProduct, WEIGHTS["int4 blocks"]), (ManyRowsProduct, WEIGHTS["int4 blocks"])],
    ids=["int8", "int4", "int4, many rows"],
)
def test_a_wrong_loop_is_noticed_whatever_the_rows_of_the_example(rows, most, product, weight, monkeypatch):
    call = product.of_integers
    monkeypatch.setattr(product, "of_integers", lambda self, *args: call(self, *args) * 1.05)
    monkeypatch.setattr(loops("few_rows_loops"), "MAX_INTEGER_ROWS", most)
    monkeypatch.setattr(loops("many_rows_loops"), "IS_FASTER", True)
    with pytest.warns(UserWarning):
        qmodel = quantized(weight or fxq.Recipe.dynamic().config.weight, rows)
    assert qmodel.ledger.where(kind="unverified")


@needs_numba
def test_fewer_rows_than_a_tile_are_not_for_the_loop_of_many_rows(monkeypatch):
    """On AVX512 without VNNI a tile has 6 rows, and the loop for few rows is the fastest up to 4."""
    monkeypatch.setattr(loops("many_rows_loops"), "IS_FASTER", True)
    monkeypatch.setattr(loops("many_rows_loops"), "ROWS", 6)
    monkeypatch.setattr(loops("few_rows_loops"), "MAX_INTEGER_ROWS", 4)
    (kernel,) = (m for m in quantized(WEIGHTS["int4 blocks"]).modules() if isinstance(m, DynamicLinear))
    rows = [torch.zeros(n, 128, dtype=torch.uint8) for n in (5, 6)]
    assert kernel._of_many_rows(rows[0]) is None and kernel._of_many_rows(rows[1]) is not None
    x, scale = torch.randint(0, 256, (5, 128), dtype=torch.uint8), torch.rand(5, 1)
    wanted = (x.double() - 128) * scale.double() @ real_weight(kernel).T + kernel.bias
    y = kernel(x, scale, torch.full((5, 1), 128.0))
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-3)  # float32 sums


def test_int8_per_channel_keeps_the_kernel_of_many_rows():
    kernels = {type(module) for module in quantized(fxq.Recipe.dynamic().config.weight).modules()}
    assert DynamicLayer in kernels and DynamicLinear not in kernels


def test_convolutions_and_engines_refuse_blocks():
    """The ledger says so, and the layer stays in float."""
    recipe = fxq.Recipe.dynamic(weight=WEIGHTS["int8 blocks"], optimize="coverage", backend="x86")
    qmodel = fxq.quantize(nn.Sequential(nn.Conv2d(3, 8, 3)), recipe, example_inputs=torch.randn(1, 3, 8, 8))
    (entry,) = qmodel.ledger
    assert entry.precision == "float" and "scales per block" in entry.reason


@needs_numba
def test_a_row_that_is_not_finite_leaves_others_alone():
    qmodel, x = quantized(WEIGHTS["int4 blocks"]), torch.randn(4, 128)
    x[2, 5] = float("nan")
    y = qmodel(x)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@needs_numba
@pytest.mark.parametrize("weight", ["int4 per channel", "int4 blocks"])
def test_a_loop_multiplies_many_rows(weight, monkeypatch):
    qmodel = quantized(WEIGHTS[weight], columns=256)
    (kernel,) = (module for module in qmodel.modules() if isinstance(module, DynamicLinear))
    x = torch.randint(0, 256, (300, 256), dtype=torch.uint8)
    scale, zero = torch.rand(300, 1) + 0.1, torch.randint(0, 256, (300, 1)).float()
    wanted = (x.double() - zero) * scale.double() @ real_weight(kernel).T + kernel.bias
    close = {"rtol": 1e-4, "atol": 1e-2}  # sums of values up to 1000
    monkeypatch.setattr(loops("many_rows_loops"), "IS_FASTER", False)
    calls, call = [], ManyRowsProduct.of_integers
    monkeypatch.setattr(ManyRowsProduct, "of_integers", lambda self, *args: calls.append(1) or call(self, *args))
    torch.testing.assert_close(kernel(x, scale, zero).double(), wanted, **close)
    assert not calls
    monkeypatch.setattr(loops("many_rows_loops"), "IS_FASTER", True)
    torch.testing.assert_close(kernel(x, scale, zero).double(), wanted, **close)
    assert calls


def test_the_ledger_shows_the_bits_of_weights_that_have_fewer_than_8():
    few, eight = (quantized(weight).ledger for weight in (WEIGHTS["int4 blocks"], fxq.Recipe.dynamic().config.weight))
    assert [round(entry.weight_bits, 2) for entry in few if entry.precision == "int8"] == [5.0]
    titles, _, row, *_ = str(few).splitlines()
    assert titles.split()[-1] == "bits" and row.split()[-1] == "5.00"
    assert "bits" not in str(eight).splitlines()[0]
