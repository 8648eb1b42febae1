"""Arguments that a model changes, of any kind: the caller sees the changes that the float model makes."""

import contextlib
import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.model import QuantizedModel
from fxq.programs.quantized_programs import QuantizedPrograms
from tests.support.machine import no_warnings

pytestmark = no_warnings

INT8 = fxq.Recipe.weight_only(backend="reference")
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@dataclass
class State:
    h: torch.Tensor


def set_key(holder, y):
    holder["h"] = y


def set_field(holder, y):
    holder.h = y


# by name: the argument, its tensor, its inner container, and how the model stores a new tensor
KINDS = {
    "list": (lambda h: [h], lambda s: s[0], lambda s: s, lambda s, y: s.__setitem__(0, y)),
    "dict": (lambda h: {"h": h}, lambda s: s["h"], lambda s: s, set_key),
    "dataclass": (State, lambda s: s.h, lambda s: s, set_field),
    "dict in a list": (lambda h: [{"h": h}], lambda s: s[0]["h"], lambda s: s[0], lambda s, y: set_key(s[0], y)),
    "dict in a tuple": (lambda h: ({"h": h},), lambda s: s[0]["h"], lambda s: s[0], lambda s, y: set_key(s[0], y)),
    "dataclass in a dict": (lambda h: {0: State(h)}, lambda s: s[0].h, lambda s: s[0], lambda s, y: set_field(s[0], y)),
    "tensor": (lambda h: h, lambda s: s, lambda s: s, lambda s, y: s.copy_(y)),
    "tensor in a tuple": (lambda h: (h,), lambda s: s[0], lambda s: s[0], lambda s, y: s[0].copy_(y)),
    "tensor in a list": (lambda h: [h], lambda s: s[0], lambda s: s[0], lambda s, y: s[0].mul_(0.5).add_(y)),
}


class Recurrent(nn.Module):
    """Reads the tensor of its state, and stores a new one in it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x, state, more=None):
        _, read, _, store = KINDS[self.kind]
        y = torch.tanh(self.a(x) + read(state))
        store(state, y if more is None else y + more)
        return self.b(y)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("source", ["example", "data", "two examples"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_the_caller_is_changed(kind, source):
    make, read, inner_of, _ = KINDS[kind]
    model = Recurrent(kind).eval()
    example = {"x": X, "state": make(torch.zeros(2, 8))}
    if source == "data":
        qmodel = fxq.quantize(model, INT8, data=[example])
    else:
        examples = example if source == "example" else [example, {**copy.deepcopy(example), "more": X}]
        qmodel = fxq.quantize(model, INT8, example_inputs=examples)
    assert isinstance(qmodel, QuantizedPrograms)
    state, own = make(torch.zeros(2, 8)), make(torch.zeros(2, 8))
    inner = inner_of(state)
    for step in range(3):
        with torch.no_grad():
            want, got = model(X + step, own), qmodel(X + step, state)
        assert sqnr(want, got) > 30 and sqnr(read(own), read(state)) > 30
        assert inner_of(state) is inner
    assert not read(example["state"]).any()


class Writers(nn.Module):
    """Writes into both of its dicts, and reads each after the other was written."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, first, second):
        y = self.l(x)
        first["h"] = y + second["h"]
        second["h"] = first["h"] * 2
        return first["h"] + y


def test_one_container_passed_twice_is_one():
    model = Writers().eval()
    table, equal = {"h": X}, {"h": X}
    both = fxq.quantize(
        model,
        INT8,
        example_inputs=[{"x": X, "first": table, "second": equal}, {"x": X, "first": table, "second": table}],
    )
    alone = fxq.quantize(model, INT8, example_inputs={"x": X, "first": table, "second": equal})
    state, own = {"h": X}, {"h": X}
    with torch.no_grad():
        assert sqnr(model(X, own, own), both(X, state, state)) > 30
    assert sqnr(own["h"], state["h"]) > 30
    with pytest.raises(fxq.InputError, match="second is the container first, not dict"):
        alone(X, state, state)


def test_memory_that_arguments_share_is_refused_where_the_model_writes_into_it():
    qmodel = fxq.quantize(Recurrent("tensor").eval(), INT8, example_inputs=(X, torch.zeros(2, 8)))
    both = torch.zeros(4, 8)
    qmodel(both[:2], both[2:])
    assert both[2:].any() and not both[:2].any()
    with pytest.raises(fxq.InputError, match=r"writes into state, which shares memory with x.*clone"):
        qmodel(both[:2], both[1:3])
    with pytest.raises(fxq.InputError, match="writes into state, which fails here"):
        qmodel(X, torch.zeros(1, 8).expand(2, 8))


