"""A model's later calls run a function that its graph was bound to: the numbers must not tell."""

import copy
import gc
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.convert import Quantize
from fxq.backends.elementwise import Clamp
from fxq.backends.kernel import Post
from fxq.backends.x86_conv import Conv
from fxq.binding import KEPT, Bindings, bind, kind_of
from fxq.qparams import QParams
from fxq.unit import Unit
from tests import models
from tests.graphs import equal
from tests.helpers import module

ALL = fxq.Recipe.static(optimize="coverage", backend="x86")
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    return nn.Sequential(*layers).eval()


def quantized(model=None, data=(X,), recipe=ALL):
    return fxq.quantize(network() if model is None else model, recipe, data=list(data))


def plain(qmodel, *args, **kwargs):
    """What the graph stands for: its own forward, never bound."""
    return type(qmodel).forward.__wrapped__(qmodel, *args, **kwargs)


def bindings(qmodel):
    """The model's `Bindings`."""
    cells = [cell.cell_contents for cell in type(qmodel).forward.__closure__]
    return next(value for value in cells if isinstance(value, Bindings))


def functions(qmodel):
    """The functions that it is bound to now, the newest last."""
    return [bound for bound in bindings(qmodel)._known.values() if bound is not None]


# ---- the same numbers


@pytest.mark.parametrize("name", models.NETWORKS)
def test_every_call_gives_the_same(name):
    model, data = models.build(name), [models.batch(name)]
    qmodel = fxq.quantize(model, ALL, data=data)
    expected = models.call(qmodel, data[0])
    for _ in range(3):
        assert equal(models.call(qmodel, data[0]), expected)
    other = models.batch(name, seed=2)
    fresh = copy.deepcopy(qmodel)
    assert equal(models.call(qmodel, other), models.call(fresh, other))


def test_what_the_function_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    _, bound = bind(quantized(model), (X,), {})
    lines = [
        "def forward(input):",
        "    _v1 = _c0(input)",
        "    del input",
        "    _v2 = _c1(_v1)",
        "    del _v1",
        "    _v3 = _c2(_v2, start_dim=1)",
        "    del _v2",
        "    _v4 = _c3(_v3)",
        "    del _v3",
        "    return _v4",
    ]
    assert bound.source.replace("input_1", "input").splitlines() == lines


def test_the_second_call_of_a_kind_binds_and_later_ones_run_the_function():
    qmodel = quantized()
    qmodel(X)
    assert functions(qmodel) == []
    expected = qmodel(X)
    (bound,) = functions(qmodel)
    assert torch.equal(qmodel(X), expected) and functions(qmodel) == [bound]


