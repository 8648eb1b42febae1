"""State of further kinds: in functions, iterators, bytes, script modules, threads and attributes of tensors."""

import array
import copy
import functools
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.tracing.fidelity import call
from fxq.tracing.float_run import FloatRun
from tests.support.helpers import REFERENCE
from tests.tracing.test_float_run import Layers, batches, model_of

pytestmark = pytest.mark.any_cpu
ALL_FLOAT = REFERENCE.override("*", fxq.FLOAT)


class RunningMax(Layers):
    def prepare(self):
        self.most = torch.zeros(())

    def step(self, y):
        self.most = torch.maximum(self.most, y.abs().max())
        return y / (self.most + 1)


class FirstMean(Layers):
    def prepare(self):
        self.mean = None

    def step(self, y):
        if self.mean is None:
            self.mean = y.mean()
        return y - self.mean


class BySize(Layers):
    def prepare(self):
        self.cache = {}

    def step(self, y):
        if len(y) not in self.cache:
            self.cache[len(y)] = y.abs().max()
        return y / (self.cache[len(y)] + 1)


class Sizes(Layers):
    def prepare(self):
        self.sizes = set()

    def step(self, y):
        self.sizes.add(len(y))
        return y * len(self.sizes)


class EveryEighth(Layers):
    def prepare(self):
        self.seen = []

    def step(self, y):
        self.seen.append(0)
        return y * 2 if len(self.seen) % 8 == 0 else y


class InBytes(Layers):
    def prepare(self):
        self.n = bytearray(1)

    def step(self, y):
        self.n[0] = (self.n[0] + 1) % 100
        return y * 2 if self.n[0] % 50 == 0 else y


class InCArray(InBytes):
    def prepare(self):
        self.n = array.array("l", [0])


class IntTensor(InBytes):
    def prepare(self):
        self.n = torch.zeros(1, dtype=torch.int64)


class ObjectArray(Layers):
    def prepare(self):
        self.h = np.array([1, 2.0], dtype=object)

    def step(self, y):
        self.h[0] = self.h[0] + 1
        return y * float(self.h[0])


class Counts(Layers):
    def prepare(self):
        self.it = itertools.count(1)

    def step(self, y):
        return y * next(self.it)


class Cycles(Counts):
    def prepare(self):
        self.it = itertools.cycle([1, 2, 3])


class OfListIterator(Counts):
    def prepare(self):
        self.it = iter(list(range(1, 100)))


class PairOfIterators(Counts):
    def prepare(self):
        self.it = (itertools.count(1), 0)

    def step(self, y):
        return y * next(self.it[0])


class OnTensor(Layers):
    def step(self, y):
        self.a.weight.n = getattr(self.a.weight, "n", 0) + 1
        return y * 2 if self.a.weight.n % 3 == 0 else y


class InPartial(Layers):
    def prepare(self):
        self.f = functools.partial(kept, [torch.zeros(8)])

    def step(self, y):
        return self.f(y)


def kept(memory, y):
    memory[0] = memory[0] * 0.5 + y.mean(0)
    return y + memory[0]


class CountingList(list):
    n = 0


class OnList(Layers):
    def prepare(self):
        self.h = CountingList()

    def step(self, y):
        self.h.n += 1
        return y * self.h.n


class OnDict(OnList):
    def prepare(self):
        self.h = type("Table", (dict,), {"n": 0})()


class Owner:
    def __init__(self):
        self.n = 0

    def scaled(self, y):
        self.n += 1
        return y * self.n


class InMethod(Layers):
    def prepare(self):
        self.f = Owner().scaled

    def step(self, y):
        return self.f(y)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.h, self.t = 0, [torch.zeros(8)], torch.zeros(8)

    def forward(self, y):
        self.n += 1
        self.h[0] = self.h[0] * 0.5 + y.mean(0)
        self.t = self.t + 1
        return y * self.n + self.h[0] + self.t


