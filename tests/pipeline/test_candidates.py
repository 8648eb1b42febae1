"""Which of the ops that could run on integers do, beside their neighbours."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.passes import Annotate
from fxq.rewriting.rewriter import Rewriter
from tests.support.graphs import text, until
from tests.support.helpers import REFERENCE, context, module, steps
from tests.support.models import settled


class Stream(nn.Module):
    """A residual stream that layer norms read, as in a transformer; with `last`, a layer reads the last sum itself."""

    def __init__(self, last=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 3) if last else nn.Identity()

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.last(x)


def sums(model):
    gm = until(model, torch.rand(2, 5, 6), "annotate", REFERENCE).gm
    return [
        (n.meta["fxq"].plan.kernel_ops, n.meta["fxq"].plan.decision.text) for n in gm.graph.nodes if "_add" in n.name
    ]


def test_a_sum_that_only_float_reads_is_left_to_float():
    alone = ((1,), "nothing reads integers from the sum")
    assert sums(settled(Stream)) == [alone, alone]
    assert sums(settled(lambda: Stream(last=True))) == [((), ""), ((), "")]


def test_a_residual_stream_is_not_rounded():
    model, x = settled(Stream), torch.rand(2, 5, 6)
    lines = text(until(model, x, "fallback", REFERENCE).gm).splitlines()
    assert "add = add(x, layers_0)" in lines or "add = add(layers_0, x)" in lines
    assert not any(line.startswith("add_q") for line in lines)


class Sums(nn.Module):
    """Equal sums, each of two float values that it shares with its neighbours; a layer reads each.

    The first value has a layer as a reader, so that the sums lose their reason to run one by one, from the last on.
    """

    def __init__(self, count):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(count))

    def forward(self, x):
        values = [torch.erf(x * i) for i in range(1, len(self.layers) + 2)]
        sums = [a + b for a, b in pairwise(values)]
        return self.first(values[0]) + sum(layer(y) for layer, y in zip(self.layers, sums, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [3, 14, 40])
def test_equal_sums_get_one_decision(count):
    gm = fxq.extend.run_passes(
        settled(lambda: Sums(count)), REFERENCE, example_inputs=torch.randn(2, 3, 4, 4), until="annotate"
    )
    sums = [n for n in gm.graph.nodes if is_op(n, "add") and all(is_op(v, "erf") for v in n.all_input_nodes)]
    assert len(sums) == count
    assert {info(n).plan.precision for n in sums} == {"float"}
    assert all("is float, so float costs no conversion" in info(n).plan.decision.text for n in sums)


def chained(count):
    """As many candidates as `Sums` has, with a value that all of them read."""

    def forward(self, x):
        shared = torch.erf(x)
        sums = [torch.sin(x * i) + shared for i in range(count)]
        return sum(self.layer(y) for y in sums)

    return module(forward, layer=nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize("model", [Sums, chained])
def test_settling_takes_time_linear_in_the_graph(model):
    counts = []
    for count in (10, 40):
        gm = fxq.extend.run_passes(model(count).eval(), REFERENCE, example_inputs=torch.randn(1, 3, 2, 2), until="fuse")
        counts.append(steps(lambda gm=gm: Annotate().run(Rewriter(gm, context(gm, torch.randn(1, 3, 2, 2))))))
    assert counts[1] < 5 * counts[0]