KINDS = {
    "batch": X[:1],
    "channels-last": X.contiguous(memory_format=torch.channels_last),
    "strided": torch.cat([X, X], 3)[..., ::2],
    "expanded": X[:1].expand(2, 3, 8, 8),
    "empty": X[:0],
    "with a gradient": X.clone().requires_grad_(),
    "parameter": nn.Parameter(X),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_input_has_a_function_of_its_own(kind):
    qmodel = quantized()
    for _ in range(2):
        qmodel(X.double().float())
    x = KINDS[kind]
    expected = plain(qmodel, x)
    assert torch.equal(qmodel(x), expected) and torch.equal(qmodel(x), expected)
    assert len(functions(qmodel)) == 2
    bound = functions(qmodel)[-1]
    assert torch.equal(qmodel(x), expected) and functions(qmodel)[-1] is bound


def test_the_kinds_that_came_last_are_kept():
    qmodel, batches = quantized(), [torch.cat([X] * n) for n in range(1, KEPT + 2)]
    for x in batches[:KEPT] * 2:
        assert torch.equal(qmodel(x), plain(qmodel, x))
    first, *others = functions(qmodel)
    assert len(others) == KEPT - 1
    for x in (batches[0], batches[KEPT], batches[KEPT]):  # the second kind has not come for longest
        assert torch.equal(qmodel(x), plain(qmodel, x))
    assert functions(qmodel)[:-1] == [*others[1:], first]


def test_more_kinds_in_turn_than_are_kept_are_not_bound():
    qmodel, batches = quantized(), [torch.cat([X] * n) for n in range(1, KEPT + 2)]
    for x in batches * 3:
        assert torch.equal(qmodel(x), plain(qmodel, x))
    assert functions(qmodel) == []


def test_kinds_differ_by_all_that_kernels_look_at():
    inputs = [X, X[:1], X.mT, X.double(), X.clone().requires_grad_()]
    kinds = [kind_of((x,), {}) for x in inputs] + [kind_of((), {"x": X}), kind_of((X, 1), {}), kind_of((X, True), {})]
    kinds += [kind_of(([X],), {}), kind_of(((X,),), {}), kind_of(({"a": X},), {}), kind_of(({"b": X},), {})]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds.append(kind_of((X,), {}))
    assert None not in kinds and len(set(kinds)) == len(kinds)
    assert kind_of((X.clone(),), {}) == kinds[0]


def test_the_number_of_threads_is_part_of_the_kind():
    before, threads = kind_of((X,), {}), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert kind_of((X,), {}) != before
    finally:
        torch.set_num_threads(threads)


def test_nothing_is_bound_for_odd_inputs_and_watched_calls():
    class Subclass(torch.Tensor):
        pass

    odd = X.as_subclass(Subclass), X.to("meta"), X.to_sparse(), object(), [object()], {1: object()}
    assert [kind_of((x,), {}) for x in odd] == [None] * len(odd)
    seen = []
    torch.func.vmap(lambda x: seen.append(kind_of((x,), {})) or x)(X)
    torch.jit.trace(lambda x: seen.append(kind_of((x,), {})) or x + 1, X, check_trace=False)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    seen.append(kind_of((X,), {}))
    handle.remove()
    assert seen == [None] * 3


def test_keywords_defaults_and_optional_inputs():
    def forward(self, x, y=None, *, scale: float = 1.0):
        x = self.conv(x)
        return {"sum": x if y is None else x + y, "scaled": [x * scale]}

    model = module(forward, conv=nn.Conv2d(3, 3, 3, padding=1))
    qmodel = quantized(model, data=[{"x": X, "y": X}])
    for _ in range(3):
        for args, kwargs in (((X, X), {}), ((X,), {"y": X}), ((), {"x": X, "y": X})):
            got = qmodel(*args, **kwargs)
            assert type(got) is dict and type(got["scaled"]) is list and equal(got, plain(qmodel, *args, **kwargs))


def takes_two():
    def forward(self, x, scale):
        return self.conv(x) * scale

    return quantized(module(forward, conv=nn.Conv2d(3, 3, 3)), data=[(X, X[:, :, :6, :6])])


WRONG_CALLS = {
    "too many": ((X, X, X), {}),
    "too few": ((X,), {}),
    "none": ((), {}),
    "twice": ((X,), {"x": X}),
    "unknown": ((X, X), {"bogus": 1}),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_stays_wrong(name):
    qmodel, (args, kwargs) = takes_two(), WRONG_CALLS[name]
    for _ in range(3):
        with pytest.raises(TypeError):
            qmodel(*args, **kwargs)
    assert functions(qmodel) == []


@pytest.mark.parametrize("names", ["x, _v1", "x, _c0", "_v1, _v2", "x, _c1", "forward, __v1"])
def test_inputs_may_have_any_names(names):
    first, second = names.split(", ")
    made = {}
    exec(f"def forward(self, {names}):\n    return self.conv({first})[:, :, 1:] + {second}[:, :, 1:]", made)
    qmodel = quantized(module(made["forward"], conv=nn.Conv2d(3, 3, 3, padding=1)), data=[(X, X)])
    for _ in range(3):
        assert torch.equal(qmodel(X, -X), plain(qmodel, X, -X))
    assert len(functions(qmodel)) == 1


def test_an_error_inside_shows_the_line():
    qmodel, fails = quantized(), []
    for _ in range(3):
        qmodel(X)
    kernel = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel))

    def forward(x):
        if fails:
            raise ValueError("on purpose")
        return type(kernel).forward(kernel, x)

    kernel.forward = forward
    assert torch.equal(qmodel(X), plain(qmodel, X)) and len(functions(qmodel)) == 0
    assert torch.equal(qmodel(X), plain(qmodel, X)) and len(functions(qmodel)) == 1
    fails.append(True)
    with pytest.raises(ValueError, match="on purpose") as info:
        qmodel(X)
    assert "_v2 = _c1(_v1)" in [entry.line for entry in traceback.extract_tb(info.tb)]
    fails.clear()
    assert torch.equal(qmodel(X), plain(qmodel, X)) and len(functions(qmodel)) == 1


def test_a_result_is_not_the_one_of_an_earlier_call():
    qmodel = quantized()
    results = [qmodel(X * i) for i in range(4)]
    assert all(torch.equal(results[i], plain(qmodel, X * i)) for i in range(4))


