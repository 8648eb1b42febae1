"""Networks whose values have ranges that are hard to quantize: saturated functions, constants."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.models import settled

BACKENDS = ["x86", "reference"]


class Net(nn.Module):
    """A function of its layers and inputs."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


class Masked(Net):
    """Net that takes a mask, too."""

    def forward(self, x, mask):
        return self.function(self, x, mask)


def conv(inputs, outputs, kernel=1, **options):
    return nn.Conv2d(inputs, outputs, kernel, **options)


def with_bias(layer, value):
    with torch.no_grad():
        layer.bias.fill_(value)
    return layer


def quantized(model, inputs, backend, **options):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", **options)
    return fxq.quantize(model, recipe, data=[inputs])


def quality(model, inputs, backend):
    """SQNR of every output."""
    qmodel = quantized(model, inputs, backend)
    with torch.no_grad():
        real, got = model(*inputs), qmodel(*inputs)
    pairs = zip(real, got, strict=True) if isinstance(real, tuple) else [(real, got)]
    return [sqnr(a, b) for a, b in pairs], qmodel


def precisions(qmodel):
    return [(entry.op, entry.precision) for entry in qmodel.ledger]


# ---- functions with a bound


def saturated(m, x):
    return m.last(torch.sigmoid(m.first(x)))


def gate(m, x):
    y = m.first(x)
    return m.last(y * torch.sigmoid(m.gate(y)))


