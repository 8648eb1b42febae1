"""Graphs read back from their text: equal text, equal results, and equal effect of passes."""

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import fxq
from fxq.passes import Cleanup, Fuse, InsertQdq, Propagate
from fxq.pipeline.manager import PassManager
from fxq.recipe.pass_base import Stage
from fxq.workflow.steps import manager_for
from tests.support.graphs import equal, graph
from tests.support.helpers import REFERENCE, module
from tests.support.machine import needs_x86
from tests.support.models import NETWORKS, batch, build, call
from tests.test_fuzz import plans, recipe


def again(gm):
    """Return the graph that is read from a graph's text."""
    leaves = {n.target: gm.get_submodule(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    return fxq.extend.read_graph(fxq.extend.write_graph(gm), fxq.extend.graph_tensors(gm), leaves)


def check(manager, inputs):
    """Writing and reading a graph gives the same text, and the same results bit for bit."""
    read_back = again(manager.gm)
    assert fxq.extend.write_graph(read_back) == fxq.extend.write_graph(manager.gm)
    manager.gm.recompile()
    assert equal(call(read_back, inputs), call(manager.gm, inputs))


def stages(model, inputs, recipe):
    """The manager after each pass from canonicalize on."""
    manager = manager_for(model, recipe, inputs)
    for step in recipe.pipeline:
        if step.name == "choose-grids":
            call(manager.gm, inputs)
            manager.context.samples.append(manager.context.example)
        manager.run([step])
        if manager.stage >= Stage.CANONICAL:
            yield step.name, manager


@pytest.mark.slow
@needs_x86
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(12))
def test_random_networks_at_every_stage(plan):
    network, inputs = plan.build()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        try:
            for _, manager in stages(network, inputs, recipe()) if network.lines else ():
                check(manager, inputs)
        except fxq.CalibrationError as error:  # see tests/test_fuzz.py
            assert "holds Inf" in str(error)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["residual", "shapes", "several_inputs", "dict_output", "upscaler"])
def test_networks_at_every_stage(name):
    assert name in NETWORKS
    for _, manager in stages(build(name), batch(name), REFERENCE):
        check(manager, batch(name))


NEXT = {"fold-batch-norm": Fuse(), "choose-grids": InsertQdq(), "insert-qdq": Propagate(), "verify-lowering": Cleanup()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "upscaler"])
def test_a_pass_makes_the_same_of_the_graph_that_was_read(name):
    tried = set()
    for stage, manager in stages(build(name), batch(name), REFERENCE):
        if stage in NEXT:
            texts = []
            for gm in (manager.gm, again(manager.gm)):
                context = copy.copy(manager.context)
                context.units = {}
                other_manager = PassManager(context)
                other_manager.gm, other_manager.stage = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph)), manager.stage
                texts.append(fxq.extend.write_graph(other_manager.run([NEXT[stage]])))
            assert texts[0] == texts[1]
            tried.add(stage)
    assert tried == NEXT.keys()


def test_leaf_modules_come_from_the_caller():
    model = module(lambda self, x: self.rnn(self.fc(x))[0], fc=nn.Linear(4, 4), rnn=nn.GRU(4, 3))
    x = torch.randn(5, 4)
    gm = graph(model, x)
    text, tensors = fxq.extend.write_graph(gm), fxq.extend.graph_tensors(gm)
    assert "modules['rnn'] = leaf('GRU')" in text and set(tensors) == {"fc.weight", "fc.bias"}
    with pytest.raises(
        fxq.InputError, match=r"line 1: the leaf module 'rnn' is not in the text: pass it as modules=\{'rnn': "
    ):
        fxq.extend.read_graph(text, tensors)
    assert torch.equal(fxq.extend.read_graph(text, tensors, {"rnn": model.rnn})(x), model(x))


# ---- kernels


LOWERED = """modules['q'] = cpu.quantize(out={})
x: float32[2, 4] = input()
y: uint8[2, 4] = modules['q'](x)
return y"""
GRID = "{'scale': 0.5, 'zero_point': 3, 'qmin': 0, 'qmax': 255}"


@pytest.mark.any_cpu
def test_a_kernel_from_text():
    gm = fxq.extend.read_graph(LOWERED.format(GRID), {})
    assert gm(torch.tensor([[0.0, 0.5, -9.0, 999.0]])).tolist() == [[3, 4, 0, 255]]


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (LOWERED.format(GRID).replace("cpu.quantize", "cpu.quantise"), "line 1: unknown kernel 'cpu.quantise'; did"),
        (LOWERED.format("3.0, size=2"), "line 1: these options do not fit cpu.quantize: .*size"),
        (LOWERED.format("None, w=tensor('w')"), "line 1: unknown tensor 'w'"),
        (LOWERED.format(GRID).replace("['q'](", "['p']("), "line 3: unknown module 'p'"),
        (LOWERED.format(GRID).replace("'q'", "'__class__'"), "line 1: expected the path of a tensor or module"),
        (LOWERED.format(GRID).replace("'q'", "'graph'"), "line 1: expected the path of a tensor or module"),
    ],
)
def test_refused_kernels(line, why):
    with pytest.raises(fxq.InputError, match=why):
        fxq.extend.read_graph(line, {})
