import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import RecipeError
from fxq.recipe.selector import Selector, ancestors, as_selector, by_op
from tests.support.helpers import REFERENCE, module


class MyConv(nn.Conv2d):
    """A type of the user's."""


TYPES = {
    "": nn.Module,
    "stem": MyConv,
    "layer1": nn.Sequential,
    "layer1.0": nn.Sequential,
    "layer1.0.conv": nn.Conv2d,
    "layer10": nn.Sequential,
    "layer10.conv": nn.Conv2d,
    "head": nn.Linear,
}


def selected(selector, ops=()):
    """The module paths that a selector covers."""
    return [path for path in TYPES if as_selector(selector).matches(path, ops, TYPES)]


def test_ancestors_are_innermost_first_and_leave_out_the_model():
    assert ancestors("layer1.0.conv") == ["layer1.0.conv", "layer1.0", "layer1"]
    assert ancestors("") == []


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("stem", ["stem"]),
        ("layer1", ["layer1", "layer1.0", "layer1.0.conv"]),  # what is inside, but not layer10
        ("layer1.*", ["layer1.0", "layer1.0.conv"]),
        ("layer1*", ["layer1", "layer1.0", "layer1.0.conv", "layer10", "layer10.conv"]),
        ("*.conv", ["layer10.conv"]),
        ("**.conv", ["layer1.0.conv", "layer10.conv"]),
        ("layer1.**", ["layer1.0", "layer1.0.conv"]),
        ("layer*.0.conv", ["layer1.0.conv"]),
        ("layer?", ["layer1", "layer1.0", "layer1.0.conv"]),
        ("[sh]*", ["stem", "head"]),
        ("Stem", []),
        ("*", list(TYPES)),  # functions in the forward of the model itself among them
        ("", []),
    ],
)
def test_a_glob_selects_modules_and_all_inside(glob, paths):
    assert selected(glob) == paths


def test_a_type_selects_its_subclasses_and_all_inside():
    assert selected(nn.Conv2d) == ["stem", "layer1.0.conv", "layer10.conv"]
    assert selected(MyConv) == ["stem"]
    assert selected(nn.Sequential) == ["layer1", "layer1.0", "layer1.0.conv", "layer10", "layer10.conv"]
    assert selected(nn.LSTM) == []


def test_an_op_selects_by_what_a_node_runs_wherever_it_is():
    assert by_op("conv2d").matches("any.where", ("conv2d", "relu"), TYPES)
    assert not by_op("conv2d").matches("stem", ("relu",), TYPES)


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(RecipeError, match="unknown op 'conv2'; did you mean 'conv"):
        fxq.by_op("conv2")


@pytest.mark.parametrize("value", [3, None, int, ["layer1"], torch.relu])
def test_what_is_no_selector(value):
    with pytest.raises(RecipeError, match=r"a selector is a module path glob, fxq\.by_op\(name\) or an nn\.Module"):
        as_selector(value)


@pytest.mark.parametrize(
    ("selector", "text"), [("layer1.*", "'layer1.*'"), (nn.Conv2d, "Conv2d"), (by_op("relu"), "fxq.by_op('relu')")]
)
def test_a_selector_prints_as_it_is_written(selector, text):
    assert str(as_selector(selector)) == text


@pytest.mark.parametrize("selector", ["layer1.*", nn.Conv2d, MyConv, by_op("relu")])
def test_a_selector_as_data_and_back(selector):
    parsed = as_selector(selector)
    data = parsed.to_dict()
    assert all(isinstance(value, str) for value in data.values())
    assert Selector.from_dict(data) == parsed


def test_a_type_local_to_a_function_cannot_be_written():
    class Local(nn.Module):
        pass

    with pytest.raises(RecipeError, match="Local is local to a function"):
        as_selector(Local).to_dict()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "one of path, op and module, or op and path together, not none"),
        ({"path": "a", "module": "torch.nn:ReLU"}, r"or op and path together, not \['module', 'path'\]"),
        ({"path": "a", "pth": "b"}, "unknown override key 'pth'; did you mean 'path'"),
        ({"path": 3}, "an override's path is a string, not 3"),
        ({"op": "rellu"}, "unknown op 'rellu'; did you mean 'relu"),
        ({"module": "no.such.module:X"}, "cannot import 'no.such.module:X'"),
        ({"module": "torch.nn:Conv9d"}, "cannot import 'torch.nn:Conv9d'"),
        ({"module": ""}, "cannot import ''"),
        ({"module": "torch:relu"}, "'torch:relu' is not a subclass of Module"),
        ({"module": "builtins:int"}, "'builtins:int' is not a subclass of Module"),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(RecipeError, match=message):
        Selector.from_dict(data)


# ---- a selector that selects nothing


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer1(x))


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("layr1", r"the override for 'layr1' selects nothing in this model; near: layer1"),
        ("layer1.7", r"'layer1.7' selects nothing.*near: layer1"),
        ("zzz", "nothing looks like it"),
        ("l*0", r"selects nothing.*near: 'l\*\*0', since \* stops at a dot"),
        (fxq.by_op("conv2d"), r"fxq.by_op\('conv2d'\) selects nothing in this model; near: linear"),
        (nn.Conv2d, "Conv2d selects nothing in this model; near: Linear, ReLU, Sequential"),
    ],
)
def test_nothing_selected_names_near_misses(selector, message):
    recipe = REFERENCE.override(selector, fxq.FLOAT)
    with pytest.raises(RecipeError, match=message):
        fxq.prepare(Net().eval(), recipe, example_inputs=torch.rand(2, 4))


def test_a_star_stops_at_a_dot():
    """It took attention.output.dense for output.dense, and set the wrong layers to float."""
    block = nn.ModuleDict({"output": nn.Linear(4, 4), "attention": nn.ModuleDict({"output": nn.Linear(4, 4)})})

    def forward(self, x):
        for layer in self.layers:
            x = layer["output"](layer["attention"]["output"](x))
        return x

    model = module(forward, layers=nn.ModuleList([block, copy.deepcopy(block)]))
    for glob, taken in (("layers.*.output", ["layers.0.output", "layers.1.output"]), ("layers.**.output", None)):
        qmodel = fxq.quantize(model, REFERENCE.override(glob, fxq.FLOAT), data=[torch.rand(8, 4)])
        kept = [e.path for e in qmodel.ledger.where(precision="float")]
        assert sorted(kept) == (taken or sorted(e.path for e in qmodel.ledger))


@pytest.mark.parametrize("selector", ["layer1", "layer1.*", "h*", fxq.by_op("relu"), nn.ReLU, nn.Sequential])
def test_what_is_selected_runs_in_float(selector):
    observed = fxq.prepare(Net().eval(), REFERENCE.override(selector, fxq.FLOAT), example_inputs=torch.rand(2, 4))
    assert any("the recipe says float" in node.reason for node in observed.history[-1].graph)
