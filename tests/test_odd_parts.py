"""Models with parts that no trace sees into: script modules, modules in lists, functions of autograd, long chains."""

import copy
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations

import fxq
from fxq.common.metrics import sqnr, tensors
from tests.support.helpers import REFERENCE, module

pytestmark = [
    pytest.mark.any_cpu,
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:.*requires_grad=True"),
]
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.a(x) * 2
        return self.a(x)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(4, 8))

    def forward(self, x):
        self.h = self.h * 0.5 + self.a(x)
        return self.h


@pytest.mark.parametrize("part", [Branches, Remembers])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_script_module_runs_as_a_leaf_call_after_call(part, backend):
    """The second call raised `'ScriptMethod' object has no attribute '__self__'`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(part()), nn.Linear(8, 8)).eval()
    reference, recipe = copy.deepcopy(model), fxq.Recipe.static(backend=backend, optimize="coverage")
    with pytest.warns(fxq.FxqWarning, match='layer "1".*TorchScript module'):
        qmodel = fxq.quantize(model, recipe, data=[X, -X, X.flip(0), X.flip(1)])
    copied = copy.deepcopy(qmodel)
    with torch.no_grad():
        for x in (X, X, -X, X.flip(0)):
            expected = reference(x)
            assert sqnr(expected, qmodel(x)) > 25 and sqnr(expected, copied(x)) > 25
    assert part is Branches or not model[1].h.any()


def test_a_whole_script_module_says_what_to_give():
    with pytest.raises(fxq.InputError, match=r"TorchScript module.*nn.Module that it was scripted from.*torch.export"):
        fxq.quantize(torch.jit.script(Branches()).eval(), REFERENCE, data=[X])


class InPlainList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.a = [nn.Linear(8, 8)], nn.Linear(8, 8)

    def forward(self, x):
        return self.a(self.layers[0](x))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def between(function):
    return module(lambda self, x: self.b(function(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (InPlainList(), r"a Linear that is not a submodule of the model.*plain list.*nn.ModuleList"),
        (between(lambda x: torch.Tensor.abs(x)), r"torch.Tensor.abs\(x\), which takes no traced value.*x.abs\("),
        (between(scripted), r"a TorchScript function is called.*Python function that it was scripted from"),
        (
            between(lambda x: torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=True)),
            r"an autograd.Function is called.*use_reentrant=False",
        ),
    ],
)
def test_what_no_trace_sees_is_said(model, words):
    with pytest.raises(fxq.TraceError, match=words):
        fxq.quantize(model.eval(), replace(REFERENCE, strict_trace=True), data=[X])


class Weight(torch.Tensor):
    pass


def with_subclass():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[0].weight = nn.Parameter(torch.randn(8, 8).as_subclass(Weight))
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_subclass,
        lambda: between(lambda x: torch.roll(x, 1, 1)),
        lambda: between(lambda x: torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=False)),
    ],
    ids=["subclass", "roll", "checkpoint"],
)
def test_what_works(make):
    torch.manual_seed(0)
    model = make()
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) > 25 and qmodel.ledger.count("int8") >= 2


def test_a_long_chain_is_no_deep_recursion():
    """Cleanup raised RecursionError at 60 to 400 steps, as deep as the caller's stack left it."""

    def forward(self, x):
        x = y = self.a(x)
        for _ in range(400):
            y = y * 0.9 + x
        return y

    model = module(forward, a=nn.Linear(8, 8)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) > 25


class Items(list):
    pass


class Pair(tuple):
    pass


class Named(NamedTuple):
    x: Any
    y: Any


@dataclass
class Both:
    x: Any
    y: Any


@dataclass
class Computes:
    """Its constructor computes one field from another, and changes that."""

    x: Any
    y: Any = field(init=False)

    def __post_init__(self):
        self.x = self.x * 2
        self.y = self.x + 1


CONTAINERS = {
    "OrderedDict": lambda y: OrderedDict(a=y, b=y + 1),
    "defaultdict": lambda y: defaultdict(list, {"a": y}),
    "list": lambda y: Items([y, y + 1]),
    "tuple": lambda y: Pair((y, y + 1)),
    "named tuple": lambda y: Named(y, y + 1),
    "dataclass": lambda y: Both(y, y + 1),
    "dataclass that computes a field": lambda y: Computes(y),
    "UserDict": lambda y: UserDict(a=y, b=y + 1),
    "ChainMap": lambda y: ChainMap({"a": y}),
    "nested": lambda y: {"k": [OrderedDict(a=Items([y])), Named(y, Pair((y,)))]},
}


def shape_of(value):
    """The types in nested containers."""
    parts = value.values() if isinstance(value, Mapping) else vars(value).values() if is_dataclass(value) else value
    return type(value), [] if isinstance(value, torch.Tensor) else [shape_of(part) for part in parts]


@pytest.mark.parametrize("name", CONTAINERS)
def test_outputs_come_back_in_their_own_type(name, tmp_path):
    model = module(lambda self, x: CONTAINERS[name](self.a(x)), a=nn.Linear(8, 8)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    qmodel.save(tmp_path / "m.fxq")
    with torch.no_grad():
        wanted = shape_of(model(X))
        for candidate in (qmodel, qmodel, qmodel, copy.deepcopy(qmodel), fxq.load(tmp_path / "m.fxq")):
            assert shape_of(candidate(X)) == wanted
            for a, b in zip(tensors(model(X)), tensors(candidate(X)), strict=True):
                assert sqnr(a, b) > 30


@pytest.mark.parametrize("inputs", [OrderedDict(x=X, y=X), Items([X, X]), Pair([X, X]), Named(X, X), Both(X, X)])
def test_inputs_go_in_and_come_back_in_their_own_type(inputs):
    def forward(self, d):
        x, y = (d["x"], d["y"]) if isinstance(d, dict) else (d.x, d.y) if hasattr(d, "x") else (d[0], d[1])
        return self.a(x) + self.b(y), d

    model = module(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[(inputs,)])
    with torch.no_grad():
        for _ in range(3):
            got, back = qmodel(inputs)
            assert sqnr(model(inputs)[0], got) > 25 and type(back) is type(inputs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_recurrent_layer_with_a_parametrization_is_trained(kind, parametrization):
    """Copies of it failed: it keeps weights with a history from its last call."""
    torch.manual_seed(0)
    layer = kind(8, 8, batch_first=True)
    parametrization(layer, "weight_hh_l0")
    model, x = module(lambda self, x: self.a(self.r(x)[0]), r=layer, a=nn.Linear(8, 8)).eval(), torch.randn(2, 5, 8)
    trained = fxq.prepare(model, fxq.Recipe.qat(backend="reference"), example_inputs=x)
    for _ in range(2):
        trained(x).square().mean().backward()
    qmodel = fxq.convert(copy.deepcopy(trained))
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 25


class LeavesOut(nn.Module):
    """Takes an input that may be left out before any number of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y=None, *rest):
        return self.layer(x)


def test_an_input_that_is_left_out_before_others():
    x, model = torch.randn(4, 8), LeavesOut().eval()
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="reference", optimize="coverage"), data=[(x,)] * 2)
    assert sqnr(model(x), qmodel(x)) > 30
