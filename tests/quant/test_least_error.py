"""Ranges of least error: rows against slices, the search against trying, and what it is worth for weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxq
from fxq.quant.least_error import least_range, rows_of
from fxq.quant.observers import observer_for
from fxq.quant.qparams import choose_qparams, dequantize, quantize


def weights(*shape):
    """Values with a few large ones, as weights have."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x * (1 + x.abs() ** 2)


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), axis=st.integers(0, 1), per=st.integers(1, 40))
@settings(deadline=None)
def test_rows_are_the_blocks_that_share_a_scale(shape, axis, per):
    """As min-max finds their ends; zeros fill up the last block."""
    x = weights(*shape)
    minmax = observer_for(fxq.TensorSpec(per=per, observer="minmax"), axis)
    minmax(x)
    rows = rows_of(x, axis, minmax.block)
    assert rows.shape[:-1] == minmax.minimum.shape
    assert torch.equal(rows.amax(-1).clamp(min=0), minmax.maximum.clamp(min=0))
    assert torch.equal(rows.amin(-1).clamp(max=0), minmax.minimum.clamp(max=0))
    assert rows.sum() == pytest.approx(float(x.sum()), abs=1e-3)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_rows_of_channels(axis):
    x = weights(3, 4, 2)
    wanted = x.flatten() if axis is None else torch.stack([part.flatten() for part in x.unbind(axis)])
    assert torch.equal(rows_of(x, axis, None), wanted)
    assert rows_of(torch.arange(3.0), 0, None).tolist() == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("power", [1.0, 2.0, 2.4, 4.0])
def test_symmetric_ranges_against_all_of_a_fine_list(power):
    spec, x = fxq.TensorSpec(bits=4, signed=True, symmetric=True), weights(6, 64)

    def error(low, high):
        qp = choose_qparams(low, high, spec, 0)
        return (dequantize(quantize(x, qp), qp) - x).abs().pow(power).sum(1)

    low, high = x.amin(1), x.amax(1)
    least = error(*least_range(x, low, high, spec, power))
    tried = torch.stack([error(f * low, f * high) for f in torch.linspace(0.15, 1, 600)]).amin(0)
    assert (least <= 1.05 * tried).all() and (least <= error(low, high)).all()


@pytest.mark.parametrize("emphasis", [1.0, 4.0])
def test_errors_of_large_values_count_more(emphasis):
    """The weighted error of affine ranges, against that of many pairs of ends, on scaled and on zero rows, too."""
    spec, x = fxq.TensorSpec(bits=4), weights(6, 64)
    x[5] = 0
    low, high = x.amin(1), x.amax(1)
    counts = 1 + emphasis * x.square() / x.square().mean(1, keepdim=True).clamp(min=1e-9)

    def error(low, high):
        qp = choose_qparams(low, high, spec, 0)
        return ((dequantize(quantize(x, qp), qp) - x).square() * counts).sum(1)

    ends = least_range(x, low, high, spec, 2.0, emphasis=emphasis)
    factors = torch.linspace(0.15, 1, 35)
    tried = torch.stack([error(f * low, g * high) for f in factors for g in factors]).amin(0)
    assert (error(*ends) <= 1.05 * tried + 1e-9).all()
    for factor in (2.0**-20, 2.0**20):
        scaled = least_range(factor * x, factor * low, factor * high, spec, 2.0, emphasis=emphasis)
        assert torch.allclose(torch.stack(scaled), factor * torch.stack(ends), rtol=1e-4)
    plain = least_range(x, low, high, spec, 2.0)
    assert float((ends[1] - ends[0]).sum()) > 1.01 * float((plain[1] - plain[0]).sum())


@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_squares_that_float32_does_not_hold(magnitude):
    x = magnitude * weights(3, 32)
    low, high = least_range(x, x.amin(1), x.amax(1), fxq.TensorSpec(bits=4), 2.0, emphasis=1.0)
    assert (low >= x.amin(1)).all() and (high <= x.amax(1)).all() and (high > low).all()


@pytest.mark.parametrize("per", ["channel", 16])
@pytest.mark.parametrize("shape", [(8, 40), (8, 20, 3, 3), (4, 12, 5)])
def test_weights_of_four_bits_are_closer_than_with_minmax(shape, per):
    x = weights(*shape)
    errors = []
    for observer in ("minmax", "mse"):
        spec = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per=per, observer=observer)
        fitted = observer_for(spec, 0 if per == "channel" else 1)
        fitted(x)
        qp = fitted.qparams()
        errors.append(float((dequantize(quantize(x, qp), qp) - x).square().sum()))
    assert errors[1] < 0.99 * errors[0]


@pytest.mark.parametrize("per", ["channel", 32])
def test_in_a_recipe(per):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 16)).eval()
    model[0].weight.data = weights(16, 64)
    spec = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per=per)
    x = torch.randn(32, 64)
    errors = []
    for observer in ("minmax", "mse"):
        weight = fxq.TensorSpec(**{**vars(spec), "observer": observer})
        recipe = fxq.Recipe.weight_only(weight=weight, backend="reference").without_pass("gptq")
        errors.append(float((fxq.quantize(model, recipe, data=[x])(x) - model(x)).detach().square().sum()))
    assert errors[1] < 0.99 * errors[0]
