"""Patterns of elementwise ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from tests.support.fusions import check_numbers, check_refused, data, fused, lines
from tests.support.graphs import graph
from tests.support.models import settled

SHAPE = (4, 6, 6, 6)


def layer():
    return nn.Conv2d(6, 6, 1)


def pooled(m, x):
    """Two activations whose sum no convolution can include."""
    return F.max_pool2d(m.layer(x), 3, 1, 1), F.max_pool2d(m.branch(x), 3, 1, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("swapped", [False, True])
def test_add_relu(swapped):
    def forward(m, x):
        a, b = pooled(m, x)
        return m.other(F.relu(b + a if swapped else a + b))

    model, x, before, behind = fused(layer, SHAPE, forward)
    inputs = "max_pool2d_1, max_pool2d" if swapped else "max_pool2d, max_pool2d_1"
    assert lines(before)[4:6] == [f"add = add({inputs})", "relu = relu(add)"]
    assert lines(behind)[4:6] == [
        f"add_relu = add_relu({inputs})",
        "other = conv2d(add_relu, @other.weight, @other.bias)",
    ]
    check_numbers(model, x, before, behind)


def test_the_same_value_twice():
    model, x, before, behind = fused(layer, SHAPE, lambda m, x: m.other(F.relu((lambda a: a + a)(pooled(m, x)[0]))))
    assert "add_relu = add_relu(max_pool2d, max_pool2d)" in lines(behind)
    check_numbers(model, x, before, behind)


def test_a_broadcast_sum_is_a_unit_too():
    def forward(m, x):
        a, b = pooled(m, x)
        return m.other(F.relu(a + b.mean((2, 3), keepdim=True)))

    model, x, before, behind = fused(layer, SHAPE, forward)
    assert "add_relu = add_relu(max_pool2d, mean)" in lines(behind)
    check_numbers(model, x, before, behind)


def returned_too(m, x):
    a, b = pooled(m, x)
    c = a + b
    return m.other(F.relu(c)), c


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: m.other(F.relu(pooled(m, x)[0] + 0.5)), "operand_is_a_number"),
        (lambda m, x: m.other(F.relu(pooled(m, x)[0] + pooled(m, x)[1].sum())), "operand_is_a_number"),
        (lambda m, x: m.other(F.relu(torch.add(*pooled(m, x), alpha=2))), "alpha=1, but %add has 2"),
        (returned_too, "%add is also read by %output"),
        (lambda m, x: m.other(F.relu(torch.mul(*pooled(m, x)))), "expects add, but %mul is mul"),
    ],
)
def test_refuses(forward, reason):
    check_refused("add_relu", "relu", reason, *fused(layer, SHAPE, forward))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spelled", [torch.mul, lambda a, b: a * b, lambda a, b: b.mul(a)])
def test_mul_relu(spelled):
    model, x, before, behind = fused(layer, SHAPE, lambda m, x: m.other(F.relu(spelled(*pooled(m, x)))))
    assert any(line.startswith("mul_relu = mul_relu(") for line in lines(behind))
    check_numbers(model, x, before, behind)


def test_batch_norm_relu():
    """A batch norm that reads a sum is folded into no layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.other = layer(), nn.BatchNorm2d(6), layer()

        def forward(self, x):
            y = self.layer(x)
            return self.other(F.relu(self.norm(y + F.max_pool2d(y, 3, 1, 1))))

    model, x = settled(Model), data(SHAPE)
    before, behind = graph(model, x, "fold-batch-norm"), graph(model, x, "fuse")
    assert any(line.startswith("norm_relu = batch_norm_relu(") for line in lines(behind))
    check_numbers(model, x, before, behind)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    assert [e.precision for e in quantized.ledger if e.op == "batch_norm"] == ["int8"]
