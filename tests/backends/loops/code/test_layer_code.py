"""Tiles of sums, which are exact, against integers of 64 bits; whole layers are tested in test_layer_loops.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import compiled
from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

layer_code = pytest.importorskip("fxq.backends.loops.code.layer_code", reason="needs Numba", exc_type=ImportError)
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")

many_pixels, four_pixels, one_pixel = layer_code.many_pixels, layer_code.four_pixels, layer_code.one_pixel
round_many, round_four, round_one = layer_code.round_many, layer_code.round_four, layer_code.round_one
prelu_many, residual_many = layer_code.prelu_many, layer_code.residual_many
TileInput, TileOutput, Residual = layer_code.TileInput, layer_code.TileOutput, layer_code.Residual
silu_many, hardswish_many, gelu_many = layer_code.silu_many, layer_code.hardswish_many, layer_code.gelu_many
four_depthwise, one_depthwise = layer_code.four_depthwise, layer_code.one_depthwise
four_wide, one_wide = layer_code.four_wide, layer_code.one_wide
GROUP, LANES, WIDE = machine_code.GROUP, 16, machine_code.WIDE_CHANNELS
SIZES = (machine_code.TILE_PIXELS, 4, 1)
"""The pixels of the tiles of layers; those of depthwise ones are of the last two."""


@compiled("i i i i i i i i i")
def layer(which, x, places, runs, many, groups, weight, start, sums):
    """A tile of `SIZES[which]` pixels."""
    if which == 0:
        many_pixels(TileInput(x, places, runs, many, groups, weight, start), sums)
    elif which == 1:
        four_pixels(TileInput(x, places, runs, many, groups, weight, start), sums)
    else:
        one_pixel(TileInput(x, places, runs, many, groups, weight, start), sums)


@compiled("i i i i i i i i i i i i i i i i")
def rounded_layer(
    which, x, places, runs, many, groups, weight, start, scale, bias, numbers, out, to, slope, residual, others
):
    """Rounded tiles; from 3 on large tiles with one of `FINISHES` before. A grid is stored after the slopes."""
    tile, result = TileInput(x, places, runs, many, groups, weight, start), TileOutput(scale, bias, numbers, out, to)
    if which == 0:
        round_many(tile, result)
    elif which == 1:
        round_four(tile, result)
    elif which == 2:
        round_one(tile, result)
    elif which == 3:
        prelu_many(tile, result, slope)
    elif which == 4:
        residual_many(tile, result, Residual(residual, others, slope + 64))
    elif which == 5:
        silu_many(tile, result)
    elif which == 6:
        hardswish_many(tile, result)
    elif which == 7:
        gelu_many(tile, result)


FINISHES = ("prelu", "add", "silu", "hardswish", "gelu")


@compiled("i i i i i i i i i")
def depthwise(which, x, places, runs, many, stride, weight, start, sums):
    if which == 1:
        four_depthwise(TileInput(x, places, runs, many, 0, weight, start), stride, sums)
    else:
        one_depthwise(TileInput(x, places, runs, many, 0, weight, start), stride, sums)


@compiled("i i i i i i i i i i")
def wide(which, x, places, runs, many, weight, start, scale, bias, tile):
    if which == 1:
        four_wide(TileInput(x, places, runs, many, 0, weight, start), scale, bias, tile)
    else:
        one_wide(TileInput(x, places, runs, many, 0, weight, start), scale, bias, tile)


def run(function, which, *arguments):
    """Call one of them with arrays and counts."""
    function(which, *(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))


class Window:
    """Random memory with pixels and their runs, before and after the address that tiles get."""

    def __init__(self, seed, pixels, many, length, values=(0, 256)):
        self.random = random = np.random.default_rng(seed)
        self.memory = random.integers(*values, 700).astype(np.uint8)
        self.x = self.memory[250:]
        self.places = random.integers(-100, 100, pixels).astype(np.int32)
        self.runs = random.integers(-100, 100, many).astype(np.int32)
        at = 250 + self.places[:, None, None].astype(int) + self.runs[:, None] + np.arange(length)
        self.values = self.memory[at].astype(np.int64)  # (pixels, many, length)


SEEDS, WHICH = st.integers(0, 99), st.integers(0, 2)
EXTREMES = st.sampled_from([((0, 256), (-128, 128)), ((255, 256), (-128, -127)), ((255, 256), (127, 128))])
"""Ranges of integers, and of those of weights."""


def layer_case(seed, which, many, groups, extremes):
    """A window, a weight as tiles read it, what sums begin with, and the sums, int64 (pixels, 16)."""
    at = Window(seed, SIZES[which], many, groups * GROUP, extremes[0])
    weight = at.random.integers(*extremes[1], (many, groups, LANES, GROUP)).astype(np.int8)
    start = at.random.integers(-(2**29), 2**29, LANES).astype(np.int32)
    values = at.values.reshape(-1, many, groups, GROUP)
    return at, weight, start, np.einsum("pmgk,mglk->pl", values, weight.astype(np.int64)) + start


@settings(deadline=None)
@given(which=WHICH, many=st.integers(1, 5), groups=st.integers(1, 30), extremes=EXTREMES, seed=SEEDS)
def test_sums_of_layers(which, many, groups, extremes, seed):
    at, weight, start, exact = layer_case(seed, which, many, groups, extremes)
    sums = np.full((SIZES[which] + 1, LANES), 77, np.int32)
    run(layer, which, at.x, at.places, at.runs, many, groups, weight, start, sums)
    assert sums[:-1].tolist() == exact.tolist() and sums[-1].tolist() == [77] * LANES


@pytest.mark.parametrize("which", [0, 1, 2])
def test_sums_over_31_bits(which):
    """Sums that start below the range of int32 wrap around to the exact result."""
    at, weight, start, exact = layer_case(0, which, 3, 30, ((255, 256), (127, 128)))
    start += np.int32(2**31 - 1) - np.int32(exact.max())
    exact = exact - exact.max() + (2**31 - 1)
    sums = np.zeros((SIZES[which], LANES), np.int32)
    run(layer, which, at.x, at.places, at.runs, 3, 30, weight, start, sums)
    assert sums.tolist() == exact.tolist() and sums.max() == 2**31 - 1


@settings(deadline=None)
@given(
    which=st.integers(0, 2 + len(FINISHES)), many=st.integers(1, 4), groups=st.integers(1, 9),
    bounds=st.sampled_from([(0, 255), (3, 200)]), seed=SEEDS,
)  # fmt: skip
def test_rounded_sums_of_layers(which, many, groups, bounds, seed):
    size = which if which < 3 else 0
    pixels = SIZES[size]
    at, weight, start, exact = layer_case(seed, size, many, groups, ((0, 256), (-128, 128)))
    scale, bias, slope = at.random.random(LANES) / 2**27, at.random.normal(0, 3, LANES), at.random.normal(0, 1, LANES)
    residual, others = at.random.integers(0, 256, 300).astype(np.uint8), at.random.integers(0, 280, pixels)
    factor, zero = (20, 100) if which >= 3 else (1, 0)  # the others have the grid in their scale and bias
    if which < 3:
        scale, bias = 20 * scale, 20 * bias + 100
    columns = np.arange(LANES)
    real = exact * scale + bias
    if which >= 3:
        name = FINISHES[which - 3]
        finished = {
            "prelu": lambda y: np.where(y < 0, y * slope, y),
            "add": lambda y: y + residual[others[:, None] + columns] * 0.037 - 1.5,
        }
        real = finished[name](real) if name in finished else EXACT[name](torch.from_numpy(real)).numpy()
    out, to = np.full(20 * pixels + 5, 9, np.uint8), (20 * at.random.permutation(pixels) + 3).astype(np.int32)
    scale, bias, numbers = (np.array(a, np.float32) for a in (scale, bias, [*bounds, factor, zero]))
    slope, others = np.array([*slope, 0.037, -1.5], np.float32), others.astype(np.int32)
    about = at.x, at.places, at.runs, many, groups, weight, start, scale, bias
    run(rounded_layer, which, *about, numbers, out, to, slope, residual, others)
    written = to[:, None] + columns
    assert np.abs(out[written] - (real * factor + zero).clip(*bounds)).max() <= 0.5 + 1e-3
    assert bool((np.delete(out, written.ravel()) == 9).all())


@settings(deadline=None)
@given(which=st.integers(1, 2), many=st.integers(1, 9), blocks=st.integers(1, 3), extremes=EXTREMES, seed=SEEDS)
def test_sums_of_depthwise_layers(which, many, blocks, extremes, seed):
    at = Window(seed, SIZES[which], many, LANES, extremes[0])
    weight = at.random.integers(*extremes[1], (many, blocks * LANES)).astype(np.int8)
    start = at.random.integers(-(2**30), 2**30, LANES).astype(np.int32)
    sums = np.full((SIZES[which] + 1, LANES), 77, np.int32)
    run(depthwise, which, at.x, at.places, at.runs, many, blocks * LANES, weight, start, sums)
    exact = (at.values * weight[:, :LANES].astype(np.int64)).sum(1) + start
    assert sums[:-1].tolist() == exact.tolist() and sums[-1].tolist() == [77] * LANES


ORDER = np.array([[16 * (lane // 4) + 4 * v + lane % 4 for lane in range(LANES)] for v in range(4)])
"""The channels of four vectors of sums: each has four of each 16."""


@settings(deadline=None)
@given(which=st.integers(1, 2), fours=st.integers(1, 4), extremes=EXTREMES, seed=SEEDS)
def test_64_channels_of_depthwise_layers(which, fours, extremes, seed):
    """Scales are powers of two, and sums below 2**24: all is exact. A CPU without VNNI does nothing."""
    at = Window(seed, SIZES[which], 4 * fours, WIDE, extremes[0])
    by_channel = at.random.integers(*extremes[1], (4 * fours, WIDE))
    start, bias = at.random.integers(-(2**20), 2**20, (2, WIDE))
    scale = 2.0 ** at.random.integers(-2, 3, WIDE)
    exact = ((at.values * by_channel).sum(1) + start) * scale + bias
    weight = np.ascontiguousarray(by_channel.reshape(fours, 4, WIDE).transpose(0, 2, 1)[:, ORDER], np.int8)
    tile = np.full((SIZES[which] + 1, 4, LANES), 77, np.float32)
    start, scale, bias = start[ORDER].astype(np.int32), scale[ORDER].astype(np.float32), bias[ORDER].astype(np.float32)
    run(wide, which, at.x, at.places, at.runs, fours, weight, start, scale, bias, tile)
    wanted = exact[:, ORDER] if machine_code.HAS_VNNI else np.full_like(tile[:-1], 77)
    assert tile[:-1].tolist() == wanted.tolist() and bool((tile[-1] == 77).all())
