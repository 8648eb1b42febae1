"""Runs of a program's steps in memory that must not change otherwise, and their functions in float64."""

import torch
import torch.nn.functional as F

from fxq.backends.loops.code import compiler
from fxq.backends.loops.programs.areas import ABSOLUTE, LANES, SCRATCH, SLACK_BYTES
from fxq.backends.loops.programs.program_steps import RowWriter

EXACT = {
    "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardsigmoid": F.hardsigmoid,
}  # fmt: skip
"""Functions without options, by their names in `FUNCTION_NAMES`."""


def applied(function, x):
    """Apply a step's function in float64; the last axis has the channels."""
    if function.name == "clamp":
        return x.clamp(function.low, function.high)
    if function.name == "prelu":
        return torch.where(x < 0, x * function.slope.double(), x)
    return EXACT[function.name](x)


def real(x, grid):
    """Dequantized integers in float64; floats as they are."""
    return x.double() if grid is None else (x.double() - grid.z) * grid.s


def distance(result, exact, grid):
    """The largest difference of integers from real values, in steps of the grid: 0.5 if they are the nearest ones."""
    assert bool(((result >= grid.qmin) & (result <= grid.qmax)).all())
    wanted = (exact / grid.s + grid.z).clamp(grid.qmin, grid.qmax)
    return (result.double() - wanted).abs().max().item()


def run_steps(steps, values, loops=None):
    """Run steps in memory of random bytes, and return the result of the last one, (N, H, W, C).

    Only the bytes of results, and of the room after their channels, may change. Steps get as much scratch memory as
    they ask for, and no more.

    Args:
        steps: Steps in order.
        values: Values by area, (N, H, W, C), float32 or uint8.
        loops: Compiled functions. Default: those of this process.
    """
    areas = dict.fromkeys(a.root for step in steps for a in (*step.reads, step.out) if a.base != ABSOLUTE)
    size = 64
    for area in areas:
        area.offset = size
        size += -(-(area.nbytes + SLACK_BYTES) // 64) * 64
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for area in areas:
        if any(area.border):
            memory[area.offset : area.offset + area.nbytes] = area.zero or 0
            room = _pixels(memory, area, area.pixel_stride)
            room[:] = torch.randint(0, 256, room.shape, dtype=torch.uint8)
    for area, value in values.items():
        _values(memory, area)[:] = value
    before, may_change = memory.clone(), torch.zeros(size, dtype=torch.bool)
    for step in steps:
        area = step.out
        _pixels(may_change, area, area.shape[3] if area.room else -(-area.shape[3] // LANES) * LANES)[:] = True
    loops = loops or compiler.loops("program_loops")
    rows = RowWriter(loops)
    table = [row + [0] * (loops.MAX_STEP_FIELDS - len(row)) for step in steps for row in step.rows(rows)]
    usual = loops.SCRATCH_BYTES + 8 * max(area.pixel_stride for area in areas)
    scratch = torch.randint(0, 256, (max(step.scratch(loops) or usual for step in steps) + 64,), dtype=torch.uint8)
    after_scratch = scratch[-64:].clone()
    table, bases = torch.tensor(table), torch.tensor([memory.data_ptr()] * 8)
    bases[ABSOLUTE], bases[SCRATCH] = 0, scratch.data_ptr()
    loops.run(table.data_ptr(), len(table), bases.data_ptr())
    assert torch.equal(memory[~may_change], before[~may_change]) and torch.equal(scratch[-64:], after_scratch)
    return _values(memory, steps[-1].out).clone()


def _values(memory, area):
    kind = torch.float32 if area.is_float else torch.uint8
    first = area.origin[1] // area.size
    return memory.view(kind).as_strided(area.shape, (area.sample_stride, area.row_stride, area.pixel_stride, 1), first)


def _pixels(memory, area, channels):
    """View of the bytes of an area's pixels, with `channels` channels."""
    n, h, w, _ = area.shape
    return memory.as_strided((n, h, w, channels * area.size), (*area.byte_strides, 1), area.origin[1])
