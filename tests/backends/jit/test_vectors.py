"""Code for 16 floats at a time, each piece in a function of its own, against float64."""

import math

import numpy as np
import pytest
import torch

from fxq.backends.jit.compiler import compiled
from tests.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

vectors = pytest.importorskip("fxq.backends.jit.vectors", reason="needs Numba", exc_type=ImportError)
on_addresses = pytest.importorskip("fxq.backends.jit.machine_code").on_addresses


@on_addresses
def functions(b, x, out):
    """Those of `EXACT`, one after the other."""
    for k, name in enumerate(EXACT):
        y = getattr(vectors, name)(b, vectors.load(b, x, vectors.FLOATS))
        vectors.store(b, y, b.add(out, vectors.number(64 * k)))


@on_addresses
def pieces(b, x, numbers, out):
    """The others: 16 bytes; 16 integers; four times 16 floats."""
    whole, floats = vectors.load(b, x, vectors.FLOATS), [out]
    for size in (16, 64, 64, 64, 64):
        floats.append(b.add(floats[-1], vectors.number(size)))
    low, high = vectors.bounds(b, numbers)
    inside = vectors.clamped(b, whole, low, high)
    for place, value in zip(
        floats,
        [
            vectors.rounded(b, inside),
            vectors.nearest(b, inside),
            inside,
            vectors.fused(b, whole, 0.5, low),
            vectors.splat(b, 7.0),
            vectors.splat(b, vectors.load(b, numbers, vectors.FLOAT, 8)),
        ],
        strict=True,
    ):
        vectors.store(b, value, place)


@compiled("i i i")
def run_functions(x, blocks, out):
    for k in range(blocks):
        functions(x + 64 * k, out + 64 * 6 * k)


@compiled("i i i")
def run_pieces(x, numbers, out):
    pieces(x, numbers, out)


def found(x):
    """float32 of a multiple of 16 -> each function of them."""
    out = torch.empty(len(x) // 16, len(EXACT), 16)
    run_functions(x.data_ptr(), len(out), out.data_ptr())
    return {name: out[:, k].flatten() for k, name in enumerate(EXACT)}


WIDE = torch.from_numpy(
    np.concatenate([np.linspace(-30, 30, 40000), np.linspace(-1e-3, 1e-3, 2000), np.linspace(-8, 8, 6000)])
).float()


@pytest.mark.parametrize(
    ("name", "atol"),
    [("silu", 6e-7), ("hardswish", 1e-6), ("gelu", 1e-6), ("sigmoid", 2e-7), ("tanh", 3e-7), ("hardsigmoid", 2e-7)],
)
def test_near_float64(name, atol):
    torch.testing.assert_close(found(WIDE)[name].double(), EXACT[name](WIDE.double()), rtol=3e-7, atol=atol)


def test_far_from_zero():
    x = torch.tensor([30.0, 88, 89, 104, 127, 130, 1e3, 1e6, 1e10, 1e20, 3e38, math.inf, 31, 32, 33, 34])
    above, below = found(x), found(-x)
    for name in ("sigmoid", "tanh", "hardsigmoid"):
        assert above[name].tolist() == [1.0] * 16, name
        wanted = torch.full((16,), -1.0 if name == "tanh" else 0.0)
        torch.testing.assert_close(below[name], wanted, rtol=0, atol=2e-13, msg=name)
    for name in ("silu", "hardswish", "gelu"):
        torch.testing.assert_close(above[name], x, rtol=3e-7, atol=0, msg=name)
        finite = x.isfinite()
        assert bool((below[name].abs() <= 3e-8 * x)[finite].all()), name


def test_near_zero():
    """Powers of ten down to those that are not normal."""
    x = torch.tensor([s * 10.0**-k for k in range(1, 45, 2) for s in (1, -1)] + [0.0] * 4)
    by_name = found(x)
    for name in ("silu", "hardswish", "gelu"):
        torch.testing.assert_close(by_name[name].double(), EXACT[name](x.double()), rtol=1e-6, atol=2e-45, msg=name)
    torch.testing.assert_close(by_name["tanh"].double(), torch.tanh(x.double()), rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu"])
def test_what_is_not_a_number_stays_that(name):
    assert bool(found(torch.full((16,), math.nan))[name].isnan().all())


# ---- the others


def made(x, low=0.0, high=255.0):
    """16 floats -> bytes, integers, clamped, x / 2 + low, 7 everywhere, 9 everywhere.

    All lies at odd addresses, for which nothing is aligned.
    """
    memory, numbers = np.zeros(65, np.uint8), np.array([low, high, 9], np.float32)
    memory[1:] = np.array(x, np.float32).view(np.uint8)
    out = np.zeros(16 + 5 * 64 + 1, np.uint8)
    run_pieces(memory.ctypes.data + 1, numbers.ctypes.data, out.ctypes.data + 1)
    floats = out[81:].copy().view(np.float32).reshape(4, 16)
    return (out[1:17], out[17:81].copy().view(np.int32), *floats)


def test_the_nearest_integers():
    """Halves become even, and what is a bit more or less than half does not."""
    halves = np.arange(256, dtype=np.float32) + np.float32(0.5)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(999))])
    x = np.concatenate([near[near <= 255], np.arange(256, dtype=np.float32), [0, 1e-45, 254.999, 1e-7]])
    for part in np.resize(x, (-(-len(x) // 16), 16)).astype(np.float32):
        as_bytes, as_integers, *_ = made(part)
        assert as_bytes.tolist() == as_integers.tolist() == np.rint(part).tolist()


def test_bounds():
    """What is not a number becomes the lower one."""
    x = [math.nan, -math.inf, math.inf, -3e38, 3e38, 3.0, 2.9, 3.1, 200.0, 199.9, 200.1, -0.0, 0.0, 255.0, 5.5, 100.0]
    _, integers, inside, *_ = made(x, 3.0, 200.0)
    wanted = [3, 3, 200, 3, 200, 3, 3, 3.1, 200, 199.9, 200, 3, 3, 200, 5.5, 100]
    assert inside.tolist() == np.array(wanted, np.float32).tolist()
    assert integers.tolist() == np.rint(np.array(wanted)).tolist()


def test_products_and_sums():
    x = np.linspace(-5, 5, 16, dtype=np.float32)
    *_, halved, sevens, nines = made(x, -1.25)
    np.testing.assert_allclose(halved, x.astype(np.float64) / 2 - 1.25, rtol=1e-7)
    assert sevens.tolist() == [7.0] * 16 and nines.tolist() == [9.0] * 16
