"""ONNX form of recurrent layers as the ops of a step, in a Scan over the steps, or by themselves for a single step.

It is the form of layers whose state is quantized or projected in each step. A single float step, as in a stream, has it
for OpenVINO, too, whose recurrent nodes take longer than matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxq.onnx.dequantized import stored_weight, transposed
from fxq.onnx.layer_nodes import linear
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer
from fxq.ops.recurrent import MIN_STATE_RANGE
from fxq.quant.dynamic_grid import MIN_SCALE, DynamicGrid, Grid
from fxq.quant.qparams import QParams


def state_grid(qmax: int, scale: float | None, affine: bool = False) -> Grid | None:
    """Grid of a hidden state from the options of its op, see `fxq/ops/recurrent.py`; None if it is not quantized."""
    if not qmax:
        return None
    if affine:
        return DynamicGrid(0, qmax, torch.uint8, symmetric=False)
    if scale is None:
        return DynamicGrid(-qmax, qmax, torch.int8, axis=-1)
    return QParams.per_tensor(scale, 0, -qmax, qmax, torch.int8)


def _rounded(body: Writer, h: Operand, grid: Grid | None) -> Operand:
    """Write the quantization and dequantization of a state, (N, P)."""
    if grid is None:
        return h
    if isinstance(grid, DynamicGrid) and not grid.symmetric:
        low = body.emit("Min", body.emit("ReduceMin", h, keepdims=0), _number(0.0))
        high = body.emit("Max", body.emit("ReduceMax", h, keepdims=0), _number(0.0))
        size = body.emit("Div", body.emit("Sub", high, low), _number(grid.qmax))
        scale = body.emit("Max", size, _number(MIN_SCALE))
        zero = body.emit("Neg", body.emit("Round", body.emit("Div", low, scale)))
        steps = body.emit("Add", body.emit("Round", body.emit("Div", h, scale)), zero)
        clamped = body.emit("Clip", steps, _number(0.0), _number(grid.qmax))
        return body.emit("Mul", body.emit("Sub", clamped, zero), scale)
    if isinstance(grid, DynamicGrid):
        largest = body.emit("ReduceMax", body.emit("Abs", h), body.ints([1]), keepdims=1)
        by: Operand = body.emit("Div", body.emit("Max", largest, _number(MIN_STATE_RANGE)), _number(grid.qmax))
    else:
        by = grid.scale
    steps = body.emit("Round", body.emit("Div", h, by))
    return body.emit("Mul", body.emit("Clip", steps, _number(grid.qmin), _number(grid.qmax)), by)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


Weights = Sequence[Value | None]
Step = Callable[[Writer, Operand, list[Operand]], list[str]]
"""Function that writes a step: takes a writer, the step's input (N, ...) and the states; returns the new states."""


