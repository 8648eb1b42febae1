"""Code for 16 floats at a time, each piece in a function of its own, against float64."""

import math

import numpy as np
import pytest
import torch

from fxq.backends.loops.code.compiler import compiled
from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

vectors = pytest.importorskip("fxq.backends.loops.code.vectors", reason="needs Numba", exc_type=ImportError)
on_addresses = pytest.importorskip("fxq.backends.loops.code.machine_code").on_addresses


@on_addresses
def functions(b, x, out):
    """Functions of `EXACT`, one after the other."""
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
    inside = vectors.clamp(b, whole, low, high)
    for place, value in zip(
        floats,
        [
            vectors.rounded(b, inside),
            vectors.nearest(b, inside),
            inside,
            vectors.multiply_add(b, whole, 0.5, low),
            vectors.splat(b, 7.0),
            vectors.splat(b, vectors.load(b, numbers, vectors.FLOAT32, 8)),
        ],
        strict=True,
    ):
        vectors.store(b, value, place)


@on_addresses
def powers(b, x, out):
    """2**x of 16 floats."""
    vectors.store(b, vectors.power_of_two(b, vectors.load(b, x, vectors.FLOATS)), out)


@on_addresses
def joins(b, x, out):
    """16 floats joined by sums, by the larger of two, and by differences."""

    def larger(left, right):
        return b.select(b.fcmp_ordered(">", left, right), left, right)

    y = vectors.load(b, x, vectors.FLOATS)
    for k, join in enumerate((b.fadd, larger, b.fsub)):
        vectors.store(b, vectors.reduced(b, y, join), b.add(out, vectors.number(4 * k)))


@compiled("i i i")
def run_powers(x, blocks, out):
    for k in range(blocks):
        powers(x + 64 * k, out + 64 * k)


@compiled("i i")
def run_joins(x, out):
    joins(x, out)


@compiled("i i i")
def run_functions(x, blocks, out):
    for k in range(blocks):
        functions(x + 64 * k, out + 64 * 6 * k)


@compiled("i i i")
def run_pieces(x, numbers, out):
    pieces(x, numbers, out)


def result(x):
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
    torch.testing.assert_close(result(WIDE)[name].double(), EXACT[name](WIDE.double()), rtol=3e-7, atol=atol)


def test_far_from_zero():
    x = torch.tensor([30.0, 88, 89, 104, 127, 130, 1e3, 1e6, 1e10, 1e20, 3e38, math.inf, 31, 32, 33, 34])
    above, below = result(x), result(-x)
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
    by_name = result(x)
    for name in ("silu", "hardswish", "gelu"):
        torch.testing.assert_close(by_name[name].double(), EXACT[name](x.double()), rtol=1e-6, atol=2e-45, msg=name)
    torch.testing.assert_close(by_name["tanh"].double(), torch.tanh(x.double()), rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu"])
def test_what_is_not_a_number_stays_that(name):
    assert bool(result(torch.full((16,), math.nan))[name].isnan().all())


# ---- powers of two


def powers_of_two(x):
    """float32 of any count."""
    padded = torch.cat([x, torch.zeros(-len(x) % 16)])
    out = torch.empty_like(padded)
    run_powers(padded.data_ptr(), len(padded) // 16, out.data_ptr())
    return out[: len(x)]


def test_powers_near_float64():
    x = torch.cat([torch.linspace(-120, 120, 50001), torch.linspace(-2, 2, 20001), torch.linspace(-1e-4, 1e-4, 2001)])
    torch.testing.assert_close(powers_of_two(x).double(), 2 ** x.double(), rtol=2e-7, atol=0)


def test_powers_of_integers_are_exact():
    whole = torch.arange(-120.0, 121)
    assert torch.equal(powers_of_two(whole).double(), 2 ** whole.double())


def test_powers_that_are_too_large_or_small():
    """NaN stays."""
    result = powers_of_two(torch.tensor([120.01, 128, 1e4, 3e38, math.inf, -120.01, -150, -3e38, -math.inf, math.nan]))
    assert result[:9].tolist() == [2.0**120] * 5 + [2.0**-120] * 4 and math.isnan(result[9])


def test_powers_of_halves():
    """And of the floats next to them: they are as far from a whole number as any."""
    half = np.arange(-119, 120, dtype=np.float32) + np.float32(0.5)
    x = torch.from_numpy(np.concatenate([np.nextafter(half, np.float32(to)) for to in (-999, 999)] + [half]))
    torch.testing.assert_close(powers_of_two(x).double(), 2 ** x.double(), rtol=2e-7, atol=0)


# ---- all lanes as one number


def joined_lanes(x):
    """The sum, the largest, and the difference."""
    x, out = np.array(x, np.float32), np.zeros(3, np.float32)
    run_joins(x.ctypes.data, out.ctypes.data)
    return out.tolist()


@pytest.mark.parametrize("lane", range(16))
def test_each_lane_is_joined(lane):
    x = np.full(16, -2.0)
    x[lane] = 5
    total, largest, difference = joined_lanes(x)
    sign = (-1) ** lane.bit_count()
    assert (total, largest, difference) == (-25, 5, 7 * sign)


def test_lanes_of_several_sizes():
    total, largest, _ = joined_lanes([2.0**k for k in range(16)])
    assert (total, largest) == (2**16 - 1, 2**15)


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
    """NaN becomes the lower bound."""
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
