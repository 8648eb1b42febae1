"""A model through a file: the same numbers in another process, all that is known of it, and what a file cannot hold."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import unavailable
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import FallbackKernel
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.common.metrics import tensors
from fxq.errors import BackendError, FxqWarning
from tests.support import extensions, models
from tests.support.graphs import equal, full_text
from tests.support.helpers import REFERENCE, filed
from tests.support.hostile import Parts
from tests.support.machine import needs_x86

ROOT = Path(__file__).parents[2]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
RECIPES = {
    "static": fxq.Recipe.static(optimize="coverage"),
    "reference": REFERENCE,
    "dynamic": fxq.Recipe.dynamic(optimize="coverage"),
    "4 bits": fxq.Recipe.weight_only(bits=4),
    "fbgemm": fxq.Recipe.static(backend="fbgemm", optimize="coverage"),
    "openvino": fxq.Recipe.static(backend="openvino", optimize="coverage"),
    "onnxruntime": fxq.Recipe.static(backend="onnxruntime", optimize="coverage"),
}


def quantized(model, recipe, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if recipe.preset in ("dynamic", "weight_only"):
            return fxq.quantize(model, recipe, example_inputs=batch)
        return fxq.quantize(model, recipe, data=[batch])


@pytest.fixture(scope="module")
def qmodel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    return quantized(net.eval(), fxq.Recipe.static(), X)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, recipe) for name in ("residual", "shared_weight") for recipe in RECIPES),
        *((name, recipe) for name in ("called_twice", "several_inputs", "shapes") for recipe in ("static", "dynamic")),
    ],
)
def test_all_of_it_comes_back(name, recipe):
    if why := unavailable(RECIPES[recipe].backend):
        pytest.skip(why)
    batch = models.batch(name)
    model = quantized(models.build(name), RECIPES[recipe], batch)
    reloaded = filed(model)
    for a, b in zip(tensors(models.call(model, batch)), tensors(models.call(reloaded, batch)), strict=True):
        assert torch.equal(a, b)
    assert full_text(reloaded) == full_text(model)
    assert (reloaded.history, reloaded.ledger, reloaded.record) == (model.history, model.ledger, model.record)
    assert (reloaded.recipe, reloaded.backend, reloaded._decided) == (model.recipe, model.backend, model._decided)
    reloaded.load_state_dict(model.state_dict())
    model.load_state_dict(reloaded.state_dict())
    assert full_text(filed(reloaded)) == full_text(model)


@pytest.mark.slow
def test_another_process_computes_the_same(tmp_path):
    paths = []
    for i, (name, recipe) in enumerate(
        [("residual", "static"), ("squeeze_excite", "static"), ("several_inputs", "dynamic")]
    ):
        batch = models.batch(name)
        model = quantized(models.build(name), RECIPES[recipe], batch)
        paths.append(str(model.save(tmp_path / f"{i}.fxq")))
        torch.save((batch, models.call(model, batch)), tmp_path / f"{i}.pt")
    code = f"""
import sys, torch, fxq
torch.set_num_threads(1)
for path in {paths!r}:
    batch, expected = torch.load(path.replace(".fxq", ".pt"))
    found = fxq.load(path)(*(batch if isinstance(batch, tuple) else (batch,)))
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (found, expected)), strict=True):
        assert torch.equal(a, b), path
assert "tests.support.models" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_a_loaded_model_is_as_good_as_any(qmodel, tmp_path):
    reloaded = filed(qmodel)
    assert reloaded.output_sqnr == qmodel.output_sqnr and list(reloaded.qparams()) == list(qmodel.qparams())
    assert reloaded.report(tmp_path / "r.html").stat().st_size > 1000
    assert len(reloaded.profile()) == len(qmodel.profile())
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()
    assert fxq.compare(net, reloaded, [X]).output_sqnr == fxq.compare(net, qmodel, [X]).output_sqnr
    assert fxq.diff(reloaded.history["fuse"], reloaded.history[-1]) is not None and reloaded.float_model is None
    assert len(pickle.dumps(reloaded)) < 2 * len(pickle.dumps(qmodel))
    for again in (copy.deepcopy(reloaded), pickle.loads(pickle.dumps(reloaded)), filed(reloaded)):
        assert torch.equal(again(X), qmodel(X))
    assert reloaded.recipe_as_decided() == qmodel.recipe_as_decided()


@pytest.mark.slow
def test_with_the_fastest_backend():
    model = quantized(models.build("residual"), RECIPES["static"].with_backend("fastest"), models.batch("residual"))
    assert filed(model).attempts == model.attempts and len(model.attempts) > 1