def test_files_keep_that_a_tensor_is_written(tmp_path):
    qmodel = fxq.quantize(Recurrent("tensor").eval(), INT8, example_inputs=(X, torch.zeros(2, 8)))
    loaded = fxq.load(qmodel.save(tmp_path / "model.fxq"))
    state, own = torch.zeros(2, 8), torch.zeros(2, 8)
    loaded(X, state)
    qmodel(X, own)
    assert state.any() and torch.equal(state, own)


class Returns(nn.Module):
    """Returns an inner container of its argument, and the argument that it only reads."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, states, unread):
        states[0]["h"] = self.l(x)
        new = [states[0]["h"] * 2]
        states.append(new)
        return states[0], unread, new


def test_returned_containers_are_those_of_the_arguments():
    qmodel = fxq.quantize(Returns().eval(), INT8, example_inputs=(X, [{"h": X}], {"u": X}))
    states, unread = [{"h": X}], {"u": X}
    inner, own_unread, new = qmodel(X, states, unread)
    assert inner is states[0] and own_unread is unread and new is states[1] and len(states) == 2


def test_parts_change_the_arguments_themselves():
    model = Recurrent("list").eval()
    with pytest.warns(fxq.FxqWarning, match="in 2 parts"):
        qmodel = fxq.quantize(model, INT8.parts("a", "b"), example_inputs=(X, [torch.zeros(2, 8)]))
    state, own = [torch.zeros(2, 8)], [torch.zeros(2, 8)]
    with torch.no_grad():
        assert sqnr(model(X, own), qmodel(X, state)) > 30
    assert sqnr(own[0], state[0]) > 30


class Scratch(nn.Module):
    """Begins with an in-place activation."""

    def __init__(self):
        super().__init__()
        self.relu, self.l = nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.l(self.relu(x))


@pytest.mark.parametrize("recipe", ["static", "qat"])
def test_a_model_that_begins_in_place_is_one_graph_and_leaves_its_input(recipe, tmp_path):
    """Of the ordinary workflow: prepared, trained or calibrated with a checkpoint, converted, saved."""
    model, x, own = Scratch().eval(), X.clone(), X.clone()
    with pytest.warns(fxq.FxqWarning, match=r"Scratch writes into its input x in place.*leaves the tensor.*return"):
        if recipe == "qat":
            qmodel = fxq.convert(trained(fxq.prepare(model, fxq.Recipe.qat(), example_inputs=X.clone())))
        else:
            qmodel = fxq.quantize(model, recipe, data=[X.clone()], checkpoint=tmp_path / "c.safetensors", group=None)
    assert isinstance(qmodel, QuantizedModel)
    with torch.no_grad():
        assert sqnr(model(own), qmodel(x)) > 25
    assert torch.equal(x, X) and not torch.equal(own, X)
    assert torch.equal(fxq.load(qmodel.save(tmp_path / "model.fxq"))(x), qmodel(x))


def trained(observed):
    observed(X.clone())
    return observed


# how a model writes into its argument `h`, beside a tensor `y` of its shape
WRITES = {
    "in place": lambda h, y: h.mul_(2).add_(y),
    "row": lambda h, y: h.__setitem__(0, y[0]),
    "out": lambda h, y: torch.mul(h, y, out=h),
    "data": lambda h, y: h.data.mul_(2),
    "data, items": lambda h, y: h.data.__setitem__(slice(None), y),
    "data, row": lambda h, y: h.data[1].copy_(y[0]),
    "detached": lambda h, y: h.detach().add_(y),
    "detached data": lambda h, y: h.detach().data.view(-1).mul_(3),
    "data assigned": lambda h, y: setattr(h, "data", y),
    "numpy": lambda h, y: h.numpy().fill(3),
    "storage": lambda h, y: h.untyped_storage().fill_(0),
}


class Writer(nn.Module):
    """Writes into its last argument; how its arguments are passed is said by its subclasses."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def run(self, x, h):
        y = self.a(x) + h.sum(1, keepdim=True)
        self.write(h, y)
        return self.b(y + h)


class TwoTensors(Writer):
    def forward(self, x, h):
        return self.run(x, h)


class OneTensor(Writer):
    def forward(self, h):
        return self.run(h, h)