def test_two_threads_at_once():
    qmodel = quantized()
    inputs = [X * i / 8 for i in range(8)]
    expected, wrong = [plain(qmodel, x) for x in inputs], []

    def run(i):
        for _ in range(50):
            if not torch.equal(qmodel(inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_values_go_when_they_have_been_read():
    qmodel = quantized()
    alive, most = [], [0]

    def watch(kernel, inputs, output):
        alive.append(weakref.ref(output))
        most[0] = max(most[0], sum(ref() is not None for ref in alive))

    for kernel in qmodel.fxq_kernels.children():
        kernel.register_forward_hook(watch)
    for _ in range(3):
        qmodel(X)
    assert len(functions(qmodel)) == 1 and most[0] == 2  # a kernel's input, and its output


# ---- sizes that follow from values


class Keeps(nn.Module):
    """The rows with a positive first value: how many, no shape tells."""

    def forward(self, x):
        return x[x[:, 0] > 0]


def test_kernels_behind_sizes_that_follow_from_values_are_not_bound():
    model = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    data = torch.randn(64, 8)
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage", leaf_modules=["1"]), data=[data])
    counts = set()
    for seed in range(6):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        got = qmodel(x)
        counts.add(len(got))
        assert torch.equal(got, plain(qmodel, x))
    assert len(counts) > 1 and len(functions(qmodel)) == 1


def forwards(bound):
    """The kernels that a bound function calls by their own forward, which looks at its inputs."""
    called = (getattr(value, "__func__", value) for value in bound.run.__globals__.values())
    return [f.__qualname__ for f in called if getattr(f, "__qualname__", "") in ("Linear.forward", "Quantize.forward")]


BETWEEN = {
    "a table op": lambda x: x.reshape(2, 2, 8),
    "an op that fxq does not know": lambda x: torch.gather(x, 1, torch.arange(8, device=x.device).expand_as(x)),
    "a method": lambda x: x.cumsum(0),
    "arithmetic on sizes": lambda x: x.view(x.shape[0] // 2, -1, 8),
    "an index": lambda x: x[torch.arange(2)],
    "random numbers": lambda x: x + torch.rand_like(x),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_kernels_are_bound_behind(name):
    torch.manual_seed(0)
    model = module(lambda self, x: self.b(BETWEEN[name](self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[torch.ones(4, 8)])
    _, bound = bind(qmodel, (torch.ones(4, 8),), {})
    assert forwards(bound) == []


FROM_VALUES = {
    "a mask": lambda x: x[x[:, 0] > 0],
    "where it is not zero": lambda x: x[torch.nonzero(x[:, 0].relu())[:, 0]],
    "repeated by values": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).to(torch.int64), 0),
    "distinct values": lambda x: torch.unique(x[:, :1].relu().expand(-1, 8), dim=0),
}


@pytest.mark.parametrize("name", FROM_VALUES)
def test_kernels_are_not_bound_behind(name):
    torch.manual_seed(0)
    model = module(lambda self, x: self.b(FROM_VALUES[name](self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[torch.randn(16, 8)])
    _, bound = bind(qmodel, (torch.randn(16, 8),), {})
    assert "Linear.forward" in forwards(bound)
    counts = set()
    for seed in range(5):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        got = bound.run(x)
        counts.add(len(got))
        assert torch.equal(got, plain(qmodel, x))
    assert len(counts) > 1


# ---- what changes is noticed


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


def first_kernel(qmodel, kind=Conv):
    return next(name for name, kernel in qmodel.fxq_kernels.named_children() if isinstance(kernel, kind))


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
    other = quantized(copy.deepcopy(network()).apply(lambda m: m.reset_parameters() if hasattr(m, "weight") else None))
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    before = qmodel(X)
    qmodel.load_state_dict(other.state_dict())
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
    qmodel, other = quantized(), quantized()
    for _ in range(3):
        qmodel(X)
        other(X)
    bound = functions(qmodel)
    other.load_state_dict(other.state_dict())
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
    for kernel, x in ((Doubled(grid, Post("relu")), torch.arange(9, dtype=torch.uint8)), (Halved(grid), torch.rand(9))):
        assert torch.equal(kernel.callee(x)(x), kernel(x))


def test_a_copy_and_a_model_that_is_gone_leave_nothing():
    qmodel = quantized()
    for _ in range(3):
        qmodel(X)
    other = copy.deepcopy(qmodel)
    assert functions(other) == [] and torch.equal(other(X), qmodel(X))
    kernel = weakref.ref(next(qmodel.fxq_kernels.children()))
    del qmodel
    gc.collect()
    assert kernel() is None
