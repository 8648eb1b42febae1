"""ONNX of recurrent layers, in float; on integers as ONNX Runtime has them, or for any runtime step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import dequantized, measured, stored_weight, weight_for
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.stepwise_nodes import Grid, gru_steps, lstm_steps, rnn_steps
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes


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
) -> str:
    if w.portable and (weight_hr is not None or options["state_qmax"]):
        grid = Grid(options["state_qmax"], options["state_scale"], state_affine)
        weights = [weight_ih, weight_hh, bias_ih, bias_hh]
        return lstm_steps(w, x, weights, [h, c], weight_hr, grid, options["reverse"], cell)
    refuse(weight_hr is not None, "its hidden state is projected")
    order = (0, 3, 1, 2)  # input, forget, cell, output; ONNX: input, output, forget, cell
    kind = "DynamicQuantizeLSTM" if state_affine and not w.floats else "LSTM"
    made = _layer(w, kind, x, [weight_ih, weight_hh, bias_ih, bias_hh], [h, c], order, **options)
    return w.emit("Concat", made[0], made[2], axis=0) if cell else made[0]


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
) -> str:
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
    if w.portable and options["state_qmax"]:
        return gru_steps(w, x, weights, h, Grid(options["state_qmax"], options["state_scale"]), options["reverse"])
    order = (1, 0, 2)  # reset, update, new; ONNX: update, reset, new
    return _layer(w, "GRU", x, weights, [h], order, linear_before_reset=1, **options)[0]


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
) -> str:
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
    if w.portable and options["state_qmax"]:
        grid = Grid(options["state_qmax"], options["state_scale"])
        return rnn_steps(w, x, weights, h, grid, options["reverse"], nonlinearity)
    return _layer(w, "RNN", x, weights, [h], (0,), activations=[nonlinearity.capitalize()], **options)[0]


def _layer(
    w: Writer,
    kind: str,
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
    """A layer of one direction: its hidden states (T, N, H), and its last states (1, N, H).

    Args:
        w: the model.
        kind: the type of the ONNX node.
        x: (T, N, I).
        weights: of the input, of the hidden state, and their biases.
        states: what it begins with, (N, H) each.
        order: which of torch's gates ONNX has first, and so on.
        reverse: whether the last entry is the first step.
        state_qmax: see `fxq/ops/recurrent.py`.
        state_scale: the same.
        attributes: further ones of the node.
    """
    steps, samples, _ = x.shape
    parts: Sequence[Operand]
    if kind == "DynamicQuantizeLSTM":
        refuse(state_qmax != 255 or state_scale is not None, "its hidden state is on another grid than 0..255")
        x, (parts, grids) = _before_rounding(w, x), _integers(w, weights[:2], order)
        if samples != 1:  # each thread would measure the state of some samples, not that of all
            w.threads = 1
    else:
        refuse(state_qmax and not w.floats, "its hidden state is on a grid")
        parts, grids = [_gates(w, x, part, order) for part in weights[:2]], []
    biases = [gates for part in weights[2:] if isinstance(gates := _gates(w, x, part, order), Tensor)]
    bias = w.kept(("biases", *map(id, biases)), lambda: torch.cat(biases, 1)) if biases else None
    first: list[Operand] = [None if h is None else w.reshaped(h, (1, *h.shape)) for h in states]
    hidden = 0 if weights[1] is None else weights[1].shape[-1]
    made, *last = w.emit_several(
        kind, [x, *parts, bias, None, *first, None, *grids], 1 + len(states), hidden_size=hidden,
        direction="reverse" if reverse else "forward", **attributes,
    )  # fmt: skip
    return [w.reshaped(made, (steps, samples, hidden)), *last]


def _before_rounding(w: Writer, x: Value) -> Value:
    """What was measured and rounded to make a value, for a layer that does the same."""
    grid = measured(w, x)
    refuse(grid is None and dequantized(w, x) is not None, "the range of its input is not measured")
    if grid is None:
        return x
    whole = w.made_by(grid.reads[0])
    if whole is None or whole.kind != "DynamicQuantizeLinear":
        raise NotInOnnx("its input is on another grid than 0..255, or on several")
    return Value(whole.reads[0], x.like)


def _integers(
    w: Writer, weights: Sequence[Value | None], order: Sequence[int]
) -> tuple[list[Tensor | None], list[Operand]]:
    """Weights as integers (1, columns, gates), and of each the scales and zero points, (1, gates) or one, (1,).

    No node shares them with another: ONNX Runtime fails to make unsigned integers of what nodes share.
    """
    parts: list[Tensor | None] = []
    grids: list[Operand] = []
    for weight in weights:
        found = dequantized(w, weight) if weight is not None else None
        q = w.value_of(found.node.reads[0]) if found is not None else None
        if found is None or q is None or bool(found.zero.any()) or found.node.attributes.get("block_size"):
            raise NotInOnnx("its weights have zero points, or blocks, or are not in integers")
        parts.append(_in_order(q, order).transpose(1, 2).contiguous())
        scale = found.scale.reshape(1) if found.scale.numel() == 1 else _in_order(found.scale, order)
        grids += [scale, torch.zeros(scale.shape, dtype=torch.int8, device="cpu")]
    return parts, grids


def _gates(w: Writer, x: Value, weight: Value | None, order: Sequence[int]) -> Operand:
    """A weight or bias in ONNX's order of the gates, with an axis in front for the directions."""
    if weight is None:
        return None
    stored = stored_weight(w, weight) if w.portable else None
    if stored is not None:
        node, parts = stored
        turned = [part if part.dim() == 0 else _in_order(part, order) for part in parts]
        turned = [part[0] if part.dim() == 2 and i else part for i, part in enumerate(turned)]  # scales of channels
        attributes = {k: v + 1 if k == "axis" else v for k, v in node.attributes.items()}
        names = [w.constant(part, w.type_of(name)) for part, name in zip(turned, node.reads, strict=True)]
        return w.emit(node.kind, *names, **attributes)
    found = weight_for(w, x, weight)
    real = found if isinstance(found, Tensor) else w.value_of(found.name)
    if real is None:
        raise NotInOnnx("its weights are computed")
    return w.kept(("gates", id(real)), lambda: _in_order(real, order))


def _in_order(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of a tensor in ONNX's order of the gates, with an axis in front for the directions."""
    return rows.detach().unflatten(0, (len(order), -1))[list(order)].flatten(0, 1)[None]