def test_layout_and_parameters_stay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).eval().to(memory_format=torch.channels_last)
    model = quantized(net, REFERENCE.override("*", fxq.FLOAT), X)
    reloaded = filed(model)
    assert [n for n, _ in reloaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert reloaded.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert reloaded.get_parameter("0.weight").requires_grad == model.get_parameter("0.weight").requires_grad
    assert torch.equal(reloaded(X), model(X))


def test_modules_may_be_called_anything_that_torch_takes():
    net = nn.Sequential()
    for name in ("é", "a-b", "x y", "relu", "self_", "_", "0"):
        net.add_module(name, nn.Linear(8, 8))
        net.add_module(f"_{name}", nn.ReLU())
    x = torch.randn(4, 8)
    model = quantized(net.eval(), fxq.Recipe.static(optimize="coverage"), x)
    assert torch.equal(filed(model)(x), model(x))


class Holder(nn.Module):
    """A float model with data of its own, some of it in objects."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.sizes, self.names, self.low = (1, [2]), {0: "a", "b": None}, -float("inf")
        self.dtype_used, self.config = torch.float16, OrderedDict(a=1)

    def forward(self, x):
        return self.fc(x)


def test_plain_data_of_the_float_model():
    model = quantized(Holder().eval(), REFERENCE, torch.rand(3, 4))
    reloaded = filed(model)
    assert (reloaded.sizes, reloaded.names, reloaded.low) == ((1, [2]), {0: "a", "b": None}, -float("inf"))
    assert reloaded.dtype_used == torch.float16 and model.config == {"a": 1}
    with pytest.raises(AttributeError, match=r"it is a OrderedDict, .* a model file holds plain data only"):
        _ = reloaded.config
    left = reloaded._float_attributes.left
    assert left.keys() == {"fc", "config"} and left["fc"] == model._float_attributes.left["fc"]


class Padding(str, Enum):
    REFLECT = "reflect"


class Axis(IntEnum):
    LAST = 1


class OfEnums(nn.Module):
    """Options that are plain values of a type of their own, and an output by pairs of numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = F.pad(self.fc(x), (Axis.LAST, np.float64(1).astype(int).item()), mode=Padding.REFLECT)
        return {(0, 1): y * np.float64(0.5), None: y.roll(Axis.LAST, Axis.LAST), -1.5: y.sum(dim=Axis.LAST)}


@pytest.mark.parametrize("recipe", ["reference", "static"])
def test_values_of_types_of_their_own(recipe):
    x = torch.randn(4, 8)
    model = quantized(OfEnums().eval(), RECIPES[recipe], x)
    reloaded, expected = filed(model)(x), model(x)
    assert reloaded.keys() == expected.keys() == {(0, 1), None, -1.5}
    assert all(torch.equal(reloaded[key], expected[key]) for key in expected)


class Labelled(nn.Linear):
    def forward(self, x):
        return super().forward(x), Padding.REFLECT


def test_members_of_an_enum_that_are_returned_are_refused(tmp_path):
    """Loaded, they would be strings."""
    model = quantized(Labelled(8, 8).eval(), REFERENCE, torch.randn(4, 8))
    with pytest.raises(fxq.InputError, match=r"output.* holds a Padding .* return its plain value"):
        model.save(tmp_path / "m.fxq")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    """Here an edited graph: a text reads no private attribute."""
    model = quantized(nn.Linear(8, 8).eval(), REFERENCE, torch.randn(4, 8))
    output = model.graph.output_node()
    with model.graph.inserting_before(output):
        version = model.graph.call_function(getattr, (output.args[0], "_version"))
    output.args = ((output.args[0], version),)
    model.recompile()
    with pytest.raises(
        fxq.InputError, match=r"the model cannot be saved, since .*public attribute.* That line is `getattr_1"
    ):
        model.save(tmp_path / "m.fxq")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_exported(tmp_path):
    model = quantized(nn.Linear(8, 8).eval(), REFERENCE, torch.randn(4, 8))
    for name in ("m.onnx", "m.xml", "m.pt2"):
        with pytest.raises(fxq.InputError, match=r"save writes fxq files, not"):
            model.save(tmp_path / name)


# ---- leaves


class Leaf(nn.Module):
    """Module that torch.fx cannot trace."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x * self.w if x.sum() > 0 else x


def with_leaf():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), OrderedDict(leaf=Leaf())["leaf"], nn.Linear(4, 2)).eval()


def test_leaves_come_from_the_caller(tmp_path):
    net, x = with_leaf(), torch.rand(3, 4)
    model = quantized(net, REFERENCE.leaf("1"), x)
    path = model.save(tmp_path / "m.fxq")
    with pytest.raises(
        fxq.FileError,
        match=r"its leaf modules \(Leaf\) are not in the file; pass them: fxq.load\(path, leaves=\{'1': ...\}\)",
    ):
        fxq.load(path)
    assert torch.equal(fxq.load(path, {"1": net[1]})(x), model(x))
    for wrong in (Leaf(), nn.Identity(), 3):
        with pytest.raises(fxq.FileError, match="the leaf '1' is not the module that the model was saved with, a Leaf"):
            fxq.load(path, {"1": wrong})
    with pytest.raises(fxq.FileError, match="unknown leaf '2'"):
        fxq.load(path, {"1": net[1], "2": net[2]})
    own = net[1].train()
    loaded = fxq.load(path, {"1": own})
    assert own.training and not loaded.get_submodule("1").training


# ---- what is the user's own


@pytest.mark.slow
def test_own_ops_and_kernels_are_imported_by_the_caller(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return extensions.bump(self.b(torch.tanh(self.a(x)) * 0.5), width=2.0)

    x = torch.rand(4, 8)
    model = quantized(Net().eval(), REFERENCE.with_extensions(extensions.bump), x)
    path = model.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(path)(x), model(x))
    assert Parts(path).model["imports"] == {"op bump": "tests.support.extensions:bump"}
    code = f"""
import sys, fxq
try:
    fxq.load({str(path)!r})
except fxq.FileError as error:
    print(error)
assert "tests" not in sys.modules
import tests.support.extensions
fxq.load({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "needs the module 'tests.support.extensions', and loading a file imports no code: `import" in done.stdout
    parts = Parts(path)
    parts.model["imports"] = {"op bump": "tests.support.extensions:swap"}
    path.write_bytes(parts.data())
    with pytest.raises(
        fxq.FileError,
        match=r"the op bump of the file is tests.support.extensions:swap, which is not what is registered",
    ):
        fxq.load(path)


def test_what_a_file_cannot_name(qmodel, tmp_path):
    duplicate = copy.deepcopy(qmodel)
    kernel = next((m for m in duplicate.modules() if isinstance(m, Kernel)), None)
    if kernel is not None:
        hook = kernel.register_forward_hook(lambda *_: None)
        with pytest.raises(fxq.InputError, match="its kernel has hooks or its own forward, and a file holds no code"):
            duplicate.save(tmp_path / "m.fxq")
        hook.remove()
    hook = duplicate.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(fxq.InputError, match="the model has hooks, and a file holds no code"):
        duplicate.save(tmp_path / "m.fxq")
    hook.remove()
    last = duplicate.graph.output_node().args[0]
    with duplicate.graph.inserting_after(last):
        duplicate.graph.output_node().args = (duplicate.graph.call_function(importlib.import_module, (last,)),)
    with pytest.raises(fxq.InputError, match=r"calls <function import_module.*which cannot be written as text"):
        duplicate.save(tmp_path / "m.fxq")

    class Local(fxq.Pass):
        name = "local"
        needs = gives = fxq.extend.Stage.CANONICAL

        def run(self, rewriter):
            pass

    model = quantized(
        nn.Sequential(nn.Linear(4, 2)).eval(), REFERENCE.insert_pass(Local(), after="fuse"), torch.rand(2, 4)
    )
    with pytest.raises(fxq.RecipeError, match="the class of the pass 'local' is local to a function"):
        model.save(tmp_path / "m.fxq")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(fxq.InputError, match="named by a str or a path"):
        qmodel.save(3)
    with pytest.raises(fxq.InputError, match="path must be a str or a path"):
        fxq.load(None)


@needs_x86
def test_a_kernel_of_a_class_without_a_name(tmp_path):
    class Mine(OnednnConv):
        pass

    model = quantized(
        nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), fxq.Recipe.static(backend="x86", optimize="coverage"), X
    )
    kernel = next(m for m in model.modules() if isinstance(m, OnednnConv))
    kernel.__class__ = Mine
    with pytest.raises(
        fxq.InputError, match=r"its kernel is a Mine, which has no registered name: 'x86\.conv' is another"
    ):
        model.save(tmp_path / "m.fxq")


# ---- from another machine


def saved_elsewhere(model, path):
    with pytest.MonkeyPatch.context() as there:
        made_on = {**cpu.machine(), "CPU": "another"}
        there.setattr(cpu, "machine", lambda: made_on)
        return model.save(path)


def refuse(kernel, *args):
    raise BackendError("x86.conv: not here. Keep the layer in float or in q/dq form.")


@pytest.mark.one_in(2)
@needs_x86
@pytest.mark.parametrize("where", ["check", "from_config"])
def test_kernels_that_do_not_fit_run_in_their_form(qmodel, tmp_path, monkeypatch, where):
    if qmodel.backend != "x86":
        pytest.skip("the backend is another one")
    path = saved_elsewhere(qmodel, tmp_path / "m.fxq")
    assert torch.equal(fxq.load(path)(X), qmodel(X))
    monkeypatch.setattr(OnednnConv, where, refuse if where == "check" else classmethod(refuse))
    with pytest.warns(FxqWarning, match=r"2 of its \d+ kernels are wrong on this machine: .*not here"):
        loaded = fxq.load(path)
    assert sum(isinstance(m, FallbackKernel) for m in loaded.modules()) == 2
    expected = qmodel(X)
    torch.testing.assert_close(loaded(X), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    again = filed(loaded)  # they stay so on the same machine
    assert equal(again(X), loaded(X)) and sum(isinstance(m, FallbackKernel) for m in again.modules()) == 2
    path = saved_elsewhere(loaded, path)
    monkeypatch.undo()
    assert torch.equal(fxq.load(path)(X), expected)  # and come back where they fit


def test_a_newer_file(qmodel, tmp_path):
    path = qmodel.save(tmp_path / "m.fxq")
    path.write_bytes(Parts(path).data({"version": "2", "something": "new"}))
    with pytest.raises(
        fxq.FileError, match="has version 2 of the format, and this fxq reads version 1: install a newer"
    ):
        fxq.load(path)
