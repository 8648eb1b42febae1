"""Bound functions are bound again if something changes, and only then."""

import copy
import functools
import gc
import inspect
import itertools
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.kernel import PostOp
from fxq.backends.plain.clamp_and_pad import Clamp
from fxq.backends.plain.converters import Quantize
from fxq.graph.unit import Unit
from fxq.quant.qparams import QParams
from fxq.runtime.binding import MAX_BOUND_KINDS
from tests.support.bound import ALL, X, first_kernel, functions, network, plain, quantized
from tests.support.helpers import module


def test_a_hook_on_a_kernel_runs():
    qmodel, seen = quantized(), []
    for _ in range(3):
        qmodel(X)
    handle = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel)).register_forward_hook(lambda *_: seen.append(1))
    qmodel(X)
    qmodel(X)
    assert len(seen) == 2
    handle.remove()
    qmodel(X)
    assert len(seen) == 2


def test_another_kernel_in_its_place_is_used():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    name = first_kernel(qmodel, Quantize)
    old = getattr(qmodel.fxq_kernels, name)
    setattr(qmodel.fxq_kernels, name, Quantize(QParams.per_tensor(2 * old.out.s, old.out.z, 0, 255)))
    assert torch.equal(qmodel(X), plain(qmodel, X)) and not torch.equal(qmodel(X), plain(quantized(), X))


def test_another_forward_in_its_place_is_used():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    kernel = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel))
    kernel.forward = lambda x: type(kernel).forward(kernel, x).zero_()
    assert torch.equal(qmodel(X), plain(qmodel, X)) and not torch.equal(qmodel(X), plain(quantized(), X))


def test_loaded_weights_are_used():
    torch.manual_seed(1)
    reinitialized = quantized(
        copy.deepcopy(network()).apply(lambda m: m.reset_parameters() if hasattr(m, "weight") else None)
    )
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    before = qmodel(X)
    qmodel.load_state_dict(reinitialized.state_dict())
    assert torch.equal(qmodel(X), plain(qmodel, X)) and not torch.equal(qmodel(X), before)


def test_an_edited_graph_is_run():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    before = qmodel(X)
    last = qmodel.graph.output_node().args[0]
    with qmodel.graph.inserting_after(last):
        doubled = qmodel.graph.call_function(torch.mul, (last, 2.0))
    qmodel.graph.output_node().args = (doubled,)
    qmodel.recompile()
    for _ in range(3):
        assert torch.equal(qmodel(X), 2 * before)


def test_a_graph_that_was_edited_but_not_recompiled_is_not_run():
    qmodel = quantized()
    expected = qmodel(X)
    last = qmodel.graph.output_node().args[0]
    with qmodel.graph.inserting_after(last):
        doubled = qmodel.graph.call_function(torch.mul, (last, 2.0))
    qmodel.graph.output_node().args = (doubled,)
    for _ in range(3):
        assert torch.equal(qmodel(X), expected)
    qmodel.recompile()
    for _ in range(3):
        assert torch.equal(qmodel(X), 2 * expected)


def test_an_edited_unit_is_run():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.GELU(), nn.Conv2d(3, 3, 3), nn.ReLU()).eval()
    qmodel = quantized(model, recipe=fxq.Recipe.static(backend="reference"))
    for _ in range(3):
        qmodel(X)
    unit = next(m for m in qmodel.modules() if isinstance(m, Unit))
    output = unit.graph.output_node()
    with unit.graph.inserting_before(output):
        negative = unit.graph.call_function(torch.neg, (output.args[0],))
    output.args = (negative,)
    unit.recompile()
    assert torch.equal(qmodel(X), plain(qmodel, X)) and not torch.equal(qmodel(X), plain(quantized(model), X))


