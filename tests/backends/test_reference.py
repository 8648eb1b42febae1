"""The reference backend supports every op with an integer form, and keeps the qdq graph."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.reference import Reference
from fxq.graph.unit import calls_of
from tests.support.graphs import graph, node, text, until
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build

pytestmark = pytest.mark.any_cpu


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_lowering_leaves_the_graph_as_it_is(name):
    manager = until(build(name), batch(name), "lower", REFERENCE)
    assert manager.history["lower"].edits == ()
    assert text(manager.history["lower"].graph) == text(manager.history["fallback"].graph)


def test_all_ops_of_a_unit_are_supported_with_any_bits():
    gm = graph(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).eval(), torch.rand(1, 3, 8, 8), until="fuse"
    )
    calls = calls_of(gm, unit := node(gm, "_0_silu"))
    config = fxq.QuantConfig(activation=fxq.TensorSpec(bits=3, signed=True))
    support = Reference().supports(gm, unit, calls, config)
    assert (support.ops, support.reason) == (len(calls), "") and len(calls) == 2
    assert Reference().config(gm, config, calls) == config and not Reference().adds_in_int16(calls)
