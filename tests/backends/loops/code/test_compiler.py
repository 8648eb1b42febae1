"""Functions that Numba compiles, and what happens where it does not."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from fxq.backends.loops.code import amx_probe, compiler
from fxq.backends.loops.code.cpu_kinds import KINDS, cpu_kind


@pytest.fixture
def anew():
    compiler._loaded.cache_clear()
    yield
    compiler._loaded.cache_clear()


def test_a_function_of_addresses_and_numbers():
    numba = pytest.importorskip("numba")

    @compiler.compiled("f* i f")
    def scale(values, count, factor):
        values = numba.carray(values, count)
        for i in range(count):
            values[i] *= np.float32(factor)

    x = torch.arange(5.0)
    scale(x.data_ptr(), 4, 2.0)
    assert x.tolist() == [0, 2, 4, 6, 4]


def test_each_closure_has_its_own_name():
    """Numba tells closures with one name apart by a counter, which is another one where cached code was compiled."""
    pytest.importorskip("numba")

    def adds(number, name):
        return compiler.helper(lambda x: x + number, name)

    assert [adds(1, "adds_1")(2), adds(2, "adds_2")(2)] == [3, 4]
    with pytest.raises(ValueError, match="test_compiler would be compiled as adds_1: give each"):
        adds(3, "adds_1")


@pytest.mark.slow
def test_cached_code_calls_its_own_closures(tmp_path):
    """Compiled where one function more came before, and read beside fresh code of the same closures."""
    pytest.importorskip("numba")
    module = (
        "from fxq.backends.loops.code import compiler, memory_loops\n"
        "@compiler.compiled('i i i i i')\n"
        "def {}(kind, x, count, slope, numbers):\n"
        "    memory_loops.apply_function(kind, x, count, slope, numbers)\n"
    )
    (tmp_path / "cached.py").write_text(module.format("run_cached"))
    (tmp_path / "fresh.py").write_text(module.format("run_fresh"))
    script = (
        "import sys, numba, torch\n"
        "from numba.core.bytecode import FunctionIdentity\n"
        "if sys.argv[1] == 'write': next(FunctionIdentity._unique_ids)\n"
        "from fxq.backends.loops.code.memory_loops import SIGMOID\n"
        "if sys.argv[1] == 'read': import fresh\n"
        "from cached import run_cached\n"
        "x = torch.linspace(-4, 4, 16); y, slope, numbers = x.clone(), torch.ones(16), torch.zeros(2)\n"
        "run_cached(SIGMOID, y.data_ptr(), 16, slope.data_ptr(), numbers.data_ptr())\n"
        "torch.testing.assert_close(y, x.sigmoid(), rtol=1e-6, atol=1e-6)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FXQ_CACHE": str(tmp_path / "cache")}
    for role in ("write", "read"):
        subprocess.run([sys.executable, "-c", script, role], check=True, env=environment, cwd=tmp_path)


@pytest.mark.usefixtures("anew")
def test_without_numba_there_are_no_loops(monkeypatch):
    for name in ("numba", "fxq.backends.loops.code.row_loops"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it raises
    assert compiler.loops("row_loops") is None and compiler.loops_for("row_loops", 1) is None
    assert "pip install fxq[jit]" in compiler.description()


def test_what_compiles_is_said():
    pytest.importorskip("numba")
    kind = cpu_kind()
    played = " by order of FXQ_CPU_KIND" if kind.is_played else ""
    emulated = ", which it emulates slowly" if kind.is_played and kind.has_amx else ""
    said = compiler.description()
    assert said.startswith(f"compiled by Numba {compiler.installed()} for {kind.name}{played}{emulated}")


def test_the_reason_is_said_if_the_cpu_has_amx_and_it_does_not_work(monkeypatch):
    pytest.importorskip("numba")
    for has_amx, said in ((True, " for avx512_vnni (without AMX: Linux denies it)"), (False, " for avx512_vnni")):
        monkeypatch.setattr(compiler, "cpu_kind", lambda: next(kind for kind in KINDS if kind.name == "avx512_vnni"))
        monkeypatch.setattr(amx_probe, "has_amx", lambda has_amx=has_amx: has_amx)
        monkeypatch.setattr(amx_probe, "refusal", lambda: "Linux denies it")
        assert compiler.description().endswith(said)


@pytest.mark.parametrize(("threads", "few", "many"), [(1, True, True), (compiler._MAX_LOOP_THREADS + 1, True, False)])
def test_pytorch_is_quicker_with_many_threads(threads, few, many, monkeypatch):
    monkeypatch.setattr(compiler, "loops", lambda name: sys)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert (compiler.loops_for("row_loops", 100) is sys) == few
    assert (compiler.loops_for("row_loops", 2**30) is sys) == many


def test_threads_call_at_once():
    pytest.importorskip("numba")
    quantize = compiler.loops("row_loops").quantize_rows
    wrong = []

    def call(seed):
        x = torch.randn(64, 33, generator=torch.Generator().manual_seed(seed))
        scale, zero, integers = torch.empty(64), torch.empty(64), torch.empty(64, 33, dtype=torch.uint8)
        for _ in range(200):
            addresses = (tensor.data_ptr() for tensor in (x, scale, zero, integers))
            quantize(*addresses, 64, 33, 0, 127, 1, 255)
            if not torch.equal(integers, ((x * (1 / scale[:, None])).round() + 128).to(torch.uint8)):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
