"""Tiles of sums, which are exact, against integers of 64 bits; whole layers are tested in test_layer_loops.py."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

layer_code = pytest.importorskip("fxq.backends.loops.code.layer_code", reason="needs Numba", exc_type=ImportError)
epilogue_code = pytest.importorskip("fxq.backends.loops.code.epilogue_code")
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")
vectors = pytest.importorskip("fxq.backends.loops.code.vectors")

emitted = pytest.importorskip("tests.support.emitted")

TileInput, TileOutput, Residual = layer_code.TileInput, epilogue_code.TileOutput, epilogue_code.Residual
GROUP, LANES = machine_code.GROUP, 16
KINDS = [kind for kind in emitted.PLAYED if not kind.has_amx]
"""Kinds of CPUs that this machine can play. Tiles of the kind with AMX are those of AVX512-VNNI."""


def sizes(kind):
    """Pixels of the tiles of layers; those of depthwise ones are the last two."""
    return kind.tile_pixels, 4, 1


def run(kind, make, parameters, *arguments):
    """Compile code for a kind of CPU, and call it with arrays and counts."""
    function = emitted.emitted(kind, make, *parameters)
    function(*(a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in arguments))


@cache
def tile_of(make, *arguments):
    """Function that makes the code of a tile."""
    return partial(make, *arguments)


FINISHES = {
    "prelu": tile_of(lambda: layer_code.prelu_many),
    "add": tile_of(lambda: layer_code.residual_many),
    **{name: tile_of(layer_code.activation_tile, getattr(vectors, name)) for name in ("silu", "hardswish", "gelu")},
}
"""Code of large tiles with something else before the rounding."""


def tile_input(kind, pixels, at, weight, start):
    """`TileInput` as tiles of a kind read it, from a weight (runs, groups, 16, GROUP)."""
    many, groups = weight.shape[:2]
    if kind.dot:
        return at.x, at.places, at.runs, many, groups, weight, start, 0
    pairs = weight.reshape(*weight.shape[:-1], 2, 2)  # third axis from the end: columns
    packed = np.moveaxis(pairs, -2, -3).astype(np.int16 if pixels == kind.tile_pixels else np.int8, order="C")
    own = own_products(at.values, groups).sum((1, 2)).astype(np.int32)
    start = start - own_products(weight, 1).sum((0, 1, -1), dtype=np.int32)
    at.wide = at.memory.astype(np.int16)
    return at.wide[250:], at.places, at.runs, many, groups, packed, start, own


def own_products(integers, groups):
    """Sum of the products of the first and third, and of the second and fourth of each group of the last axis."""
    a, b, c, d = np.moveaxis(integers.reshape(*integers.shape[:-1], groups, GROUP).astype(np.int64), -1, 0)
    return a * c + b * d


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


SEEDS, WHICH, OF_KINDS = st.integers(0, 99), st.integers(0, 2), st.sampled_from(KINDS)
EXTREMES = st.sampled_from([((0, 256), (-128, 128)), ((255, 256), (-128, -127)), ((255, 256), (127, 128))])
"""Ranges of integers, and of those of weights."""


def layer_case(seed, pixels, many, groups, extremes):
    """A window, a weight, what sums begin with, and the sums, int64 (pixels, 16)."""
    at = Window(seed, pixels, many, groups * GROUP, extremes[0])
    weight = at.random.integers(*extremes[1], (many, groups, LANES, GROUP)).astype(np.int8)
    start = at.random.integers(-(2**29), 2**29, LANES).astype(np.int32)
    values = at.values.reshape(-1, many, groups, GROUP)
    return at, weight, start, np.einsum("pmgk,mglk->pl", values, weight.astype(np.int64)) + start


def run_layer(kind, pixels, at, weight, start, sums):
    about = tile_input(kind, pixels, at, weight, start)
    run(kind, tile_of(layer_code.layer_tile, pixels), (TileInput, None), *about, sums)


@settings(deadline=None)
@given(
    kind=OF_KINDS, which=WHICH, many=st.integers(1, 5), groups=st.integers(1, 30), extremes=EXTREMES, seed=SEEDS
)  # fmt: skip
def test_sums_of_layers(kind, which, many, groups, extremes, seed):
    pixels = sizes(kind)[which]
    at, weight, start, exact = layer_case(seed, pixels, many, groups, extremes)
    sums = np.full((pixels + 1, LANES), 77, np.int32)
    run_layer(kind, pixels, at, weight, start, sums)
    assert sums[:-1].tolist() == exact.tolist() and sums[-1].tolist() == [77] * LANES


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_sums_over_31_bits(kind, which):
    """Sums that start below the range of int32 wrap around to the exact result."""
    pixels = sizes(kind)[which]
    at, weight, start, exact = layer_case(0, pixels, 3, 30, ((255, 256), (127, 128)))
    start += np.int32(2**31 - 1) - np.int32(exact.max())
    exact = exact - exact.max() + (2**31 - 1)
    sums = np.zeros((pixels, LANES), np.int32)
    run_layer(kind, pixels, at, weight, start, sums)
    assert sums.tolist() == exact.tolist() and sums.max() == 2**31 - 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.dot], ids=lambda kind: kind.name)
@pytest.mark.parametrize("groups", [1, 7, 8, 21])
def test_products_within_the_groups_of_pixels(kind, groups):
    at = Window(groups, 5, 3, groups * GROUP)
    sums, memory = np.full(6, 77, np.int32), np.append(at.memory, np.zeros(100, np.uint8)).astype(np.int16)
    about = memory[250:], at.places, at.runs, 3, groups, 0, 0, sums
    run(kind, OWN_PRODUCTS, (TileInput, None), *about, 5)
    assert sums.tolist() == [*own_products(at.values, groups).sum((1, 2)).tolist(), 77]


OWN_PRODUCTS = tile_of(lambda: layer_code.sum_own_products)


@settings(deadline=None)
@given(
    kind=OF_KINDS, which=WHICH, finish=st.sampled_from([None, *FINISHES]), many=st.integers(1, 4),
    groups=st.integers(1, 9), bounds=st.sampled_from([(0, 255), (3, 200)]), seed=SEEDS,
)  # fmt: skip
def test_rounded_sums_of_layers(kind, which, finish, many, groups, bounds, seed):
    pixels = sizes(kind)[0 if finish else which]
    at, weight, start, exact = layer_case(seed, pixels, many, groups, ((0, 256), (-128, 128)))
    scale, bias, slope = at.random.random(LANES) / 2**27, at.random.normal(0, 3, LANES), at.random.normal(0, 1, LANES)
    residual, others = at.random.integers(0, 256, 300).astype(np.uint8), at.random.integers(0, 280, pixels)
    factor, zero = (20, 100) if finish else (1, 0)  # the others have the grid in their scale and bias
    if not finish:
        scale, bias = 20 * scale, 20 * bias + 100
    columns = np.arange(LANES)
    real = exact * scale + bias
    if finish:
        finished = {
            "prelu": lambda y: np.where(y < 0, y * slope, y),
            "add": lambda y: y + residual[others[:, None] + columns] * 0.037 - 1.5,
        }
        real = finished[finish](real) if finish in finished else EXACT[finish](torch.from_numpy(real)).numpy()
    out, to = np.full(20 * pixels + 5, 9, np.uint8), (20 * at.random.permutation(pixels) + 3).astype(np.int32)
    scale, bias, numbers, slope, grid = (
        np.array(a, np.float32) for a in (scale, bias, [*bounds, factor, zero], slope, [0.037, -1.5])
    )
    about = tile_input(kind, pixels, at, weight, start)
    more = {"prelu": (slope,), "add": (residual, others.astype(np.int32), grid)}.get(finish, ())
    parameters = [TileInput, TileOutput, *{"prelu": (None,), "add": (Residual,)}.get(finish, ())]
    make = FINISHES[finish] if finish else tile_of(layer_code.rounded_layer_tile, pixels)
    run(kind, make, parameters, *about, scale, bias, numbers, out, to, *more)
    written = to[:, None] + columns
    assert np.abs(out[written] - (real * factor + zero).clip(*bounds)).max() <= 0.5 + 1e-3
    assert bool((np.delete(out, written.ravel()) == 9).all())


@settings(deadline=None)
@given(
    kind=OF_KINDS, pixels=st.sampled_from([4, 1]), many=st.integers(1, 9), blocks=st.integers(1, 3), extremes=EXTREMES,
    seed=SEEDS,
)  # fmt: skip
def test_sums_of_depthwise_layers(kind, pixels, many, blocks, extremes, seed):
    at = Window(seed, pixels, many, LANES, extremes[0])
    weight = at.random.integers(*extremes[1], (many, blocks * LANES)).astype(np.int8)
    start = at.random.integers(-(2**30), 2**30, LANES).astype(np.int32)
    sums = np.full((pixels + 1, LANES), 77, np.int32)
    about = at.x, at.places, at.runs, many, 0, weight, start, 0, blocks * LANES
    run(kind, tile_of(layer_code.depthwise_tile, pixels), (TileInput, None, None), *about, sums)
    exact = (at.values * weight[:, :LANES].astype(np.int64)).sum(1) + start
    assert sums[:-1].tolist() == exact.tolist() and sums[-1].tolist() == [77] * LANES
