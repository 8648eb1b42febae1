"""The pattern of squeeze-and-excitation, in every variant."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.patterns.fusions.excite import FUNCTIONS, GATES
from tests.support.fusions import check_numbers, check_refused, data, fused, lines
from tests.support.graphs import graph

SHAPE = (4, 6, 6, 6)
OPTIONS = {
    "adaptive_avg_pool2d": ("", "output_size=(1, 1)"),
    "mean": ("_mean", "dim=(2, 3), keepdim=True"),
}


def layer():
    return nn.Conv2d(6, 6, 1)


def gate(m, y, act=F.relu, gate=torch.sigmoid):
    return gate(m.branch(act(m.layer(y))))


def excited(m, x):
    """Product of a value that has other users and its gate."""
    y = F.max_pool2d(m.other(x), 3, 1, 1)
    return y, gate(m, F.adaptive_avg_pool2d(y, 1))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("pool", OPTIONS)
@pytest.mark.parametrize(("act", "function"), list(itertools.product(FUNCTIONS, GATES)))
def test_every_variant(act, function, pool):
    def forward(m, x):
        y = m.other(x)
        means = F.adaptive_avg_pool2d(y, 1) if pool != "mean" else y.mean((2, 3), keepdim=True)
        factor = gate(m, means, getattr(F, act), getattr(F, function))
        return m.other(y * factor if act == "relu" else factor * y)

    model, x, before, behind = fused(layer, SHAPE, forward)
    (kind, options), name = OPTIONS[pool], f"{pool}_conv2d_{act}_conv2d_{function}_mul"
    assert lines(behind) == [
        "other = conv2d(x, @other.weight, @other.bias)",
        f"{name} = squeeze_excite{kind}_{act}_{function}(other, @layer.weight, @layer.bias, @branch.weight, "
        f"@branch.bias) {{{pool}({options}); conv2d; {act}; conv2d; {function}; mul}}",
        f"other_1 = conv2d({name}, @other.weight, @other.bias)",
    ]
    unit = next(n for n in behind.graph.nodes if n.name == name)
    assert info(unit).fused.paths == ("", "layer", "", "branch", "", "")
    check_numbers(model, x, before, behind)


def test_the_module():
    """Spellings of the mean: torchvision's and others."""

    class Excitation(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), layer(), layer()
            self.act, self.gate = nn.SiLU(), nn.Sigmoid()

        def forward(self, x):
            return self.gate(self.fc2(self.act(self.fc1(self.pool(x))))) * x

    model, x = nn.Sequential(layer(), Excitation(), layer()).eval(), data(SHAPE)
    assert "squeeze_excite_silu_sigmoid(" in lines(graph(model, x, "fuse"))[1]
    recipe = fxq.Recipe.static(backend="reference")
    numbers = fxq.quantize(model, recipe, data=[x]).qparams()
    assert list(numbers) == ["0", "1.fc1", "1.fc2", "2"]
    inner = numbers["1.fc1"]
    assert inner.weight.dtype == torch.int8 and inner.weight.shape == (6, 6, 1, 1)
    assert (inner.input_scale, inner.input_zero_point, inner.bias_scale, inner.output_scale) == (None,) * 4
    assert torch.equal(inner.bias, model[1].fc1.bias)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [(-1, -2), (3, 2), [2, -1]], ids=str)
def test_the_same_axes(dim):
    model, x, before, behind = fused(
        layer, SHAPE, lambda m, x: (lambda y: m.other(y * gate(m, y.mean(dim, keepdim=True))))(m.other(x))
    )
    assert "squeeze_excite_mean_relu_sigmoid(" in lines(behind)[1]
    check_numbers(model, x, before, behind)


def test_a_value_that_others_read_and_a_result_in_float():
    def forward(m, x):
        y, factor = excited(m, x)
        return y * factor, y

    model, x, before, behind = fused(layer, SHAPE, forward)
    assert "squeeze_excite_relu_sigmoid(max_pool2d, " in lines(behind)[2]
    check_numbers(model, x, before, behind)


POOLED, MEAN = "squeeze_excite_relu_sigmoid", "squeeze_excite_mean_relu_sigmoid"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("forward", "rule", "reason"),
    [
        (lambda m, x: (lambda y: y * gate(m, y.mean(3, keepdim=True)))(m.other(x)), MEAN, "not_over_height_and_width"),
        (lambda m, x: (lambda y: y * gate(m, y.mean((1, 2), keepdim=True).expand_as(y)))(m.other(x)), MEAN, "expand"),
        (
            lambda m, x: (lambda y: y * gate(m, F.adaptive_avg_pool2d(y, (1, 6))))(m.other(x)),
            POOLED, "with output_size=(1, 1), but %adaptive_avg_pool2d has (1, 6)",
        ),
        (lambda m, x: (lambda y: m.other(x) * gate(m, F.adaptive_avg_pool2d(y, 1)))(m.other(x)), POOLED, "%"),
        (lambda m, x: (lambda y, g: (y * g, g))(*excited(m, x)), POOLED, "is also read by %output"),
        (lambda m, x: (lambda y, g: y + g)(*excited(m, x)), POOLED, "expects mul, but %add is add"),
    ],
)  # fmt: skip
def test_refuses(forward, rule, reason):
    model, x, before, behind = fused(layer, SHAPE, forward)
    node = next(n.name for n in reversed(before.graph.nodes) if n.name in ("mul", "add"))
    check_refused(rule, node, reason, model, x, before, behind)


@pytest.mark.slow
def test_refuses_larger_kernels_and_padding():
    """A kernel of more than a pixel reads padding; of one pixel it may, too."""
    for options, rule in [({"kernel_size": 3, "padding": 1}, "padding"), ({"kernel_size": 1, "groups": 2}, "groups")]:
        model, x, before, behind = fused(
            lambda o=options: nn.Conv2d(6, 6, **o),
            SHAPE,
            lambda m, x: (lambda y: m.other(y * gate(m, F.adaptive_avg_pool2d(y, 1))))(m.other(x)),
        )
        check_refused(POOLED, "mul", f"with {rule}=", model, x, before, behind)


def test_other_backends_run_the_parts():
    model, x, _, _ = fused(layer, SHAPE, lambda m, x: (lambda y, g: m.other(y * g))(*excited(m, x)))
    with torch.no_grad():
        y = model(x)
    for backend in ("fbgemm", "qnnpack"):
        if not has_engine(backend):
            continue
        quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend).with_optimize("coverage"), data=[x])
        assert all("squeeze_excite" not in str(n.target) for n in quantized.graph.nodes)
        assert sqnr(y, quantized(x)) > 25
