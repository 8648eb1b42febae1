"""The decisions of a quantized model, pinned: the same graph again, with no price asked, whatever prices there are."""

import copy
import pickle
import warnings
import zlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.cost import cache as costs
from fxq.errors import RecipeError
from fxq.passes.fallback import DECIDED
from fxq.recipe.pins import Pin, Place
from tests.support.graphs import text
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build, call, settled

pytestmark = needs_x86


@pytest.fixture(autouse=True)
def quiet():
    """Some prices leave nothing on integers; a CPU without VNNI is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        yield


def no_prices(monkeypatch):
    monkeypatch.setattr(costs, "machine_costs", lambda: pytest.fail("prices were asked for"))


def through_a_file(recipe, folder):
    recipe.save(folder / "decided.toml")
    return fxq.Recipe.load(folder / "decided.toml")


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_graph_again_without_prices(name, seed, plant, monkeypatch, tmp_path):
    plant(lambda key: zlib.crc32(f"{seed} {key.partition(')')[0]}".encode()) % 7)
    model, inputs = build(name), batch(name)
    qmodel = fxq.quantize(model, X86, data=[inputs])
    recipe = qmodel.recipe_as_decided()
    assert through_a_file(recipe, tmp_path) == recipe and recipe.backend == "x86"
    no_prices(monkeypatch)
    again = fxq.quantize(model, through_a_file(recipe, tmp_path), data=[inputs])
    assert text(again) == text(qmodel)
    got, wanted = call(again, inputs), call(qmodel, inputs)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert torch.equal(a, b)
    assert again.recipe_as_decided() == recipe


class Mixed(nn.Module):
    """Layers that pay and that do not, a PReLU that a kernel may take along, and data that is moved."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x):
        return self.head(F.relu(self.b(self.act(self.a(x)))).flatten(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("whole", [2.0, 4.0])
def test_opposite_prices_do_not_count(whole, plant):
    def price(sign):
        def of(key):
            if "quantize" in key:
                return 0.1
            if "prelu" in key and not key.startswith("float"):
                return 3.0 if "after 1" in key else 3.0 + sign * (whole - 3.0)
            loses = ("linear" in key) == (sign > 0)
            return 5.0 if key.startswith("float") != loses else 1.0

        return of

    model, x = settled(Mixed), torch.rand(2, 3, 8, 8)
    plant(price(1))
    qmodel = fxq.quantize(model, X86, data=[x])
    plant(price(-1))
    assert text(fxq.quantize(model, X86, data=[x])) != text(qmodel)
    again = fxq.quantize(model, qmodel.recipe_as_decided(), data=[x])
    assert text(again) == text(qmodel) and torch.equal(again(x), qmodel(x))
    entry = next(e for e in again.ledger if e.op == "linear")
    assert (entry.precision, entry.reason, entry.float_us) == ("float", DECIDED, None)
    assert (entry.kind, entry.decided_by) == ("excluded by the recipe", "fallback")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", ["auto", "weights", "activations"])
def test_the_role_with_7_bits_is_pinned(role):
    model, x = settled(Mixed), torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, replace(X86, reduce_range=role), data=[x])
    recipe = qmodel.recipe_as_decided()
    assert recipe.reduce_range == (
        qmodel.ledger.reduced_range.role if qmodel.ledger.reduced_range is not None else role
    )
    again = fxq.quantize(model, recipe, data=[x])
    assert text(again) == text(qmodel) and torch.equal(again(x), qmodel(x))


class Twice(nn.Module):
    """One module, called at two sizes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.layer(F.avg_pool2d(self.layer(x), 2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("float_one", [0, 1])
def test_two_calls_of_one_module_are_two_decisions(float_one, plant, monkeypatch):
    size = "[1, 4, 8, 8]" if float_one == 0 else "[1, 4, 4, 4]"
    plant(
        lambda key: 0.1 if "quantize" in key else 5.0 if key.startswith("float") != (f"float32{size}" in key) else 1.0
    )
    model, x = settled(Twice), torch.randn(1, 4, 8, 8)
    qmodel = fxq.quantize(model, X86, data=[x])
    precisions = [e.precision for e in qmodel.ledger if e.op == "conv2d"]
    assert precisions == (["float", "int8"] if float_one == 0 else ["int8", "float"])
    recipe = qmodel.recipe_as_decided()
    assert {pin.call: pin.runs for pin in recipe.decided if pin.op == "conv2d"} == dict(enumerate(precisions))
    no_prices(monkeypatch)
    again = fxq.quantize(model, recipe, data=[x])
    assert text(again) == text(qmodel) and torch.equal(again(x), qmodel(x))


def test_paths_are_literal(plant):
    """Names of modules may look like globs: decisions are no selectors."""
    plant(lambda key: 5.0 if key.startswith("float") != ("[8, 8]" in key) else 1.0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    qmodel = fxq.quantize(model, X86, data=[torch.randn(4, 6)])
    assert {p.path: p.runs for p in qmodel.recipe_as_decided().decided} == {"0": "int8", "1": "float", "2": "int8"}


def test_a_copy_and_a_pickle_know_the_decisions():
    model, x = settled(Mixed), torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, X86, data=[x])
    recipe = qmodel.recipe_as_decided()
    assert copy.deepcopy(qmodel).recipe_as_decided() == recipe
    assert pickle.loads(pickle.dumps(qmodel)).recipe_as_decided() == recipe


def test_coverage_and_the_reference_are_pinned_as_well(monkeypatch):
    model, x = settled(Mixed), torch.rand(2, 3, 8, 8)
    for recipe in (X86.with_optimize("coverage"), fxq.Recipe.static(backend="reference")):
        qmodel = fxq.quantize(model, recipe, data=[x])
        with monkeypatch.context() as patch:
            no_prices(patch)
            again = fxq.quantize(model, qmodel.recipe_as_decided(), data=[x])
        assert text(again) == text(qmodel) and torch.equal(again(x), qmodel(x))


def test_the_recipe_of_the_user_stays():
    model, x = settled(Mixed), torch.rand(2, 3, 8, 8)
    recipe = X86.override("head", fxq.FLOAT).override("b", fxq.QuantConfig(activation=fxq.TensorSpec(bits=6)))
    qmodel = fxq.quantize(model, recipe, data=[x])
    decided = qmodel.recipe_as_decided()
    assert decided.overrides == recipe.overrides and "head" not in {pin.path for pin in decided.decided}
    assert decided.with_optimize("speed").with_optimize("decided") == decided
    assert text(fxq.quantize(model, decided, data=[x])) == text(qmodel)


def test_decisions_of_another_model_are_refused():
    x = torch.randn(4, 6)
    recipe = fxq.quantize(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval(), X86, data=[x]).recipe_as_decided()
    more = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3)).eval()
    with pytest.raises(
        RecipeError, match=r"has no decision for linear of 2, which can run on integers; near: linear of"
    ):
        fxq.quantize(more, recipe, data=[x])
    with pytest.raises(RecipeError, match=r"for another model: this one has no linear of 1 \(1 such"):
        fxq.quantize(nn.Sequential(nn.Linear(6, 6)).eval(), recipe, data=[x])


def test_what_has_no_kernel_here_is_said():
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval()
    recipe = fxq.quantize(model, X86, data=[x]).recipe_as_decided()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxq.quantize(model, recipe.override("1", fxq.FLOAT), data=[x])
    assert any("1 ops that the recipe's decisions run on integers" in str(w.message) for w in caught)
    assert any("the first is linear of 1: the recipe says float for '1'" in str(w.message) for w in caught)


def test_nothing_to_decide():
    qmodel = fxq.quantize(nn.Sequential(nn.Softmax(-1)).eval(), X86, data=[torch.randn(4, 6)])
    with pytest.raises(RecipeError, match="nothing to decide"):
        qmodel.recipe_as_decided()


# ---- files


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"op": "linear", "rums": "int8"}, "rums"),
        ({"op": "linear", "call": "1"}, "call is '1'; it must be of type int"),
        ({"path": "a", "runs": "int8"}, "is not a valid decision"),
        ({"op": "linear", "runs": "int4"}, "is not a valid decision"),
        ({"op": "linear", "runs": "opened"}, "is not a valid decision"),
        ({"op": "linear", "runs": "int8", "ops": 1}, "is not a valid decision"),
    ],
)
def test_what_is_no_pin_is_refused(pin, said):
    with pytest.raises(RecipeError, match=said):
        fxq.Recipe.from_dict({"optimize": "decided", "decided": [pin]})


def test_decided_needs_decisions():
    with pytest.raises(RecipeError, match="needs decisions"):
        X86.with_optimize("decided")
    with pytest.raises(RecipeError, match="lists of tables"):
        fxq.Recipe.from_dict({"decided": ["linear"]})


def test_places_are_said_in_words():
    assert str(Place("head.fc", "linear+relu")) == "linear+relu of head.fc"
    assert str(Place("", "add", 2)) == "add of the model, call 2"
    assert Pin.at(Place("a", "add", 1), "float").place == Place("a", "add", 1)
