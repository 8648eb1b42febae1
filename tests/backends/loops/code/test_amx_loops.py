"""Large integer layers with AMX, emulated where the CPU has none, against convolutions in float64."""

import ctypes
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.loops import jit_engine
from fxq.backends.loops.code import compiler
from fxq.backends.loops.code.step_fields import AmxField
from fxq.backends.loops.programs import amx_tiles
from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.program_steps import CLAMP, Function, RowWriter
from fxq.backends.loops.programs.split_rows import split_row
from fxq.common.metrics import sqnr
from fxq.quant.qparams import QParams
from tests.support.layers import FLOATS, FUNCTIONS, GRID, GRIDS, check, conv, weights
from tests.support.programs import quantized, regions

pytestmark = pytest.mark.any_cpu

amx_loops = pytest.importorskip("fxq.backends.loops.code.amx_loops", reason="needs Numba", exc_type=ImportError)
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")
program_loops = pytest.importorskip("fxq.backends.loops.code.program_loops")
emitted = pytest.importorskip("tests.support.emitted")
numba = pytest.importorskip("numba")

words, MAX_STEP_FIELDS = (
    pytest.importorskip("fxq.backends.loops.code.memory_loops").words,
    program_loops.MAX_STEP_FIELDS,
)

if not emitted.WITH_AMX or machine_code.KIND.bits < 512 or not machine_code.KIND.dot:
    pytest.skip("AMX is emulated on CPUs with AVX512-VNNI", allow_module_level=True)


@cache
def loops_with_amx():
    """Loops of a CPU with AMX. Only that of large layers is compiled for it; small ones run in those of this process.

    Attributes:
        rows: Rows of the steps that ran.
        offset: Bytes that are added to the address of a weight.
    """
    kind = emitted.WITH_AMX[0]
    with mock.patch.object(machine_code, "KIND", kind):
        large = numba.cfunc(numba.types.void(numba.types.int64, numba.types.int64), **compiler._OPTIONS)(
            lambda step, bases: amx_loops.amx_product(numba.carray(words(step), MAX_STEP_FIELDS), words(bases))
        )

    def run(steps, count, bases):
        for address in range(steps, steps + 8 * MAX_STEP_FIELDS * count, 8 * MAX_STEP_FIELDS):
            row = (ctypes.c_int64 * MAX_STEP_FIELDS).from_buffer_copy(ctypes.string_at(address, 8 * MAX_STEP_FIELDS))
            loops.rows.append(list(row))
            if row[0] == program_loops.AMX_PRODUCT:
                row[AmxField.WEIGHT] += loops.offset
                large.ctypes(ctypes.addressof(row), bases)
            else:
                program_loops.run(address, 1, bases)

    loops = SimpleNamespace(**{**vars(program_loops), "KIND": kind, "run": run, "rows": [], "offset": 0})
    return loops


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """Use AMX for layers of any size."""
    monkeypatch.setattr(amx_tiles, "VECTOR_CYCLES", 1e9)
    loops_with_amx().rows.clear()


