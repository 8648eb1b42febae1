"""ONNX of recurrent layers, in float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import weight_for
from fxq.onnx.writer import NotInOnnx, Operand, Value, Writer, refuse, writes


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
    **options: Any,
) -> str:
    refuse(weight_hr is not None, "its hidden state is projected")
    order = (0, 3, 1, 2)  # input, forget, cell, output; ONNX: input, output, forget, cell
    made = _layer(w, "LSTM", x, [weight_ih, weight_hh, bias_ih, bias_hh], [h, c], order, **options)
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
    order = (1, 0, 2)  # reset, update, new; ONNX: update, reset, new
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
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
    refuse(state_qmax, "its hidden state is on a grid")
    steps, samples, _ = x.shape
    parts = [_gates(w, x, part, order) for part in weights]
    biases = [part for part in parts[2:] if part is not None]
    bias = w.kept(("biases", *map(id, biases)), lambda: torch.cat(biases, 1)) if biases else None
    first: list[Operand] = [None if h is None else w.reshaped(h, (1, *h.shape)) for h in states]
    hidden = 0 if parts[1] is None else parts[1].shape[-1]
    made, *last = w.emit_several(
        kind, [x, *parts[:2], bias, None, *first], 1 + len(states), hidden_size=hidden,
        direction="reverse" if reverse else "forward", **attributes,
    )  # fmt: skip
    return [w.reshaped(made, (steps, samples, hidden)), *last]


def _gates(w: Writer, x: Value, weight: Value | None, order: Sequence[int]) -> Tensor | None:
    """A weight or bias in ONNX's order of the gates, with an axis in front for the directions."""
    if weight is None:
        return None
    found = weight_for(w, x, weight)
    real = found if isinstance(found, Tensor) else w.value_of(found.name)
    if real is None:
        raise NotInOnnx("its weights are computed")
    gates = real.detach().unflatten(0, (len(order), -1))
    return w.kept(("gates", id(real)), lambda: gates[list(order)].flatten(0, 1)[None])
