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
from fxq.backends.loops.code.step_fields import ProductField
from fxq.backends.loops.programs import layer_steps
from fxq.backends.loops.programs.program_steps import CLAMP, Function
from fxq.backends.loops.programs.split_rows import split_row
from fxq.common.metrics import sqnr
from fxq.quant.qparams import QParams
from tests.support.layers import FUNCTIONS, GRID, GRIDS, check, conv, weights
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
                row[ProductField.WEIGHT] += loops.offset
                large.ctypes(ctypes.addressof(row), bases)
            else:
                program_loops.run(address, 1, bases)

    loops = SimpleNamespace(**{**vars(program_loops), "KIND": kind, "run": run, "rows": [], "offset": 0})
    return loops


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """Use AMX for layers of any size."""
    monkeypatch.setattr(layer_steps, "MIN_AMX_PIXELS", 1)
    monkeypatch.setattr(layer_steps, "MIN_AMX_DEPTH", 1)
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
    residual=st.sampled_from([None, None, QParams.per_tensor(0.07, 9)]), dense=st.booleans(), border=st.integers(0, 1),
    seed=st.integers(0, 99),
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
    copied=st.sampled_from([1 << 18, 1]), grid=GRIDS, seed=st.integers(0, 99),
)  # fmt: skip
def test_any_number_of_pixels(count, depth, columns, copied, grid, seed):
    """Pixels that fill tiles are read where they are, 63 integers with one more; others are copied, if they fit."""
    torch.manual_seed(seed)
    with mock.patch.object(layer_steps, "MAX_COPIED_BYTES", copied):
        row = check_amx((1, 1, count, depth), columns, grid=grid)
    assert row[ProductField.X_STEP] == (64 * -(-depth // 64) if count > 1 and depth % 64 in (0, 63) else 0)
    assert row[ProductField.PIXELS_AT_ONCE] == min(-(-count // 32) * 32, 96 if copied > 1 else 64)


def test_pixels_with_a_border_between_them():
    """Distances differ at the ends of rows, so that pixels are copied."""
    assert check_amx((1, 7, 9, 64), 32, padding=(1, 1), stride=(2, 1))[ProductField.X_STEP] == 0
    assert check_amx((2, 6, 6, 64), 32)[ProductField.X_STEP] == 64
    assert check_amx((2, 6, 6, 64), 32, stride=(1, 2))[ProductField.X_STEP] == 128


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("end", [-128, 127])
def test_the_largest_products(value, end):
    x, weight = torch.full((1, 5, 8, 64), value, dtype=torch.uint8), weights(40, 64, 3, 3)
    weight[:] = end
    for grid in (None, GRID):
        check_amx((1, 5, 8, 64), 40, (3, 3), x=x, weight=weight, padding=(1, 1), grid=grid)


def test_small_layers_use_other_products(monkeypatch):
    """A weight of whole tiles is also read by them."""
    monkeypatch.undo()
    for shape, depthwise in (((1, 1, 7, 80), False), ((1, 4, 4, 60), False), ((1, 4, 4, 64), True)):
        loops_with_amx().rows.clear()
        check(*conv(shape, shape[3], depthwise=depthwise, loops=loops_with_amx()), GRID)
        assert program_loops.AMX_PRODUCT not in [row[0] for row in loops_with_amx().rows]


@pytest.mark.parametrize(("shape", "field", "unit"), [((1, 56, 57, 64), "PIXELS", 32), ((1, 7, 7, 512), "BLOCKS", 2)])
def test_parts_of_threads_begin_with_tiles(shape, field, unit):
    row = check_amx(shape, shape[3] + 16, (3, 3), padding=(1, 1), function=CLAMP)
    parts = split_row(loops_with_amx(), row, 3)
    sizes = [part[ProductField[field]] for part in parts]
    assert len(parts) == 3 and sum(sizes) == row[ProductField[field]] and not any(n % unit for n in sizes[:-1])


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
