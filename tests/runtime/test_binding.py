"""Calls of bound functions give the numbers of the unbound graph."""

import copy
import pickle
import sys
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

import fxq
from fxq.runtime import binding
from fxq.runtime.binding import MAX_BOUND_KINDS, bind, kind_of
from tests.support import models
from tests.support.bound import ALL, X, first_kernel, functions, plain, quantized
from tests.support.graphs import equal
from tests.support.helpers import module

# ---- the same numbers


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", models.NETWORKS)
def test_every_call_gives_the_same(name):
    model, data = models.build(name), [models.batch(name)]
    qmodel = fxq.quantize(model, ALL, data=data)
    expected = models.call(qmodel, data[0])
    for _ in range(3):
        assert equal(models.call(qmodel, data[0]), expected)
    second_batch = models.batch(name, seed=2)
    fresh = copy.deepcopy(qmodel)
    assert equal(models.call(qmodel, second_batch), models.call(fresh, second_batch))


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
    qmodel, batches = quantized(), [torch.cat([X] * n) for n in range(1, MAX_BOUND_KINDS + 2)]
    for x in batches[:MAX_BOUND_KINDS] * 2:
        assert torch.equal(qmodel(x), plain(qmodel, x))
    first, *others = functions(qmodel)
    assert len(others) == MAX_BOUND_KINDS - 1
    for x in (
        batches[0],
        batches[MAX_BOUND_KINDS],
        batches[MAX_BOUND_KINDS],
    ):  # the least recent kind is dropped
        assert torch.equal(qmodel(x), plain(qmodel, x))
    assert functions(qmodel)[:-1] == [*others[1:], first]


def test_more_kinds_in_turn_than_are_kept_are_not_bound():
    qmodel, batches = quantized(), [torch.cat([X] * n) for n in range(1, MAX_BOUND_KINDS + 2)]
    for x in batches * 3:
        assert torch.equal(qmodel(x), plain(qmodel, x))
    assert functions(qmodel) == []


