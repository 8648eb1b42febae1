"""Fake quantizers: what they compute, their gradients, and how ranges follow what was seen."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import fxq
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight, full_tensor, move_ranges, use_ranges
from fxq.quant.observers import observer_for
from fxq.quant.oscillation import Oscillation
from fxq.quant.qparams import QParams, choose_qparams, dequantize, quantize

AVERAGE = fxq.TensorSpec(observer="moving_average:0.25")
MINMAX = fxq.TensorSpec(observer="minmax")
WEIGHT = fxq.TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")


def value_quantizer(spec=MINMAX, scale=1.0, zero_point=0, **options):
    return FakeQuantizeValue(spec, QParams.per_tensor(scale, zero_point, spec.qmin, spec.qmax), "x", **options)


def settled(quantizer, *batches):
    """The quantizer after forwards on these batches."""
    for x in batches:
        quantizer(x)
        move_ranges([quantizer], quantizer.seen[None])
        quantizer.started = quantizer.has_range = True
        use_ranges([quantizer])
    return quantizer


@given(st.integers(0, 2**16), st.sampled_from([2, 4, 7, 8]), st.booleans(), st.floats(0.01, 100), st.floats(-3, 3))
def test_a_value_is_what_quantize_and_dequantize_make_of_it(seed, bits, symmetric, spread, shift):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * spread + shift
    spec = fxq.TensorSpec(bits=bits, symmetric=symmetric, observer="minmax")
    quantizer = settled(value_quantizer(spec), x)
    grid = choose_qparams(x.min(), x.max(), spec)
    assert quantizer.qparams().same_as(grid)
    assert torch.equal(quantizer(x), dequantize(quantize(x, grid), grid))


def test_before_the_first_batch_counts_values_are_handed_on():
    quantizer, x = value_quantizer(), torch.randn(9)
    assert torch.equal(quantizer(x), x)
    assert torch.equal(value_quantizer(nonnegative=True)(x), x.relu())
    assert torch.equal(quantizer.seen, torch.stack([x.min(), x.max()]))


def test_a_learned_scale_starts_with_its_grid_and_follows_no_range():
    spec = fxq.TensorSpec(range="learned", observer="mse")
    quantizer = value_quantizer(spec, scale=0.5, zero_point=3)
    before = quantizer.qparams()
    x = torch.randn(100)
    assert torch.equal(quantizer(x), dequantize(quantize(x, before), before))
    assert quantizer.qparams().same_as(before)
    assert [name for name, _ in quantizer.named_parameters()] == ["factor"]
    assert quantizer.factor.shape == (1,)  # FSDP takes no 0-d parameters


def test_a_value_of_zeros_gets_a_grid_of_its_own():
    quantizers = [value_quantizer(), value_quantizer()]
    move_ranges(quantizers, torch.tensor([[0.0, 1000.0], [0.0, 0.0]]))
    for quantizer in quantizers:
        quantizer.has_range = True
    use_ranges(quantizers)
    assert [float(quantizer.scale) for quantizer in quantizers] == pytest.approx([1000 / 255, 1 / 255])


def test_a_learned_factor_below_zero_is_used_without_its_sign():
    quantizer = value_quantizer(fxq.TensorSpec(range="learned", observer="mse"), scale=0.5)
    with torch.no_grad():
        quantizer.factor.neg_()
    assert quantizer.qparams().s == 0.5
    assert quantizer(torch.tensor([1.3])).item() == 1.5


@pytest.mark.parametrize("spec", [AVERAGE, MINMAX, fxq.TensorSpec(observer="moving_average:1.0")])
def test_ranges_follow_as_the_observer_would(spec):
    batches = [torch.randn(20) * scale + 1 for scale in (1, 3, 0.2)]
    quantizer, observer = settled(value_quantizer(spec), *batches), observer_for(spec)
    for x in batches:
        observer(x)
    assert_close(torch.stack([quantizer.low, quantizer.high]), torch.stack(observer.range()), rtol=1e-6, atol=0)


def test_what_is_not_finite_or_empty_moves_no_range():
    quantizer = settled(value_quantizer(AVERAGE), torch.tensor([-1.0, 2.0]))
    for x in (torch.tensor([math.nan, 5.0]), torch.tensor([math.inf]), torch.empty(0)):
        settled(quantizer, x)
        assert (quantizer.low.item(), quantizer.high.item()) == (-1.0, 2.0)


def test_in_eval_mode_nothing_is_noted():
    quantizer = settled(value_quantizer(), torch.tensor([0.0, 1.0])).eval()
    quantizer(torch.tensor([9.0]))
    assert quantizer.seen.tolist() == [math.inf, -math.inf]


def test_a_relu_that_is_left_to_the_grid():
    x = torch.randn(50)
    quantizer = settled(value_quantizer(nonnegative=True), x)
    grid = choose_qparams(torch.zeros(()), x.max(), MINMAX)
    assert quantizer.low.item() == 0.0
    assert torch.equal(quantizer(x), dequantize(quantize(x.relu(), grid), grid))


@pytest.mark.parametrize(
    ("spec", "axis", "block"),
    [
        (WEIGHT, 0, None),
        (WEIGHT, 1, None),
        (fxq.TensorSpec(signed=True, symmetric=True, observer="minmax"), None, None),
        (fxq.TensorSpec(bits=4, per=4, observer="minmax"), 1, 4),
    ],
)
def test_a_weight_is_on_the_grid_of_its_own_range(spec, axis, block):
    observer = observer_for(spec, axis)
    observer(torch.ones(6, 10))
    quantizer, w = FakeQuantizeWeight(spec, observer.qparams(), "w"), torch.randn(6, 10, requires_grad=True)
    fresh = observer_for(spec, axis)
    fresh(w)
    grid = fresh.qparams()
    assert grid.block == block
    assert torch.equal(quantizer(w), dequantize(quantize(w.detach(), grid), grid))
    (passed,) = torch.autograd.grad(quantizer(w).sum(), w)
    assert passed.eq(1).all()


def test_frozen_elements_keep_their_integers_when_the_scale_changes():
    """The scale is measured: a step that moves the largest weights changes it for all."""
    torch.manual_seed(0)
    spec, w = fxq.TensorSpec(signed=True, symmetric=True), torch.randn(6, 10)
    observer = observer_for(spec)
    observer(w)
    quantizer = FakeQuantizeWeight(spec, observer.qparams(), "w")
    noted = quantizer.oscillation = Oscillation(w.shape, torch.int8)
    quantizer(w)
    noted.update(1.0, first=True)
    frozen, kept = w.abs() < 1, noted.now.clone()
    noted.frequency.masked_fill_(frozen, 2.0)
    for _ in range(3):
        w += 0.3 * torch.randn(6, 10)
        w[0, 0] *= 1.3
        quantizer.restore_frozen(w)
        quantizer(w)
        noted.update(1.0)
        assert torch.equal(noted.now[frozen], kept[frozen]) and torch.equal(noted.before[frozen], kept[frozen])
    assert not torch.equal(noted.now, kept)


def test_half_precision_is_rounded_in_float32():
    quantizer = settled(value_quantizer(), torch.tensor([0.0, 1.0]))
    assert quantizer(torch.rand(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_plain_tensor_is_whole():
    x = torch.rand(2)
    assert full_tensor(x) is x