def attention(m, x):
    scores = m.q(x) @ m.k(x).transpose(1, 2) / 4
    return m.out(torch.softmax(scores, -1) @ m.v(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saturated_function_has_the_range_of_its_values(backend):
    image = (torch.randn(4, 3, 12, 12),)
    model = settled(lambda: Net(saturated, first=conv(3, 8, 3), last=conv(8, 4, 3, bias=False)))
    with_bias(model.first, -7.0)
    assert quality(model, image, backend)[0][0] > 25
    model = settled(lambda: Net(gate, first=conv(3, 8, 3), gate=conv(8, 8), last=conv(8, 4, 3, bias=False)))
    with_bias(model.gate, -4.6)
    assert quality(model, image, backend)[0][0] > 25
    model = settled(lambda: Net(lambda m, x: m.last(m.first(x).softmax(1)), first=conv(3, 512), last=conv(512, 4)))
    with_bias(model.last, 0.0)
    assert quality(model, image, backend)[0][0] > 25


def test_attention_over_many_tokens():
    layers = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    assert quality(settled(lambda: Net(attention, **layers)), (torch.randn(4, 256, 16),), "reference")[0][0] > 25


# ---- constants


FILLS = {
    "masked_fill": lambda x, mask, value: x.masked_fill(~mask, value),
    "where": lambda x, mask, value: torch.where(mask, x, value),
    "where of a constant": lambda x, mask, value: torch.where(mask, x, torch.tensor(value)),
    "where of a full": lambda x, mask, value: torch.where(mask, x, torch.full_like(x, value)),
    "cat": lambda x, mask, value: torch.cat([x, torch.full((8, 2, 16), value)], 1),
    "cat of a new_full": lambda x, mask, value: torch.cat([x, x.new_full((8, 2, 16), value)], 1),
}


def masked_maximum(fill, value):
    return settled(
        lambda: Masked(
            lambda m, x, mask: m.last(fill(m.first(x), mask, value).max(1).values),
            first=nn.Linear(16, 16),
            last=nn.Linear(16, 8),
        )
    )


def sequences():
    mask = torch.rand(8, 20, 1) > 0.4
    mask[:, 0] = True
    return torch.randn(8, 20, 16), mask


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [-1e4, -100.0, -math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("fill", FILLS)
def test_what_a_mask_fills_in_is_no_data(fill, value, backend):
    [output_sqnr], qmodel = quality(masked_maximum(FILLS[fill], value), sequences(), backend)
    assert output_sqnr > 25
    assert precisions(qmodel)[-1] == ("linear", "int8")
    reason = next(entry.reason for entry in qmodel.ledger if entry.op == "amax")
    assert f"holds {value:g}, far outside of its data" in reason


def test_a_mask_that_calibration_did_not_use_is_in_force_all_the_same():
    model, (x, mask) = masked_maximum(FILLS["masked_fill"], 1e4), sequences()
    qmodel = quantized(model, (x, torch.ones_like(mask)), "x86")
    amax = next(entry for entry in qmodel.ledger if entry.op == "amax")
    assert amax.precision == "float" and "holds 10000" in amax.reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_reads_a_filled_value_and_computes_reads_it_in_float(backend):
    """Of a row that is filled in nothing is clipped, and the others are as good as without it."""

    def function(m, x, mask):
        return m.last(m.first(x).masked_fill(~mask, -1e4))

    model = settled(lambda: Masked(function, first=nn.Linear(16, 16), last=nn.Linear(16, 8)))
    x, mask = sequences()
    qmodel = quantized(model, (x, mask), backend)
    with torch.no_grad():
        real, got = model(x, mask), qmodel(x, mask)
    torch.testing.assert_close(got[~mask[..., 0]], real[~mask[..., 0]], rtol=1e-5, atol=1e-2)
    assert sqnr(real[mask[..., 0]], got[mask[..., 0]]) > 25
    assert precisions(qmodel)[0] == ("linear", "int8") and precisions(qmodel)[-1] == ("linear", "float")


def test_a_residual_that_is_filled_leaves_the_layer_on_integers():
    def function(m, x, mask):
        return m.last(m.first(x) + m.second(x).masked_fill(~mask, 1e4))

    layers = {"first": nn.Linear(16, 16), "second": nn.Linear(16, 16), "last": nn.Linear(16, 8)}
    model = settled(lambda: Masked(function, **layers))
    qmodel = quantized(model, sequences(), "x86")
    node_precisions = {(entry.path or entry.op): entry.precision for entry in qmodel.ledger}
    assert (node_precisions["first"], node_precisions["second"], node_precisions["add"]) == ("int8", "int8", "float")


PADS = [(-1.0, 1, 2), (-1.0, 2, 2), (-20.0, 3, 2), (-20.0, 3, 3), (-20.0, 1, 3), (-math.inf, 1, 3), (100.0, 1, 2)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("value", "width", "kernel"), PADS)
def test_a_pad_before_a_max_pool(value, width, kernel, adaptive, backend):
    def function(m, x):
        y = F.pad(torch.relu(m.first(x)), (width,) * 4, value=value)
        return m.last(F.adaptive_max_pool2d(y, 5) if adaptive else F.max_pool2d(y, kernel))

    model = settled(lambda: Net(function, first=conv(3, 8, 3), last=conv(8, 4)))
    [output_sqnr], qmodel = quality(model, (torch.randn(4, 3, 12, 12),), backend)
    assert output_sqnr > 25
    assert precisions(qmodel)[0] == ("conv2d", "int8")
    if not adaptive and width == 1 and value < 0:  # no output has the value: even the pool runs on integers
        assert all(precision != "float" for _, precision in precisions(qmodel))


def two_convs():
    return {"first": conv(3, 8, 3), "last": conv(8, 4)}


def test_a_value_of_constants_alone_is_on_a_grid():
    def function(m, x):
        y = m.first(x)
        return m.last(y) + m.last(y.new_full((4, 8, 10, 10), 1e3))

    assert quality(settled(lambda: Net(function, **two_convs())), (torch.randn(4, 3, 12, 12),), "reference")[0][0] > 25


def test_a_mask_of_minus_infinity_may_be_an_input():
    attend = nn.MultiheadAttention(16, 2, batch_first=True)
    layers = {"attend": attend, "last": nn.Linear(16, 16)}
    model = settled(lambda: Masked(lambda m, x, mask: m.last(m.attend(x, x, x, attn_mask=mask)[0]), **layers))
    inputs = torch.randn(8, 20, 16), nn.Transformer.generate_square_subsequent_mask(20)
    for backend in BACKENDS:
        assert quality(model, inputs, backend)[0][0] > 25


MASKED_BY_INPUTS = {
    "added": lambda y, keep: y + (1 - keep) * -1e4,
    "taken away": lambda y, keep: y - (1 - keep) * 1e4,
    "chosen": lambda y, keep: torch.where(keep > 0.5, y, keep - 1e4),
    "moved": lambda y, keep: (y + (1 - keep) * -1e4).flip(1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("apply", MASKED_BY_INPUTS.values(), ids=MASKED_BY_INPUTS)
def test_a_mask_that_is_an_input_and_pushes_values_far_away(apply):
    """The rows that it leaves alone are right; where it does nothing, they are read on integers."""
    layers = {"first": nn.Linear(16, 16), "last": nn.Linear(16, 4)}
    model = settled(lambda: Masked(lambda m, x, mask: m.last(apply(m.first(x), mask)), **layers))
    x, keep = torch.randn(64, 8, 16), (torch.rand(64, 8, 1) > 0.3).float()
    kept = apply(torch.zeros(64, 8, 1), keep)[..., 0].abs() < 1
    _, qmodel = quality(model, (x, keep), "x86")
    assert precisions(qmodel)[-1] == ("linear", "float") and "two ranges far apart" in qmodel.ledger[-1].reason
    with torch.no_grad():
        assert sqnr(model(x, keep)[kept], qmodel(x, keep)[kept]) > 30
    assert precisions(quality(model, (x, torch.ones_like(keep)), "x86")[1])[-1] == ("linear", "int8")


def test_a_pad_with_a_value_that_is_an_argument():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = conv(3, 8, 3), conv(8, 4)

        def forward(self, x, value: float):
            return self.last(F.pad(self.first(x), (1, 1, 1, 1), value=value))

    model, x = settled(Model), torch.randn(4, 3, 12, 12)
    qmodel = quantized(model, (x, 0.5), "x86")
    assert sqnr(model(x, 0.5), qmodel(x, 0.5)) > 25


def test_a_clamp_whose_bounds_are_arguments():
    """Its effect on a constant is unknown: the constant may pass."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = conv(3, 8, 3), conv(8, 4)

        def forward(self, x, low: float):
            return self.last(F.pad(self.first(x), (1, 1, 1, 1), value=-1.0).clamp(low, 3.0))

    model, x = settled(Model), torch.randn(4, 3, 12, 12)
    qmodel = quantized(model, (x, -2.0), "x86")
    assert sqnr(model(x, -2.0), qmodel(x, -2.0)) > 25
