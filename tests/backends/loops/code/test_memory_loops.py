"""Helpers that the loops of a program share."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import compiled
from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

memory_loops = pytest.importorskip("fxq.backends.loops.code.memory_loops", reason="needs Numba", exc_type=ImportError)

apply, at, read, write = memory_loops.apply_function, memory_loops.address_of, memory_loops.read, memory_loops.write
floats, bytes_, ints = memory_loops.floats, memory_loops.bytes_, memory_loops.ints


@compiled("i i f f i i")
def run_read(x, is_float, scale, shift, out, count):
    read(x, is_float, scale, shift, out, count)


@compiled("i i i i i")
def run_write(x, to_floats, numbers, out, count):
    write(x, to_floats, numbers, out, count)


@compiled("i i i i i")
def run_apply(kind, x, count, slope, numbers):
    apply(kind, x, count, slope, numbers)


@compiled("i64* i64* i")
def to_integers(bases, step, k):
    """Write the sum of the float, the byte and the integer at an address as the next integer."""
    address = at(bases, step, k)
    ints(address)[2] = int(floats(address)[0]) + bytes_(address)[4] + ints(address)[3]


def test_an_address_is_one_of_some_and_bytes_from_there():
    memory = np.zeros(9, np.int32)
    memory[5:].view(np.float32)[0] = 3.0
    memory[6:].view(np.uint8)[0] = 200
    memory[8] = -1000
    bases, step = np.array([0, 1, memory.ctypes.data]), np.array([9, 2, 20, 0, memory.ctypes.data + 20])
    for k in (1, 3):
        memory[7] = 0
        to_integers(bases.ctypes.data, step.ctypes.data, k)
        assert memory[7] == 3 + 200 - 1000


COUNTS = st.one_of(st.integers(0, 70), st.sampled_from([511, 512]))


@settings(deadline=None)
@given(count=COUNTS, scale=st.sampled_from([0.0271, 1.0, 1e-6]), zero=st.integers(0, 255))
def test_integers_as_floats(count, scale, zero):
    x, out = torch.randint(0, 256, (count,), dtype=torch.uint8), torch.full((count + 1,), 9.0)
    run_read(x.data_ptr(), 0, scale, -zero * scale, out.data_ptr(), count)
    torch.testing.assert_close(out[:count].double(), (x.double() - zero) * scale, rtol=1e-6, atol=5e-5 * scale)
    assert out[count] == 9


def test_floats_stay_what_they_are():
    """All bits of them, read or written."""
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3e38, 1.5] * 3)
    for run in (
        lambda out: run_read(x.data_ptr(), 1, 2.0, 3.0, out, 20),
        lambda out: run_write(x.data_ptr(), 1, 0, out, 20),
    ):
        out = torch.full((21,), 9.0)
        run(out.data_ptr())
        assert torch.equal(out[:20].view(torch.int32), x[:20].view(torch.int32)) and out[20] == 9


@settings(deadline=None)
@given(
    count=COUNTS, low=st.integers(0, 100), high=st.integers(100, 255), factor=st.sampled_from([1.0, 4.0, 0.125]),
    zero=st.integers(0, 255), seed=st.integers(0, 99),
)  # fmt: skip
def test_floats_as_integers(count, low, high, factor, zero, seed):
    """All is exact, and halves become even."""
    torch.manual_seed(seed)
    x, out = torch.randint(-2000, 2000, (count,)) / (4 * factor), torch.full((count + 1,), 9, dtype=torch.uint8)
    numbers = torch.tensor([low, high, factor, zero]).float()
    run_write(x.data_ptr(), 0, numbers.data_ptr(), out.data_ptr(), count)
    wanted = (x * factor + zero).round().clamp(low, high)
    assert torch.equal(out[:count], wanted.to(torch.uint8)) and out[count] == 9


@pytest.mark.parametrize("count", [6, 22])
def test_floats_that_have_no_integer(count):
    """NaN becomes the lowest integer."""
    x = torch.tensor([math.nan, -math.inf, math.inf, 3e38, -3e38, 1e-45] * 4)
    numbers, out = torch.tensor([5.0, 250, 10, 20]), torch.zeros(count, dtype=torch.uint8)
    run_write(x.data_ptr(), 0, numbers.data_ptr(), out.data_ptr(), count)
    assert out.tolist() == ([5, 5, 250, 250, 5, 20] * 4)[:count]


def test_functions_have_the_numbers_of_their_names():
    numbers = [getattr(memory_loops, name.upper()) for name in memory_loops.FUNCTION_NAMES]
    assert numbers == list(range(len(numbers))) and memory_loops.NO_FUNCTION not in numbers


@pytest.mark.parametrize("name", memory_loops.FUNCTION_NAMES)
@pytest.mark.parametrize("count", [0, 1, 16, 48, 50])
def test_functions(count, name):
    """16 at a time: only these and the room after them may change."""
    x, slope, numbers = torch.randn(80) * 3, torch.randn(16), torch.tensor([-1.0, 2.0])
    before, room = x.clone(), -(-count // 16) * 16
    exact = {
        "clamp": lambda x: x.clamp(-1, 2),
        "prelu": lambda x: torch.where(x < 0, x * slope.double().repeat(len(x) // 16), x),
        **EXACT,
    }[name](before[:room].double())
    run_apply(memory_loops.FUNCTION_NAMES.index(name), x.data_ptr(), count, slope.data_ptr(), numbers.data_ptr())
    torch.testing.assert_close(x[:count].double(), exact[:count], rtol=1e-6, atol=1e-6)
    assert torch.equal(x[room:], before[room:])
