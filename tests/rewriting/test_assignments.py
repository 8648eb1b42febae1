"""Assignments as ops, by kind of index."""

import pytest
import torch

from tests.support.graphs import expected, graph, text
from tests.support.helpers import module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
ROW = torch.arange(4.0)


def canonical(assign):
    def forward(self, x):
        y = x * 2
        assign(y, x)
        return y

    return text(graph(module(forward), X))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("assign", "lines"),
    [
        (lambda y, x: y.__setitem__(0, 1.5), "assign = assign(mul, 1.5, index=(0,))"),
        (lambda y, x: y.__setitem__((..., slice(1, None)), x[..., 1:]), "assign = assign(mul, getitem, index="),
        (lambda y, x: y.__setitem__(slice(None), 1.5), "assign = assign(mul, 1.5, index=())"),
        (lambda y, x: y.__setitem__((0, None), 1.5), "assign = assign(mul, 1.5, index=(0, None))"),
        (lambda y, x: y.__setitem__(x > 0, 1.5), "masked_fill = masked_fill(mul, gt, 1.5)"),
        (lambda y, x: y.__setitem__((..., x[0, 0] > 0), 1.5), "masked_fill = masked_fill(mul, gt, 1.5)"),
        (
            lambda y, x: y.__setitem__(x[..., 0] > 0, x[0, 0]),
            "unsqueeze = unsqueeze(gt, dim=2)\nwhere = where(unsqueeze",
        ),
        (lambda y, x: y.__setitem__(x > 0, x[x > 0]), "updated = updated(mul, gt, getitem)"),
        (lambda y, x: y.__setitem__(torch.tensor([1, 0]), 1.5), "updated = updated(mul, "),
    ],
)
def test_the_op(assign, lines):
    assert lines in canonical(assign)


def test_a_part_that_was_changed_by_itself_is_not_assigned_once_more():
    def add(y, x):
        y[:, 1:] += 1

    assert canonical(add) == expected("""
        x = input
        mul = mul(x, 2)
        getitem = getitem(mul, index=(slice(None, None, None), slice(1, None, None)))
        iadd = add(getitem, 1)
        assign = assign(mul, iadd, index=(slice(None, None, None), slice(1, None, None)))
        return assign
    """)
