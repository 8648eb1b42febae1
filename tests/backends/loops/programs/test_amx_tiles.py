"""Tiles of pixels for AMX: each pixel in one tile, at its place, and no place beyond the pixels."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.backends.loops.programs.amx_tiles import PixelGrid, Runs, amx_tiles

pytestmark = pytest.mark.any_cpu
LOOPS = SimpleNamespace(ROW_BYTES=64, TILE_ROWS=16, GROUP=4, pixel_bytes=lambda depth: 64 * (depth | 1))


def grid_of(counts, stride, border, channels, may_exceed=True):
    """Windows of images that have columns of border on the right, and rows of border below."""
    row = (counts[2] * stride[1] + border[1]) * channels
    steps = (counts[1] * stride[0] + border[0]) * row, stride[0] * row, stride[1] * channels
    return PixelGrid(counts, steps, 7, may_exceed)


def weight_of(columns, taps, channels):
    """Weights other than zero, int8 (columns, taps, channels)."""
    return torch.arange(1, columns * taps * channels + 1).remainder(127).add(1).to(torch.int8).view(columns, taps, -1)


@given(
    counts=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 40)), columns=st.sampled_from([16, 512]),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), border=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    channels=st.sampled_from([1, 16, 24, 64]), taps=st.sampled_from([1, 9]), may_exceed=st.booleans(),
)  # fmt: skip
def test_each_pixel_is_in_one_tile(counts, columns, stride, border, channels, taps, may_exceed):
    grid = grid_of(counts, stride, border, channels, may_exceed)
    offsets = [1000 * k for k in range(taps)]
    tiles = amx_tiles(grid, offsets, weight_of(columns, taps, channels), channels, LOOPS)
    if tiles is None:
        return
    places, is_pixel = grid.places(), tiles.pixels >= 0
    assert tiles.pixels[is_pixel].sort().values.tolist() == list(range(len(places)))
    slots = tiles.x_places[:, None] + tiles.x_step * torch.arange(16) if tiles.x_step else tiles.x_places
    assert slots[is_pixel].tolist() == places[tiles.pixels[is_pixel]].tolist()
    assert int(slots.min()) >= int(places.min()) and int(slots.max()) <= int(places.max())
    assert not tiles.x_step or may_exceed or channels % 4 == 0
    outs = torch.arange(len(places)) * 3
    assert tiles.places_of(outs, -1)[is_pixel].tolist() == outs[tiles.pixels[is_pixel]].tolist()
    assert bool((tiles.places_of(outs, -1)[~is_pixel] == -1).all()) and bool((tiles.places_of(outs) >= 0).all())


@pytest.mark.parametrize(("channels", "stride"), [(3, 3), (24, 32), (64, 64)])
def test_neighbours_in_memory_are_one_run(channels, stride):
    """Bytes between two pixels get weights of zero. Those after the last tap are not read."""
    weight = weight_of(5, 6, channels)
    offsets = [1000 * r + stride * c for r in range(2) for c in range(3)]
    alone, together = Runs.choices(offsets, weight, stride)
    assert alone.offsets == offsets and alone.weight is weight
    assert together.offsets == [0, 1000] and together.weight.shape == (5, 2, 2 * stride + channels)
    for k in range(6):
        begin = stride * (k % 3)
        assert together.weight[:, k // 3, begin : begin + channels].equal(weight[:, k])
    assert together.weight.count_nonzero() == weight.numel()


def test_taps_with_distances_are_runs_of_their_own():
    (alone,) = Runs.choices([0, 128, 256], weight_of(5, 3, 64), 64)
    assert alone.offsets == [0, 128, 256]


def test_few_rows_are_no_tiles():
    """A row through a linear layer is computed as fast without AMX."""
    weight = weight_of(64, 1, 256)
    assert amx_tiles(grid_of((1, 1, 1), (1, 1), (0, 0), 256), [0], weight, 256, LOOPS) is None
    assert amx_tiles(grid_of((1, 1, 16), (1, 1), (0, 0), 256), [0], weight, 256, LOOPS) is not None


@pytest.mark.parametrize("copied", [False, True])
def test_order_of_weights(copied):
    """Tiles of 64 integers and 16 columns, by fours of integers. Runs are padded one by one, or as they are copied."""
    grid = grid_of((1, 3, 3) if copied else (1, 8, 8), (1, 1), (0, 0), 70)
    tiles = amx_tiles(grid, [0, 1000], weight_of(600 if copied else 20, 2, 70), 70, LOOPS)
    packed = tiles.packed(-(-len(tiles.runs.weight) // 16), LOOPS)
    assert (tiles.x_step == 0) == copied and tiles.depth == (3 if copied else 2)
    assert tiles.size == (48 if copied else 36)
    run = 72
    for column, tap, integer in [(0, 0, 0), (17, 1, 69), (3, 0, 65)]:
        block, depth = packed[column // 16], run * tap + integer
        assert block[depth // 4, column % 16, depth % 4] == tiles.runs.weight[column, tap, integer]
    assert packed.shape[1] == 36
    assert packed.count_nonzero() == tiles.runs.weight.numel()