def lstm_steps(
    w: Writer,
    x: Value,
    weights: Weights,
    states: Weights,
    weight_hr: Value | None,
    grid: Grid | None,
    reverse: bool,
    cell: bool,
) -> str:
    """Write an LSTM, as `fxq.ops.recurrent.lstm`."""
    weight_hh = weights[1]
    assert weight_hh is not None
    hidden, width = weight_hh.shape[0] // 4, weight_hh.shape[1]
    inner = state_grid(grid.qmax, 1 / grid.qmax) if isinstance(grid, QParams) else grid

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        summed = b.emit("Add", gates, _product(b, _rounded(b, before[0], grid), w, weight_hh, weights[3]))
        i, f, g, o = b.emit_several("Split", [summed], 4, axis=1, num_outputs=4)
        forgotten = b.emit("Mul", b.emit("Sigmoid", f), before[1])
        c = b.emit("Add", forgotten, b.emit("Mul", b.emit("Sigmoid", i), b.emit("Tanh", g)))
        h = b.emit("Mul", b.emit("Sigmoid", o), b.emit("Tanh", c))
        return [h if weight_hr is None else _product(b, _rounded(b, h, inner), w, weight_hr, None), c]

    y, _, c = _write_steps(w, x, weights, states, [width, hidden], step, reverse)
    if not cell:
        return y
    count, samples = -(-hidden // width), x.shape[1]
    padded = w.emit("Pad", c, w.ints([0, 0, 0, count * width - hidden])) if count * width > hidden else c
    rows = w.emit("Transpose", w.reshaped(padded, (samples, count, width)), perm=[1, 0, 2])
    return w.emit("Concat", y, rows, axis=0)


def gru_steps(w: Writer, x: Value, weights: Weights, state: Value | None, grid: Grid | None, reverse: bool) -> str:
    """Write a GRU, as `fxq.ops.recurrent.gru`."""
    weight_hh = weights[1]
    assert weight_hh is not None

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        product = _product(b, _rounded(b, before[0], grid), w, weight_hh, weights[3])
        parts = [b.emit_several("Split", [value], 3, axis=1, num_outputs=3) for value in (gates, product)]
        (reset, update, new), (other_reset, other_update, other_new) = parts
        update = b.emit("Sigmoid", b.emit("Add", update, other_update))
        reset = b.emit("Sigmoid", b.emit("Add", reset, other_reset))
        new = b.emit("Tanh", b.emit("Add", new, b.emit("Mul", reset, other_new)))
        return [b.emit("Add", new, b.emit("Mul", update, b.emit("Sub", before[0], new)))]

    return _write_steps(w, x, weights, [state], [weight_hh.shape[1]], step, reverse)[0]


def rnn_steps(
    w: Writer, x: Value, weights: Weights, state: Value | None, grid: Grid | None, reverse: bool, nonlinearity: str
) -> str:
    """Write a plain recurrent layer, as `fxq.ops.recurrent.rnn`."""
    weight_hh = weights[1]
    assert weight_hh is not None

    def step(b: Writer, gates: Operand, before: list[Operand]) -> list[str]:
        product = _product(b, _rounded(b, before[0], grid), w, weight_hh, weights[3])
        summed = b.emit("Add", product, gates)  # with the gates first, OpenVINO is wrong from the second step on
        return [b.emit(nonlinearity.capitalize(), summed)]

    return _write_steps(w, x, weights, [state], [weight_hh.shape[1]], step, reverse)[0]


def is_one_step(x: Value) -> bool:
    """Whether the input of a recurrent layer, (T, N, I), has a single time step in every call."""
    return not varies(x.shape[0]) and x.shape[0] == 1


def _write_steps(
    w: Writer, x: Value, weights: Weights, states: Weights, widths: Sequence[int], step: Step, reverse: bool
) -> list[str]:
    """Write a Scan over the steps, or a single step by itself.

    Args:
        w: writer of the model.
        x: input, (T, N, I).
        weights: weight_ih, weight_hh, bias_ih, bias_hh.
        states: initial states, (N, width) each; None for zeros.
        widths: widths of the states.
        step: function that writes a step.
        reverse: whether to start from the last time step.

    Returns:
        Names of the first state after each step, (T, N, P), and of all states after the last step.
    """
    weight_ih = weights[0]
    assert weight_ih is not None
    samples, inputs = x.shape[1], linear(w, x, weight_ih, weights[2])
    first: list[Operand] = []
    for state, width in zip(states, widths, strict=True):
        first.append(state if state is not None else w.emit("Expand", _number(0.0), w.ints([samples, width])))
    if is_one_step(x):
        after = step(w, w.reshaped(inputs, (samples, weight_ih.shape[0])), first)
        return [w.reshaped(after[0], (1, samples, widths[0])), *after]
    b = w.body()
    before = [b.input("state", x.like.new_empty((samples, width))) for width in widths]
    read = b.input("gates", x.like.new_empty((samples, weight_ih.shape[0])))
    written = [Value(name, v.like) for name, v in zip(step(b, read, list(before)), before, strict=True)]
    body = b.graph([*written, written[0]], keep_inputs=True)
    direction = [1] if reverse else None
    *last, hidden_states = w.emit_several(
        "Scan", [*first, inputs], len(widths) + 1, body=body, num_scan_inputs=1, scan_input_directions=direction,
        scan_output_directions=direction,
    )  # fmt: skip
    return [hidden_states, *last]


def _product(b: Writer, h: Operand, w: Writer, weight: Value, bias: Value | None) -> str:
    """Write the product of a state (N, P) with a weight (G, P) of the model, plus a bias, inside of a step."""
    if b is w:  # outside of a loop; only the rank of the state matters
        return linear(w, Value(w.name_of(h), w.empty((1, weight.shape[1]), torch.float32)), weight, bias)
    stored = stored_weight(w, weight)
    if stored is not None:
        node, constants = stored
        names = [b.constant(part, w.type_number_of(name)) for part, name in zip(constants, node.inputs, strict=True)]
        step_weight = Value(b.emit(node.op_type, *names, **node.attributes), weight.like)
    else:
        constant = w.constant_of(weight.name)
        if constant is None:
            raise NotInOnnx("its weights are computed")
        step_weight = Value(b.constant(constant), weight.like)
    product = b.emit("MatMul", h, transposed(b, step_weight))
    constant_bias = w.constant_of(bias.name) if bias is not None else None
    return product if constant_bias is None else b.emit("Add", product, constant_bias)
