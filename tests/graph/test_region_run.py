"""Running a region: it computes the same values as its nodes in the graph."""

import pytest
import torch

from fxq.cost.prices import regions_of
from fxq.graph.info import info
from fxq.graph.region_run import run_region, weights_in
from tests.support.graphs import until
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build


def integers(region):
    generator = torch.Generator().manual_seed(0)
    return {
        node: torch.randint(0, 256, info(node).shape, dtype=torch.uint8, generator=generator)
        for node in region.inputs
        if info(node).shape is not None
    }


def numbers(name, gm, region):
    """Inputs of a region that are not tensors, such as a size of the input."""
    if all(info(node).shape is not None for node in region.inputs):
        return {}
    run = torch.fx.Interpreter(gm, garbage_collect_values=False)
    run.run(batch(name))
    return {node: run.env[node] for node in region.inputs if info(node).shape is None}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_region_computes_what_its_graph_does(name):
    gm = until(build(name), batch(name), "propagate", REFERENCE).gm
    for region in regions_of(gm, list(gm.graph.nodes)).values():
        inputs = {**integers(region), **numbers(name, gm, region)}
        values = {node: inputs[node] for node in region.inputs}
        own = torch.fx.GraphModule(gm, region.to_graph())
        assert [n.name for n in own.graph.nodes][:-1] == [n.name for n in region.inputs] + [
            s.name for s in region.steps
        ]
        got = run_region(gm, region, values)[0].value
        assert torch.equal(got, own(*values.values()))


def test_weights_that_are_computed_beforehand():
    gm = until(build("residual"), batch("residual"), "propagate", REFERENCE).gm
    seen = 0
    for region in regions_of(gm, list(gm.graph.nodes)).values():
        values, weights = integers(region), weights_in(gm, region)
        seen += len(weights)
        for alone, with_weights in zip(
            run_region(gm, region, values), run_region(gm, region, values | weights), strict=True
        ):
            assert torch.equal(alone.value, with_weights.value)
    assert seen
