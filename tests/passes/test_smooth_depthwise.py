"""smooth-depthwise: each channel of a depthwise convolution's input uses the whole grid, at no cost to the weights."""

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from fxq.graph.query import constant, is_op
from fxq.passes import SmoothDepthwise
from tests.support.graphs import text
from tests.support.helpers import REFERENCE, module

FITTED = REFERENCE.without_pass("correct-bias").without_pass("keep-small-values").without_pass("split-inputs")
PLAIN = FITTED.without_pass("smooth-depthwise")
SIZES = torch.logspace(-2, 1, 8)
"""Sizes of the channels between the layers of `uneven`."""


def uneven(act=None, dims=2, outputs=16, **options):
    """A convolution whose channels differ in size, a function, and a depthwise convolution that makes them equal."""
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{dims}d")
    first, last = conv(3, 8, 3, padding=1), conv(8, outputs, 3, groups=8, **options)
    with torch.no_grad():
        first.weight.mul_(SIZES.view(-1, 1, *[1] * dims))
        first.bias.mul_(SIZES)
        last.weight.div_(SIZES.repeat_interleave(outputs // 8).view(-1, 1, *[1] * dims))
    return nn.Sequential(first, act or nn.ReLU(), last).eval()


def pictures(count, seed=0, dims=2):
    size = [16 if dims < 3 else 8] * dims
    return list(torch.randn(count, 8, 3, *size, generator=torch.Generator().manual_seed(seed)))


def graphs(model, step=None):
    """The graphs before and after the pass."""
    recipe = FITTED if step is None else PLAIN.insert_pass(step, after="insert-qdq")
    data = pictures(4)
    names = "insert-qdq", "smooth-depthwise"
    return [fxq.extend.run_passes(model, recipe, example_inputs=data[0], data=data, until=name) for name in names]


def weights(gm: fx.GraphModule):
    """Integers and scales of the weights, in order."""
    dequantized = [n for n in gm.graph.nodes if is_op(n, "dequantize") and n.args[0].op == "get_attr"]
    return [(constant(gm, n.args[0]), constant(gm, n.kwargs["scale"])) for n in dequantized]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Identity(), nn.LeakyReLU(0.1)])
def test_the_layer_before_takes_the_factors(act):
    """Integers and grids stay; what the scales of one layer are divided by, those of the other are multiplied by."""
    before, after = graphs(uneven(act))
    assert text(after) == text(before).replace("@0.bias", "@fxq_data.0_bias_smoothed")
    (first, m), (last, k) = weights(before)
    (new_first, new_m), (new_last, new_k) = weights(after)
    assert torch.equal(first, new_first) and torch.equal(last, new_last)
    torch.testing.assert_close((m / new_m).repeat_interleave(2), new_k / k)
    torch.testing.assert_close(
        before.get_parameter("0.bias") / (m / new_m), after.fxq_data.get_buffer("0_bias_smoothed")
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "gains"), [(16, True), (1, False)])
def test_one_batch_is_divided_into_halves(size, gains):
    """A single value of each channel says nothing of its range."""
    model, data = uneven(padding=1), [torch.randn(1 if size == 1 else 4, 3, size, size)]
    with_pass, without = (fxq.quantize(model, recipe, data=data) for recipe in (FITTED, PLAIN))
    want = model(data[0])
    assert sqnr(want, with_pass(data[0])) > sqnr(want, without(data[0])) + (10 if gains else -0.01)


@pytest.mark.slow
def test_an_input_that_is_computed_in_float_is_multiplied():
    layers = uneven()
    model = module(
        lambda self, x: self.last(torch.sin(self.first(x)) * self.sizes),
        first=nn.Conv2d(3, 8, 3, padding=1),
        last=layers[2],
        sizes=SIZES.view(-1, 1, 1),
    )
    before, after = graphs(model)
    lines = text(after).splitlines()
    (added,) = (line for line in lines if line not in text(before).splitlines() and " = mul(" in line)
    assert added == "mul_smooth = mul(mul, @fxq_data.mul_smoothing)"
    assert "mul_smooth_q" not in text(after) and "quantize(mul_smooth, " in text(after)
    plain, fitted = (fxq.quantize(model, recipe, data=pictures(4)) for recipe in (PLAIN, FITTED))
    (fresh,) = pictures(1, seed=1)
    with torch.no_grad():
        assert sqnr(model(fresh), fitted(fresh)) > sqnr(model(fresh), plain(fresh)) + 10  # dB
    factors = fitted.qparams()["last"].input_factors
    assert factors.shape == (8,) and bool((factors[:-1] > factors[1:]).all())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_accuracy(dims):
    model, (fresh,) = uneven(dims=dims), pictures(1, seed=1, dims=dims)
    plain, fitted = (fxq.quantize(model, recipe, data=pictures(4, dims=dims)) for recipe in (PLAIN, FITTED))
    with torch.no_grad():
        wanted = model(fresh)
        assert sqnr(wanted, fitted(fresh)) > max(35, sqnr(wanted, plain(fresh)) + 15)  # dB
    assert fitted.output_sqnr > 35


def test_the_ledger_compares_what_was_divided():
    """Errors of the layers are those of divided values, and no warning names a layer."""
    qmodel = fxq.quantize(uneven(), FITTED, data=pictures(4))
    assert all(entry.own_sqnr is None or entry.own_sqnr > 30 for entry in qmodel.ledger)


def with_two_readers():
    layers = uneven()

    def forward(self, x):
        between = torch.relu(self.first(x))
        return self.last(between), between

    return module(forward, first=layers[0], last=layers[2])


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("make", "step"),
    [
        (uneven, SmoothDepthwise(gain=60.0)),
        (uneven, SmoothDepthwise(enough=0.0)),
        (uneven, SmoothDepthwise(least=10**6)),
        (lambda: uneven(nn.ReLU6()), None),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)).eval(), None),
        (with_two_readers, None),
    ],
    ids=["little gain", "good enough", "few values", "clipped", "not depthwise", "two readers"],
)
def test_what_it_leaves_alone(make, step):
    before, after = graphs(make(), step)
    assert text(after) == text(before)


def test_a_channel_that_calibration_saw_as_zero_keeps_its_scale():
    model = uneven()
    with torch.no_grad():
        model[0].weight[3] = 0
        model[0].bias[3] = -1
    before, after = graphs(model)
    divided = weights(before)[0][1] / weights(after)[0][1]
    assert divided[3] == 1 and bool(torch.isfinite(divided).all())


def test_without_samples_nothing_changes():
    recipe = fxq.Recipe.dynamic(backend="reference")
    assert not fxq.quantize(uneven(), recipe, example_inputs=pictures(1)[0]).history["smooth-depthwise"].edits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["x86", "openvino", "jit"])
def test_kernels(backend):
    model, (fresh,) = uneven(), pictures(1, seed=1)
    try:
        qmodel = fxq.quantize(model, FITTED.with_backend(backend), data=pictures(4))
    except BackendError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        assert sqnr(model(fresh), qmodel(fresh)) > 30  # dB
