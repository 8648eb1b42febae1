"""Dynamic quantization: what a user sees of it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError, RecipeError
from tests.support.helpers import module
from tests.support.machine import decibels, needs_x86, quiet

DYNAMIC = fxq.Recipe.dynamic(optimize="coverage")
SYMMETRIC = fxq.TensorSpec(symmetric=True, range="dynamic")
FORMS = {
    "row": fxq.Recipe.dynamic().config.activation,
    "symmetric row": fxq.TensorSpec(symmetric=True, per="row", range="dynamic"),
    "tensor": fxq.TensorSpec(range="dynamic"),
    "symmetric tensor": SYMMETRIC,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(288, 16),
        nn.GELU(), nn.Linear(16, 4),
    ).eval()  # fmt: skip


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def precisions(qmodel):
    return {row.op: row.precision for row in qmodel.ledger}


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
@pytest.mark.parametrize("backend", ["reference", pytest.param("x86", marks=needs_x86)])
@pytest.mark.parametrize("activation", FORMS.values(), ids=FORMS)
def test_layers_run_on_integers_without_data(backend, activation):
    recipe = fxq.Recipe.dynamic(backend=backend, activation=activation, optimize="coverage")
    qmodel = fxq.quantize(network(), recipe, example_inputs=X)
    kinds = precisions(qmodel)
    assert (kinds["conv2d"], kinds["linear"], kinds["flatten"]) == (
        "int8",
        "int8",
        "float",
    )
    assert qmodel.output_sqnr > decibels(35, backend)


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
def test_an_image_has_its_own_scale_and_a_tensor_one_for_all():
    """With a scale for each row, what is far larger beside it in the batch takes nothing from an image."""
    qmodel = fxq.quantize(network(), DYNAMIC, example_inputs=X)
    alone, beside = qmodel(X[:1]), qmodel(torch.cat([X[:1], 1000 * X[1:2]]))[:1]
    torch.testing.assert_close(beside, alone)
    for_all = fxq.quantize(network(), fxq.Recipe.dynamic(activation=SYMMETRIC, optimize="coverage"), example_inputs=X)
    lost = for_all(torch.cat([X[:1], 1000 * X[1:2]]))[:1] - network()(X[:1])
    assert lost.abs().max() > 10 * (alone - network()(X[:1])).abs().max()


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
def test_copies_files_and_state_dicts():
    qmodel = fxq.quantize(network(), DYNAMIC, example_inputs=X)
    again = copy.deepcopy(qmodel)
    again.load_state_dict(qmodel.state_dict())
    for duplicate in (pickle.loads(pickle.dumps(qmodel)), again):
        assert torch.equal(duplicate(X), qmodel(X)) and torch.equal(duplicate(X[:1]), qmodel(X[:1]))


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
def test_static_and_dynamic_layers_in_one_model():
    recipe = fxq.Recipe.static(optimize="coverage").override(nn.Linear, DYNAMIC.config).override("6", fxq.FLOAT)
    qmodel = fxq.quantize(network(), recipe, data=[X])
    node_precisions = {row.name: row.precision for row in qmodel.ledger}
    assert (node_precisions["_0"], node_precisions["_4"], node_precisions["_6"]) == ("int8", "int8", "float")
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(InputError, match="needs data to calibrate with"):
        fxq.quantize(network(), recipe)
    with pytest.raises(InputError, match="needs data to calibrate with, for %input_1"):
        fxq.quantize(network(), recipe, example_inputs=X)


@needs_x86
def test_a_static_layer_reads_what_a_dynamic_one_gives():
    """The kernel of the first emits float, although a quantize alone reads it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage").override("0", DYNAMIC.config)
    with quiet():
        qmodel = fxq.quantize(model, recipe, data=[torch.randn(16, 8)])
    assert precisions(qmodel) == {"linear": "int8"} and qmodel.output_sqnr > decibels(30)


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
def test_only_what_is_selected():
    qmodel = fxq.quantize(network(), DYNAMIC.only(nn.Linear), example_inputs=X)
    assert precisions(qmodel) == {
        "conv2d": "float",
        "relu": "float",
        "flatten": "float",
        "linear": "int8",
        "gelu": "float",
    }
    (row, *_) = qmodel.ledger.where(op="conv2d")
    assert row.reason == "the recipe says float for all ops that no override selects"
    assert row.fix == "recipe.override('0', fxq.Recipe.dynamic().config)"
    mended = fxq.quantize(network(), eval(row.fix, {"recipe": DYNAMIC.only(nn.Linear), "fxq": fxq}), example_inputs=X)
    assert {r.name: r.precision for r in mended.ledger}["_0"] == "int8"
    for wrong in (lambda: DYNAMIC.only(), lambda: DYNAMIC.override("0", fxq.FLOAT).only(nn.Linear)):
        with pytest.raises(RecipeError, match="must be called before any override"):
            wrong()


