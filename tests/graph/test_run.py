"""Running a graph node by node."""

import inspect
import weakref

import pytest
import torch
from torch import fx, nn

from fxq.common.data import Batch
from fxq.graph.info import info, set_info
from fxq.graph.run import Runner, infer, inputs_for, last_uses
from fxq.ops import OPS
from tests.support.processes import in_new_python


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x, y, z=2):
        x = self.linear(x).relu()
        return [torch.cat([x, y * self.scale], 1), z]


X, Y = torch.randn(2, 4), torch.randn(2, 4)


def test_it_computes_what_the_graph_does():
    gm = fx.symbolic_trace(Net())
    for batch in (Batch((X, Y)), Batch((X,), {"y": Y, "z": 3})):
        got, expected = Runner(gm, batch).run(), gm(*batch.args, **batch.kwargs)
        assert torch.equal(got[0], expected[0]) and got[1] == expected[1]


def test_inputs():
    graph = fx.Graph()
    x, others = graph.placeholder("x"), graph.placeholder("*others")
    assert inputs_for(graph, Batch((1, 2, 3))) == {x: 1, others: [2, 3]}
    k = graph.placeholder("k", default_value=4)
    assert inputs_for(graph, Batch((1,), {"k": 5})) == {x: 1, others: [], k: 5}


def test_values_go_when_they_have_been_read_for_the_last_time():
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(5)]))
    runner, alive, most = Runner(gm, Batch((X.clone(),))), [], 0
    for node in gm.graph.nodes:
        alive.append(weakref.ref(runner.step(node)))
        most = max(most, sum(ref() is not None for ref in alive))
    assert most == 1 and runner.values == {}
    assert [len(read) for read in last_uses(gm.graph).values()] == [1] * 6


def test_other_modules_and_another_graph():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert torch.equal(Runner(gm, Batch((X,)), modules={"0": nn.Identity(), "1": nn.Identity()}).run(), X)
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    assert Runner(gm, Batch((X,)), graph).run() is X


def test_hooks():
    """A subclass is called for every node, replaces a value, and keeps values that would be freed."""
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    freed = []

    class Doubled(Runner):
        def compute(self, node):
            value = super().compute(node)
            return 2 * value if node.op == "call_module" else value

        def free(self, node):
            freed.append(node.name)

    runner = Doubled(gm, Batch((X,)))
    assert torch.equal(runner.run(), 2 * torch.relu(2 * gm.get_submodule("0")(X)))
    assert freed == ["input_1", "_0", "_1"] and [n.name for n in runner.values] == freed


POINTWISE = [op for op in OPS if op.traits.pointwise and not op.target.__module__.startswith("tests.")]
"""Pointwise ops of fxq. Those that tests register may have no meta kernel to compare with."""


@pytest.mark.parametrize("op", POINTWISE, ids=[op.name for op in POINTWISE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_types_of_pointwise_ops_are_those_on_the_meta_device(op, dtype):
    """Also for operands of other shapes and for types that the op refuses."""
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in op.tensors]
    for i, tensor in enumerate(tensors):
        set_info(tensor, shape=((2, 3, 4), (3, 1), (3,))[min(i, 2)], dtype=dtype)
    required = {name: 1 for name, default in op.options.items() if default is inspect.Parameter.empty}
    node = graph.call_function(op.target, tuple(tensors), required)
    meta = [torch.empty(info(tensor).shape, dtype=dtype, device="meta") for tensor in tensors]
    try:
        value = op.target(*meta, **required)
        wanted = tuple(value.shape), value.dtype
    except (RuntimeError, TypeError, ValueError):
        wanted = None, None
    assert infer(node) == wanted


@pytest.mark.slow
def test_types_of_pointwise_ops_need_no_sympy():
    """Kernels of PyTorch for the meta device import it, which takes seconds."""
    code = """
import sys, torch
from torch import fx
from fxq.graph.info import set_info
from fxq.graph.run import infer
from fxq.ops import OPS
graph = fx.Graph()
x, y = graph.placeholder("x"), graph.placeholder("y")
set_info(x, shape=(2, 3), dtype=torch.float32), set_info(y, shape=(3,), dtype=torch.float32)
for node in (graph.call_function(OPS["hardsigmoid"].target, (x,)), graph.call_function(OPS["add"].target, (x, y))):
    assert infer(node) == ((2, 3), torch.float32)
assert "sympy" not in sys.modules
"""
    done = in_new_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [
        ("conv1d", [(2, 6, 11), (9, 2, 3), (9,)], {"stride": (2,), "padding": (1,), "groups": 3}),
        ("conv2d", [(6, 9, 10), (8, 6, 3, 1), None], {"padding": "same", "dilation": (2, 1)}),
        ("conv2d", [(2, 6, 9, 10), (8, 6, 3, 3), (8,)], {"padding": (1, 2), "padding_mode": "reflect"}),
        ("conv_transpose2d", [(2, 6, 5, 4), (6, 4, 3, 3), (8,)], {"stride": (2, 2), "groups": 2}),
        ("linear", [(2, 3, 7), (5, 7), None], {}),
        ("avg_pool2d", [(2, 6, 9, 9)], {"kernel_size": (3, 3), "stride": (2, 2), "ceil_mode": True}),
        ("adaptive_avg_pool2d", [(2, 6, 9, 9)], {"output_size": (1, 2)}),
        ("lstm", [(7, 2, 4), (12, 4), (12, 3), (12,), (12,), (2, 3), (2, 3)], {"cell": True}),
        ("gru", [(7, 2, 4), (9, 4), (9, 3), (9,), (9,), (2, 3)], {"reverse": True}),
    ],
)
def test_types_of_layers_and_pools_are_those_of_their_values(name, shapes, options):
    graph, op = fx.Graph(), OPS[name]
    tensors = [None if shape is None else graph.placeholder(f"x{i}") for i, shape in enumerate(shapes)]
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor is not None:
            set_info(tensor, shape=shape, dtype=torch.float32)
    node = graph.call_function(op.target, tuple(tensors), options)
    value = op.target(*(None if shape is None else torch.rand(shape) for shape in shapes), **options)
    assert infer(node) == (tuple(value.shape), value.dtype)