def test_eval_changes_nothing():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    (bound,) = functions(qmodel)
    qmodel.eval()(X)
    assert functions(qmodel) == [bound]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_stays_where_it_is(register):
    qmodel, seen = quantized(), []
    getattr(qmodel.fxq_kernels.get_submodule(first_kernel(qmodel)), register)(lambda *_: seen.append(1))
    for _ in range(4):
        qmodel(X)
    assert len(seen) == 4 and len(functions(qmodel)) == 1


def test_another_forward_for_a_while_is_used_for_a_while():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    kernel, before = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel)), qmodel(X)
    with mock.patch.object(kernel, "forward", lambda x: type(kernel).forward(kernel, x).zero_()):
        assert not torch.equal(qmodel(X), before)
    for _ in range(3):
        assert torch.equal(qmodel(X), before)


def test_a_hook_that_keeps_something_on_its_kernel_binds_once():
    qmodel = quantized()
    kernel = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel))
    kernel.register_forward_hook(lambda module, inputs, output: setattr(module, "last", output))
    for _ in range(3):
        qmodel(X)
    (bound,) = functions(qmodel)
    assert torch.equal(qmodel(X), plain(qmodel, X)) and functions(qmodel) == [bound]


def test_a_hook_may_return_another_kind():
    sizes = itertools.cycle([8, 6])
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    qmodel = quantized(model)
    kernel = next(iter(qmodel.fxq_kernels.children()))
    kernel.register_forward_hook(lambda module, inputs, output: output[..., : next(sizes)])
    assert [qmodel(X).shape[-1] for _ in range(6)] == [6, 4, 6, 4, 6, 4]


def test_backward_hooks_of_a_float_unit_run():
    recipe = functools.reduce(lambda r, path: r.override(path, fxq.FLOAT), "013", ALL)
    qmodel = quantized(nn.Sequential(*network()[:2], nn.Identity(), nn.Conv2d(8, 4, 3)).eval(), recipe=recipe)
    unit, seen = next(m for m in qmodel.modules() if isinstance(m, Unit)), []
    x = X.clone().requires_grad_()
    for _ in range(3):
        qmodel(x).sum().backward()
    unit.register_full_backward_hook(lambda *_: seen.append(1))
    for count in range(1, 5):
        qmodel(x).sum().backward()
        assert len(seen) == count


def test_weights_that_are_laid_out_anew():
    conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1)

    def forward(self, x):
        y = self.a(x).relu()
        return self.d((self.c(self.b(y).relu()) + y).relu())

    model = module(forward, a=conv(3, 16), b=conv(16, 16), c=conv(16, 16), d=conv(16, 4))
    qmodel = quantized(model, recipe=ALL.override("a", fxq.FLOAT))
    expected = plain(qmodel, X)
    for layout in (torch.channels_last, torch.contiguous_format) * 2:
        qmodel.to(memory_format=layout)
        for _ in range(3):
            torch.testing.assert_close(qmodel(X), expected, rtol=0, atol=0.1 * float(expected.abs().max()))
        assert torch.equal(qmodel(X), plain(qmodel, X)) and len(functions(qmodel)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda leaf: leaf.register_forward_hook(lambda module, inputs, output: output[:1]),
        lambda leaf: setattr(leaf, "padding", (3, 3)),
        lambda leaf: leaf.to(memory_format=torch.channels_last),
    ],
)
def test_a_float_leaf_that_changes(change):
    def forward(self, x):
        y = self.a(x).relu()
        return self.c((self.b(y) + y).relu())

    conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1)
    qmodel = quantized(module(forward, a=conv(3, 8), b=conv(8, 8), c=conv(8, 4)), recipe=ALL.leaf("a"))
    for _ in range(3):
        qmodel(X)
    change(qmodel.get_submodule("a"))
    for _ in range(3):
        assert torch.equal(qmodel(X), plain(qmodel, X))


