"""A recipe as plain data, as TOML, and in a file; what a user adds is named by import path."""

import pickle
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.errors import RecipeError
from fxq.ops import OPS
from fxq.passes import PASSES, VerifyLowering
from fxq.quant.observers import OBSERVERS, Histogram
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.recipe.recipe_file import tomllib
from tests.support.helpers import Scale

NAMES = [p.name for p in PASSES]


def names(recipe):
    return [p.name for p in recipe.pipeline]


# ---- files

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
of_data = [name for name, kind in OBSERVERS.items() if not kind.keeps_data]
observers = st.sampled_from([*of_data, "percentile:99.9", "moving_average:momentum=0.5"])
activations = st.builds(
    TensorSpec, bits=st.integers(2, 8), signed=st.booleans(), symmetric=st.booleans(), observer=observers
)
by_channel = st.builds(
    TensorSpec,
    bits=st.integers(2, 8),
    signed=st.booleans(),
    symmetric=st.booleans(),
    per=st.just("channel"),
    observer=st.sampled_from(["minmax", "mse:2.4", "moving_average:momentum=0.5"]),
)
weights = activations | by_channel
configs = st.just(FLOAT) | st.builds(QuantConfig, activation=activations, weight=weights)
selectors = words | st.sampled_from([nn.Conv2d, nn.Linear]) | st.sampled_from([o.name for o in OPS]).map(fxq.by_op)
backends = st.sampled_from(["auto", "x86", "reference"])


@st.composite
def recipes(draw):
    recipe = Recipe(
        backend=draw(backends),
        config=draw(configs),
        leaf_modules=tuple(draw(st.lists(words, max_size=2))),
        check=draw(st.sampled_from(["none", "numeric"])),
        max_loss=draw(st.floats(allow_nan=False)),
    )
    for selector, config in draw(st.lists(st.tuples(selectors, configs), max_size=3)):
        recipe = recipe.override(selector, config)
    if draw(st.booleans()):
        where = draw(st.sampled_from(["after", "before"]))
        verification = VerifyLowering(draw(st.floats(0, 1)), draw(st.floats(0, 1)))
        recipe = recipe.without_pass("verify-lowering").insert_pass(
            verification, **{where: draw(st.sampled_from(["fuse", "cleanup"]))}
        )
    return recipe


@given(recipes())
@settings(max_examples=25, deadline=None)
def test_a_recipe_as_data_and_as_toml_and_back(recipe):
    data = recipe.to_dict()
    assert Recipe.from_dict(data) == recipe
    assert tomllib.loads(recipe.to_toml()) == data
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe


def test_a_recipe_in_a_file(tmp_path):
    recipe = (
        Recipe.static(backend="reference")
        .override("layer4.*", FLOAT)
        .override(fxq.by_op("linear"), QuantConfig(activation=TensorSpec(bits=7, observer="percentile")))
        .without_pass("propagate")
    )
    path = tmp_path / "mine.toml"
    recipe.save(path)
    assert Recipe.load(path) == recipe == as_recipe(path) == as_recipe(str(path))
    assert tomllib.loads(path.read_text())["override"][0] == {"path": "layer4.*", "config": "float"}
    assert as_recipe(recipe) is recipe and as_recipe({}) == Recipe() == as_recipe("static")


HAND_WRITTEN = """
preset = "static"
backend = "reference"
leaf_modules = ["decoder"]

[config]
activation = { observer = "minmax" }
weight = { signed = true, symmetric = true, per_channel = true, observer = "minmax" }

[[override]]
path = "head"
config = "float"

[[pass]]
remove = "verify-lowering"

[[pass]]
insert = "fxq.passes:VerifyLowering"
before = "cleanup"
options = { tolerance = 0.1 }

[[pass]]
remove = "propagate"
"""


def test_a_hand_written_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(HAND_WRITTEN)
    recipe = Recipe.load(path)
    assert recipe == (
        Recipe.static(backend="reference", activation=TensorSpec(observer="minmax"))
        .override("head", FLOAT)
        .leaf("decoder")
        .without_pass("verify-lowering")
        .insert_pass(VerifyLowering(tolerance=0.1), before="cleanup")
        .without_pass("propagate")
    )


