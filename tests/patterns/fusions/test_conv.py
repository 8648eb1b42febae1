"""Patterns around convolutions, in every variant."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxq.patterns.fusions.conv import ACTIVATIONS
from tests.support.fusions import check_numbers, check_refused, fused, lines

LAYERS = {
    "conv1d": (lambda: nn.Conv1d(6, 6, 3, padding=1), (8, 6, 12), "padding=(1,)"),
    "conv2d": (lambda: nn.Conv2d(6, 6, 3, padding=1), (4, 6, 6, 6), "padding=(1, 1)"),
    "conv3d": (lambda: nn.Conv3d(6, 6, 3, padding=1), (2, 6, 4, 4, 4), "padding=(1, 1, 1)"),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(6, 6, 3, padding=1), (8, 6, 12), "padding=(1,)"),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(6, 6, 3, padding=1), (2, 6, 4, 4, 4), "padding=(1, 1, 1)"),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(6, 6, 3, padding=1), (4, 6, 5, 5), "padding=(1, 1)"),
}
FUNCTIONS = {"hardtanh": lambda x: F.hardtanh(x, -0.3, 0.5)}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("conv", LAYERS)
def test_conv_act(conv, act):
    layer, shape, padding = LAYERS[conv]
    function = FUNCTIONS.get(act, getattr(F, act))
    model, x, before, behind = fused(layer, shape, lambda m, x: m.other(function(m.layer(x))))
    options = "(min_val=-0.3, max_val=0.5)" if act == "hardtanh" else ""
    assert lines(before)[0] == f"layer = {conv}(x, @layer.weight, @layer.bias, {padding})"
    assert lines(behind) == [
        f"layer_{act} = {conv}_{act}(x, @layer.weight, @layer.bias) {{{conv}({padding}); {act}{options}}}",
        f"other = {conv}(layer_{act}, @other.weight, @other.bias, {padding})",
    ]
    check_numbers(model, x, before, behind)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("conv", LAYERS)
def test_conv_prelu(conv):
    layer, shape, padding = LAYERS[conv]
    model, x, before, behind = fused(layer, shape, lambda m, x: m.other(F.prelu(m.layer(x), m.slope)))
    assert lines(behind)[0] == (
        f"layer_prelu = {conv}_prelu(x, @layer.weight, @layer.bias, @slope) {{{conv}({padding}); prelu}}"
    )
    check_numbers(model, x, before, behind)


SUMS = {
    "first": lambda y, r: y + r,
    "second": lambda y, r: r + y,
    "torch.add": lambda y, r: torch.add(y, r),
    "in place": operator.iadd,
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("spelled", SUMS)
@pytest.mark.parametrize("conv", ["conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("relu", [False, True])
def test_conv_add(conv, relu, spelled):
    """The residual is an activation: either operand."""
    layer, shape, padding = LAYERS[conv]

    def forward(m, x):
        y = SUMS[spelled](m.layer(x), torch.sigmoid(x))
        return m.other(F.relu(y) if relu else y)

    model, x, before, behind = fused(layer, shape, forward)
    name, kind, body = ("layer_add_relu", "add_relu", "; relu") if relu else ("layer_add", "add", "")
    assert lines(behind) == [
        "sigmoid = sigmoid(x)",
        f"{name} = {conv}_{kind}(x, @layer.weight, @layer.bias, sigmoid) {{{conv}({padding}); add{body}}}",
        f"other = {conv}({name}, @other.weight, @other.bias, {padding})",
    ]
    check_numbers(model, x, before, behind)


def test_the_sum_of_two_convolutions_belongs_to_one_of_them():
    layer, shape, _ = LAYERS["conv2d"]
    model, x, before, behind = fused(layer, shape, lambda m, x: m.other(F.relu(m.layer(x) + m.branch(x))))
    assert [line.partition("(")[0] for line in lines(behind)] == [
        "branch = conv2d",
        "layer_add_relu = conv2d_add_relu",
        "other = conv2d",
    ]
    check_numbers(model, x, before, behind)


def test_a_convolution_added_to_its_input():
    layer, shape, padding = LAYERS["conv2d"]
    model, x, before, behind = fused(layer, shape, lambda m, x: m.other(m.layer(x) + x))
    assert lines(behind)[0] == f"layer_add = conv2d_add(x, @layer.weight, @layer.bias, x) {{conv2d({padding}); add}}"
    check_numbers(model, x, before, behind)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("forward", "rule", "node", "reason"),
    [
        (
            lambda m, x: m.other(F.relu(m.layer(x) + x.mean((2, 3), keepdim=True))),
            "conv2d_add_relu", "relu", "residual_is_broadcast",
        ),
        (lambda m, x: m.other(m.layer(x) + m.slope.reshape(6, 1, 1)), "conv2d_add", "add", "residual_is_broadcast"),
        (lambda m, x: m.other(m.layer(x) + 1), "conv2d_add", "add", "residual_is_broadcast"),
        (
            lambda m, x: m.other(m.layer(x[:1]) + x),
            "conv2d_add", "add", "residual_is_broadcast",  # here it is the convolution that is broadcast
        ),
        (lambda m, x: m.other(torch.add(m.layer(x), x, alpha=2)), "conv2d_add", "add", "with alpha=1, but %add has 2"),
        (
            lambda m, x: m.other(F.relu(torch.add(x, m.layer(x), alpha=0.5))),
            "conv2d_add_relu", "relu", "with alpha=1, but %add has 0.5",
        ),
        (lambda m, x: (lambda y: F.relu(y) * y)(m.layer(x)), "conv2d_relu", "relu", "%layer is also read by %mul"),
        (
            lambda m, x: (lambda y: (F.relu(y + x), y))(m.layer(x)),
            "conv2d_add_relu", "relu", "%layer is also read by %output",
        ),
        (lambda m, x: F.relu(F.max_pool2d(m.layer(x), 2)), "conv2d_relu", "relu", "%max_pool2d is max_pool2d"),
        (lambda m, x: F.gelu(m.layer(x)), "conv2d_relu", "gelu", "expects relu, but %gelu is gelu"),
    ],
)  # fmt: skip
def test_refuses(forward, rule, node, reason):
    layer, shape, _ = LAYERS["conv2d"]
    check_refused(rule, node, reason, *fused(layer, shape, forward))


def test_a_sum_read_elsewhere_is_fused_without_its_relu():
    layer, shape, _ = LAYERS["conv2d"]

    def forward(m, x):
        y = m.layer(x) + torch.sigmoid(x)
        return m.other(F.relu(y)), y

    model, x, before, behind = fused(layer, shape, forward)
    assert [line.partition("(")[0] for line in lines(behind)[:3]] == [
        "sigmoid = sigmoid", "layer_add = conv2d_add", "relu = relu",
    ]  # fmt: skip
    check_numbers(model, x, before, behind)
