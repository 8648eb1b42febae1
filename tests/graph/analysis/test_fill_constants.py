"""Fill constants: numbers that masks, pads and fills write among the values of a network."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxq.graph.analysis.fill_constants import FillConstants
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE


class Of(nn.Module):
    """A function of x, with a buffer and a parameter."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("minus", torch.full((4, 3, 8, 8), -7.0))
        self.learned = nn.Parameter(torch.randn(4, 3, 8, 8))

    def forward(self, x):
        return self.function(self, torch.erf(x))


def held(function):
    """Fill constants that the output of a network may hold."""
    gm = graph(Of(function).eval(), torch.randn(4, 3, 8, 8), "fuse", REFERENCE)
    fill_constants = FillConstants(gm)
    for node in gm.graph.nodes:
        if node.op not in ("output", "get_attr"):
            fill_constants.of(node)
    (result,) = next(n for n in gm.graph.nodes if n.op == "output").all_input_nodes
    return set(fill_constants.of(result))


MASK = torch.rand(8, 8) > 0.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, x: x.masked_fill(MASK, -1e4), {-1e4}),
        (lambda m, x: x.masked_fill(MASK, 0.0), set()),
        (lambda m, x: x.masked_fill(MASK, torch.tensor(-3.0)), {-3.0}),
        (lambda m, x: x.masked_fill(MASK, float("-inf")), {-math.inf}),
        (lambda m, x: torch.where(MASK, x, -2.0), {-2.0}),
        (lambda m, x: torch.where(MASK, -2.0, x), {-2.0}),
        (lambda m, x: torch.where(MASK, x, m.minus), {-7.0}),
        (lambda m, x: torch.where(MASK, x, m.learned), set()),
        (lambda m, x: torch.where(MASK, x, torch.full_like(x, 3.0)), {3.0}),
        (lambda m, x: torch.cat([x, m.minus], 1), {-7.0}),
        (lambda m, x: torch.cat([x, x.new_full((4, 1, 8, 8), 5.0)], 1), {5.0}),
        (lambda m, x: torch.cat([x, x.new_ones((4, 1, 8, 8))], 1), {1.0}),
        (lambda m, x: torch.cat([x, x.new_zeros((4, 1, 8, 8))], 1), set()),
        (lambda m, x: F.pad(x, (1, 1), value=-3.0), {-3.0}),
        (lambda m, x: F.pad(x, (1, 1, 1, 1), "reflect"), set()),
        (lambda m, x: F.threshold(x, 0.1, -9.0), {-9.0}),
        (lambda m, x: F.pad(x, (1, 1), value=-3.0).masked_fill(x.new_ones(10) > 0, 4.0), {-3.0, 4.0}),
        (lambda m, x: F.pad(x, (1, 1), value=-3.0)[:, :2].flatten(1).amax(1), {-3.0}),
        (lambda m, x: torch.relu(F.pad(x, (1, 1), value=-3.0)), set()),
        (lambda m, x: F.pad(x, (1, 1), value=-3.0).clamp(-1, 1), {-1.0}),
        (lambda m, x: torch.erf(F.pad(x, (1, 1), value=-3.0)), set()),
        (lambda m, x: F.pad(x, (1, 1), value=-3.0) * 2, set()),
    ],
)
def test_what_a_value_may_hold(function, expected):
    assert held(function) == expected


POOLS = [
    ((1, 1, 1, 1), {"kernel_size": 2}, True),
    ((1, 1, 1, 1), {"kernel_size": 3, "stride": 2}, True),
    ((0, 1, 0, 1), {"kernel_size": 3, "stride": 2}, True),
    ((2, 2, 2, 2), {"kernel_size": 2}, False),
    ((0, 2, 0, 2), {"kernel_size": 2, "stride": 1}, False),
    ((1, 1, 1, 1), {"kernel_size": 2, "padding": 1}, False),
    ((1, 1, 1, 1), {"kernel_size": 3, "padding": 1}, True),
    ((2, 2, 2, 2), {"kernel_size": 2, "dilation": 2, "stride": 1}, True),
    ((3, 3, 3, 3), {"kernel_size": 2, "dilation": 2, "stride": 1}, False),
    ((1, 1, 1, 1), {"kernel_size": 2, "ceil_mode": True}, False),
    ((1, 0, 1, 0), {"kernel_size": 2, "ceil_mode": True}, True),
    ((1, 1, 1, 1, 1, 1), {"kernel_size": 3}, False),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("sides", "options", "unseen"), POOLS)
def test_a_pad_before_a_max_pool_is_unseen_where_every_window_holds_data(sides, options, unseen):
    def function(m, x):
        return F.max_pool2d(F.pad(x, sides, value=-3.0), **options)

    assert (held(function) == set()) is unseen
    if unseen:  # checked for several sizes by running the pool
        for size in (2, 3, 5, 6, 8, 9):
            x = torch.rand(1, 1, size, size) + 1
            padded = F.pad(x, sides, value=-math.inf)
            if min(padded.shape[2:]) > options["kernel_size"] * options.get("dilation", 1):
                assert F.max_pool2d(padded, **options).min() >= 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.adaptive_max_pool2d(F.pad(x, (1, 1, 1, 1), value=-3.0), 9),
        lambda m, x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=3.0), 2) * 1 + 0,
        lambda m, x: (lambda y: F.max_pool2d(y, 2).sum() + y.sum())(F.pad(x, (1, 1), value=-3)),
    ],
)
def test_others_see_it(function):
    gm = graph(Of(function).eval(), torch.randn(4, 3, 8, 8), "fuse", REFERENCE)
    fill_constants = FillConstants(gm)
    pad = next(n for n in gm.graph.nodes if n.name == "pad")
    assert fill_constants.of(pad) in ({-3.0}, {3.0}) and fill_constants.added_by(pad) == fill_constants.of(pad)