class InScript(Layers):
    def prepare(self):
        self.f = torch.jit.script(Scripted())

    def step(self, y):
        return self.f(y)


OWN = {
    RunningMax: "most", FirstMean: "mean", BySize: "cache[4]", Sizes: "sizes[4]", EveryEighth: "seen[0]", InBytes: "n",
    InCArray: "n", IntTensor: "n", ObjectArray: "h", Counts: "it", Cycles: "it", OfListIterator: "it",
    PairOfIterators: "it", OnTensor: "weight.n", InPartial: "f.args[0][0]", OnList: "h.n", InMethod: "f.__self__.n",
    InScript: "n",
}  # fmt: skip


def place_of(model, path):
    """Text of all Python state of the model's third layer; iterators are copied before they are read."""
    layer = model[path]
    values = {name: repr(value) for name, value in vars(layer).items() if not name.startswith("_")}
    attributes = [sorted(vars(p)) for p in layer.a.parameters()]
    more = [getattr(layer, name, None) for name in ("f", "h", "it")]
    script = [repr((f.n, f.h, f.t)) for f in more[:1] if isinstance(f, torch.jit.ScriptModule)]
    methods = [f.__self__.n for f in more[:1] if hasattr(f, "__self__")]
    return values, attributes, script, methods, [getattr(value, "n", None) for value in more[1:2]]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("by_recipe", [True, False])
def test_a_leaf_is_right_on_a_long_stream_and_the_model_stays(kind, by_recipe):
    model = model_of(kind)
    before, reference = place_of(model, 2), copy.deepcopy(model)
    if by_recipe:
        qmodel = fxq.quantize(model, ALL_FLOAT.leaf("2"), data=batches(3))
    else:
        with pytest.warns(fxq.FxqWarning) as caught:
            qmodel = fxq.quantize(model, ALL_FLOAT, data=batches(3))
        assert any(f"'{OWN[kind]}'" in str(w.message).replace('"', "'") for w in caught)
    assert place_of(model, 2) == before
    with torch.no_grad():
        for i, x in enumerate(batches(20, seed=1)):
            x = x[:2] * 3 if i % 5 == 3 else x
            assert sqnr(reference(x), qmodel(x)) > 90  # all layers in float
    assert place_of(model, 2) == before


def bumped(y):
    bumped.calls += 1
    return y * 2 if bumped.calls % 3 == 0 else y


bumped.calls = 0


def cached(y):
    if not hasattr(cached, "first"):
        cached.first = y.mean()
    return y - cached.first


TICKS = itertools.count()
PLACE = threading.local()
TABLE = weakref.WeakKeyDictionary()


def ticking(y):
    return y * (next(TICKS) % 4)


def local(y):
    PLACE.n = getattr(PLACE, "n", 0) + 1
    return y * PLACE.n


def by_default(y, it=itertools.count()):  # noqa: B008 - the default is the state
    return y * (next(it) % 4)


def created(y):
    global CREATED
    CREATED = globals().get("CREATED", 0) + 1
    return y * CREATED


def stateful(function):
    class Calls(Layers):
        def step(self, y):
            return function(y)

    return Calls


class InWeakTable(Layers):
    def step(self, y):
        TABLE[self] = TABLE.get(self, 0) + y.mean()
        return y * TABLE[self]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (stateful(bumped), "attribute of function: bumped.calls"),
        (stateful(cached), "attribute of function: cached.first"),
        (stateful(ticking), "global TICKS"),
        (stateful(local), "global PLACE.n"),
        (stateful(by_default), "default of by_default: it"),
        (stateful(created), "global CREATED"),
        (InWeakTable, "global TABLE["),
    ],
)
def test_state_that_all_models_share_is_refused_and_set_back(kind, place, leaf):
    with pytest.raises(fxq.TraceError) as error:
        fxq.quantize(model_of(kind), REFERENCE.leaf("2") if leaf else REFERENCE, data=batches(2))
    words = str(error.value).replace('"', "'")
    assert place in words and "layer '2'" in words and "would share it" in words
    assert bumped.calls == 0 and not hasattr(cached, "first") and repr(TICKS) == "count(0)" and not vars(PLACE)
    assert repr(by_default.__defaults__) == "(count(0),)" and "CREATED" not in globals() and not TABLE