def test_one_quantize_serves_all_that_read_a_value():
    model = module(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(8, 4), b=nn.Linear(8, 4))
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    text = fxq.extend.write_graph(fxq.quantize(model, recipe, example_inputs=torch.randn(2, 8)))
    assert [text.count(f" {op}(") for op in ("choose_scale", "choose_zero_point", "quantize")] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
@pytest.mark.parametrize("backend", ["reference", pytest.param("x86", marks=needs_x86)])
def test_values_of_one_sign_keep_the_whole_grid(backend):
    """After a relu, a symmetric grid leaves half of its integers unused: 6 dB."""
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(32, 64)
    sqnrs = {
        name: fxq.quantize(
            model, fxq.Recipe.dynamic(backend=backend, activation=activation, optimize="coverage"), example_inputs=x
        ).output_sqnr
        for name, activation in FORMS.items()
    }
    assert sqnrs["row"] > sqnrs["symmetric row"] + 2 and sqnrs["tensor"] > sqnrs["symmetric tensor"] + 2


@needs_x86
def test_the_integers_of_a_dynamic_grid():
    layers = fxq.quantize(network(), DYNAMIC, example_inputs=X).qparams()
    assert {(layer.reads, layer.input_scale, layer.input_zero_point) for layer in layers.values()} == {
        ("dynamic", None, None)
    }


def test_a_recipe_by_name_and_as_a_file(tmp_path):
    fxq.Recipe.dynamic().save(tmp_path / "r.toml")
    assert (tmp_path / "r.toml").read_text() == 'preset = "dynamic"\n'
    assert fxq.Recipe.load(tmp_path / "r.toml") == fxq.Recipe.dynamic() == fxq.Recipe("dynamic")


def test_what_is_missing_is_said():
    with pytest.raises(InputError, match="one batch of inputs to infer shapes from"):
        fxq.quantize(network(), "dynamic")
    with pytest.raises(RecipeError, match=r'rows cannot have calibrated ranges.*range="dynamic"'):
        fxq.Recipe.static(activation=fxq.TensorSpec(symmetric=True, per="row"))
    with pytest.raises(RecipeError, match='range="dynamic" for the weight is not supported yet'):
        fxq.Recipe.dynamic(weight=fxq.TensorSpec(signed=True, symmetric=True, range="dynamic"))


@pytest.mark.filterwarnings("ignore::fxq.errors.FxqWarning")
def test_zeros_and_what_is_not_a_number():
    model, recipe = nn.Sequential(nn.Linear(4, 3)).eval(), DYNAMIC
    qmodel = fxq.quantize(model, recipe, example_inputs=torch.randn(2, 4))
    torch.testing.assert_close(qmodel(torch.zeros(1, 4)), model[0].bias[None])
    out = qmodel(torch.tensor([[1.0, torch.nan, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]))
    assert out[0].isnan().all() and out[1].isfinite().all()
