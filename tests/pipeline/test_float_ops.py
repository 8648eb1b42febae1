"""The float model as the ledger speaks of it: every op that it had, whatever passes make of it."""

import pytest
import torch
from torch import fx, nn

from fxq.common.data import Batch
from fxq.graph.analysis.macs import macs_of
from fxq.graph.run import Runner
from fxq.pipeline.float_ops import divide_original
from fxq.recipe.pass_base import Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.workflow.steps import manager_for, up_to
from tests.support.graphs import equal, until
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build, call

pytestmark = pytest.mark.any_cpu


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_that_is_kept_is_not_edited_and_computes_the_model(name):
    model, inputs = build(name), batch(name)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    original = manager.context.original
    original.graph.lint()
    assert equal(call(fx.GraphModule(original.gm, original.graph), inputs), call(model, inputs))
    assert {op.name for op in original.ops if not op.gone} <= set(original.nodes)
    assert list(original.by_name) == [op.name for op in original.ops]


def test_ops_that_are_gone_say_why_and_stand_where_they_were():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return torch.relu(self.drop(self.fc(x)))

    manager = until(Model().eval(), torch.rand(2, 4), "fuse", REFERENCE)
    ops = [(op.op, op.path, op.gone) for op in manager.context.original.ops]
    assert ops == [("linear", "fc", ""), ("dropout", "drop", "has no effect on the output"), ("relu", "", "")]


@pytest.mark.parametrize("name", ["residual", "convolutions", "sequence"])
def test_multiply_accumulates_are_those_of_the_canonical_graph(name):
    original = until(build(name), batch(name), "fuse", REFERENCE).context.original
    for op in original.ops:
        if not op.gone:
            assert op.macs == macs_of(original.gm, original.nodes[op.name])
    assert sum(op.macs for op in original.ops) > 0


def test_values_are_compared_with_what_a_pass_has_made_of_them():
    """Values are divided where requested; the values after them are those of the float model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    x, by = torch.randn(2, 4), torch.tensor([1.0, 2.0, 4.0])
    manager = manager_for(model, REFERENCE, x)
    manager.run(up_to(manager.context.recipe, Stage.FUSED))
    names = {op.path: op.name for op in manager.context.original.ops}
    divide_original(Rewriter(manager.gm, manager.context), {names["1"]: by, names["0"]: None})
    original = manager.context.original
    assert names["0"] not in original.nodes and names["2"] in original.nodes
    seen = {}
    run = Runner(original.gm, Batch((x,)), original.graph)
    for node in original.graph.nodes:
        seen[node] = run.step(node)
    torch.testing.assert_close(seen[original.nodes[names["1"]]], model[:2](x) / by, rtol=1e-6, atol=0)
    torch.testing.assert_close(seen[original.nodes[names["2"]]], model(x), rtol=1e-6, atol=1e-7)
