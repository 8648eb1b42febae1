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
