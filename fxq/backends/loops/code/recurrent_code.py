"""Machine code for a time step of a recurrent layer: gates of 16 units at once, from the product to the new state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.machine_code import GROUP, choose, on_addresses
from fxq.backends.loops.code.many_rows_code import add_group, group_of_columns, group_of_row
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT32, INT64, INTS, LANES, load, number, splat

SAMPLES = 4 if machine_code.KIND.has_avx512 else 1
"""Samples of a large tile: all its sums stay in registers. Small tiles have one sample."""
_PARTS = 2 if machine_code.KIND.has_avx512 else 1
"""Number of sums of a gate in a small tile, which do not wait for each other."""
_BYTES_AHEAD = 1024
"""Distance of prefetches into the first-level cache. The weight is read in the order of memory."""
_MAX_SERIES_X = 0.25
"""Largest magnitude for which tanh is computed by its Taylor series."""


class Units(NamedTuple):
    """Operands of a tile: 16 units of a layer, for some samples.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        x: Address of the state as integers, uint8 (samples, x_bytes).
        x_bytes: Bytes from there to the next sample.
        weight: Address of int8 (words, gates, 16, GROUP).
        words: Number of groups of `GROUP` integers of the state, an even number.
        start: Address of int32 (gates, 16): initial sums.
        scale: Address of float32 (gates, 16).
        sizes: Address of float32 (samples,): factor of the products of each sample.
        gates: Address of float32 (samples, gates, 16) that is added to the products.
        gates_bytes: Bytes from there to the next sample.
        memory: Address of float32: cell state of an LSTM, which is overwritten, or previous state of a GRU.
        memory_bytes: Bytes from there to the next sample.
        bias: Address of float32 (16,): what is added to the state's part of the new gate of a GRU.
        out: Address of the new state, float32, written.
        out_bytes: Bytes from there to the next sample.
        count: Number of units that exist, counted from the first one of the tile.
    """

    x: Any
    x_bytes: Any
    weight: Any
    words: Any
    start: Any
    scale: Any
    sizes: Any
    gates: Any
    gates_bytes: Any
    memory: Any
    memory_bytes: Any
    bias: Any
    out: Any
    out_bytes: Any
    count: Any


class _Sample(NamedTuple):
    """Operands of the units of one sample.

    Attributes:
        products: Scaled product of the state for each gate, (16,).
        inputs: What is added to it.
        memory: Address of float32, see `Units`.
        bias: Address of float32, see `Units`.
        exists: Which units exist, bits (16,).
    """

    products: Sequence[Any]
    inputs: Sequence[Any]
    memory: Any
    bias: Any
    exists: Any

    def gate(self, b: Any, index: Any) -> Any:
        """Value of a gate before its function."""
        return b.fadd(self.products[index], self.inputs[index])


def _tanh(b: Any, x: Any) -> Any:
    """tanh(x), with a small relative error near zero, too."""
    square = b.fmul(x, x)
    series = vectors.polynomial(b, square, 2.1869489e-2, -5.3968254e-2, 1.3333333e-1, -3.3333333e-1)
    near = vectors.multiply_add(b, b.fmul(x, square), series, x)
    return b.select(b.fcmp_ordered("<", square, splat(b, _MAX_SERIES_X**2)), near, vectors.tanh(b, x))


def _lstm(b: Any, sample: _Sample) -> Any:
    """New state of an LSTM; gates in the order input, forget, cell, output."""
    i, f, g, o = (sample.gate(b, k) for k in range(4))
    kept = b.fmul(vectors.sigmoid(b, f), load(b, sample.memory, FLOATS))
    cell = vectors.multiply_add(b, vectors.sigmoid(b, i), _tanh(b, g), kept)
    vectors.store(b, cell, sample.memory)
    return b.fmul(vectors.sigmoid(b, o), _tanh(b, cell))


def _gru(b: Any, sample: _Sample) -> Any:
    """New state of a GRU; gates in the order reset, update, new."""
    reset, update = (vectors.sigmoid(b, sample.gate(b, k)) for k in (0, 1))
    of_state = b.fadd(sample.products[2], load(b, sample.bias, FLOATS))
    new = _tanh(b, vectors.multiply_add(b, reset, of_state, sample.inputs[2]))
    before = vectors.load_some(b, sample.memory, sample.exists)
    return vectors.multiply_add(b, update, b.fsub(before, new), new)


def _tanh_unit(b: Any, sample: _Sample) -> Any:
    """New state of an RNN with tanh."""
    return _tanh(b, sample.gate(b, 0))


def _relu_unit(b: Any, sample: _Sample) -> Any:
    """New state of an RNN with relu. NaN stays."""
    x, zero = sample.gate(b, 0), splat(b, 0.0)
    return b.select(b.fcmp_ordered("<", x, zero), zero, x)


CELLS = {"lstm": (4, _lstm), "gru": (3, _gru), "rnn_tanh": (1, _tanh_unit), "rnn_relu": (1, _relu_unit)}
"""Number of gates of each kind of layer, and the code of its new state."""


def _sums(b: Any, units: Units, gates: int, samples: int) -> list[list[Any]]:
    """Sums of the products of each sample and gate."""
    parts, zero = _PARTS if samples == 1 else 1, ir.Constant(INTS, None)
    starts = [load(b, units.start, INTS, 4 * LANES * g) for g in range(gates)]
    sums = [
        [[cgutils.alloca_once_value(b, zero if part else start) for part in range(parts)] for start in starts]
        for _ in range(samples)
    ]
    lines = [b.add(units.x, b.mul(units.x_bytes, number(r))) for r in range(samples)]
    group_bytes = GROUP * LANES * gates
    with cgutils.for_range(b, b.udiv(units.words, number(parts)), intp=INT64) as step:
        for part in range(parts):
            word = b.add(b.mul(step.index, number(parts)), number(part))
            address = b.add(units.weight, b.mul(word, number(group_bytes)))
            weights = [group_of_columns(b, b.add(address, number(GROUP * LANES * g))) for g in range(gates)]
            for g in range(gates):
                vectors.prefetch(b, b.add(address, number(_BYTES_AHEAD + GROUP * LANES * g)))
            for line, of_sample in zip(lines, sums, strict=True):
                values = group_of_row(b, b.add(line, b.mul(word, number(GROUP))))
                for of_gate, weight in zip(of_sample, weights, strict=True):
                    b.store(add_group(b, b.load(of_gate[part]), values, weight), of_gate[part])
    return [[_total(b, of_gate) for of_gate in of_sample] for of_sample in sums]


def _total(b: Any, sums: Sequence[Any]) -> Any:
    """Sum of all numbers in some registers."""
    total = b.load(sums[0])
    for part in sums[1:]:
        total = b.add(total, b.load(part))
    return total


def _step(b: Any, kind: str, samples: int, units: Units) -> None:
    """Compute 16 units of a kind of layer for some samples."""
    gates, new_state = CELLS[kind]
    lanes = ir.Constant(INTS, list(range(LANES)))
    exists = b.icmp_signed("<", lanes, splat(b, b.trunc(units.count, INT32)))
    scales = [load(b, units.scale, FLOATS, 4 * LANES * g) for g in range(gates)]
    for r, of_sample in enumerate(_sums(b, units, gates, samples)):
        size = splat(b, load(b, units.sizes, FLOAT32, 4 * r))
        inputs = b.add(units.gates, b.mul(units.gates_bytes, number(r)))
        sample = _Sample(
            [
                b.fmul(b.sitofp(total, FLOATS), b.fmul(scale, size))
                for total, scale in zip(of_sample, scales, strict=True)
            ],
            [load(b, inputs, FLOATS, 4 * LANES * g) for g in range(gates)],
            b.add(units.memory, b.mul(units.memory_bytes, number(r))),
            units.bias,
            exists,
        )
        state = new_state(b, sample)
        vectors.store_some(b, state, b.add(units.out, b.mul(units.out_bytes, number(r))), exists)


@partial(on_addresses, is_called=True)
def compute_units(b, kind, samples, units):
    """Compute 16 units for 1 sample or for `SAMPLES`. `kind` is the index of a kind of layer in `CELLS`."""
    kinds = list(CELLS)
    counts = sorted({1, SAMPLES})

    def of_kind(index: int) -> None:
        choose(b, samples, counts, lambda count: _step(b, kinds[index], count, units))

    choose(b, kind, range(len(kinds)), of_kind)
