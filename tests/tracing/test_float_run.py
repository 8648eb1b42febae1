"""State of a model between calls, outside its buffers: named in an error, or in a float leaf."""

import copy
import itertools
import random
import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu
SHARED = {"h": torch.zeros(4, 8)}
LOG = []
TOTAL = torch.zeros(4, 8)


STRICT = replace(REFERENCE, strict_trace=True)
"""Recipe with which a model that cannot be traced is refused, instead of being quantized in parts."""


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(4, 8, generator=generator) * 2 - 1 for _ in range(count)]


class Layers(nn.Module):
    """Two layers, and a module between them that depends on earlier calls."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, x):
        return self.b(self.step(self.a(x)))


class InList(Layers):
    def prepare(self):
        self.h = [torch.zeros(4, 8)]

    def step(self, y):
        return self.h[0].mul_(0.5).add_(y)


class OfList(InList):
    def step(self, y):
        self.h[0] = self.h[0] * 0.5 + y
        return self.h[0]


class InDict(Layers):
    def prepare(self):
        self.h = {"deep": [{"h": torch.zeros(4, 8)}]}

    def step(self, y):
        self.h["deep"][0]["h"] = self.h["deep"][0]["h"] * 0.5 + y
        return self.h["deep"][0]["h"]


class InDeque(Layers):
    def prepare(self):
        self.h = deque([torch.zeros(4, 8)] * 2, maxlen=2)

    def step(self, y):
        self.h.append(y)
        return self.h[0] + self.h[1]


class InAttribute(Layers):
    def prepare(self):
        self.h = torch.zeros(4, 8)

    def step(self, y):
        self.h = self.h * 0.5 + y
        return self.h


class InTensor(InAttribute):
    def step(self, y):
        return self.h.mul_(0.5).add_(y)


class InObject(Layers):
    def prepare(self):
        self.o = SimpleNamespace(h=torch.zeros(4, 8))

    def step(self, y):
        self.o.h = self.o.h * 0.5 + y
        return self.o.h


class InArray(Layers):
    def prepare(self):
        self.gain = np.ones(1)

    def step(self, y):
        y = y * float(self.gain[0])
        self.gain *= 0.9
        return y


class EveryThird(Layers):
    def prepare(self):
        self.n = 0

    def step(self, y):
        if self.n % 3 == 0:
            y = y * 2
        self.n += 1
        return y


class EveryHundredth(EveryThird):
    def step(self, y):
        self.n += 1
        return y * 2 if self.n % 100 == 0 else y


class KeyFrames(EveryThird):
    def step(self, y):
        if self.n % 3 == 0:
            self.key = y
        self.n += 1
        return self.key + y


class OwnGenerator(Layers):
    def prepare(self):
        self.draws = np.random.default_rng(0)

    def step(self, y):
        return y * float(self.draws.random())


HELD = {
    InList: r"h[0]",
    OfList: r"h[0]",
    InDict: r"h['deep'][0]['h']",
    InDeque: r"h[1]",
    InAttribute: "h",
    InTensor: "h",
    InObject: "o.h",
    InArray: "gain",
    EveryThird: "n",
    EveryHundredth: "n",
    KeyFrames: "n",
    OwnGenerator: "draws",
}


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), kind(), nn.ReLU(), nn.Linear(8, 8)).eval()


def state_of(model):
    """Attributes of the held module other than torch's, as text, and copies of all tensors."""
    held = {k: repr(v) for k, v in vars(model[2]).items() if not k.startswith("_")}
    return held, {k: v.clone() for k, v in model.state_dict().items()}


def assert_same_state(model, before):
    held, tensors = state_of(model)
    assert held == before[0]
    assert all(torch.equal(tensors[k], v) for k, v in before[1].items())


@pytest.mark.parametrize("kind", HELD)
def test_the_place_is_named_and_the_model_left_as_it_was(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind().eval())
    held = repr(HELD[kind]).strip("'\"")
    before = {k: repr(v) for k, v in vars(model[0]).items() if not k.startswith("_")}
    with pytest.raises(fxq.TraceError) as error:
        fxq.quantize(model[0], STRICT, data=batches(2))
    assert held in str(error.value).replace('"', "'") and "recipe.leaf" in str(error.value)
    assert {k: repr(v) for k, v in vars(model[0]).items() if not k.startswith("_")} == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", HELD)