@pytest.mark.parametrize("copied", [lambda q: q, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
@pytest.mark.parametrize("kept", [0, 1, 3, MAX_BOUND_KINDS + 2])
def test_how_many_kinds_are_kept_is_an_option(copied, kept):
    qmodel, batches = quantized(), [torch.cat([X] * n) for n in range(1, kept + 1)]
    assert qmodel.kinds_kept == MAX_BOUND_KINDS
    qmodel.kinds_kept = kept
    qmodel = copied(qmodel)
    for x in batches * 3:
        assert torch.equal(qmodel(x), plain(qmodel, x))
    assert len(functions(qmodel)) == kept
    for _ in range(3):
        assert torch.equal(qmodel(X[:1]), plain(qmodel, X[:1]))
    assert len(functions(qmodel)) == kept


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
        with pytest.raises(fxq.InputError, match="the model does not run on"):
            qmodel(*args, **kwargs)
    assert functions(qmodel) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("names", ["x, _v1", "x, _c0", "_v1, _v2", "x, _c1", "forward, __v1"])
def test_inputs_may_have_any_names(names):
    first, second = names.split(", ")
    namespace = {}
    exec(f"def forward(self, {names}):\n    return self.conv({first})[:, :, 1:] + {second}[:, :, 1:]", namespace)
    qmodel = quantized(module(namespace["forward"], conv=nn.Conv2d(3, 3, 3, padding=1)), data=[(X, X)])
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shapes", [1, MAX_BOUND_KINDS, MAX_BOUND_KINDS + 2])
def test_threads_at_once(shapes):
    """Threads with as many kinds of inputs, which switch at any point."""
    qmodel = quantized()
    for kernel in qmodel.fxq_kernels.children():
        kernel.register_forward_hook(lambda module, *_: setattr(module, "last", object()))
    inputs = [torch.cat([X * i / 8] * (i % shapes + 1)) for i in range(6)]
    expected, wrong = [plain(qmodel, x) for x in inputs], []

    def run(i):
        try:
            for _ in range(40):
                assert torch.equal(qmodel(inputs[i]), expected[i])
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
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
    """Rows with a positive first value. Their number depends on values."""

    def forward(self, x):
        return x[x[:, 0] > 0]


def test_kernels_after_sizes_that_follow_from_values_are_not_bound():
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
    """Kernels that a bound function calls by their forward, which checks its inputs."""
    called = (getattr(value, "__func__", value) for value in bound.run.__globals__.values())
    return [
        f.__qualname__ for f in called if getattr(f, "__qualname__", "") in ("OnednnLinear.forward", "Quantize.forward")
    ]


BETWEEN = {
    "a table op": lambda x: x.reshape(2, 2, 8),
    "an op that fxq does not know": lambda x: torch.gather(x, 1, torch.arange(8, device=x.device).expand_as(x)),
    "a method": lambda x: x.cumsum(0),
    "arithmetic on sizes": lambda x: x.view(x.shape[0] // 2, -1, 8),
    "an index": lambda x: x[torch.arange(2)],
    "random numbers": lambda x: x + torch.rand_like(x),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BETWEEN)
def test_kernels_are_bound_after(name):
    torch.manual_seed(0)
    model = module(lambda self, x: self.b(BETWEEN[name](self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[torch.ones(4, 8)])
    _, bound = bind(qmodel, (torch.ones(4, 8),), {})
    assert forwards(bound) == []


class Best(nn.Module):
    """Samples that pass a test. Their number is computed outside torch."""

    def forward(self, x):
        return x[[i for i, value in enumerate(x[:, 0].tolist()) if value > 0] or [0]]


FROM_VALUES = {
    "a mask": lambda x: x[x[:, 0] > 0],
    "where it is not zero": lambda x: x[torch.nonzero(x[:, 0].relu())[:, 0]],
    "repeated by values": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).to(torch.int64), 0),
    "what a sparse tensor holds": lambda x: (x * (x[:, :1] > 0)).to_sparse(1).values(),
    "a size that is a tensor": lambda x: x.new_zeros(((x[:, 0] > 0).sum() + 1, 8)) + x[:1],
    "a container of torch's with a module of the user's": nn.Sequential(Best()),
    "distinct values": lambda x: torch.unique(x[:, :1].relu().expand(-1, 8), dim=0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FROM_VALUES)
def test_kernels_are_not_bound_after(name):
    torch.manual_seed(0)
    between = FROM_VALUES[name]
    parts = {"k": between} if isinstance(between, nn.Module) else {}
    model = module(lambda self, x: self.b(between(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8), **parts)
    recipe = fxq.Recipe.static(optimize="coverage", leaf_modules=list(parts))
    qmodel = fxq.quantize(model, recipe, data=[torch.randn(16, 8)])
    _, bound = bind(qmodel, (torch.randn(16, 8),), {})
    assert "OnednnLinear.forward" in forwards(bound)
    counts = set()
    for seed in range(5):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        got = bound.run(x)
        counts.add(len(got))
        assert torch.equal(got, plain(qmodel, x))
    assert len(counts) > 1


@pytest.mark.slow
def test_operators_of_higher_order():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y + 1, (y,)))

    x = torch.randn(16, 8)
    qmodel = fxq.quantize(torch.export.export(Branches().eval(), (x,)), ALL, data=[x])
    for _ in range(3):
        assert torch.equal(qmodel(x), plain(qmodel, x)) and torch.equal(qmodel(-x), plain(qmodel, -x))


def test_inputs_of_many_kinds_run_one_function_for_all_kinds(monkeypatch):
    """Its results are those of the plain graph, also after a change of a kernel, and wrong calls are refused."""
    bound = []
    monkeypatch.setattr(binding, "bind", lambda *args, **options: bound.append(options) or bind(*args, **options))
    qmodel = quantized()
    for count in range(1, 6):
        x = torch.cat([X] * count)
        assert equal(qmodel(x), plain(qmodel, x))
    assert bound == [{"to_kind": False}]
    with pytest.raises(fxq.InputError, match="the model does not run on"):
        qmodel()
    kernel = qmodel.fxq_kernels.get_submodule(first_kernel(qmodel))
    kernel.register_forward_hook(lambda module, args, result: torch.zeros_like(result))
    for count in range(6, 9):
        x = torch.cat([X] * count)
        assert equal(qmodel(x), plain(qmodel, x))
    assert bound == [{"to_kind": False}] * 2
