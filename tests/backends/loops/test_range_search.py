"""The compiled search for ranges of blocks, against the one that runs on PyTorch's ops."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.loops import range_search
from fxq.backends.loops.range_search import least_block_range
from fxq.quant.least_error import QUICK_ZOOMS, ZOOMS, least_range
from fxq.quant.qparams import choose_qparams, dequantize, quantize

pytest.importorskip("numba")


def errors(x, ends, spec, emphasis=0.0):
    """Squared error of each row (R, n) with the grids of ranges (R,), (R,); those of large values count more."""
    qp = choose_qparams(*ends, spec, 0)
    counts = 1 + emphasis * x.square() / x.square().mean(1, keepdim=True).clamp(min=1e-9)
    return ((dequantize(quantize(x, qp), qp) - x).double().square() * counts).sum(1)


def blocks(n, count=2**16):
    """Rows with a few large values; one is zero, one has no negative values, one a single value."""
    x = torch.randn(-(-count // n) + 3, n)
    x = x * (1 + x.abs() ** 2)
    x[0], x[1], x[2] = 0, x[1].abs(), 3.5
    return x


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zooms", [QUICK_ZOOMS, ZOOMS], ids=["quick", "thorough"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "n"), [(2, 64), (4, 32), (4, 37), (8, 128)])
def test_the_errors_are_those_of_the_search_by_ops(bits, n, symmetric, zooms):
    x, spec = blocks(n), fxq.TensorSpec(bits=bits, signed=symmetric, symmetric=symmetric)
    low, high = x.amin(1), x.amax(1)
    by_ops = errors(x, least_range(x, low, high, spec, 2.0, zooms=zooms), spec)
    compiled = errors(x, least_block_range(x, low, high, spec, 2.0, zooms), spec)
    assert float(compiled.sum()) == pytest.approx(float(by_ops.sum()), rel=1e-3)
    assert (compiled <= 1.5 * by_ops + 1e-9).all()  # float32 against float64: a row may end in another local optimum
    assert (compiled <= errors(x, (low, high), spec) * (1 + 1e-5) + 1e-9).all()


@pytest.mark.parametrize(("bits", "symmetric"), [(3, True), (4, False)])
def test_errors_of_large_values_count_as_in_the_search_by_ops(bits, symmetric):
    x, spec = blocks(37), fxq.TensorSpec(bits=bits, signed=symmetric, symmetric=symmetric)
    arguments = x, x.amin(1), x.amax(1), spec, 2.0
    by_ops = errors(x, least_range(*arguments, zooms=QUICK_ZOOMS, emphasis=1.5), spec, 1.5)
    compiled = errors(x, least_block_range(*arguments, QUICK_ZOOMS, emphasis=1.5), spec, 1.5)
    plain = errors(x, least_block_range(*arguments, QUICK_ZOOMS), spec, 1.5)
    assert float(compiled.sum()) == pytest.approx(float(by_ops.sum()), rel=1e-3)
    assert (compiled <= 1.5 * by_ops + 1e-9).all()
    assert float(compiled.sum()) < 0.99 * float(plain.sum())


def test_any_shape_and_number_of_threads():
    x, spec = blocks(32)[:2049].view(3, -1, 32), fxq.TensorSpec(bits=4)
    ends = x.amin(2), x.amax(2)
    on_one_thread = least_block_range(x, *ends, spec, 2.0, QUICK_ZOOMS)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        on_three = least_block_range(x, *ends, spec, 2.0, QUICK_ZOOMS)
    finally:
        torch.set_num_threads(before)
    assert all(end.shape == ends[0].shape and end.dtype == torch.float32 for end in on_one_thread)
    assert all(map(torch.equal, on_one_thread, on_three))


@pytest.mark.parametrize(("n", "power", "count"), [(32, 2.4, 2**16), (512, 2.0, 2**16), (32, 2.0, 2**10)])
def test_what_the_loop_is_not_for_is_searched_by_ops(n, power, count):
    """Other powers, long rows, and few values."""
    x, spec = blocks(n, count), fxq.TensorSpec(bits=4)
    arguments = x, x.amin(1), x.amax(1), spec, power
    wanted = least_range(*arguments, zooms=QUICK_ZOOMS)
    assert all(map(torch.equal, least_block_range(*arguments, QUICK_ZOOMS), wanted))


def test_a_quantized_layer_has_the_searched_scales(monkeypatch):
    """With and without the loop, the weight of a layer has nearly the same error, which is below that of min-max."""

    def error(observer="mse"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 256)).eval()
        weight = fxq.TensorSpec(bits=4, per=64, observer=observer)
        x = torch.eye(512)
        with torch.no_grad():
            y = fxq.quantize(model, fxq.Recipe.weight_only(weight=weight), example_inputs=x)(x)
            return float((y - model(x)).square().sum())

    compiled = error()
    monkeypatch.setattr(range_search, "loops", lambda name: None)
    assert compiled == pytest.approx(error(), rel=1e-3)
    assert compiled < 0.95 * error("minmax")
