"""Backends and kernels by name: which backends run here, why others do not, and that names are unique."""

import pytest

import fxq
from fxq.backends import by_name, cpu
from fxq.backends.by_name import (
    auto_order,
    backend_type,
    builtin_names,
    devices_of,
    fastest_order,
    get_backend,
    kernel_named,
    unavailable,
)
from fxq.backends.kernel import Kernel, known_kernels
from fxq.errors import BackendError

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("name", builtin_names())
def test_a_backend_is_available_or_says_what_to_do(name):
    reason = unavailable(name, "meta")
    assert reason is None if name in ("reference", "tensorrt") else "the model is on meta" in reason
    reason = unavailable(name)
    if reason is None:
        assert get_backend(name).name == name
    else:
        assert "Use backend=" in reason
        with pytest.raises(BackendError, match="Use backend="):
            get_backend(name)


def test_auto_takes_the_first_that_is_available(monkeypatch):
    monkeypatch.setattr(cpu, "is_x86", lambda: False)
    monkeypatch.setattr("fxq.backends.packed.packed_kernels.has_engine", lambda name: False)
    assert "needs an x86-64 CPU" in unavailable("x86")
    for taken in ("jit", "openvino", "onnxruntime"):  # before the one that runs nothing on integers
        if unavailable(taken) is None:
            assert get_backend("auto").name == taken
        monkeypatch.setattr(backend_type(taken), "available", lambda self: "not here")
    with pytest.warns(fxq.FxqWarning, match="no int8 kernels"):
        assert get_backend("auto").name == "reference"


def test_fastest_tries_all_that_may_win_here(monkeypatch):
    monkeypatch.setattr(cpu, "is_x86", lambda: True)
    assert fastest_order() == ("x86", "fbgemm", "jit", "openvino", "onnxruntime")
    monkeypatch.setattr(cpu, "is_x86", lambda: False)
    assert fastest_order() == ("qnnpack", "jit", "openvino", "onnxruntime")


def test_an_unknown_name():
    with pytest.raises(BackendError, match="did you mean 'fbgemm'"):
        unavailable("fbgem")
    with pytest.raises(BackendError, match=r"unknown kernel 'x86.convs'; did you mean .*'x86.conv'"):
        kernel_named("x86.convs")


@pytest.mark.parametrize("name", ["x86.conv", "fbgemm.linear", "qnnpack.conv_transpose", "cpu.table"])
def test_a_kernel_by_its_name(name):
    assert kernel_named(name).name == name
    assert {kernel.name: kernel for kernel in known_kernels().values()} == dict(known_kernels())


def test_a_name_claimed_twice():
    """Another class may not take the name; a class that is defined again replaces the first."""

    def make(name, path):
        return type(path, (Kernel,), {"name": name, "__qualname__": path})

    mean = kernel_named("cpu.mean")
    with pytest.raises(
        BackendError, match=r"two kernels are called 'cpu.mean': fxq.backends.plain.pool.Mean and .*Other"
    ):
        make("cpu.mean", "Other")
    assert kernel_named("cpu.mean") is mean
    make("mine", "Mine")
    again = make("mine", "Mine")
    assert kernel_named("mine") is again
    assert type("Child", (mean,), {}).name == "cpu.mean"
    assert kernel_named("cpu.mean") is mean


def test_a_model_elsewhere_is_told_where_to():
    assert devices_of("x86") == ("cpu",)
    with pytest.raises(BackendError, match=r"'x86' runs on cpu, the model is on cuda; move it with model.to\('cpu'\)"):
        get_backend("x86", "cuda")
    assert get_backend("reference", "cuda").name == "reference"


@pytest.mark.parametrize("runs", ["x86", "fbgemm", "reference"])
def test_auto_is_the_first_that_runs_here(runs, monkeypatch):
    monkeypatch.setattr(cpu, "is_x86", lambda: True)
    order = auto_order()

    class Fake:
        devices = ()

        def __init__(self, name):
            self.name = name

        def __call__(self):
            return self

        def available(self):
            return "not here" if order.index(self.name) < order.index(runs) else None

        def drawback(self):
            return None

    monkeypatch.setattr(by_name, "backend_type", Fake)
    if runs == "reference":
        with pytest.warns(fxq.FxqWarning, match="no int8 kernels"):
            assert get_backend("auto").name == runs
    else:
        assert get_backend("auto").name == runs
