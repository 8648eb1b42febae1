"""Instructions of ARM CPUs that an operating system reports, and kinds of CPUs that follow from them."""

import ctypes
import platform
from types import SimpleNamespace

import pytest

from fxq.backends.loops.code import amx_probe, arm_probe, cpu_kinds

pytestmark = pytest.mark.any_cpu
pytest.importorskip("numba")
LISTED = "+fp-armv8,+lse,+neon"
"""Features that LLVM lists for a CPU with more."""


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ({16: 1 << 20 | 1 << 1, 26: 1 << 13}, ("neon", "dotprod", "i8mm")),
        ({16: 1 << 20 | 1 << 1, 26: 0}, ("neon", "dotprod")),
        ({16: 1 << 1, 26: 0}, ("neon",)),
    ],
)
def test_linux(words, features, monkeypatch):
    def getauxval(entry):
        return words[entry]

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=getauxval))
    assert arm_probe.features.__wrapped__() == features


def test_macos(monkeypatch):
    def sysctlbyname(name, value, *_):
        value._obj.value = int(name == b"hw.optional.arm.FEAT_DotProd")
        return -1 if name == b"hw.optional.arm.FEAT_I8MM" else 0  # of a system that does not know it

    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert arm_probe.features.__wrapped__() == ("dotprod",)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="another CPU than ARM")
def test_other_machines_have_none():
    assert arm_probe.features() == ()


@pytest.fixture
def arm_cpu(monkeypatch):
    """A CPU with instructions that LLVM does not list."""
    monkeypatch.setattr(cpu_kinds, "compiled_features", lambda: LISTED)
    monkeypatch.setattr(arm_probe, "features", lambda: ("neon", "dotprod", "i8mm"))
    monkeypatch.setattr(amx_probe, "refusal", lambda: "")
    monkeypatch.delenv("FXQ_CPU_KIND", raising=False)
    for setting in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(pytest.importorskip("numba.core.config"), setting, None, raising=False)


@pytest.mark.usefixtures("arm_cpu")
@pytest.mark.parametrize(
    ("played", "told"),
    [("", f"{LISTED},+dotprod,+i8mm"), ("neon_dot", f"{LISTED},+dotprod,+i8mm,-i8mm")],
)
def test_numba_is_told_what_llvm_does_not_list(played, told, monkeypatch):
    texts = []
    monkeypatch.setenv("FXQ_CPU_KIND", played)
    monkeypatch.setattr(cpu_kinds, "_tell_numba", lambda text: texts.append(text) or True)
    assert cpu_kinds.cpu_kind.__wrapped__().name == (played or "neon_i8mm") and texts == [told]


@pytest.mark.usefixtures("arm_cpu")
def test_numba_that_has_compiled_before(monkeypatch, caplog):
    """LLVM would end the process where code needs an instruction that Numba does not compile for."""
    monkeypatch.setattr(cpu_kinds, "_tell_numba", lambda _: False)
    assert cpu_kinds.cpu_kind.__wrapped__().name == "other"
    assert "without dotprod and i8mm, which the CPU has" in caplog.text


@pytest.mark.usefixtures("arm_cpu")
def test_features_that_the_user_chose(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("numba.core.config"), "CPU_FEATURES", LISTED, raising=False)
    assert cpu_kinds.cpu_kind.__wrapped__().name == "other"