def test_a_forward_in_its_place_may_return_another_kind():
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)]
    qmodel, sizes = quantized(nn.Sequential(*convs).eval()), itertools.cycle([2, 1])
    kernel = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel))
    kernel.forward = lambda x: type(kernel).forward(kernel, x)[: next(sizes)]
    assert [len(qmodel(X)) for _ in range(6)] == [2, 1] * 3


def test_code_that_is_not_made_of_the_graph_is_run():
    qmodel = quantized()
    qmodel.graph.on_generate_code(lambda current: lambda body: ["return torch.zeros(1)\n"])
    qmodel.recompile()
    for _ in range(3):
        assert torch.equal(qmodel(X), plain(qmodel, X))
    assert functions(qmodel) == []


def test_functions_that_were_dropped_leave_no_memory():
    qmodel, alive = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()), weakref.WeakSet()
    gc.collect()
    gc.disable()
    try:
        for n in range(2, 40):
            for _ in range(2):
                qmodel(torch.ones(1, 3, n + 1, 4))
            alive.update(bound.run for bound in functions(qmodel))
        assert len(alive) == MAX_BOUND_KINDS
    finally:
        gc.enable()


def test_a_leaf_gets_plain_lists():
    class Leaf(nn.Module):
        def forward(self, xs):
            kinds.append(type(xs))
            return xs[0] + xs[1]

    kinds = []
    model = module(lambda self, x: self.last(self.leaf([x, self.first(x)])), first=conv1(), leaf=Leaf(), last=conv1())
    qmodel = quantized(model, recipe=ALL.leaf("leaf"))
    kinds.clear()
    for _ in range(3):
        qmodel(X)
    assert kinds == [list] * 3


def conv1():
    return nn.Conv2d(3, 3, 1)


def test_its_arguments_can_be_asked_for():
    assert list(inspect.signature(quantized().forward).parameters) == ["input"]
    assert inspect.getfullargspec(quantized().forward).args == ["self", "input"]


def test_a_float_weight_in_its_place_is_used():
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage").override("4", fxq.FLOAT)
    qmodel = quantized(recipe=recipe)
    for _ in range(3):
        qmodel(X)
    path = next(str(n.target) for n in qmodel.graph.nodes if n.op == "get_attr" and str(n.target).endswith("weight"))
    owner, name = qmodel.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    zeros = torch.zeros_like(getattr(owner, name))
    setattr(owner, name, nn.Parameter(zeros, requires_grad=False) if name in owner._parameters else zeros)
    assert torch.equal(qmodel(X), plain(qmodel, X)) and not torch.equal(qmodel(X), plain(quantized(recipe=recipe), X))
    getattr(owner, name).data.fill_(0.5)  # in place, too
    assert torch.equal(qmodel(X), plain(qmodel, X))


def test_a_change_of_another_model_changes_nothing():
    qmodel, second_model = quantized(), quantized()
    for _ in range(3):
        qmodel(X)
        second_model(X)
    bound = functions(qmodel)
    second_model.load_state_dict(second_model.state_dict())
    qmodel(X)
    assert functions(qmodel) == bound


def test_a_kernel_without_a_bind_of_its_own_runs_its_forward():
    class Doubled(Clamp):
        def forward(self, x):
            return super().forward(x) * 2

    class Halved(Quantize):
        def forward(self, x):
            return super().forward(x) // 2

    grid = QParams.per_tensor(0.1, 0)
    for kernel, x in (
        (Doubled(grid, PostOp("relu")), torch.arange(9, dtype=torch.uint8)),
        (Halved(grid), torch.rand(9)),
    ):
        assert torch.equal(kernel.callable_for(x)(x), kernel(x))


def test_a_copy_and_a_model_that_is_gone_leave_nothing():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    copied = copy.deepcopy(qmodel)
    assert functions(copied) == [] and torch.equal(copied(X), qmodel(X))
    kernel = weakref.ref(next(qmodel.fxq_kernels.children()))
    del qmodel
    gc.collect()
    assert kernel() is None
