"""Sizes of all last, or of the first, axes of a tensor, recognized in traced models."""

import pytest
import torch

from fxq.ops.sizes import is_all_of, leads
from tests.support.graphs import graph, node, text
from tests.support.helpers import module

pytestmark = pytest.mark.any_cpu

X = torch.zeros(2, 3, 5, 7)


@pytest.mark.parametrize(
    ("sizes", "answer"),
    [
        (lambda x: [x.size(2), x.size(3)], True),
        (lambda x: [x.size(-2), x.shape[3]], True),
        (lambda x: [x.shape[2:][0], x.size()[-1]], True),
        (lambda x: [x.size(3)], True),
        (lambda x: [x.size(3), x.size(2)], False),
        (lambda x: [x.size(2)], False),
        (lambda x: [x.size(1), x.size(3)], False),
        (lambda x: [x.size(2), 7], False),
        (lambda x: [x.size(0), x.size(1), x.size(2), x.size(3)], False),  # all axes
        (lambda x: [x.relu().size(2), x.size(3)], False),
    ],
)
def test_sizes_of_the_last_axes(sizes, answer):
    gm = graph(module(lambda self, x: (x + 1, torch.ones(1).new_zeros(sizes(x)))), X, until="trace")
    assert is_all_of(node(gm, "x"), node(gm, "new_zeros").args[1]) is answer


@pytest.mark.parametrize(
    ("sizes", "answer"),
    [
        (lambda x: [x.size(0)], True),
        (lambda x: [x.shape[0], x.size(-3)], True),
        (lambda x: [x.size()[0], x.size(1), x.size(2)], True),
        (lambda x: [x.size(1)], False),
        (lambda x: [x.size(1), x.size(0)], False),
        (lambda x: [x.relu().size(0)], False),
        (lambda x: [x.size(0), x.size(1), x.size(2), x.size(3)], False),  # all axes
    ],
)
def test_sizes_of_the_first_axes(sizes, answer):
    gm = graph(module(lambda self, x: (x + 1, torch.ones(1).new_zeros(sizes(x)))), X, until="trace")
    assert leads(node(gm, "x"), node(gm, "new_zeros").args[1]) is answer
    assert not leads(node(gm, "x"), [2]) and not leads(node(gm, "x"), [])


def test_a_shape_of_leading_sizes_is_flattened_whatever_they_are():
    gm = graph(module(lambda self, x: x.view(x.size(0), x.shape[1], -1)), X, until="canonicalize")
    assert "flatten(x, start_dim=2)" in text(gm) and "reshape" not in text(gm)
    gm = graph(module(lambda self, x: x.view(x.size(0), 3, -1)), X, until="canonicalize")
    assert "reshape" in text(gm)


def test_a_value_of_another_tensor_is_none():
    gm = graph(module(lambda self, x: x.new_zeros([x.size(2), x.size(3)])), X, until="trace")
    sizes = node(gm, "new_zeros").args[1]
    assert is_all_of(node(gm, "x"), sizes) and not is_all_of(sizes[0], sizes) and not is_all_of(None, sizes)