OLD = """
preset = "static_corrected"

[config]
activation = { bits = 7, signed = false, symmetric = false, per_channel = false, observer = "minmax" }
weight = { bits = 8, signed = true, symmetric = true, per_channel = true, observer = "minmax" }

[[override]]
path = "head"
config = { activation = { observer = "moving_average" }, weight = { signed = true, per_channel = false } }

[[pass]]
insert = "fxq.passes:VerifyLowering"
after = "correct-bias"
"""


def test_a_file_of_version_0_1(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(OLD.replace("[[pass]]", '[[pass]]\nremove = "verify-lowering"\n\n[[pass]]'))
    recipe = Recipe.load(path)
    head = QuantConfig(TensorSpec(observer="moving_average"), TensorSpec(signed=True))
    assert recipe == (
        Recipe.static(activation=TensorSpec(bits=7, observer="minmax"))
        .override("head", head)
        .without_pass("verify-lowering")
        .insert_pass(VerifyLowering(), after="correct-bias")
    )
    recipe.save(path)
    assert "per_channel" not in path.read_text() and Recipe.load(path) == recipe
    with pytest.raises(RecipeError, match="unknown value of per in TensorSpec 'yes'"):
        Recipe.from_dict({"config": {"weight": {"per_channel": "yes"}}})


# ---- what users add is named by import path


class Tenth(Histogram):
    """An observer of the user's, with an option: a share of the range is kept."""

    options: ClassVar = {"share": (0.0, 1.0)}
    share = 0.1

    def clipped(self, low, high):
        return self.share * low, self.share * high


@fxq.fusion(everywhere=False)
def tanh_of_linear(op, x, w, b):
    return op.tanh(op.linear(x, w, b))


@fxq.extend.rewrite
def tanh_twice(op, x):
    return op.tanh(op.tanh(x))


@tanh_twice.becomes
def tanh_once(op, m):
    return op.tanh(m.x)


def test_what_a_user_adds_is_saved_loaded_and_gives_the_same_model(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.randn(8, 4)
    spec = TensorSpec(observer=f"{__name__}:Tenth:0.2")
    plain = Recipe.static(backend="reference", activation=spec).with_min_sqnr(None)
    recipe = plain.with_fusions(tanh_of_linear).insert_pass(Scale(2.0), after="decompose")
    assert recipe.fusions == (f"{__name__}:tanh_of_linear",)
    assert recipe == replace(recipe, fusions=()).with_fusions(*recipe.fusions)
    recipe.save(tmp_path / "r.toml")
    loaded = Recipe.load(tmp_path / "r.toml")
    assert loaded == recipe
    from_recipe, two, without = (fxq.quantize(model, r, data=[x]) for r in (recipe, loaded, plain))
    assert torch.equal(from_recipe(x), two(x))
    assert str(from_recipe.history["fuse"].graph) == str(two.history["fuse"].graph)
    fused = ["tanh_of_linear" in m.history["fuse"].to_text() for m in (from_recipe, two, without)]
    assert fused == [True, True, False]
    usual = fxq.quantize(model, replace(recipe, config=QuantConfig()), data=[x])
    assert not torch.equal(from_recipe(x), usual(x))  # the observer counts
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe.static().with_fusions("no_such_module:rule"), "cannot import 'no_such_module:rule'"),
        (lambda: Recipe.static().with_fusions("torch.nn:Linear"), "'torch.nn:Linear' is not a fusion"),
        (lambda: Recipe.static().with_fusions(tanh_twice), "tanh_twice' is not a fusion: decorate .* with fxq.fusion"),
        (lambda: Recipe.from_dict({"fusions": [3]}), "cannot import 3"),
        (lambda: Recipe.from_dict({"fusions": "a:b"}), "'fusions' has a value of the wrong type"),
        (
            lambda: Recipe.static(activation=TensorSpec(observer="no_such.module:Mine")),
            "cannot import 'no_such.module:M",
        ),
        (lambda: Recipe.static(activation=TensorSpec(observer="torch.nn:Linear")), "is not a subclass of Observer"),
        (
            lambda: Recipe.static(activation=TensorSpec(observer=f"{__name__}:Tenth:2")),
            "observer Tenth: share is '2'; it must be from 0 to 1",
        ),
    ],
)
def test_what_a_user_adds_must_be_there(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_a_fusion_local_to_a_function_cannot_be_named():
    @fxq.fusion(everywhere=False)
    def local(op, x):
        return op.relu(op.tanh(x))

    with pytest.raises(RecipeError, match="the fusion is local to a function"):
        Recipe.static().with_fusions(local)


def test_a_pass_local_to_a_function_cannot_be_written():
    class Local(Scale):
        name = "local"

    with pytest.raises(RecipeError, match="the class of the pass 'local' is local to a function"):
        Recipe.static().insert_pass(Local(), after="fuse").to_dict()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"presett": "static"}, "unknown recipe key 'presett'; did you mean 'preset'"),
        ({"preset": "statc"}, "unknown preset 'statc'"),
        ({"config": {"activations": {}}}, "unknown quantization config key 'activations'; did you mean 'activation'"),
        (
            {"config": {"activation": {"bit": 8}, "weight": {}}},
            "unknown field of activation 'bit'; did you mean 'bits'",
        ),
        ({"config": {"activation": 8}}, "activation must be a table of TensorSpec fields, or 'float', not 8"),
        ({"config": "int8"}, "a quantization config is 'float' or a table .*, not 'int8'"),
        ({"override": [{"path": "head"}]}, "a quantization config is 'float' or a table .*, not None"),
        ({"override": [{"config": "float"}]}, "one of path, op and module"),
        ({"override": [{"op": "lineer", "config": "float"}]}, "unknown op 'lineer'; did you mean 'linear'"),
        ({"pass": [{"remove": "fuze"}]}, "unknown pass 'fuze'; did you mean 'fuse'"),
        ({"pass": [{"insert": "torch.nn:Linear", "after": "fuse"}]}, "'torch.nn:Linear' is not a subclass of Pass"),
        ({"pass": [{"insert": "fxq.passes:Lower"}]}, "'insert' with one of 'after' and 'before'"),
        ({"pass": [{"insert": "fxq.passes:Lower", "after": "a", "before": "b"}]}, "'insert' with one of"),
        ({"pass": [{}]}, r"a \[\[pass\]\] entry has 'remove'"),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(data)


