"""ONNX form of recurrent layers: float nodes, ONNX Runtime's integer node, or for any runtime a loop of steps.

OpenVINO (2026.4) computes all but one of the recurrent nodes that read the same value wrong at many sizes. The two
directions of a layer are such nodes. So for OpenVINO, the second node reads the steps in reverse order and runs in the
other direction, and each further node reverses them once more, so that no two nodes read the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import dequantize_node, dynamic_dequantize_node, stored_weight, weight_for
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.stepwise_nodes import gru_steps, is_one_step, lstm_steps, rnn_steps, state_grid
from fxq.onnx.writer import MOVING_OP_TYPES, Operand, Value, Writer, refuse, writes


@writes("lstm")
def lstm(
    w: Writer,
    x: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias_ih: Value | None = None,
    bias_hh: Value | None = None,
    h: Value | None = None,
    c: Value | None = None,
    weight_hr: Value | None = None,
    *,
    cell: bool,
    state_affine: bool,
    **options: Any,
) -> Value:
    rows = -(-weight_hh.shape[0] // (4 * weight_hh.shape[1])) if cell else 0
    if _in_steps(w, x, options["state_qmax"], weight_hr is not None):
        grid = state_grid(options["state_qmax"], options["state_scale"], state_affine)
        weights = [weight_ih, weight_hh, bias_ih, bias_hh]
        states = lstm_steps(w, x, weights, [h, c], weight_hr, grid, options["reverse"], cell)
        return _states(w, states, x, weight_hh, rows)
    refuse(weight_hr is not None, "its hidden state is projected")
    order = (0, 3, 1, 2)  # input, forget, cell, output; ONNX: input, output, forget, cell
    op_type = "DynamicQuantizeLSTM" if state_affine and not w.floats else "LSTM"
    outputs = _layer(w, op_type, x, [weight_ih, weight_hh, bias_ih, bias_hh], [h, c], order, **options)
    states = w.emit("Concat", outputs[0], outputs[2], axis=0) if cell else outputs[0]
    return _states(w, states, x, weight_hh, rows)


@writes("gru")
def gru(
    w: Writer,
    x: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias_ih: Value | None = None,
    bias_hh: Value | None = None,
    h: Value | None = None,
    **options: Any,
) -> Value:
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
    if _in_steps(w, x, options["state_qmax"]):
        grid = state_grid(options["state_qmax"], options["state_scale"])
        return _states(w, gru_steps(w, x, weights, h, grid, options["reverse"]), x, weight_hh)
    order = (1, 0, 2)  # reset, update, new; ONNX: update, reset, new
    states, _ = _layer(w, "GRU", x, weights, [h], order, linear_before_reset=1, **options)
    return _states(w, states, x, weight_hh)


@writes("rnn")
def rnn(
    w: Writer,
    x: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias_ih: Value | None = None,
    bias_hh: Value | None = None,
    h: Value | None = None,
    *,
    nonlinearity: str,
    **options: Any,
) -> Value:
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
    if _in_steps(w, x, options["state_qmax"]):
        grid = state_grid(options["state_qmax"], options["state_scale"])
        return _states(w, rnn_steps(w, x, weights, h, grid, options["reverse"], nonlinearity), x, weight_hh)
    states, _ = _layer(w, "RNN", x, weights, [h], (0,), activations=[nonlinearity.capitalize()], **options)
    return _states(w, states, x, weight_hh)


def _in_steps(w: Writer, x: Value, state_qmax: int, is_projected: bool = False) -> bool:
    """Whether a layer is written as the ops of its steps, see `fxq/onnx/stepwise_nodes.py`."""
    if state_qmax or is_projected:
        return w.portable
    return w.for_openvino and is_one_step(x)


def _states(w: Writer, name: str, x: Value, weight_hh: Value, rows: int = 0) -> Value:
    """Value of the hidden states (T, N, P) and `rows` more. PyTorch's layers would fix a dynamic number of steps T."""
    steps, samples, _ = x.shape
    return Value(name, w.empty((steps + rows, samples, weight_hh.shape[1]), x.dtype))


