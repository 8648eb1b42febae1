"""Backends of other packages: real, tiny distributions on `sys.path`."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import by_name
from tests.support.processes import in_new_python

pytestmark = pytest.mark.any_cpu

CODE = """
import fxq


class Engine(fxq.extend.Backend):
    name = {name!r}
    has_kernels = False

    def supports(self, gm, node, calls, config):
        return fxq.extend.Support(1) if calls[0].op.name == "linear" else fxq.extend.Support(0, "linear layers alone")

    def lower(self, gm, region):
        return None
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with one backend, whose module has this code."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(distribution, name, code=None):
        module = distribution.replace("-", "_")
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[fxq.backends]\n{name} = {module}:Engine\n")
        (tmp_path / f"{module}.py").write_text(code if code is not None else CODE.format(name=name))
        monkeypatch.syspath_prepend(tmp_path / module)  # another `sys.path`: what was read before is read again
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return add


@pytest.mark.slow
def test_a_package_adds_a_backend(install, tmp_path):
    module = install("acme-one", "acme_one")
    recipe = fxq.Recipe.static(backend="acme_one", optimize="coverage")
    assert module not in sys.modules  # a name needs no import
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [torch.randn(8, 8, generator=torch.Generator().manual_seed(0))]
    qmodel = fxq.quantize(model, recipe, data=data)
    assert qmodel.backend == "acme_one" and [entry.precision for entry in qmodel.ledger] == ["int8", "float", "int8"]
    qmodel.save(tmp_path / "m.fxq")
    recipe.save(tmp_path / "r.toml")
    code = "import sys, fxq; print(fxq.load(sys.argv[1]).backend, fxq.Recipe.load(sys.argv[2]).backend)"
    paths = [str(tmp_path / "m.fxq"), str(tmp_path / "r.toml")]
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    done = in_new_python(program, *paths)
    assert done.stdout.split() == ["acme_one", "acme_one"], done.stderr
    assert by_name.unavailable("acme_one") is None and "acme_one" not in by_name.builtin_names()


def test_the_doctor_lists_it_with_its_distribution(install):
    install("acme-two", "acme_two")
    install("acme-broken", "acme_broken", "import no_such_module_anywhere")
    diagnosis = fxq.doctor(["acme_broken"], progress=False)
    assert diagnosis.machine["backend acme_two"] == "of acme-two 1.2"
    (row,) = diagnosis.rows
    assert row.verdict == "float" and "acme-broken 1.2 cannot be imported" in row.why and "no_such_module" in row.why
    assert "acme-two 1.2" in str(diagnosis)


def alone(monkeypatch):
    """Only backends of packages, and reference, run here."""
    for name in ("x86", "fbgemm", "qnnpack", "jit", "openvino", "onnxruntime"):
        monkeypatch.setattr(by_name.backend_type(name), "available", lambda self: "not today")


def test_fastest_times_it(install, monkeypatch):
    alone(monkeypatch)
    install("acme-quick", "acme_quick")
    install("acme-quick-broken", "acme_quick_broken", "import no_such_module_anywhere")
    install("acme-quick-taken", "jit")
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="fastest"), data=[torch.randn(8, 8)])
    assert qmodel.backend == "acme_quick"
    tried = {attempt.backend: attempt.why for attempt in qmodel.attempts}
    assert tried["acme_quick"] == "" and "acme-quick-broken 1.2 cannot be imported" in tried["acme_quick_broken"]
    assert list(tried).count("jit") == 1 and tried["jit"] == "not today"


def test_auto_selects_it_where_no_backend_of_fxq_has_kernels(install, monkeypatch):
    install(
        "acme-auto", "acme_auto", CODE.format(name="acme_auto").replace("has_kernels = False", "has_kernels = True")
    )
    install("acme-auto-broken", "acme_auto_broken", "import no_such_module_anywhere")
    install("acme-auto-slow", "acme_auto_slow")
    first = by_name.get_backend("auto").name
    assert first in by_name.builtin_names() and ("acme_auto" not in sys.modules)
    alone(monkeypatch)
    assert by_name.get_backend("auto").name == "acme_auto"
    assert fxq.doctor(["reference"], progress=False).auto == "acme_auto"
    monkeypatch.setattr(by_name.backend_type("acme_auto"), "available", lambda self: "no licence")
    with pytest.warns(fxq.FxqWarning, match="no int8 kernels"):
        assert by_name.get_backend("auto").name == "reference"


@pytest.mark.parametrize("code", ["import no_such_module_anywhere", "raise RuntimeError('no licence')", "x = 1"])
def test_a_package_that_cannot_be_imported_breaks_nothing_else(install, code):
    install("acme-three", "acme_three", code)
    assert "acme-three 1.2 cannot be imported" in by_name.unavailable("acme_three")
    with pytest.raises(
        fxq.BackendError, match=r"backend 'acme_three' of the package acme-three 1\.2 cannot be imported"
    ):
        by_name.get_backend("acme_three")
    assert by_name.get_backend("reference").name == "reference"


@pytest.mark.parametrize("method", ["__init__", "available"])
def test_a_backend_that_fails_breaks_nothing_else(install, monkeypatch, method):
    failing = f"    def {method}(self):\n        raise ValueError('no licence')\n"
    install("acme-six", "acme_six", CODE.format(name="acme_six") + failing)
    reason = "backend 'acme_six' of the package acme-six 1.2 fails: no licence"
    assert reason in by_name.unavailable("acme_six")
    alone(monkeypatch)
    with pytest.warns(fxq.FxqWarning, match="no int8 kernels"):
        assert by_name.get_backend("auto").name == "reference"
    with pytest.raises(fxq.BackendError, match="no licence"):
        by_name.get_backend("acme_six")


@pytest.mark.slow
def test_a_name_of_fxq_is_refused(install):
    install("acme-four", "reference", CODE.format(name="reference"))
    assert by_name.backend_type("reference").__module__ == "fxq.backends.reference"
    assert fxq.doctor(["reference"], progress=False).machine["backend reference"] == (
        "of acme-four 1.2: the name 'reference' is taken by a backend of fxq"
    )


def test_a_name_of_two_packages_is_refused(install):
    install("acme-five", "acme_five")
    install("acme-six", "acme_five")
    with pytest.raises(fxq.RecipeError, match=r"of acme-five 1\.2: the name 'acme_five' is taken by .* acme-six 1\.2"):
        fxq.Recipe.static(backend="acme_five")


def test_an_entry_point_of_another_name_than_its_class(install):
    install("acme-seven", "acme_seven", CODE.format(name="other"))
    with pytest.raises(fxq.BackendError, match="acme_seven:Engine is called 'other', or lacks methods"):
        by_name.get_backend("acme_seven")


def test_an_unknown_name_is_compared_with_those_of_packages(install):
    install("acme-eight", "acme_eight")
    with pytest.raises(fxq.RecipeError, match="unknown backend 'acme_eigth'; did you mean 'acme_eight'"):
        fxq.Recipe.static(backend="acme_eigth")
