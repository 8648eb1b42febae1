"""Weights as steps of layers store them, read by the tiles of each kind of CPU that this machine plays."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import ProductStep, _own_products
from fxq.quant.qparams import QParams

pytestmark = pytest.mark.any_cpu

layer_code = pytest.importorskip("fxq.backends.loops.code.layer_code", reason="needs Numba", exc_type=ImportError)
emitted = pytest.importorskip("tests.support.emitted")


@pytest.mark.parametrize("kind", emitted.PLAYED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("channels", "taps"), [(1, 1), (4, 9), (7, 2), (30, 3)])
@pytest.mark.parametrize("columns", [16, 5, 37])
def test_tiles_read_what_a_step_stores(kind, channels, taps, columns):
    random = np.random.default_rng(0)
    weight = random.integers(-128, 128, (columns, taps, channels)).astype(np.int8)
    x = random.integers(0, 256, (taps, channels + 4)).astype(np.uint8)  # four more, which are multiplied by 0
    area = Area((1, 1, taps, channels), False, channels + 4)
    step = ProductStep(
        "layer", Area((1, 1, 1, columns)), x=area, x_grid=QParams.per_tensor(1.0, 0), weight=torch.from_numpy(weight),
        taps=[(0, k) for k in range(taps)], scale=torch.ones(columns), bias=None, windows=(1, 1),
    )  # fmt: skip
    blocks = -(-columns // 16)
    loops = SimpleNamespace(GROUP=4, KIND=kind)
    packed, runs, groups = step._packed(step.weight, loops, blocks)
    memory = np.zeros(int(runs.max()) + 4 * groups + 64, np.uint8)
    for k in range(taps):
        memory[k * area.pixel_stride :][: channels + 4] = x[k]
    place, sums, own = np.zeros(1, np.int32), np.zeros((blocks, 16), np.int32), np.zeros(1, np.int32)
    start = np.zeros((blocks, 16), np.int32)
    if not kind.dot:
        memory = memory.astype(np.int16)
        read = memory[runs.numpy()[:, None] + np.arange(4 * groups)].reshape(-1, 2, 2)
        own[0], start = read.prod(1, dtype=np.int32).sum(), -_own_products(packed).numpy().reshape(blocks, 16)
    tile = emitted.emitted(kind, ONE_PIXEL, layer_code.TileInput, None)
    for block in range(blocks):
        tile(
            memory.ctypes.data, place.ctypes.data, runs.data_ptr(), len(runs), groups, packed[block].data_ptr(),
            start[block].ctypes.data, own.ctypes.data, sums[block].ctypes.data,
        )  # fmt: skip
    exact = np.einsum("ctk,tk->c", weight.astype(int), x[:, :channels].astype(int))
    assert sums.ravel()[:columns].tolist() == exact.tolist() and not sums.ravel()[columns:].any()


ONE_PIXEL = partial(layer_code.layer_tile, 1)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("channels", [5, 16, 33])
def test_scratch_holds_what_any_chunk_of_pixels_reads(samples, stride, channels):
    """Threads begin chunks at any tile."""
    area = Area((samples, 23, 19, channels), False, border=(1, 1, 1, 1))
    taps = [(r, c) for r in range(-1, 2) for c in range(-1, 2)]
    windows = tuple((size - 1) // s + 1 for size, s in zip((23, 19), stride, strict=True))
    step = ProductStep(
        "layer", Area((samples, *windows, 16)), x=area, x_grid=QParams.per_tensor(1.0, 0), taps=taps,
        weight=torch.zeros(16, 9, channels, dtype=torch.int8), scale=torch.ones(16), bias=None, windows=windows,
        stride=stride,
    )  # fmt: skip
    kind = emitted.unplayed("avx2")
    loops = SimpleNamespace(GROUP=4, KIND=kind, X_BYTES=2, TILE_PIXELS=kind.tile_pixels, MAX_TILE_INPUT_BYTES=1 << 13)
    _, runs, groups = step._packed(step.weight, loops, 1)
    places, at_once = step._places(area, (0, 0), stride), step._pixels_at_once(loops)
    chunks = [places[k : k + at_once] for k in range(0, len(places), kind.tile_pixels)]
    most = max(int(chunk.max() - chunk.min()) for chunk in chunks) + int(runs.max() - runs.min()) + 4 * groups
    assert most <= step._read_at_once(loops) <= most + stride[0] * area.row_stride