def test_a_file_that_is_not_there_or_no_toml(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read the recipe '.*none\.toml'"):
        as_recipe(str(tmp_path / "none.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("preset = ")
    with pytest.raises(RecipeError, match=r"cannot read the recipe '.*bad\.toml': "):
        Recipe.load(bad)
    bad.write_bytes(b"\xff\xfe preset")
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        Recipe.load(bad)


@pytest.mark.parametrize(
    "data",
    [
        {"override": {"path": "head", "config": "float"}},  # [override] instead of [[override]]
        {"override": ["head"]},
        {"pass": "fuse"},
        {"leaf_modules": "decoder"},
        {"max_loss": "much"},
        {"config": {"activation": {"signed": "yes"}, "weight": {}}},
        {"pass": [{"insert": "fxq.passes:VerifyLowering", "after": "fuse", "options": {"tolerence": 2}}]},
        {"override": [{"path": "head", "config": "float", "aftr": 1}]},
        {"override": [{"path": 3, "config": "float"}]},
        {"backend": 3},
    ],
)
def test_data_of_the_wrong_shape_is_an_error_of_fxq(data):
    with pytest.raises(RecipeError):
        Recipe.from_dict(data)


def test_what_tracing_is_told_survives_a_file(tmp_path):
    recipe = Recipe.static(strict_trace=True).fix_args(mode="plain", gain=2, flag=False)
    recipe.save(tmp_path / "r.toml")
    assert Recipe.load(tmp_path / "r.toml") == recipe
    assert Recipe.from_dict(recipe.fix_args(mask=None).to_dict()).concrete_args["mask"] is None
    with pytest.raises(RecipeError, match="mask=None cannot be written to a file"):
        recipe.fix_args(mask=None).to_toml()
    for wrong in ({"strict_trace": "yes"}, {"concrete_args": ["mode"]}):
        with pytest.raises(RecipeError, match="has a value of the wrong type"):
            Recipe.from_dict(wrong)
