"""Units: their shared bodies, their metadata, their copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxq.graph.info import info
from fxq.graph.unit import unit_of
from fxq.rewriting.pattern import FUSIONS
from fxq.rewriting.rewriter import make_unit
from tests.helpers import graph, module, rewriter, run
from tests.models import conv_block

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 50).reshape(1, 2, 5, 5)


@pytest.mark.parametrize(
    ("forward", "modules"),
    [
        (lambda self, x: [torch.relu(torch.sigmoid(x)) for _ in range(2)], 1),
        (lambda self, x: [torch.relu(torch.sigmoid(x)), torch.relu(torch.tanh(x))], 2),
        (lambda self, x: [F.hardtanh(torch.relu(x), 0.0, top) for top in (1.0, 1.0000001)], 2),
        (lambda self, x: [torch.relu(x) - x, x - torch.relu(x)], 2),
        (lambda self, x: [torch.relu(x) * two for two in (2, 2.0)], 2),
    ],
    ids=["equal", "op", "option", "order", "number"],
)
def test_units_share_a_module_where_their_bodies_are_equal(forward, modules):
    gm = graph(module(forward), X)
    want = [forward(None, X)[i] for i in range(2)]
    hand, ops = rewriter(gm), [n for n in gm.graph.nodes if n.op == "call_function"]
    made = [make_unit(hand, pair, pair[-1:], "pair") for pair in (ops[:2], ops[2:])]
    assert len({unit.target for unit in made}) == modules
    assert all(torch.equal(a, b) for a, b in zip(run(gm, X), want, strict=True))


def test_units_of_other_outputs_are_other_units():
    gm = graph(module(lambda self, x: [torch.relu(torch.sigmoid(x)) for _ in range(4)]), X)
    hand, ops = rewriter(gm), [n for n in gm.graph.nodes if n.op == "call_function"]
    pairs = [ops[i : i + 2] for i in range(0, 8, 2)]
    outputs = [pairs[0][1:], pairs[1][1:], pairs[2], pairs[3][::-1]]
    made = [make_unit(hand, pair, read, "pair") for pair, read in zip(pairs, outputs, strict=True)]
    assert made[0].target == made[1].target
    assert len({unit.target for unit in made}) == 3
    assert all(torch.equal(value, torch.relu(torch.sigmoid(X))) for value in run(gm, X))


def test_units_of_the_same_body_share_one_module():
    model = nn.Sequential(conv_block(), conv_block(), conv_block(stride=2)).eval()
    gm = graph(model, IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first())
    first, second, third = [n for n in gm.graph.nodes if n.op == "call_module"]
    assert first.target == second.target != third.target
    assert not list(unit_of(gm, first).parameters()) and not list(unit_of(gm, first).buffers())
    assert torch.equal(run(gm, IMAGE), model(IMAGE))


def test_the_metadata_of_a_unit_is_that_of_its_ops():
    gm = graph(nn.Sequential(conv_block()).eval(), IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first())
    (unit,) = [n for n in gm.graph.nodes if n.op == "call_module"]
    about = info(unit)
    assert (about.origins, about.parts) == (("_0_0", "_0_1"), (("_0_0",), ("_0_1",)))
    assert (about.path, about.shape, about.dtype) == ("0.0", (1, 2, 5, 5), torch.float32)
    assert about.made_by.startswith("the-test: conv2d_relu (patterns/conv.py:")