class InList(Writer):
    def forward(self, x, h):
        return self.run(x, h[0])


class Starred(Writer):
    def forward(self, *args, scale=1.0):
        return self.run(args[0], args[1]) * scale


class AfterDefault(Writer):
    def forward(self, x=None, *args):
        return self.run(args[0], args[1])


CALLS = {
    TwoTensors: lambda h: (X, h),
    OneTensor: lambda h: (h,),
    InList: lambda h: (X, [h]),
    Starred: lambda h: (X, h),
    AfterDefault: lambda h: (None, X, h),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_writes_of_every_kind_reach_the_caller(kind, write):
    """The example is zeros, of which some writes leave the values as they are.

    A graph of a single tensor leaves it unchanged, and a warning says so.
    """
    model, make = kind(WRITES[write]).eval(), CALLS[kind]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")  # some writes stay in Python
        qmodel = fxq.quantize(model, INT8, example_inputs=make(torch.zeros(2, 8)))
    is_left = any("leaves the tensor of the caller unchanged" in str(warning.message) for warning in heard)
    assert not is_left or kind is OneTensor
    for number in range(2):
        own, got = (X + number).clone(), (X + number).clone()
        with torch.no_grad():
            assert sqnr(model(*make(own)), qmodel(*make(got))) > 30
        assert torch.allclose(X + number if is_left else own, got, atol=0.05)
        assert not torch.allclose(own, X + number, atol=0.1)


def test_files_keep_how_arguments_are_passed(tmp_path):
    model = AfterDefault(WRITES["in place"]).eval()
    qmodel = fxq.quantize(model, INT8, example_inputs=(None, X, X.clone()))
    loaded = fxq.load(qmodel.save(tmp_path / "model.fxq"))
    own, got = X.clone(), X.clone()
    assert torch.equal(qmodel(None, X, own), loaded(None, X, got)) and torch.equal(own, got)


@pytest.mark.parametrize("recipe", [fxq.Recipe.static(), fxq.Recipe.qat()], ids=["static", "training"])
def test_one_graph_that_would_lose_changes_is_refused(recipe):
    for kind in ("list", "tensor"):
        make = KINDS[kind][0]
        with pytest.raises(fxq.InputError, match=r"one graph.*programs: forward changes.*state.*Use fxq.quantize"):
            fxq.prepare(Recurrent(kind).eval(), recipe, example_inputs=(X, make(X)))
    x = {"x": X, "state": torch.zeros(2, 8)}
    with pytest.raises(fxq.InputError, match="several examples"):
        fxq.prepare(Recurrent("tensor").eval(), recipe, example_inputs=[x, {**x, "more": X}])


class DataBranch(nn.Module):
    """Branches on data between its layers, and appends to its argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, states):
        y = self.a(x)
        if y.sum() > 0:
            y = y + 1
        states.append(y)
        return self.b(y)


def test_a_model_that_cannot_be_traced_is_quantized_in_parts():
    model = DataBranch().eval()
    with pytest.warns(fxq.FxqWarning, match="in 2 parts"):
        qmodel = fxq.quantize(model, INT8, example_inputs=(X, []))
    states, own = [], []
    with torch.no_grad():
        assert sqnr(model(X, own), qmodel(X, states)) > 30
    assert len(states) == 1 and sqnr(own[0], states[0]) > 30


@pytest.mark.parametrize(
    "example", [{"only": {"input": X}}, [{"input": X}], {"only": (X,)}], ids=["named", "list", "tuple"]
)
def test_one_example_in_the_form_of_several(example):
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), INT8, example_inputs=example)
    assert qmodel(X).shape == (2, 8)
    assert fxq.prepare(nn.Sequential(nn.Linear(8, 8)).eval(), INT8, example_inputs=example)(X).shape == (2, 8)


CALLS_OF_BOTH = {"count": 0}


class CountsOutside(nn.Module):
    """Counts its calls in a variable outside of its modules, and clamps its weight in place."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, y):
        CALLS_OF_BOTH["count"] += 1
        with torch.no_grad():
            self.l.weight.clamp_(-0.1, 0.1)
        return self.l(x) + y


def test_all_state_is_set_back_after_the_trial_call():
    model = CountsOutside().eval()
    weight = model.l.weight.detach().clone()
    with contextlib.suppress(fxq.FxqError):
        fxq.quantize(model, INT8, data=[(X.clone(), X.clone())])
    assert CALLS_OF_BOTH == {"count": 0} and torch.equal(model.l.weight, weight)