def _layer(
    w: Writer,
    op_type: str,
    x: Value,
    weights: Sequence[Value | None],
    states: Sequence[Value | None],
    order: Sequence[int],
    *,
    reverse: bool,
    state_qmax: int,
    state_scale: float | None,
    **attributes: Any,
) -> list[str]:
    """Write a layer of one direction as one node.

    Args:
        w: writer of the model.
        op_type: op type of the node.
        x: input, (T, N, I).
        weights: weight_ih, weight_hh, bias_ih, bias_hh.
        states: initial states, (N, H) each, or None for zeros.
        order: torch's number of each gate, in ONNX's order.
        reverse: whether to start from the last time step.
        state_qmax: see `fxq/ops/recurrent.py`.
        state_scale: see `fxq/ops/recurrent.py`.
        attributes: further attributes of the node.

    Returns:
        Names of the hidden states (T, N, H) and of the last states (1, N, H).
    """
    steps, samples, _ = x.shape
    parts: Sequence[Operand]
    if op_type == "DynamicQuantizeLSTM":
        refuse(state_qmax != 255 or state_scale is not None, "its hidden state is not on the grid 0..255")
        x, (parts, grids) = _float_input(w, x), _integer_weights(w, weights[:2], order)
        if samples != 1:  # with more threads, each computes the range of its own samples
            w.threads = 1
    else:
        refuse(state_qmax and not w.floats, "its hidden state is on a grid")
        parts, grids = [_gates(w, x, part, order) for part in weights[:2]], []
    biases = [gates for part in weights[2:] if isinstance(gates := _gates(w, x, part, order), Tensor)]
    bias = w.cached_constant(("biases", *map(id, biases)), lambda: torch.cat(biases, 1)) if biases else None
    first: list[Operand] = [None if h is None else w.reshaped(h, (1, *h.shape)) for h in states]
    hidden = 0 if weights[1] is None else weights[1].shape[-1]
    reversals = _counted_reads(w, x) if w.for_openvino else 0
    inputs: Operand = x
    for _ in range(reversals):
        inputs = w.flipped(inputs)
    hidden_states, *last = w.emit_several(
        op_type, [inputs, *parts, bias, None, *first, None, *grids], 1 + len(states), hidden_size=hidden,
        direction="reverse" if reverse != bool(reversals % 2) else "forward", **attributes,
    )  # fmt: skip
    result = w.reshaped(hidden_states, (steps, samples, hidden))
    return [w.flipped(result) if reversals % 2 else result, *last]


_MERGEABLE_OP_TYPES = (*MOVING_OP_TYPES, "QuantizeLinear", "DequantizeLinear", "Clip")
"""Op types that only move or round values, so that OpenVINO may merge the nodes of two readers of a value."""


def _counted_reads(w: Writer, x: Value) -> int:
    """Count one more recurrent node that reads a value, moved or rounded or not; return how many did before."""
    name = x.name
    while (node := w.producer(name)) is not None and node.op_type in _MERGEABLE_OP_TYPES:
        name = node.inputs[0]
    before = w.recurrent_reads.get(name, 0)
    w.recurrent_reads[name] = before + 1
    return before


def _float_input(w: Writer, x: Value) -> Value:
    """Float value before a dynamic quantization, for a layer that quantizes its input itself."""
    dequantize = dynamic_dequantize_node(w, x)
    refuse(dequantize is None and dequantize_node(w, x) is not None, "the range of its input is not dynamic")
    if dequantize is None:
        return x
    quantize = w.producer(dequantize.inputs[0])
    if quantize is None or quantize.op_type != "DynamicQuantizeLinear":
        raise NotInOnnx("its input is not on one grid of 0..255")
    return Value(quantize.inputs[0], x.like)


def _integer_weights(
    w: Writer, weights: Sequence[Value | None], order: Sequence[int]
) -> tuple[list[Tensor | None], list[Operand]]:
    """Integer weights (1, columns, gates), and the scale and zero point of each, (1, gates) or (1,).

    They are not shared with other nodes, because ONNX Runtime fails to convert shared integers to unsigned.
    """
    integers: list[Tensor | None] = []
    grids: list[Operand] = []
    for weight in weights:
        source = dequantize_node(w, weight) if weight is not None else None
        q = w.constant_of(source.node.inputs[0]) if source is not None else None
        if source is None or q is None or bool(source.zero.any()) or source.node.attributes.get("block_size"):
            raise NotInOnnx("its weights have zero points, or are per block, or are not quantized")
        integers.append(_reorder_gates(q, order).transpose(1, 2).contiguous())
        scale = source.scale.reshape(1) if source.scale.numel() == 1 else _reorder_gates(source.scale, order)
        grids += [scale, torch.zeros(scale.shape, dtype=torch.int8, device="cpu")]
    return integers, grids


def _gates(w: Writer, x: Value, weight: Value | None, order: Sequence[int]) -> Operand:
    """Write a weight or bias in ONNX's gate order, with a leading axis for directions."""
    if weight is None:
        return None
    producer = w.producer(weight.name)
    if producer is not None and producer.op_type == "Slice":  # of columns, after a last block that is not full
        return w.cut(_gates(w, x, Value(producer.inputs[0], weight.like), order), 2, 0, weight.shape[1])
    stored = stored_weight(w, weight) if w.portable else None
    if stored is not None:
        node, constants = stored
        reordered = [part if part.dim() == 0 else _reorder_gates(part, order) for part in constants]
        # A per-channel scale has one axis, so it gets no axis for directions.
        reordered = [part[0] if part.dim() == 2 and i else part for i, part in enumerate(reordered)]
        attributes = {k: v + 1 if k == "axis" else v for k, v in node.attributes.items()}
        names = [w.constant(part, w.type_number_of(name)) for part, name in zip(reordered, node.inputs, strict=True)]
        return w.emit(node.op_type, *names, **attributes)
    operand = weight_for(w, x, weight)
    constant = operand if isinstance(operand, Tensor) else w.constant_of(operand.name)
    if constant is None:
        raise NotInOnnx("its weights are computed")
    return w.cached_constant(("gates", id(constant)), lambda: _reorder_gates(constant, order))


def _reorder_gates(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Reorder the rows of a tensor to ONNX's gate order, and add a leading axis for directions."""
    return rows.detach().unflatten(0, (len(order), -1))[list(order)].flatten(0, 1)[None]
