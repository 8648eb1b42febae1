"""Tiles of depthwise convolutions that fill registers, against integers of 64 bits; layers: test_layer_loops.py."""

import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.program_runs import EXACT

pytestmark = pytest.mark.any_cpu

depthwise = pytest.importorskip("fxq.backends.loops.code.depthwise_code", reason="needs Numba", exc_type=ImportError)
vectors = pytest.importorskip("fxq.backends.loops.code.vectors")
emitted = pytest.importorskip("tests.support.emitted")

CASES = [
    pytest.param(kind, parts, id=f"{kind.name}-{parts}")
    for kind in emitted.PLAYED
    for parts in depthwise.PARTS
    if depthwise.allows(kind, parts) and not kind.has_amx
]
"""Kinds of CPUs that this machine can play, and parts of registers. The kind with AMX has those of AVX512-VNNI."""
FUNCTIONS = {"round": None, "silu": vectors.silu, "hardswish": vectors.hardswish}


@cache
def made(name):
    """Function that makes code of a name, or of tiles with a function."""
    return partial(depthwise.wide_tiles, FUNCTIONS[name]) if name in FUNCTIONS else lambda: getattr(depthwise, name)


def run(kind, code, parts, *arguments):
    """Compile code for a kind of CPU, and call it with the number of parts, `WideTiles` and an address."""
    parameters = [depthwise.WideTiles, None][: len(arguments) - len(depthwise.WideTiles._fields) + 1]
    call = emitted.emitted(kind, code, None, *parameters)
    call(parts, *(a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in arguments))


def order_of(kind):
    """Channel of a register in each place of its sums."""
    return np.array(
        [16 * block + 4 * v + k for v in range(4) for block in range(kind.wide_channels // 16) for k in range(4)]
    )


class Tiles:
    """Random tiles: sums are below 2**24 and scales powers of two, so that scaled sums are exact."""

    def __init__(self, kind, parts, count, many, seed, finish=False):
        random, channels = np.random.default_rng(seed), kind.wide_channels // parts
        self.channels, self.pixels, order = channels, count * depthwise.tile_pixels(kind, parts), order_of(kind)
        fours, last = (many // 4, 1) if many % 4 == 1 else (-(-many // 4), 0)
        memory = random.integers(0, 256, 500 + channels).astype(np.uint8)
        places, runs = random.integers(-100, 100, self.pixels), random.integers(-100, 100, many)
        weight = random.integers(-128, 128, (many, channels))
        start, bias = random.integers(-(2**20), 2**20, (2, channels))
        scale = 2.0 ** random.integers(-2, 3, channels)
        if finish:
            start, scale, bias = start // 8, scale / 2**16, bias / 2**19
        at = 250 + places[:, None, None] + runs[:, None] + np.arange(channels)
        self.exact = ((memory[at].astype(np.int64) * weight).sum(1) + start) * scale + bias
        weight = np.concatenate([weight, np.zeros((-many % 4, channels), np.int64)])
        read = np.append(runs, runs[[-1] * (-many % 4)])  # runs without weights
        by_register = np.tile(weight.reshape(-1, 4, channels).transpose(0, 2, 1), (1, parts, 1))[:, order]
        by_sum = (np.tile(values, parts)[order] for values in (start, scale, bias))
        self.out = np.full(self.pixels * (channels + 3) + 3, 9, np.uint8)
        self.to = random.permutation(self.pixels) * (channels + 3) + 3
        self.bounds, self.grid = (3, 240), (20, 100) if finish else (1, 0)
        types = np.int32, np.float32, np.float32
        self.fields = [
            memory[250:], places.astype(np.int32), self.out, self.to.astype(np.int32), count, read.astype(np.int32),
            fours, last, np.ascontiguousarray(by_register, np.int8),
            *(values.astype(kind_of) for values, kind_of in zip(by_sum, types, strict=True)),
            np.array([*self.bounds, *self.grid], np.float32),
        ]  # fmt: skip

    def check_written(self, real):
        """Compare the integers with real values of the grid; no other bytes changed."""
        written = self.to[:, None] + np.arange(self.channels)
        assert np.abs(self.out[written] - real.clip(*self.bounds)).max() <= 0.5 + 1e-3
        assert bool((np.delete(self.out, written.ravel()) == 9).all())


@pytest.mark.parametrize(("kind", "parts"), CASES)
@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 9, 25])
def test_scaled_sums(kind, parts, many):
    """They have the order of the sums, and are exact."""
    tiles, wide = Tiles(kind, parts, 1, many, many), kind.wide_channels
    floats = np.full((depthwise.registers_of(kind, parts) + 1, wide), 77, np.float32)
    run(kind, made("wide_floats"), parts, *tiles.fields, floats)
    exact = tiles.exact.reshape(-1, wide)[:, order_of(kind)]
    assert floats[:-1].tolist() == exact.tolist() and bool((floats[-1] == 77).all())


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "parts"), CASES)
@settings(deadline=None, max_examples=11)
@given(
    name=st.sampled_from([*FUNCTIONS]), count=st.integers(0, 3), many=st.integers(1, 10), seed=st.integers(0, 99)
)  # fmt: skip
def test_tiles(kind, parts, name, count, many, seed):
    tiles = Tiles(kind, parts, count, many, seed, finish=name != "round")
    if name == "round":  # scale and bias include the grid
        tiles.fields[-3] /= 2**14
        tiles.fields[-2] /= 2**14
        tiles.exact /= 2**14
    run(kind, made(name), parts, *tiles.fields)
    factor, zero = tiles.grid
    real = tiles.exact if name == "round" else EXACT[name](torch.from_numpy(tiles.exact)).numpy()
    if count:
        tiles.check_written(real * factor + zero)


@pytest.mark.parametrize(("kind", "parts"), CASES)
def test_floats_become_integers(kind, parts):
    """Halves become even integers; NaN becomes the lower bound."""
    tiles = Tiles(kind, parts, 1, 1, 0, finish=True)
    real = np.random.default_rng(0).integers(-600, 600, (tiles.pixels, tiles.channels)).astype(np.float32) / 8
    real[0, :5] = math.nan, math.inf, -math.inf, 1e9, -1e9
    floats = np.ascontiguousarray(real.reshape(-1, kind.wide_channels)[:, order_of(kind)])
    run(kind, made("pack_wide"), parts, *tiles.fields, floats)
    factor, zero = tiles.grid
    wanted = np.nan_to_num(np.rint(real * np.float32(factor) + np.float32(zero)), nan=-1e9).clip(*tiles.bounds)
    tiles.check_written(wanted)
    assert np.array_equal(tiles.out[tiles.to[:, None] + np.arange(tiles.channels)], wanted)
