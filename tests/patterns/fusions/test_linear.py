"""Patterns around linear layers, in every variant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxq.patterns.fusions.linear import ACTIVATIONS
from tests.support.fusions import check_numbers, check_refused, fused, lines

SHAPES = {"rows": (32, 6), "tokens": (4, 9, 6), "one": (6,)}
FUNCTIONS = {"hardtanh": lambda x: F.hardtanh(x, -0.3, 0.5), "leaky_relu": lambda x: F.leaky_relu(x, 0.3)}
OPTIONS = {"hardtanh": "(min_val=-0.3, max_val=0.5)", "leaky_relu": "(negative_slope=0.3)"}


def layer():
    return nn.Linear(6, 6)


def no_bias():
    return nn.Linear(6, 6, bias=False)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("shape", ["rows", "tokens"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_linear_act(act, shape):
    function = FUNCTIONS.get(act, getattr(torch, act, None) or getattr(F, act))
    model, x, before, behind = fused(layer, SHAPES[shape], lambda m, x: m.other(function(m.layer(x))))
    inside = f" {{linear; {act}{OPTIONS[act]}}}" if act in OPTIONS else ""
    assert lines(before)[0] == "layer = linear(x, @layer.weight, @layer.bias)"
    assert lines(behind) == [
        f"layer_{act} = linear_{act}(x, @layer.weight, @layer.bias){inside}",
        f"other = linear(layer_{act}, @other.weight, @other.bias)",
    ]
    check_numbers(model, x, before, behind)


def test_gelu_of_both_kinds():
    def forward(m, x):
        return m.other(F.gelu(m.layer(x), approximate="tanh"))

    model, x, before, behind = fused(layer, SHAPES["rows"], forward)
    assert lines(behind)[0] == (
        "layer_gelu = linear_gelu(x, @layer.weight, @layer.bias) {linear; gelu(approximate='tanh')}"
    )
    check_numbers(model, x, before, behind)


def test_without_bias():
    model, x, before, behind = fused(no_bias, SHAPES["rows"], lambda m, x: m.other(F.relu(m.layer(x))))
    assert lines(behind)[0] == "layer_relu = linear_relu(x, @layer.weight, None)"
    check_numbers(model, x, before, behind)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("make", [layer, no_bias])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_linear_add(relu, swapped, make):
    def forward(m, x):
        y, r = m.layer(x), torch.sigmoid(x)
        y = r + y if swapped else y + r
        return m.other(F.relu(y) if relu else y)

    model, x, before, behind = fused(make, SHAPES["tokens"], forward)
    name, kind = ("layer_add_relu", "linear_add_relu") if relu else ("layer_add", "linear_add")
    bias = "@layer.bias" if make is layer else "None"
    assert lines(behind)[:2] == ["sigmoid = sigmoid(x)", f"{name} = {kind}(x, @layer.weight, {bias}, sigmoid)"]
    check_numbers(model, x, before, behind)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("forward", "rule", "node", "reason"),
    [
        (lambda m, x: m.other(m.layer(x) + m.slope), "linear_add", "add", "residual_is_broadcast"),
        (lambda m, x: m.other(m.layer(x) + 1.5), "linear_add", "add", "residual_is_broadcast"),
        (lambda m, x: m.other(m.layer(x[:1]) + x), "linear_add", "add", "residual_is_broadcast"),
        (lambda m, x: m.other(torch.add(m.layer(x), x, alpha=3)), "linear_add", "add", "alpha=1, but %add has 3"),
        (lambda m, x: (lambda y: F.relu(y) * y)(m.layer(x)), "linear_relu", "relu", "%layer is also read by %mul"),
        (lambda m, x: F.relu(m.layer(x).reshape(-1)), "linear_relu", "relu", "%reshape is reshape"),
        (
            lambda m, x: m.other(torch.sigmoid(m.layer(x))),
            "linear_tanh",
            "sigmoid",
            "expects tanh, but %sigmoid is sigmoid",
        ),
    ],
)
def test_refuses(forward, rule, node, reason):
    check_refused(rule, node, reason, *fused(layer, SHAPES["rows"], forward))