def gains():
    while True:
        yield 1
        yield 2


class InGenerator(Counts):
    def prepare(self):
        self.it = gains()


@pytest.mark.parametrize("leaf", [True, False])
def test_a_generator_is_refused_before_it_advances(leaf):
    model = model_of(InGenerator)
    with pytest.raises(fxq.TraceError, match="forward advances 'it', a generator, which cannot be copied"):
        fxq.quantize(model, REFERENCE.leaf("2") if leaf else REFERENCE, data=batches(2))
    assert next(model[2].it) == 1


class InThreadLocal(Layers):
    def prepare(self):
        self.place = threading.local()

    def step(self, y):
        self.place.n = getattr(self.place, "n", 0) + 1
        return y * self.place.n


def test_a_leaf_that_cannot_be_copied_is_refused():
    model = model_of(InThreadLocal)
    with pytest.raises(fxq.TraceError, match=r"forward sets 'place.n'.*the module cannot be copied"):
        fxq.quantize(model, REFERENCE.leaf("2"), data=batches(2))
    assert not vars(model[2].place)


class Unused(Layers):
    """Holds iterators and functions that a forward does not advance, and counts that it does not read."""

    def prepare(self):
        self.it, self.other, self.n = gains(), itertools.count(), bytearray(8)

    def step(self, y):
        harmless.calls += 1
        return y + sized(len(y))


@functools.lru_cache
def sized(count):
    return torch.ones(count, 1)


def harmless():
    pass


harmless.calls = 0


def test_state_that_decides_nothing_is_no_leaf():
    model = model_of(Unused)
    qmodel = fxq.quantize(model, REFERENCE, data=batches(4))
    assert not [entry for entry in qmodel.ledger if entry.op == "Unused"]
    assert harmless.calls == 0 and next(model[2].it) == 1 and next(model[2].other) == 0
    with torch.no_grad():
        assert sqnr(model(batches(1)[0]), qmodel(batches(1)[0])) > 30  # 8 bits
    assert type(sized(4)) is torch.Tensor


def test_a_model_without_state_runs_once(monkeypatch):
    runs = []

    def counted(*args, **kwargs):
        runs.append(1)
        return call(*args, **kwargs)

    monkeypatch.setattr("fxq.tracing.float_run.call", counted)
    model = model_of(Layers)
    model[2].step = nn.Identity()
    FloatRun(model, Batch((batches(1)[0],), {}), {})
    assert len(runs) == 1


TOTAL = 0


class Reads(Layers):
    def step(self, y):
        event.set()
        written.wait(10)
        return y + 0 * TOTAL


event, written = threading.Event(), threading.Event()


def test_a_global_that_another_thread_writes_keeps_its_value():
    global TOTAL

    def write():
        global TOTAL
        event.wait(10)
        TOTAL += 5
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    fxq.quantize(Reads().eval(), REFERENCE, data=batches(2))
    thread.join()
    assert TOTAL == 5


def test_shared_state_after_other_state_is_refused():
    """The module with the shared counter gets other inputs in each call, so only its inputs could differ."""
    ticks = itertools.count(1)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x / self.calls

    class Shared(nn.Module):
        def forward(self, x, count=ticks):
            return x / next(count)

    model = nn.Sequential(nn.Linear(4, 4), Own(), Shared(), Own(), nn.Linear(4, 4)).eval()
    with pytest.raises(fxq.TraceError, match="share"):
        fxq.quantize(model, REFERENCE, data=[torch.rand(2, 4) for _ in range(3)])
    assert next(ticks) == 1 and model[1].calls == model[3].calls == 0
