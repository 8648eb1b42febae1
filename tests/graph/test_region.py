"""Regions: units of the qdq graph with their conversions, as they were when they were read."""

import gc
from textwrap import dedent

import pytest
import torch
from torch import nn

import fxq
from fxq.cost.prices import regions_of
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.region import integer_input, out_grids, read_region, unit_regions
from fxq.graph.region_run import run_region
from tests.support.graphs import until
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build


def qdq(name):
    return until(build(name), batch(name), "propagate", REFERENCE).gm


def first_conv(gm):
    return next(
        region for region in regions_of(gm, list(gm.graph.nodes)).values() if is_op(region.outputs[0], "quantize")
    )


def test_the_steps_are_the_unit_with_its_conversions_in_order():
    region = first_conv(qdq("residual"))
    ops = [
        step.op if step.op == "get_attr" else step.target.__name__ if callable(step.target) else "unit"
        for step in region.steps
    ]
    assert ops[0] == "dequantize" and ops[-1] == "quantize" and ops[-2] in ("unit", "conv2d")
    assert set(ops[1:-2]) == {"get_attr", "dequantize"}
    assert [step.node for step in region.steps[-2:]] == [region.node, *region.outputs]
    read = [step.args[0] for step in region.steps if is_op(step, "dequantize")]
    assert [node for node in read if node.op != "get_attr"] == list(region.inputs)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(8, 4), (5, 8)), (nn.Linear(8, 4), (1, 1, 8)), (nn.Conv2d(2, 4, 3), (2, 2, 5, 6))]
)
def test_a_copy_has_the_dynamic_grid_of_its_region(layer, shape):
    """Its scale and zero point are inputs. Prices are those of the kernel that the whole graph gets."""
    qmodel = fxq.quantize(layer.eval(), fxq.Recipe.dynamic(backend="reference"), example_inputs=torch.randn(shape))
    (region,) = (r for r in unit_regions(qmodel) if is_op(r.node, "linear", "conv2d"))
    dequantize = region.node.args[0]
    (copied,) = (n for n in region.to_graph().nodes if n.name == dequantize.name)
    assert integer_input(qmodel, copied).grid == integer_input(qmodel, dequantize).grid


def test_edits_of_the_graph_do_not_reach_a_region():
    gm = qdq("residual")
    region = first_conv(gm)
    values = {node: torch.randint(0, 256, info(node).shape, dtype=torch.uint8) for node in region.inputs}
    before = run_region(gm, region, values)[0].value
    written = [(step.name, step.args, dict(step.kwargs)) for step in region.steps]
    (out,) = region.outputs
    out.kwargs = {**out.kwargs, "scale": 1e9}
    region.node.args = (region.inputs[0], *region.node.args[1:])
    for step in reversed(region.steps):
        if not step.node.users:
            gm.graph.erase_node(step.node)
        step.node.name = f"{step.node.name}_other"
    assert [(step.name, step.args, step.kwargs) for step in region.steps] == written
    assert torch.equal(run_region(gm, region, values)[0].value, before)


@pytest.mark.slow
def test_a_region_leaves_nothing_to_the_collector():
    gm = qdq("residual")
    node = first_conv(gm).node
    gc.collect()
    gc.disable()
    try:
        read_region(gm, node)
        assert gc.collect() == 0
    finally:
        gc.enable()


BOTH = """
    def both(x, w):
        linear = linear(x, w)
        relu = relu(linear)
        return (linear, relu)

    x: float32[2, 3] = input()
    w: float32[4, 3] = tensor('w')
    y = both(x, w)
"""


@pytest.mark.parametrize(
    ("rest", "nodes", "outputs"),
    [
        ("a_q = quantize(a, scale=0.5, zero_point=3)\nreturn (b, a_q)", "y a b a_q", "a_q b"),
        ("a_q = quantize(a, scale=0.5, zero_point=3)\nreturn (a, a_q)", "y a b", "a b"),  # b is not read
        ("return (a, b)", "y a b", "a b"),
    ],
)
def test_a_region_of_a_unit_of_several_outputs(rest, nodes, outputs):
    """The outputs are in the order of the unit; a quantize that is the only reader of one is included."""
    parts = "\nb: float32[2, 4] = operator.getitem(y, 1)\na: float32[2, 4] = operator.getitem(y, 0)\n"
    tensors = {"w": torch.tensor([[1.0, -1.0, 0.0]] * 4)}
    gm = fxq.extend.read_graph(dedent(BOTH) + parts + rest, tensors)
    region = next(iter(unit_regions(gm)))
    assert " ".join(n.name for n in region.nodes) == nodes
    assert " ".join(n.name for n in region.outputs) == outputs
    assert [grid.z if grid else None for grid in out_grids(gm, region)] == [3 if "_q" in outputs else None, None]
    x = torch.randn(2, 3)
    y = nn.functional.linear(x, tensors["w"])
    got = run_region(gm, region, {region.inputs[0]: x})
    assert torch.equal(got[0].raw, y) and torch.equal(got[1].raw, y.relu())


def test_a_unit_whose_values_are_unread_is_no_region():
    gm = fxq.extend.read_graph(dedent(BOTH) + "return y", {"w": torch.ones(4, 3)})
    assert list(unit_regions(gm)) == []
