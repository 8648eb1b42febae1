"""CPU features, also those of a smaller CPU that this machine is limited to."""

from unittest.mock import mock_open

import pytest

from fxq.backends import cpu
from tests.support.processes import in_new_python


def asked_under(isa, name="ONEDNN_MAX_CPU_ISA"):
    """has_vnni() and has_amx() in a process where oneDNN is limited to the instruction set `isa`."""
    code = "from fxq.backends import cpu; print(cpu.has_vnni(), cpu.has_amx())"
    done = in_new_python(code, **{"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "", name: isa})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_cpu_questions_have_answers():
    asked = (cpu.has_vnni, cpu.has_amx, cpu.has_onednn_int8, cpu.is_x86)
    assert all(isinstance(ask(), bool) for ask in asked)


@pytest.mark.skipif(not (cpu.is_x86() and cpu.has_onednn_int8()), reason="needs the oneDNN int8 kernels")
def test_onednn_can_be_told_to_be_an_older_cpu():
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        assert asked_under("AVX2", name) == ["False", "False"]


@pytest.mark.parametrize(
    ("onednn", "dnnl", "isa"),
    [
        ("", "", "DEFAULT"),
        ("avx2", "", "AVX2"),
        ("", "AVX2", "AVX2"),
        ("AVX512_CORE_VNNI", "AVX2", "AVX512_CORE_VNNI"),
        ("DEFAULT", "AVX2", "DEFAULT"),
        ("ALL", "", "DEFAULT"),
        ("no such set", "AVX2", "DEFAULT"),
    ],
)
def test_which_of_onednns_two_variables_counts(monkeypatch, onednn, dnnl, isa):
    """The values are from oneDNN 3.12's output with `ONEDNN_VERBOSE=1`."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", onednn)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", dnnl)
    assert cpu.onednn_isa() == isa


@pytest.mark.slow
@pytest.mark.skipif(not cpu.has_vnni(), reason="needs a CPU with VNNI")
def test_vnni_without_amx():
    assert asked_under("AVX512_CORE_VNNI")[1] == "False"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: another\n", "A CPU @ 2 GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "implementer 0x41, part 0xd40"),
    ],
)
def test_name_of_a_cpu(lines, name, monkeypatch):
    """ARM's CPUs have numbers, without which all of them would count as equal machines."""
    monkeypatch.setattr("builtins.open", mock_open(read_data=lines))
    assert cpu.cpu_name.__wrapped__() == name