def test_a_model_with_state_is_right_in_parts_on_a_stream(kind):
    """Its own forward has the state, so it stays in Python, and its layers are on integers."""
    torch.manual_seed(0)
    model = kind().eval()
    reference = copy.deepcopy(model)
    with pytest.warns(fxq.FxqWarning, match="is quantized in 2 parts: a, b. The code around them stays in Python"):
        qmodel = fxq.quantize(model, REFERENCE, data=batches(24))
    assert qmodel.ledger.coverage == 1
    for current in (qmodel, model):  # of two streams, neither changes the other
        own = copy.deepcopy(reference)
        with torch.no_grad():
            expected, got = (torch.stack([m(x) for x in batches(24)]) for m in (own, current))
        assert sqnr(expected, got) > 30


class InThread(Layers):
    def prepare(self):
        self.local = threading.local()
        self.local.n = 0

    def step(self, y):
        self.local.n += 1
        return y * self.local.n


class Hooked(EveryThird):
    """Layer whose hook reads the state of the model around it."""

    def prepare(self):
        super().prepare()
        self.a.register_forward_hook(self.scaled)

    def scaled(self, layer, inputs, y):
        return y * (1 + self.n % 2)


class Clamps(EveryThird):
    def step(self, y):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return super().step(y)


@pytest.mark.parametrize("kind", [InThread, Hooked, Clamps])
def test_a_state_that_a_copy_of_the_model_would_share_is_refused(kind):
    torch.manual_seed(0)
    model = kind().eval()
    weight = model.a.weight.detach().clone()
    with pytest.raises(fxq.TraceError):
        fxq.quantize(model, REFERENCE, data=batches(4))
    assert torch.equal(model.a.weight, weight)


def test_a_model_with_state_is_calibrated_without_a_checkpoint(tmp_path):
    with pytest.raises(fxq.InputError, match=r"keeps a state between calls.*without a checkpoint"):
        fxq.quantize(InAttribute().eval(), REFERENCE, data=batches(4), checkpoint=tmp_path / "c")


class Features(Layers):
    """Forward that reads what hooks of its layers store."""

    def __init__(self, through):
        super().__init__()
        self.features = {}
        hooks = {"method": self.keep, "closure": lambda m, inputs, y: self.features.update(a=y)}
        self.a.register_forward_hook(hooks[through])

    def keep(self, layer, inputs, y):
        self.features["a"] = y

    def step(self, y):
        return torch.relu(y) + self.features["a"].mean(1, keepdim=True)


@pytest.mark.parametrize("through", ["method", "closure"])
def test_what_a_hook_of_a_layer_stores_is_no_constant(through):
    torch.manual_seed(0)
    model = Features(through).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=batches(8))
    with torch.no_grad():
        expected, got = (torch.stack([m(x) for x in batches(8, seed=1)]) for m in (model, qmodel))
    assert sqnr(expected, got) > 30


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("by_recipe", [True, False])
def test_a_leaf_is_right_on_a_stream_and_shares_nothing(kind, by_recipe):
    """`recipe.leaf` gave the same wrong numbers: its tensors were the float model's, and had been run on."""
    model = model_of(kind)
    before, reference = state_of(model), copy.deepcopy(model)
    recipe = REFERENCE.leaf("2") if by_recipe else REFERENCE
    if by_recipe:
        qmodel = fxq.quantize(model, recipe, data=batches(24))
    else:
        with pytest.warns(fxq.FxqWarning, match=r'layer "2".*float'):
            qmodel = fxq.quantize(model, recipe, data=batches(24))
    assert_same_state(model, before)
    with torch.no_grad():
        expected, got = [], []
        for x in batches(7, seed=1):
            expected.append(reference(x))
            got.append(qmodel(x))
    assert sqnr(torch.cat(expected), torch.cat(got)) > 30
    assert_same_state(model, before)
    assert qmodel.ledger.count("int8") >= 2


class InGlobal(Layers):
    def step(self, y):
        SHARED["h"] = SHARED["h"] * 0.5 + y
        return SHARED["h"]


class OfGlobal(Layers):
    def step(self, y):
        global TOTAL
        TOTAL = TOTAL * 0.5 + y
        return TOTAL


class OfClass(Layers):
    h = torch.zeros(4, 8)

    def step(self, y):
        type(self).h = type(self).h * 0.5 + y
        return self.h


def enclosing():
    kept = [torch.zeros(4, 8)]

    class Enclosed(Layers):
        def step(self, y):
            kept[0] = kept[0] * 0.5 + y
            return kept[0]

    return Enclosed


def smoothed(y, memory={"h": torch.zeros(4, 8)}):  # noqa: B006, B008 - the default is the state
    memory["h"] = memory["h"] * 0.5 + y
    return memory["h"]


