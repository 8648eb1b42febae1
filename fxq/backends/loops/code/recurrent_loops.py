"""Loop over the time steps of a recurrent layer: each step rounds the state, multiplies it, and computes the new one.

Units of a layer are computed in blocks of 16. Weights, scales and gates are ordered (block, gate, unit of the block).
On several threads each step has parts, which compute some of the blocks. Each part rounds the whole state itself: that
takes less time than to wait for a rounded one.
"""

from __future__ import annotations

from enum import IntEnum

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.memory_loops import bytes_, floats
from fxq.backends.loops.code.recurrent_code import CELLS, SAMPLES, Units, compute_units
from fxq.backends.loops.code.step_loops import quantize_state
from fxq.backends.loops.code.vectors import LANES

X_OFFSET = machine_code.KIND.x_offset
"""Number that products subtract from the integers of the state; initial sums have to add it."""
KINDS = tuple(CELLS)
"""Kinds of layers. The number of a kind is its index."""
_LSTM = KINDS.index("lstm")
_GATES = tuple(gates for gates, _ in CELLS.values())


class StepField(IntEnum):
    """Fields of a part of a time step."""

    TIME = 0  # index of the step in the input and the result
    PREVIOUS = 1  # index of the step before it, or -1: there is none
    FIRST = 2  # first block of the part, and end
    END = 3
    PART = 4  # index of the part


class LayerField(IntEnum):
    """Fields of a call of a layer. Blocks, gates and units are in the order that this module describes."""

    KIND = 0  # index in `KINDS`
    GATES = 1  # address of float32 (steps, samples, blocks, gates, 16): contribution of the input, and biases
    OUT = 2  # address of float32 (steps, samples, hidden), written: the states
    STATE = 3  # address of float32 (samples, hidden): the initial state
    CELL = 4  # address of float32 (samples, 16 * blocks): cell state of an LSTM, overwritten
    WEIGHT = 5  # address of int8 (blocks, 4 * blocks, gates, 16, 4), with zeros where units do not exist
    START = 6  # address of int32 (blocks, gates, 16): initial sums
    SCALE = 7  # address of float32 (blocks, gates, 16)
    BIAS = 8  # address of float32 (16 * blocks,): added to the state's part of the new gate of a GRU
    SAMPLES = 9
    HIDDEN = 10  # number of units
    INTEGERS = 11  # address of uint8 (parts, samples, 16 * blocks), overwritten
    SIZES = 12  # address of float32 (parts, samples), overwritten
    NUMBERS = 13  # address of float32: qmax, scale of the state or 0 if it is dynamic, least dynamic range


_STEP_FIELDS, _LAYER_FIELDS = len(StepField), len(LayerField)


@helper
def _round_state(state, integers, sizes, samples, hidden, width, numbers):
    """Round the state of each sample to integers, uint8 (samples, width), and store the factors of its products."""
    numbers, sizes = carray(floats(numbers), 3), carray(floats(sizes), samples)
    for n in range(samples):
        h, rounded = carray(floats(state + 4 * hidden * n), hidden), carray(bytes_(integers + width * n), hidden)
        sizes[n] = quantize_state(h, rounded, numbers[0], numbers[1], numbers[2])


@helper
def _run_part(step, layer):
    """Compute some blocks of a time step."""
    kind, samples, hidden = layer[LayerField.KIND], layer[LayerField.SAMPLES], layer[LayerField.HIDDEN]
    blocks, gates, previous, part = (
        (hidden + LANES - 1) // LANES, _GATES[kind], step[StepField.PREVIOUS], step[StepField.PART],
    )  # fmt: skip
    width, state_bytes = LANES * blocks, 4 * samples * hidden
    out = layer[LayerField.OUT] + state_bytes * step[StepField.TIME]
    state = layer[LayerField.STATE] if previous < 0 else layer[LayerField.OUT] + state_bytes * previous
    integers = layer[LayerField.INTEGERS] + samples * width * part
    sizes = layer[LayerField.SIZES] + 4 * samples * part
    _round_state(state, integers, sizes, samples, hidden, width, layer[LayerField.NUMBERS])
    inputs = layer[LayerField.GATES] + 4 * samples * width * gates * step[StepField.TIME]
    memory, memory_bytes = (layer[LayerField.CELL], 4 * width) if kind == _LSTM else (state, 4 * hidden)
    for block in range(step[StepField.FIRST], step[StepField.END]):
        of_block, n = LANES * gates * block, 0
        while n < samples:
            at_once = SAMPLES if samples - n >= SAMPLES else 1
            units = Units(
                integers + width * n, width, layer[LayerField.WEIGHT] + width * of_block, width // 4,
                layer[LayerField.START] + 4 * of_block, layer[LayerField.SCALE] + 4 * of_block, sizes + 4 * n,
                inputs + 4 * (width * gates * n + of_block), 4 * width * gates,
                memory + memory_bytes * n + 4 * LANES * block, memory_bytes,
                layer[LayerField.BIAS] + 4 * LANES * block, out + 4 * (hidden * n + LANES * block), 4 * hidden,
                hidden - LANES * block,
            )  # fmt: skip
            compute_units(kind, at_once, units)
            n += at_once


@compiled("i64* i i64*")
def run_steps(steps, count, layer):
    """Run time steps, or parts of one, in order. Fields: `StepField` and `LayerField`."""
    steps, layer = carray(steps, (count, _STEP_FIELDS)), carray(layer, _LAYER_FIELDS)
    for k in range(count):
        _run_part(steps[k], layer)
