"""Functions that Numba compiles, and what happens where it does not."""

import sys
import threading

import numpy as np
import pytest
import torch

from fxq.backends.loops.code import compiler


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


@pytest.mark.usefixtures("anew")
def test_without_numba_there_are_no_loops(monkeypatch):
    for name in ("numba", "fxq.backends.loops.code.row_loops"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it raises
    assert compiler.loops("row_loops") is None and compiler.loops_for("row_loops", 1) is None
    assert "pip install fxq[jit]" in compiler.description()


def test_what_compiles_is_said():
    pytest.importorskip("numba")
    assert compiler.description() == f"compiled by Numba {compiler.installed()}"


@pytest.mark.parametrize(("threads", "few", "many"), [(1, True, True), (compiler._MAX_LOOP_THREADS + 1, True, False)])
def test_pytorch_is_quicker_with_many_threads(threads, few, many, monkeypatch):
    monkeypatch.setattr(compiler, "loops", lambda name: sys)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert (compiler.loops_for("row_loops", 100) is sys) == few
    assert (compiler.loops_for("row_loops", 2**30) is sys) == many


def test_threads_call_at_once():
    pytest.importorskip("numba")
    multiply = compiler.loops("step_loops").multiply
    weight = torch.randint(-128, 128, (640, 64), dtype=torch.int8)
    wrong = []

    def call(seed):
        state = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        wide, sums = torch.zeros(64, dtype=torch.int16), torch.empty(640, dtype=torch.int32)
        for _ in range(200):
            multiply(state.data_ptr(), 64, wide.data_ptr(), weight.data_ptr(), sums.data_ptr(), *weight.shape)
            if not torch.equal(sums, weight.int() @ state.int()):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
