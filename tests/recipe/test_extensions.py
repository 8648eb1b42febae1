"""Ops, kernels and backends that users add, as they write them (`tests/support/extensions.py`)."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.by_name import get_backend
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.backends.table.kernel_table import KernelRow
from fxq.backends.x86.x86 import X86
from fxq.cost.cache import Costs
from fxq.cost.probe import Prober
from fxq.graph.query import submodule
from fxq.graph.region import read_region
from fxq.graph.unit import Calls, calls_of
from fxq.quant.observers import MinMax
from fxq.recipe.recipe_file import tomllib
from tests.support import extensions as own
from tests.support.graphs import until
from tests.support.machine import needs_x86
from tests.support.processes import in_new_python

REFERENCE = fxq.Recipe.static(backend="reference")
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
onednn = needs_x86


class Fused(nn.Module):
    def __init__(self, factor) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(8, 8), nn.Linear(8, 4), factor

    def forward(self, x):
        return self.second(self.factor * torch.tanh(self.first(x)))


def settled(make):
    torch.manual_seed(0)
    return make().eval()


def kernels(qmodel):
    return [m.name for m in (submodule(qmodel, n) for n in qmodel.graph.nodes) if isinstance(m, fxq.extend.Kernel)]


# ---- kernels


def fused_recipe():
    return fxq.Recipe.static(backend="x86").with_fusions(own.linear_tanh_mul).with_extensions(own.make_linear_tanh_mul)


@pytest.mark.one_in(2)
@onednn
@pytest.mark.parametrize("factor", [2.5, nn.Parameter(torch.linspace(1, 2, 8))])
def test_a_fusion_of_the_user_s_runs_in_the_user_s_kernel(factor):
    model = settled(lambda: Fused(factor))
    qmodel = fxq.quantize(model, fused_recipe(), data=[X])
    assert "tests.linear_tanh_mul" in kernels(qmodel)
    assert [e.precision for e in qmodel.ledger] == ["int8"] * 4
    assert qmodel.output_sqnr > 30
    for _ in range(3):  # bound to the kind of its inputs, too
        assert torch.equal(pickle.loads(pickle.dumps(qmodel))(X), qmodel(X))
    assert "tests.linear_tanh_mul" not in kernels(fxq.quantize(model, fxq.Recipe.static(backend="x86"), data=[X]))


@onednn
def test_a_kernel_is_made_of_what_the_pattern_captured(monkeypatch):
    """Here of a layer without a bias, and a number that stands on the other side in the model."""
    captured, make = [], own.LinearTanhMul
    monkeypatch.setattr(own, "LinearTanhMul", lambda *args: captured.append(args) or make(*args))
    model = settled(lambda: Fused(2.5))
    model.first.bias = None
    qmodel = fxq.quantize(model, fused_recipe(), data=[X])
    weight, scale, bias, factor, x, out = captured[-1]
    assert torch.allclose(weight * scale[:, None], model.first.weight, atol=0.6 * float(scale.max()))
    assert (weight.dtype, bias, float(factor)) == (torch.int8, None, 2.5)
    assert (x.s, out.qmin) == (pytest.approx((X.max() - X.min()).item() / x.qmax, rel=1e-3), 0)
    assert "tests.linear_tanh_mul" in kernels(qmodel)


@pytest.mark.skipif(not has_engine("fbgemm"), reason="needs fbgemm")
def test_a_kernel_on_another_backend():
    qmodel = fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe().with_backend("fbgemm"), data=[X])
    assert kernels(qmodel).count("tests.linear_tanh_mul") == 1 and qmodel.output_sqnr > 30


@onednn
def test_the_user_s_kernel_is_verified(monkeypatch):
    forward = own.LinearTanhMul.forward
    monkeypatch.setattr(own.LinearTanhMul, "forward", lambda self, x: forward(self, x) // 2)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine: off by") as warned:
        qmodel = fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe(), data=[X])
    assert "tests.linear_tanh_mul" not in kernels(qmodel) and qmodel.output_sqnr > 30
    assert qmodel.ledger[0].reason.startswith("its kernel tests.linear_tanh_mul failed verification: off by")
    assert str(warned[0].message).endswith("its class is tests.support.extensions:LinearTanhMul.")


@onednn
def test_the_user_s_kernel_has_a_price_under_a_hash_of_its_code(tmp_path):
    gm = until(settled(lambda: Fused(2.5)), X, "propagate", fused_recipe()).gm
    (unit,) = gm.graph.find_nodes(op="call_module")
    region = read_region(gm, unit)
    prober = Prober(get_backend("x86"), fused_recipe(), Costs(tmp_path / "costs.json"))
    assert prober.kernel(gm, region) > 0
    code = prober.backend.code(region.calls)
    assert len(code) == 12 and code in prober.keys(region)[0]
    assert prober.backend.code(Calls(region.calls[:1])) == ""


@onednn
def test_a_kernel_that_refuses_or_is_none(monkeypatch):
    def refuse(*args):
        raise fxq.BackendError("not today")

    monkeypatch.setattr(own, "LinearTanhMul", refuse)
    qmodel = fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe(), data=[X])
    assert "x86.linear" in kernels(qmodel) and qmodel.output_sqnr > 30
    assert [e.reason for e in qmodel.ledger.where(precision="float")] == ["not today"] * 2
    monkeypatch.setattr(own, "LinearTanhMul", lambda *args: "no kernel")
    with pytest.raises(
        fxq.InputError, match=r"make_linear_tanh_mul must return a fxq.extend.Kernel .*, not 'no kernel'"
    ):
        fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe(), data=[X])
    monkeypatch.setattr(own, "LinearTanhMul", lambda *args: {}["scale"])
    with pytest.raises(fxq.FxqError, match=r"fails for the captures x, w, b, s: KeyError: 'scale'"):
        fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe(), data=[X])


def test_a_kernel_that_a_copy_would_not_be(monkeypatch):
    monkeypatch.setattr(own.LinearTanhMul, "options", ("x",))
    with pytest.raises(fxq.InputError, match=r"linear_tanh_mul: out of its __init__ is neither an option nor a buffer"):
        fxq.quantize(settled(lambda: Fused(2.5)), fused_recipe(), data=[X])


class ExtendedX86(X86):
    """Its table is another one at every call."""

    name = "extended_x86"

    @property
    def rows(self):
        return {**super().rows, "linear": KernelRow(None)}


@onednn
def test_a_kernel_of_a_backend_that_extends_another():
    """A subclass uses the kernels of its base class, but not the other way round."""
    gm = until(settled(lambda: Fused(2.5)), X, "propagate", fused_recipe()).gm
    (unit,) = gm.graph.find_nodes(op="call_module")
    row = X86().matching_rows(calls_of(gm, unit))[0].row
    assert ExtendedX86().matching_rows(calls_of(gm, unit))[0].row is row
    fxq.extend.register_kernel("tests.recipe.test_extensions:ExtendedX86", own.linear_tanh_mul)(lambda unit: None)
    assert ExtendedX86().matching_rows(calls_of(gm, unit))[0].row is not row
    assert X86().matching_rows(calls_of(gm, unit))[0].row is row


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxq.extend.register_kernel("x87", own.linear_tanh_mul), "unknown backend 'x87'; did you mean"),
        (lambda: fxq.extend.register_kernel("reference", own.linear_tanh_mul), "'reference' has no table of kernels"),
        (
            lambda: fxq.extend.register_kernel("x86", "conv2d_relu"),
            "takes the result of fxq.fusion or the name of an op, not 'conv2d_relu'",
        ),
        (
            lambda: fxq.extend.register_kernel("x86", own.linear_tanh_mul)(3),
            "decorates a function that makes a kernel, not 3",
        ),
        (
            lambda: fxq.extend.register_kernel("x86", own.linear_tanh_mul)(lambda unit: None),
            "kernel of 'linear_tanh_mul' on x86 is made by tests.support.extensions:make_linear_tanh_mul already",
        ),
    ],
)
def test_a_kernel_that_cannot_be(make, message):
    with pytest.raises(fxq.FxqError, match=message):
        make()


# ---- backends


def test_a_backend_of_the_user_s():
    recipe = fxq.Recipe.static(backend=own.OnlyLinear)
    assert recipe == REFERENCE.with_backend("tests.support.extensions:OnlyLinear")
    qmodel = fxq.quantize(settled(lambda: Fused(2.5)), recipe, data=[X])
    assert qmodel.backend == recipe.backend and qmodel.recipe_as_decided().backend == recipe.backend
    assert [e.precision for e in qmodel.ledger] == ["int8", "float", "float", "int8"]
    again = pickle.loads(pickle.dumps(qmodel)).to("cpu")
    assert torch.equal(again(X), qmodel(X))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tests.support.extensions:NoSuch", "cannot import 'tests.support.extensions:NoSuch'"),
        ("torch.nn:Linear", "'torch.nn:Linear' is not a subclass of Backend"),
        (nn.Linear, "is not a subclass of Backend"),
        (own.OnlyLinear(), "takes the class of a backend, OnlyLinear, not an instance"),
        (own.Nameless, "has no name, or lacks methods of fxq.extend.Backend"),
        (own.NamedAsOurs, "is called 'x86', as fxq's is; choose another name"),
        (own.NamedAsAnother, "is called 'only_linear', as tests.support.extensions:OnlyLinear is; choose another name"),
        (type("Local", (own.OnlyLinear,), {"__qualname__": "f.<locals>.Local"}), "the backend is local to a function"),
    ],
)
def test_a_backend_that_cannot_be(backend, message):
    fxq.Recipe.static(backend=own.OnlyLinear)
    with pytest.raises(fxq.RecipeError, match=message):
        fxq.Recipe.static(backend=backend)


class SaysYes(own.OnlyLinear):
    """Its answer is no Support."""

    name = "says_yes"

    def supports(self, gm, node, calls, config):
        return True


class SaysTooMuch(own.OnlyLinear):
    """It runs more ops than there are."""

    name = "says_too_much"

    def supports(self, gm, node, calls, config):
        return fxq.extend.Support(9)


class Regions(ExtendedX86):
    """Asks a table of kernels for those of whole regions."""

    name = "regions_of_x86"

    def regions(self, gm):
        return fxq.extend.connected_regions(gm, lambda node: True)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (SaysYes, "backend 'says_yes' must return a fxq.extend.Support of 0 to [23] ops for %.*; it returned True"),
        (SaysTooMuch, r"a fxq.extend.Support of 0 to [23] ops for %.*; it returned Support\(ops=9"),
        pytest.param(
            Regions,
            r"'regions_of_x86' has kernels of single units: to lower a region of \d+ nodes, from %x_q on, its class",
            marks=onednn,
        ),
    ],
)
def test_a_backend_that_answers_wrong(backend, message):
    with pytest.raises(fxq.InputError, match=message):
        fxq.quantize(settled(lambda: Fused(2.5)), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X])


# ---- saved


@pytest.mark.slow
def test_a_saved_recipe_has_them_where_nothing_was_imported(tmp_path):
    recipe = REFERENCE.with_extensions(own.bump, own.swap).with_backend(own.OnlyLinear)
    recipe = recipe.with_fusions(own.linear_tanh_mul).with_extensions("tests.support.extensions:make_linear_tanh_mul")
    recipe = recipe.override(fxq.by_op("bump"), fxq.FLOAT)
    assert recipe.extensions[0] == "tests.support.extensions:bump"
    recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe
    code = "import sys, fxq; recipe = fxq.Recipe.load(sys.argv[1]); fxq.by_op('own_swap'); print(recipe.to_toml())"
    done = in_new_python(code, tmp_path / "r.toml")
    assert done.stdout.strip() == recipe.to_toml().strip()


@dataclass(frozen=True)
class Idle(fxq.Pass):
    """Does nothing."""

    name = "idle"

    def run(self, rewriter):
        pass


def test_names_of_the_running_script_are_warned_of(monkeypatch):
    """Ops, kernels, fusions, backends, observers, passes and module types: another process has another `__main__`."""
    names = ("bump", "make_linear_tanh_mul", "linear_tanh_mul", "Alone", "Swap", "Halved", "Idle")
    bases = {"Swap": nn.Module, "Halved": MinMax, "Alone": own.OnlyLinear}
    types = {name: type(name, (base,), {"name": "alone"}) for name, base in bases.items()} | {"Idle": Idle}
    for name in names:
        value = types.get(name) or getattr(own, name)
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
        if name in types:
            monkeypatch.setattr(value, "__module__", "__main__")
    recipe = REFERENCE.with_extensions(*(f"__main__:{name}" for name in names[:2])).with_backend("__main__:Alone")
    recipe = recipe.with_fusions("__main__:linear_tanh_mul").override(types["Swap"], fxq.FLOAT)
    recipe = recipe.override("a", fxq.QuantConfig(fxq.TensorSpec(observer="__main__:Halved")))
    recipe = recipe.insert_pass(Idle(), after="canonicalize")
    with pytest.warns(fxq.FxqWarning, match="only the script or notebook that defines them can load it") as caught:
        text = recipe.to_toml()
    said = str(caught.pop().message)
    assert all(f"__main__:{name}" in said for name in names)
    assert fxq.Recipe.from_dict(tomllib.loads(text)) == recipe


@onednn
def test_a_loaded_recipe_gives_the_same_model(tmp_path):
    (recipe := fused_recipe()).save(tmp_path / "r.toml")
    first, two = (fxq.quantize(settled(lambda: Fused(2.5)), r, data=[X]) for r in (recipe, tmp_path / "r.toml"))
    assert torch.equal(first(X), two(X)) and kernels(first) == kernels(two)


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ("tests.support.extensions:no_such", "cannot import 'tests.support.extensions:no_such'"),
        ("tests.support.extensions:Swap", "'tests.support.extensions:Swap' is neither an op nor a kernel: decorate"),
        (type("Local", (), {"__qualname__": "f.<locals>.Local"}), "the op or kernel is local to a function"),
    ],
)
def test_what_is_no_extension(extension, message):
    with pytest.raises(fxq.RecipeError, match=message):
        REFERENCE.with_extensions(extension)
