"""Options of ops that are no constants: sizes read from shapes, and arguments of forward that are numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import expected, full_text, graph
from tests.support.helpers import module

RANDOM = torch.Generator().manual_seed(0)
X, OTHER = torch.randn(4, 3, 12, 12, generator=RANDOM), torch.randn(2, 3, 20, 16, generator=RANDOM)
RECIPES = {
    "reference": fxq.Recipe.static(backend="reference"),
    "coverage": fxq.Recipe.static(optimize="coverage"),
    "speed": fxq.Recipe.static(),
}
pytestmark = pytest.mark.filterwarnings("ignore:nothing runs on integers")
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def between(function, *more):
    """A model with `function` between two convolutions, which is given the further arguments of forward."""
    torch.manual_seed(0)
    if more:
        return module(
            lambda self, x, value: self.b(function(self.a(x), value)), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1)
        )
    return module(lambda self, x: self.b(function(self.a(x))), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1))


def near(model, qmodel, *inputs):
    """Within 25 dB of float: 7 bits, and other values than those of calibration."""
    with torch.no_grad():
        assert sqnr(model(*inputs), qmodel(*inputs)) > 25


def rows(qmodel):
    """Op, precision and reason of what stands between the convolutions."""
    return [(e.op, e.precision, e.reason) for e in qmodel.ledger if e.path == ""]


# ---- sizes

WHOLE = {
    "size()[2:]": lambda x: F.avg_pool2d(x, x.size()[2:]),
    "size()[2:4]": lambda x: F.avg_pool2d(x, kernel_size=x.size()[2:4]),
    "shape[-2:]": lambda x: F.avg_pool2d(x, x.shape[-2:]),
    "shape[1:][1:]": lambda x: F.avg_pool2d(x, x.shape[1:][1:]),
    "numbers": lambda x: F.avg_pool2d(x, (x.size(2), x.size(dim=-1))),
    "list": lambda x: F.avg_pool2d(x, [x.shape[-2], x.shape[3]], stride=x.shape[2]),
    "module": lambda x: nn.AvgPool2d(x.size()[2:])(x),
    "max": lambda x: F.max_pool2d(x, x.size()[2:]),
    "torch.max": lambda x: torch.max_pool2d(x, x.shape[2:], ceil_mode=True),
    "max module": lambda x: nn.MaxPool2d(x.size()[2:])(x),
}


@pytest.mark.one_in(30)
@recipes
@pytest.mark.parametrize("pool", WHOLE.values(), ids=WHOLE)
def test_a_window_of_the_size_of_its_input_is_a_global_pooling(pool, recipe):
    model = between(pool)
    qmodel = fxq.quantize(model, recipe, data=[X, OTHER])
    near(model, qmodel, X)
    near(model, qmodel, OTHER)
    ((op, precision, _),) = rows(qmodel)
    assert op in ("adaptive_avg_pool2d", "adaptive_max_pool2d")
    if recipe is RECIPES["coverage"]:
        assert precision in ("int8", "moves")


@recipes
def test_repeated_as_often_as_a_size_says(recipe):
    """A number of the graph, not a tensor with one for each entry."""
    model = between(lambda x: x[:1].repeat_interleave(x.size(0) // 2, dim=0))
    qmodel = fxq.quantize(model, recipe, data=[X, OTHER])
    near(model, qmodel, X)
    near(model, qmodel, OTHER)
    assert "repeat_interleave" in [op for op, _, _ in rows(qmodel)]
    assert not qmodel.ledger.where(lambda entry: "stays as it is" in entry.reason)


def test_nothing_is_left_of_the_sizes():
    model = between(lambda x: F.avg_pool2d(x, x.size()[2:]))
    assert full_text(graph(model, X)) == expected("""
        x = input
        check_fixed = check_fixed({'x': x}, {'x': '<a tensor with 4 axes>'})
        a = conv2d(x, @a.weight, @a.bias)
        avg_pool2d = adaptive_avg_pool2d(a, output_size=(1, 1))
        b = conv2d(avg_pool2d, @b.weight, @b.bias)
        return b
    """)


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_so_is_one_of_another_number_of_axes(dims, kind):
    pool, layer = getattr(F, f"{kind}_pool{dims}d"), getattr(nn, f"Conv{dims}d")
    torch.manual_seed(0)
    model = module(lambda self, x: self.b(pool(y := self.a(x), y.size()[2:])), a=layer(3, 8, 3), b=layer(8, 4, 1))
    qmodel = fxq.quantize(model, RECIPES["reference"], data=[torch.randn(4, 3, *[9] * dims)])
    assert [e.op for e in qmodel.ledger][1] == f"adaptive_{kind}_pool{dims}d"
    near(model, qmodel, torch.randn(2, 3, *[7] * dims))


NOT_WHOLE = {
    "padded": lambda x: F.avg_pool2d(x, x.size()[2:], padding=1),
    "divisor": lambda x: F.avg_pool2d(x, x.size()[2:], divisor_override=7),
    "width twice": lambda x: F.max_pool2d(x[:, :, : x.size(3)], x.size(3)),
    "of another tensor": lambda x: F.avg_pool2d(F.pad(x, (2, 2, 2, 2)), x.size()[2:]),
    "turned round": lambda x: F.avg_pool2d(F.pad(x, (9, 9, 9, 9)), x.size()[2:][::-1]),
    "half": lambda x: F.avg_pool2d(x, x.size(2) // 2, stride=x.size(3) // 4),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (x.size(2) // 2, x.size(3) // 2)),
    "adaptive all": lambda x: F.adaptive_max_pool2d(x, x.shape[2:]),
    "window": lambda x: F.max_pool2d(x, (x.size(2) // 2, 2)),
    "size": lambda x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[-2:]),
    "sizes": lambda x: F.interpolate(F.max_pool2d(x, 2), size=(x.size(2), x.size(3)), mode="bilinear"),
    "padding": lambda x: F.pad(x, (0, 30 - x.size(3), 0, 30 - x.size(2))),
    "fold": lambda x: F.fold(F.unfold(x, 2, stride=2), x.shape[-2:], 2, stride=2),
    "roll": lambda x: torch.roll(x, (x.size(2) // 2, x.size(3) // 2), (2, 3)),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
}


@pytest.mark.one_in(18)
@recipes
@pytest.mark.parametrize("function", NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_sizes_are_those_of_the_input_at_hand(function, recipe):
    model = between(function)
    qmodel = fxq.quantize(model, recipe, data=[X, OTHER])
    near(model, qmodel, X)
    near(model, qmodel, OTHER)
    assert all(reason for _, precision, reason in rows(qmodel) if precision == "float")


def test_what_torch_looks_at_is_not_what_the_forward_asks_for():
    """torch reads every number that its functions are given; only what a forward reads is checked."""
    model = between(lambda x: torch.roll(x, x.size(2) // 2, 2))
    assert "check_same" not in str(fxq.extend.run_passes(model, "static", example_inputs=X, until="trace").code)
    asked = between(lambda x: torch.roll(x, len(range(x.size(2))), 2))
    qmodel = fxq.quantize(asked, RECIPES["reference"], data=[X])
    with pytest.raises(fxq.InputError, match=r"index of a value in `.*range.*` is 10, but here it is 18"):
        qmodel(OTHER)


# ---- numbers

NUMBERS = {
    "pad value": (lambda x, v: F.pad(x, (1, 1, 1, 1), value=v), 0.5, -0.5),
    "pad": (lambda x, v: F.pad(x, (v, v, v, v), value=v), 1, 2),
    "pad module": (lambda x, v: nn.ConstantPad2d(1, v)(x), 0.5, 0.0),
    "leaky_relu": (lambda x, v: F.leaky_relu(x, v), 0.7, 0.1),
    "rrelu": (lambda x, v: F.rrelu(x, 0.1, v), 0.5, 0.2),
    "elu": (lambda x, v: F.elu(x, v), 1.0, 0.7),
    "clamp": (lambda x, v: x.clamp(-v, v), 1.0, 0.2),
    "clip": (lambda x, v: x.clip(0, v), 1.0, 0.2),
    "hardtanh": (lambda x, v: F.hardtanh(x, -v, v), 1.0, 0.2),
    "threshold": (lambda x, v: F.threshold(x, v, 0.0), 0.0, 0.2),
    "dropout": (lambda x, v: F.dropout(x, v, training=False), 0.5, 0.2),
    "mul": (lambda x, v: x * v, 2.0, 0.5),
    "alpha": (lambda x, v: torch.add(x, x, alpha=v), 2.0, 0.5),
    "div": (lambda x, v: x / v, 0.5, 2.0),
    "pow": (lambda x, v: x.abs() ** v, 2.0, 1.5),
    "scale_factor": (lambda x, v: F.interpolate(x, scale_factor=v), 2.0, 3.0),
    "size": (lambda x, v: F.interpolate(x, size=v), 20, 10),
    "layer norm": (lambda x, v: F.layer_norm(x, x.shape[-1:], eps=v), 1e-5, 0.5),
    "batch norm": (lambda x, v: F.batch_norm(x, torch.zeros(8), torch.ones(8), eps=v), 1e-5, 3.0),
    "norm": (lambda x, v: F.normalize(x, v), 2.0, 1.0),
    "softmax": (lambda x, v: x.softmax(v), 1, 2),
    "mean": (lambda x, v: x.mean(v, keepdim=True), 2, 3),
    "window": (lambda x, v: F.avg_pool2d(x, v), 2, 3),
    "stride": (lambda x, v: F.max_pool2d(x, 3, stride=v), 2, 1),
    "output_size": (lambda x, v: F.adaptive_avg_pool2d(x, v), 3, 2),
    "convolution": (lambda x, v: F.conv2d(x, torch.ones(8, 8, 1, 1), stride=v), 1, 2),
    "fill": (lambda x, v: x.masked_fill(x < 0, v), 0.0, 0.5),
    "roll": (lambda x, v: torch.roll(x, v, 2), 1, 2),
    "repeat": (lambda x, v: x.repeat(1, 1, v, 1), 1, 2),
    "slice": (lambda x, v: x[:, :, v:], 1, 2),
    "narrow": (lambda x, v: x.narrow(2, v, 2), 1, 2),
    "narrow axis": (lambda x, v: x.narrow(v, 1, 8), 2, 3),
    "select": (lambda x, v: x.select(v, 1).unsqueeze(2), 2, 3),
    "movedim": (lambda x, v: x.movedim(v, 2), 2, 3),
}


@pytest.mark.one_in(24)
@recipes
@pytest.mark.parametrize(("function", "value", "other"), NUMBERS.values(), ids=NUMBERS)
def test_an_argument_of_forward_may_be_an_option(function, value, other, recipe):
    """As integers or in float with a reason; with another number, too."""
    model = between(function, "value")
    qmodel = fxq.quantize(model, recipe, data=[(X, value), (X, other)])
    near(model, qmodel, X, value)
    near(model, qmodel, X, other)
    assert all(reason for _, precision, reason in rows(qmodel) if precision == "float")


def test_an_activation_after_a_layer_with_a_computed_bound_is_no_part_of_its_kernel():
    """The bound was an input of the fused kernel, which found that it had one integer too few."""
    model = module(lambda self, x, v: self.b(F.hardtanh(self.a(x), -v, v)), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1))
    qmodel = fxq.quantize(model, RECIPES["coverage"], data=[(X, 0.25)])
    assert [(e.op, e.precision) for e in qmodel.ledger] == [
        ("conv2d", "int8"),
        ("hardtanh", "float"),
        ("conv2d", "int8"),
    ]
    near(model, qmodel, X, 0.125)


def test_sizes_may_be_put_together():
    model = between(lambda x: x.flatten(2).view(x.size()[:-1] + x.shape[3:]).reshape((*x.shape[:-1], x.size(3))))
    qmodel = fxq.quantize(model, RECIPES["coverage"], data=[X, OTHER])
    near(model, qmodel, OTHER)