class InDefault(Layers):
    def step(self, y):
        return smoothed(y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (InGlobal, "global SHARED['h']"),
        (OfGlobal, "global TOTAL"),
        (OfClass, "class attribute OfClass.h"),
        (enclosing(), "variable of an enclosing function: kept[0]"),
        (InDefault, "default of smoothed"),
    ],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_what_all_models_share_is_refused(kind, place, leaf):
    model = model_of(kind)
    recipe = REFERENCE.leaf("2") if leaf else REFERENCE
    with pytest.raises(fxq.TraceError) as error:
        fxq.quantize(model, recipe, data=batches(2))
    words = str(error.value).replace('"', "'")
    assert place in words and "layer '2'" in words and "would share it" in words
    assert not SHARED["h"].any() and not TOTAL.any() and not OfClass.h.any() and type(TOTAL) is torch.Tensor


class Draws(Layers):
    def step(self, y):
        return y * 2 if np.random.rand() < 0.5 else y


class PythonDraws(Layers):
    def step(self, y):
        return y * 2 if random.random() < 0.5 else y


@pytest.mark.parametrize(("kind", "generator"), [(Draws, "np.random"), (PythonDraws, "random")])
def test_a_branch_on_a_global_generator_is_no_constant(kind, generator):
    numbers, python = np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(fxq.TraceError, match=rf"forward draws numbers from {generator}, which a graph would store"):
        fxq.quantize(kind().eval(), STRICT, data=batches(2))
    with pytest.warns(fxq.FxqWarning, match='layer "2".*draws numbers'):
        fxq.prepare(model_of(kind), REFERENCE, example_inputs=batches(1)[0])
    assert (np.random.get_state()[1] == numbers).all() and random.getstate() == python


class Keeps(Layers):
    """Module that caches values and recomputable state, none of which affects its outputs."""

    def prepare(self):
        self.last, self.all, self.calls, self.table, self.most, self.grid = None, [], 0, {}, 0, None

    def step(self, y):
        if len(y) > self.most:
            self.most, self.grid = len(y), torch.linspace(0, 1, 8)
        self.calls += 1
        self.last = torch.softmax(y, -1)
        self.all.append(self.last)
        self.table["last"] = y
        LOG.append(y)
        return self.last + self.grid


def test_what_decides_nothing_is_no_state():
    model = model_of(Keeps)
    qmodel = fxq.quantize(model, REFERENCE, data=batches(4))
    assert (model[2].last, model[2].all, model[2].calls, model[2].grid) == (None, [], 0, None)
    assert all(type(value) is torch.Tensor for value in LOG)
    assert not [entry for entry in qmodel.ledger if entry.op == "Keeps"]
    with torch.no_grad():
        assert sqnr(model(batches(1)[0]), qmodel(batches(1)[0])) > 30
    LOG.clear()


class Largest(nn.Module):
    """Reads an attribute and then assigns it, which changes its output by less than rounding."""

    def __init__(self):
        super().__init__()
        self.layer, self.most = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x):
        self.most = torch.maximum(self.most, x.abs().max())
        return self.layer(x) / (1 + self.most * 1e-9)


def test_an_attribute_that_forward_reads_and_assigns_is_a_constant_of_the_graph():
    model, x = Largest().eval(), torch.randn(3, 8)
    qmodel = fxq.quantize(model, REFERENCE.override("*", fxq.FLOAT), data=[x])
    with torch.no_grad():
        assert torch.allclose(qmodel(x), model(x), rtol=0, atol=1e-6)


def test_a_dead_attribute_of_a_state_is_none():
    model = nn.Sequential(nn.Linear(8, 8), InAttribute(), nn.ReLU(), Keeps(), InList(), nn.Linear(8, 8)).eval()
    with pytest.warns(fxq.FxqWarning, match="2 modules of the model"):
        qmodel = fxq.quantize(model, REFERENCE, data=batches(24))
    assert {entry.op for entry in qmodel.ledger if entry.op[0].isupper()} == {"InAttribute", "InList"}
    reference = copy.deepcopy(model)
    with torch.no_grad():
        assert all(sqnr(reference(x), qmodel(x)) > 25 for x in batches(5, seed=1))
    LOG.clear()


