"""ONNX of recurrent layers whose hidden state is rounded, or projected, in each step: what a step does, in a Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxq.onnx.dequantized import stored_weight, transposed
from fxq.onnx.layer_nodes import linear
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.writer import Operand, Value, Writer
from fxq.ops.recurrent import TINY
from fxq.quant.dynamic_grid import MIN_SCALE


@dataclass(frozen=True)
class Grid:
    """What a hidden state is rounded to, see `fxq/ops/recurrent.py`.

    Attributes:
        qmax: the largest integer; 0: it is not rounded.
        scale: None: measured, for each sample.
        affine: whether it has a zero point, measured as well, both for all samples together.
    """

    qmax: int
    scale: float | None
    affine: bool = False

    def rounded(self, b: Writer, h: Operand) -> Operand:
        """A state (N, P) on the grid, in float."""
        if not self.qmax:
            return h
        if self.affine:
            low = b.emit("Min", b.emit("ReduceMin", h, keepdims=0), _number(0.0))
            high = b.emit("Max", b.emit("ReduceMax", h, keepdims=0), _number(0.0))
            size = b.emit("Div", b.emit("Sub", high, low), _number(self.qmax))
            scale = b.emit("Max", size, _number(MIN_SCALE))
            zero = b.emit("Neg", b.emit("Round", b.emit("Div", low, scale)))
            steps = b.emit("Add", b.emit("Round", b.emit("Div", h, scale)), zero)
            clamped = b.emit("Clip", steps, _number(0.0), _number(self.qmax))
            return b.emit("Mul", b.emit("Sub", clamped, zero), scale)
        if self.scale is None:
            largest = b.emit("ReduceMax", b.emit("Abs", h), b.ints([1]), keepdims=1)
            by: Operand = b.emit("Div", b.emit("Max", largest, _number(TINY)), _number(self.qmax))
        else:
            by = _number(self.scale)
        steps = b.emit("Round", b.emit("Div", h, by))
        return b.emit("Mul", b.emit("Clip", steps, _number(-self.qmax), _number(self.qmax)), by)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


Weights = Sequence[Value | None]
Step = Callable[[Writer, Operand, list[Operand]], list[str]]
"""Writes a step: what it reads of the input (N, ...), the states before; gives the states behind."""


def lstm_steps(
    w: Writer,
    x: Value,
    weights: Weights,
    states: Weights,
    weight_hr: Value | None,
    grid: Grid,
    reverse: bool,
    cell: bool,
) -> str:
    """An LSTM, as `fxq.ops.recurrent.lstm`."""
    weight_hh = weights[1]
    assert weight_hh is not None
    hidden, width = weight_hh.shape[0] // 4, weight_hh.shape[1]
    inner = Grid(grid.qmax, 1 / grid.qmax if grid.scale is not None else None, grid.affine)

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        summed = b.emit("Add", gates, _product(b, grid.rounded(b, before[0]), w, weight_hh, weights[3]))
        i, f, g, o = b.emit_several("Split", [summed], 4, axis=1, num_outputs=4)
        kept = b.emit("Mul", b.emit("Sigmoid", f), before[1])
        c = b.emit("Add", kept, b.emit("Mul", b.emit("Sigmoid", i), b.emit("Tanh", g)))
        h = b.emit("Mul", b.emit("Sigmoid", o), b.emit("Tanh", c))
        return [h if weight_hr is None else _product(b, inner.rounded(b, h), w, weight_hr, None), c]

    y, _, c = _scanned(w, x, weights, states, [width, hidden], step, reverse)
    if not cell:
        return y
    count, samples = -(-hidden // width), x.shape[1]
    padded = w.emit("Pad", c, w.ints([0, 0, 0, count * width - hidden])) if count * width > hidden else c
    rows = w.emit("Transpose", w.reshaped(padded, (samples, count, width)), perm=[1, 0, 2])
    return w.emit("Concat", y, rows, axis=0)


def gru_steps(w: Writer, x: Value, weights: Weights, state: Value | None, grid: Grid, reverse: bool) -> str:
    """A GRU, as `fxq.ops.recurrent.gru`."""
    weight_hh = weights[1]
    assert weight_hh is not None

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        other = _product(b, grid.rounded(b, before[0]), w, weight_hh, weights[3])
        parts = [b.emit_several("Split", [value], 3, axis=1, num_outputs=3) for value in (gates, other)]
        (reset, update, new), (other_reset, other_update, other_new) = parts
        update = b.emit("Sigmoid", b.emit("Add", update, other_update))
        reset = b.emit("Sigmoid", b.emit("Add", reset, other_reset))
        new = b.emit("Tanh", b.emit("Add", new, b.emit("Mul", reset, other_new)))
        return [b.emit("Add", new, b.emit("Mul", update, b.emit("Sub", before[0], new)))]

    return _scanned(w, x, weights, [state], [weight_hh.shape[1]], step, reverse)[0]


def rnn_steps(
    w: Writer, x: Value, weights: Weights, state: Value | None, grid: Grid, reverse: bool, nonlinearity: str
) -> str:
    """A plain recurrent layer, as `fxq.ops.recurrent.rnn`."""
    weight_hh = weights[1]
    assert weight_hh is not None

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        summed = b.emit("Add", gates, _product(b, grid.rounded(b, before[0]), w, weight_hh, weights[3]))
        return [b.emit(nonlinearity.capitalize(), summed)]

    return _scanned(w, x, weights, [state], [weight_hh.shape[1]], step, reverse)[0]


def _scanned(
    w: Writer, x: Value, weights: Weights, states: Weights, widths: Sequence[int], step: Step, reverse: bool
) -> list[str]:
    """The first state behind each step (T, N, P), and all states behind the last one.

    Args:
        w: the model.
        x: (T, N, I).
        weights: of the input, of the hidden state, and their biases.
        states: what it begins with, (N, its width) each; zeros where there is none.
        widths: of the states.
        step: writes a step.
        reverse: whether the last entry is the first step.
    """
    weight_ih = weights[0]
    assert weight_ih is not None
    samples, inputs = x.shape[1], linear(w, x, weight_ih, weights[2])
    first: list[Operand] = []
    for state, width in zip(states, widths, strict=True):
        first.append(state if state is not None else w.emit("Expand", _number(0.0), w.ints([samples, width])))
    b = w.body()
    before = [b.input("state", x.like.new_empty((samples, width))) for width in widths]
    read = b.input("gates", x.like.new_empty((samples, weight_ih.shape[0])))
    behind = [Value(name, v.like) for name, v in zip(step(b, read, list(before)), before, strict=True)]
    body = b.graph([*behind, behind[0]], keep_inputs=True)
    turn = [1] if reverse else None
    *last, made = w.emit_several(
        "Scan", [*first, inputs], len(widths) + 1, body=body, num_scan_inputs=1, scan_input_directions=turn,
        scan_output_directions=turn,
    )  # fmt: skip
    return [made, *last]


def _product(b: Writer, h: Operand, w: Writer, weight: Value, bias: Value | None) -> str:
    """The product of a state (N, P) with a weight of the model (G, P), inside of a step, and a bias."""
    stored = stored_weight(w, weight)
    if stored is not None:
        node, parts = stored
        names = [b.constant(part, w.type_of(name)) for part, name in zip(parts, node.reads, strict=True)]
        inside = Value(b.emit(node.kind, *names, **node.attributes), weight.like)
    else:
        real = w.value_of(weight.name)
        if real is None:
            raise NotInOnnx("its weights are computed")
        inside = Value(b.constant(real), weight.like)
    made = b.emit("MatMul", h, transposed(b, inside))
    known = w.value_of(bias.name) if bias is not None else None
    return made if known is None else b.emit("Add", made, known)