def check_amx(*arguments, grid=GRID, **about):
    """Check a convolution, and return the row of its step."""
    check(*conv(*arguments, grid=grid, loops=loops_with_amx(), **about), grid)
    assert loops_with_amx().rows[-1][0] == program_loops.AMX_PRODUCT
    return loops_with_amx().rows[-1]


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(3, 7), st.integers(3, 7), st.integers(1, 70)),
    columns=st.integers(1, 70), size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)), padding=st.tuples(st.integers(0, 1), st.integers(0, 2)),
    function=st.sampled_from([*FUNCTIONS, "prelu"]), grid=GRIDS,
    residual=st.sampled_from([None, None, QParams.per_tensor(0.07, 9), FLOATS]), dense=st.booleans(),
    border=st.integers(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolutions(shape, columns, size, stride, padding, function, grid, residual, dense, border, seed):
    torch.manual_seed(seed)
    function = Function("prelu", slope=torch.randn(columns)) if function == "prelu" else function
    about = {"stride": stride, "padding": padding, "function": function, "residual": residual}
    room = shape[3] if dense else 0
    check_amx(shape, columns, size, **about, grid=grid, room=room, border=(border, 0, border, border))


@settings(deadline=None)
@given(
    count=st.integers(1, 70), depth=st.sampled_from([1, 4, 63, 64, 65, 128, 192, 200]), columns=st.integers(1, 70),
    at_once=st.sampled_from([1 << 18, 1]), grid=GRIDS, seed=st.integers(0, 99),
)  # fmt: skip
def test_any_number_of_pixels(count, depth, columns, at_once, grid, seed):
    """Sixteen pixels and more are read where they are, the last tile with pixels of the one before; few are copied."""
    torch.manual_seed(seed)
    with mock.patch.object(amx_tiles, "_MAX_BYTES_AT_ONCE", at_once):
        row = check_amx((1, 1, count, depth), columns, grid=grid)
    assert row[AmxField.X_STEP] == (16 * -(-depth // 16) if count >= 16 else 0)
    assert row[AmxField.TILES] == -(-count // 16)
    assert at_once > 1 or row[AmxField.TILES_AT_ONCE] == (2 if count >= 16 else 1)


@pytest.mark.parametrize(
    ("shape", "about", "x_step", "tiles"),
    [
        ((1, 14, 14, 64), {"padding": (1, 1)}, 64, 14),  # 13 rows of 16 pixels, two of which are the border, and 14
        ((2, 6, 6, 64), {}, 64, 5),  # 72 pixels, without a border between images
        ((1, 30, 30, 64), {"padding": (1, 1), "stride": (2, 2)}, 128, 15),  # tiles of rows of 15 pixels
        ((1, 9, 40, 64), {"padding": (1, 1), "stride": (2, 1)}, 64, 15),  # rows of 40 pixels, the last tile with 8
        ((1, 3, 3, 64), {"padding": (1, 1)}, 0, 1),  # fewer than 16 places from the first to the last pixel: copied
    ],
)
def test_places_of_tiles(shape, about, x_step, tiles):
    """Tiles have places of the border, or are those of rows. Pixels are copied where they are too few for a tile."""
    row = check_amx(shape, 600, (3, 3) if about else (1, 1), **about)
    assert (row[AmxField.X_STEP], row[AmxField.TILES]) == (x_step, tiles)


def test_pixels_are_copied_if_that_takes_less_time():
    """Windows of 27 integers: for many columns, one tile of a copy is faster than a tile for each row of the window."""
    few, many = (check_amx((1, 32, 32, 3), columns, (3, 3), room=3) for columns in (16, 640))
    assert few[AmxField.X_STEP] == 3 and few[AmxField.RUN_COUNT] == few[AmxField.DEPTH] * 3 == 3
    assert many[AmxField.X_STEP] == 0 and many[AmxField.DEPTH] == 1 and many[AmxField.GROUPS] == 3


@pytest.mark.parametrize(("channels", "images"), [(256, 8), (68, 1)])
def test_scratch_memory_of_transposed_convolutions(channels, images):
    """Each place of the results of a window has a row, with tiles that differ from those of all columns at once."""
    places = [(r, c) for r in range(2) for c in range(2)]
    x, out = Area((images, 4, 4, channels), False, border=(1, 1, 1, 1)), Area((images, 8, 8, 256), False)
    step = ProductStep(
        "up", out, grid=GRID, x=x, x_grid=GRID, weight=weights(4 * 256, 4, channels), taps=places, windows=(4, 4),
        scale=torch.ones(4 * 256), bias=None, first=(-1, -1), out_stride=(2, 2),
        spread=[(*place, k) for place in places for k in range(256)],
    )  # fmt: skip
    loops = loops_with_amx()
    rows = step.rows(RowWriter(loops))
    assert len(rows) == 4 and {row[0] for row in rows} == {loops.AMX_PRODUCT}
    copied = [row[AmxField.TILES_AT_ONCE] if row[AmxField.GROUPS] else 0 for row in rows]
    needed = [loops.amx_scratch(tiles, row[AmxField.DEPTH]) for tiles, row in zip(copied, rows, strict=True)]
    assert max(needed) <= step.scratch(loops)


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("end", [-128, 127])
def test_the_largest_products(value, end):
    x, weight = torch.full((1, 5, 8, 64), value, dtype=torch.uint8), weights(40, 64, 3, 3)
    weight[:] = end
    for grid in (None, GRID):
        check_amx((1, 5, 8, 64), 40, (3, 3), x=x, weight=weight, padding=(1, 1), grid=grid)


def test_small_layers_use_other_products(monkeypatch):
    """One row through a linear layer, and depthwise layers."""
    monkeypatch.undo()
    for shape, depthwise in (((1, 1, 1, 80), False), ((1, 1, 2, 3), False), ((1, 4, 4, 64), True)):
        loops_with_amx().rows.clear()
        check(*conv(shape, shape[3], depthwise=depthwise, loops=loops_with_amx()), GRID)
        assert program_loops.AMX_PRODUCT not in [row[0] for row in loops_with_amx().rows]


@pytest.mark.parametrize(("shape", "field", "unit"), [((1, 56, 57, 64), "TILES", 2), ((1, 7, 7, 512), "BLOCKS", 2)])
def test_parts_of_threads_begin_with_tiles(shape, field, unit):
    row = check_amx(shape, shape[3] + 16, (3, 3), padding=(1, 1), function=CLAMP)
    parts = split_row(loops_with_amx(), row, 3)
    sizes = [part[AmxField[field]] for part in parts]
    assert len(parts) == 3 and sum(sizes) == row[AmxField[field]] and not any(n % unit for n in sizes[:-1])


class Network(nn.Module):
    """Layers that use AMX, with every way in which results are written."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 40, 1)
        self.slope, self.d = nn.PReLU(40), nn.Linear(40, 7)

    def forward(self, x):
        x = torch.relu(self.a(x))
        x = self.slope(self.c(F.silu(self.b(x)) + x))
        return self.d(x.mean((2, 3)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_right", [True, False])
def test_verification(is_right, monkeypatch):
    """A region whose products read the wrong row of a weight is put back, and the user is told."""
    torch.manual_seed(0)
    monkeypatch.setattr(jit_engine, "loops", lambda name: loops_with_amx())
    monkeypatch.setattr(loops_with_amx(), "offset", 0 if is_right else 64)
    model, x = Network().eval(), torch.randn(2, 3, 9, 9)
    with nullcontext() if is_right else pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        q = quantized(model, x)
    assert program_loops.AMX_PRODUCT in [row[0] for row in loops_with_amx().rows]
    assert bool(regions(q)) == is_right and sqnr(model(x), q(x)) > 25