class Outer(nn.Module):
    """Keeps a state in a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.a, self.store = nn.Linear(8, 8), nn.Module()
        self.store.h = torch.zeros(4, 8)

    def forward(self, x):
        self.store.h = self.store.h * 0.5 + self.a(x)
        return self.store.h


def test_the_module_that_changes_the_state_is_the_leaf_not_the_one_that_holds_it():
    with pytest.warns(fxq.FxqWarning, match='layer "2" .Outer.'):
        qmodel = fxq.quantize(model := model_of(Outer), REFERENCE, data=batches(24))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        assert all(sqnr(reference(x), qmodel(x)) > 25 for x in batches(5, seed=1))


def test_an_iterator_is_state():
    class Hidden(Layers):
        def prepare(self):
            self.count = itertools.count()

        def step(self, y):
            return y * 2 if next(self.count) % 2 else y

    with pytest.raises(fxq.TraceError, match="forward changes 'count' in place"):
        fxq.quantize(Hidden().eval(), STRICT, data=batches(2))


# ---- parameters


class Lookup(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.e, self.a = embedding, nn.Linear(16, 8)

    def forward(self, x):
        return self.a(self.e(x))


def words(count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 20, (4, 5), generator=generator) for _ in range(count)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("leaf", [True, False])
def test_an_embedding_with_a_largest_norm_keeps_its_weight(kind, norm, leaf):
    """It was changed by up to 2.7."""
    torch.manual_seed(0)
    model = Lookup(kind(20, 16, max_norm=1.0, norm_type=norm)).eval()
    weight, reference = model.e.weight.detach().clone(), copy.deepcopy(model)
    qmodel = fxq.quantize(model, REFERENCE.leaf("e") if leaf else REFERENCE, data=words())
    fxq.compare(model, qmodel, words())
    assert torch.equal(model.e.weight, weight)
    with torch.no_grad():
        assert all(sqnr(reference(x), qmodel(x)) > 35 for x in words())
    assert torch.equal(model.e.weight, weight)


class Normed(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [Normed, Clamped])
@pytest.mark.parametrize("leaf", [True, False])
def test_weights_that_a_forward_normalizes_stay_as_they_are(kind, leaf):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    weight, reference = model[1].weight.detach().clone(), copy.deepcopy(model)
    if leaf:
        qmodel = fxq.quantize(model, REFERENCE.leaf("1"), data=batches(4))
    else:
        with pytest.warns(fxq.FxqWarning, match='layer "1".*1.weight'):
            qmodel = fxq.quantize(model, REFERENCE, data=batches(4))
    with torch.no_grad():
        assert all(sqnr(reference(x), qmodel(x)) > 35 for x in batches(4))
    assert torch.equal(model[1].weight, weight)
    with pytest.raises(fxq.TraceError, match=r"%weight|'weight'"):
        fxq.quantize(model[1], REFERENCE, data=batches(4))
    assert torch.equal(model[1].weight, weight)


def test_a_parameter_that_is_another_one_in_each_call_is_refused():
    class Decays(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Decays(8, 8), nn.Linear(8, 8)).eval()
    weight = model[1].weight.detach().clone()
    with pytest.raises(fxq.TraceError, match=r'layer "1": forward sets .1\.weight. and returns other values'):
        fxq.quantize(model, REFERENCE.leaf("1"), data=batches(4))
    assert torch.equal(model[1].weight, weight)


def test_a_function_with_a_largest_norm_is_refused():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.a = nn.Parameter(torch.randn(20, 16)), nn.Linear(16, 8)

        def forward(self, x):
            return self.a(F.embedding(x, self.w, max_norm=1.0))

    model = Functional().eval()
    weight = model.w.detach().clone()
    with pytest.raises(fxq.TraceError, match="changes 'w', a tensor of the model, in place"):
        fxq.quantize(model, STRICT, data=words())
    assert torch.equal(model.w, weight)


# ---- autocast


class Lowers(Layers):
    on = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.on):
            return self.b(self.a(x))


def test_autocast_inside_of_a_forward_is_refused_or_a_leaf():
    """The float model returned bfloat16, the quantized one float32."""
    with pytest.raises(fxq.TraceError, match=r"enables torch.autocast, .*enabled=False"):
        fxq.quantize(Lowers().eval(), REFERENCE, data=batches(2))
    model = nn.Sequential(nn.Linear(8, 8), Lowers()).eval()
    with pytest.warns(fxq.FxqWarning, match='layer "1".*torch.autocast'):
        qmodel = fxq.quantize(model, REFERENCE, data=batches(4))
    x = batches(1)[0]
    with torch.no_grad():
        assert qmodel(x).dtype == model(x).dtype == torch.bfloat16
        assert sqnr(model(x).float(), qmodel(x).float()) > 30


def test_autocast_that_is_off_is_nothing():
    class Off(Lowers):
        on = False

    model = Off().eval()
    qmodel = fxq.quantize(model, REFERENCE, data=batches(4))
    assert qmodel.ledger.count("int8") == 2


class Window(Layers):
    def prepare(self):
        self.h = deque(maxlen=6)

    def step(self, y):
        self.h.append(y)
        return y * 2 if len(self.h) == 6 else y


def test_a_window_that_fills_up_after_many_calls_is_refused():
    with pytest.raises(fxq.FxqError, match=r"forward sets 'h\[0\]' and returns other values.*module of its own"):
        fxq.quantize(Window().eval(), STRICT, data=batches(2))
