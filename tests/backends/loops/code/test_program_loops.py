"""Programs of several steps, and rows of numbers that are written by hand."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from fxq.backends.loops.programs.areas import ARENA, EXTERNAL, Area
from fxq.backends.loops.programs.layer_steps import AttentionStep, LinearStep, ProductStep
from fxq.backends.loops.programs.program_steps import (
    Function,
    MoveStep,
    NormStep,
    PointwiseStep,
    PoolStep,
    QuantizeStep,
    RowWriter,
)
from fxq.quant.qparams import QParams
from tests.support.program_runs import distance, real, run_steps

pytestmark = pytest.mark.any_cpu

loops = pytest.importorskip("fxq.backends.loops.code.program_loops", reason="needs Numba", exc_type=ImportError)

GRID, OTHER = QParams.per_tensor(0.02, 37), QParams.per_tensor(0.07, 98)


def table(*rows):
    """Rows with unused fields, int64 (count, MAX_STEP_FIELDS)."""
    return torch.tensor([row + [0] * (loops.MAX_STEP_FIELDS - len(row)) for row in rows]).view(
        -1, loops.MAX_STEP_FIELDS
    )


def run(rows, *bases):
    """Run rows on the memory of values, and then inputs and outputs."""
    scratch = torch.empty(loops.SCRATCH_BYTES + 8 * 64, dtype=torch.uint8)
    rows, bases = table(*rows), torch.tensor([0, *bases[:1], *[0] * (not bases), scratch.data_ptr(), *bases[1:]])
    loops.run(rows.data_ptr(), len(rows), bases.data_ptr())


def copied(base, to, x=0, out=0):
    """A row that moves five bytes."""
    return [loops.MOVE, base, x, 5, 5, 5, to, out, 5, 5, 5, 1, 1, 1, 1, 5, 1]


def test_no_steps():
    memory = torch.arange(40).byte()
    run([], memory.data_ptr())
    assert memory.tolist() == list(range(40))


def test_steps_run_in_order():
    """Each reads what the one before it has written, wherever it lies."""
    memory, first, last = torch.zeros(40, dtype=torch.uint8), torch.arange(5).byte(), torch.zeros(5, dtype=torch.uint8)
    bases = memory.data_ptr(), first.data_ptr(), last.data_ptr()
    run([copied(EXTERNAL, ARENA, out=20), copied(ARENA, 0, 20, memory.data_ptr()), copied(ARENA, EXTERNAL + 1)], *bases)
    assert last.tolist() == [0, 1, 2, 3, 4]
    assert memory.tolist() == [0, 1, 2, 3, 4] + [0] * 15 + [0, 1, 2, 3, 4] + [0] * 15


def test_only_as_many_steps_as_are_asked_for():
    memory = torch.tensor([1] * 5 + [0] * 10, dtype=torch.uint8)
    rows = table(copied(ARENA, ARENA, out=5), copied(ARENA, ARENA, out=10))
    bases = torch.tensor([0, memory.data_ptr(), 0])
    loops.run(rows.data_ptr(), 1, bases.data_ptr())
    assert memory.tolist() == [1] * 10 + [0] * 5


def test_what_a_cpu_computes_at_once():
    assert (loops.KIND.tile_pixels, loops.KIND.wide_channels) == (loops.TILE_PIXELS, loops.WIDE_CHANNELS)
    assert len(set(loops.FUNCTION_NAMES)) == len(loops.FUNCTION_NAMES) and loops.NO_FUNCTION < 0


def test_no_step_has_more_numbers_than_a_row():
    """The widest ones, of layers, and their codes."""
    x, y, out = (Area((1, 2, 2, 64), False) for _ in range(3))
    f, g, pixel = Area(x.shape, True), Area((1, 1, 1, 256), True), Area((1, 1, 1, 256), True)
    about = {"x": x, "x_grid": GRID}
    ones = {"scale": torch.ones(64), "bias": None, "windows": (2, 2), "taps": [(0, 0)]}
    layer = ProductStep("layer", out, grid=GRID, weight=torch.ones(64, 1, 64, dtype=torch.int8), **ones, **about)
    layer.residual, layer.residual_grid = y, GRID
    steps = {
        loops.PRODUCT: [layer, ProductStep("layer", f, weight=torch.ones(64, 1, dtype=torch.int8), **ones, **about)],
        loops.POINTWISE: [PointwiseStep("f", out, grid=GRID, y=y, y_grid=GRID, **about)],
        loops.POOL: [PoolStep("pool", f, kernel=(1, 1), stride=(1, 1), **about)],
        loops.NORM: [NormStep("norm", f, weight=torch.ones(64), bias=torch.ones(64), eps=0.1, **about)],
        loops.LINEAR: [LinearStep("layer", g, x=pixel, weight=torch.ones(256, 256), bias=None)],
        loops.MOVE: [MoveStep("move", g, x=f, out_strides=lambda _: (1, 1, 1))],
        loops.ATTENTION: [AttentionStep("heads", f, query=f, key=f, value=f, heads=4, scale=1.0)],
        loops.QUANTIZE: [QuantizeStep("q", out, grid=GRID, x=f, strides=lambda: (1, 1, 1, 1))],
    }
    rows = RowWriter(loops)
    for code, all_of_it in steps.items():
        for step in all_of_it:
            for row in step.rows(rows):
                assert row[0] in ({code, loops.AMX_PRODUCT} if code == loops.PRODUCT else {code})
                assert len(row) <= loops.MAX_STEP_FIELDS and all(type(value) is int for value in row)
    assert len({*steps, loops.DEPTHWISE}) == 9


def network(shape):
    """Steps of a small network, their inputs, and a function that returns exact results in float64.

    Exact results are computed from the integers that the steps before have written, so that rounding ties of one step
    do not count in the next ones.
    """
    n, h, w, c = shape
    x = torch.randn(n, h, w, c)
    read = Area(shape, True, room=c)
    q, deep, mean = (Area(s, False) for s in (shape, shape, (n, 1, 1, c)))
    q.zero = deep.zero = GRID.z
    weight, scale, bias = torch.randint(-128, 128, (c, 9), dtype=torch.int8), torch.rand(c) / 300, torch.randn(c)
    taps = [(i, j) for i in range(3) for j in range(3)]
    out, real_out = Area((n, h, w, 19), False), Area((n, 1, 1, 5), True)
    wide_weight, by = torch.randint(-128, 128, (19, 1, c), dtype=torch.int8), torch.rand(19) / 1000
    last, added = torch.randn(5, c), torch.randn(5)
    float_mean = Area((n, 1, 1, c), True)
    steps = [
        QuantizeStep("q", q, grid=GRID, x=read, strides=lambda: (h * w * c, 1, w * c, c)),
        ProductStep(
            "deep", deep, Function("hardswish"), GRID, x=q, x_grid=GRID, weight=weight, taps=taps, scale=scale,
            bias=bias, windows=(h, w), first=(-1, -1),
        ),
        PoolStep("mean", mean, grid=GRID, x=deep, x_grid=GRID, kernel=(h, w), stride=(h, w)),
        ProductStep(
            "wide", out, Function("clamp", 0.0), OTHER, x=deep, x_grid=GRID, weight=wide_weight, taps=[(0, 0)],
            scale=by, bias=None, windows=(h, w),
        ),
        PointwiseStep("real", float_mean, x=mean, x_grid=GRID),
        LinearStep("last", real_out, x=float_mean, weight=last, bias=added),
    ]  # fmt: skip
    q.widen(steps[1].border())

    def exact(q, deep, mean):
        """Of the integers before each: those of the layers, of the mean, and the last result."""
        image = real(q, GRID).permute(0, 3, 1, 2)
        kernel = weight.double().view(c, 1, 3, 3) * scale.double()[:, None, None, None]
        first = F.hardswish(F.conv2d(image, kernel, bias.double(), padding=1, groups=c).permute(0, 2, 3, 1))
        second = real(deep, GRID) @ (wide_weight[:, 0].double() * by.double()[:, None]).t()
        final = F.linear(real(mean, GRID), last.double(), added.double())
        return first, real(deep, GRID).mean((1, 2), keepdim=True), second.clamp(min=0), final

    return steps, {read: x}, x, exact


@pytest.mark.parametrize("shape", [(1, 4, 5, 16), (2, 3, 3, 70), (1, 1, 1, 33), (3, 7, 2, 128)])
def test_a_network(shape):
    steps, inputs, x, exact = network(shape)

    def until(count):
        return run_steps(steps[:count], inputs)

    q, deep, mean = until(1), until(2), until(3)
    first, second, third, final = exact(q, deep, mean)
    assert distance(q, x.double(), GRID) <= 0.5 + 1e-4
    for outcome, wanted, grid in ((deep, first, GRID), (mean, second, GRID), (until(4), third, OTHER)):
        assert distance(outcome, wanted, grid) <= 0.5 + 2e-3
    torch.testing.assert_close(until(6).double(), final, rtol=1e-5, atol=1e-5)


def test_the_same_integers_again():
    steps, inputs, *_ = network((2, 3, 3, 70))
    assert torch.equal(run_steps(steps, inputs), run_steps(steps, inputs))


def test_threads_run_steps_at_once():
    """Each in memory of its own; what steps need on the way is theirs, too."""
    x, out = Area((1, 20, 20, 48), True, base=ARENA), Area((1, 20, 20, 48), True, base=EXTERNAL)
    step = NormStep("norm", out, x=x, x_grid=None, weight=torch.ones(48), bias=torch.zeros(48), eps=1e-5)
    rows = RowWriter(loops)
    program, wrong = step.rows(rows), []

    def call(seed):
        f = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        wanted, outcome = F.layer_norm(f, (48,)), torch.empty(x.shape)
        for _ in range(30):
            run(program, f.data_ptr(), outcome.fill_(math.nan).data_ptr())
            if not torch.allclose(outcome, wanted, rtol=1e-5, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
