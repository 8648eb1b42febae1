"""Rows of the op table: recurrent layers, one layer and one direction each.

Tensors, all float32: x (T, N, I), time first; weight_ih (G*H, I) and weight_hh (G*H, P), the rows of G gates
concatenated; bias_ih and bias_hh (G*H,), both or none; the initial states h (N, P) and c (N, H), zeros by default; the
projection weight_hr (P, H), without which P = H. The layers return the hidden states (T, N, P).

With `state_qmax` > 0, the product with the hidden state reads the state from a grid. By default, the grid is symmetric
with the integers -state_qmax..state_qmax and the scale `state_scale`, or a dynamic scale for each step and sample if
that is None. (Kernels store the integers unsigned, with zero point state_qmax + 1.) With `state_affine`, the grid has
the integers 0..state_qmax, and a dynamic scale and zero point for each step, common to all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.errors import InputError
from fxq.ops.registry import OPS, row
from fxq.ops.table import Shape
from fxq.ops.traits import OpTraits, Recurrence, computes
from fxq.quant.dynamic_grid import dynamic_range, dynamic_scale, dynamic_zero_point

OPS.leaf("lstm", nn.LSTM)
OPS.leaf("gru", nn.GRU)
OPS.leaf("rnn", nn.RNN)
OPS.leaf("lstm_cell", nn.LSTMCell)
OPS.leaf("gru_cell", nn.GRUCell)
OPS.leaf("rnn_cell", nn.RNNCell)

StateStep = Callable[..., tuple[Tensor, ...]]


def _macs(out: Shape, x: Shape, weight_ih: Shape, weight_hh: Shape, *rest: Shape | None) -> int:
    """Multiply-accumulates: steps x samples x values of all weights."""
    weight_hr = rest[4] if len(rest) > 4 else None
    weights = (weight_ih, weight_hh, *([weight_hr] if weight_hr is not None else []))
    return x[0] * x[1] * sum(rows * columns for rows, columns in weights)


def _bounded(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the hidden states are between -1 and 1: each step ends in tanh, and there is no initial state."""
    is_free = tensors.get("h") is not None or tensors.get("weight_hr") is not None
    return not is_free and options.get("nonlinearity", "tanh") == "tanh"


def _differs(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the value includes the cell state, which is larger, or is projected, which makes it smaller."""
    return bool(options.get("cell")) or tensors.get("weight_hr") is not None


def _traits(gates: str, weights: str, states: str, affine: str = "") -> OpTraits:
    first, *more = weights.split()
    return computes(
        "x",
        weight=first,
        more_weights=tuple(more),
        more_biases=("bias_ih", "bias_hh"),
        axis=0,
        channels=-1,
        heavy=True,
        recurrence=Recurrence(tuple(states.split()), tuple(gates), _bounded, _differs, affine=affine),
    )


@row(traits=_traits("ifgo", "weight_ih weight_hh weight_hr", "h c", affine="state_affine"), macs=_macs)
def lstm(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    weight_hr: Tensor | None = None,
    *,
    reverse: bool = False,
    cell: bool = False,
    state_qmax: int = 0,
    state_scale: float | None = None,
    state_affine: bool = False,
) -> Tensor:
    """Hidden states (T, N, P) of an LSTM layer; gates in the order input, forget, cell, output.

    With `cell`, the last cell state follows them, in ceil(H / P) rows of P values: (T + ceil(H / P), N, P). The input
    of the projection is quantized like the hidden state, with a dynamic scale or with the scale 1 / state_qmax.
    Source: Hochreiter and Schmidhuber 1997; Sak et al. 2014 (projection).
    """
    hidden, width = weight_hh.shape[0] // 4, weight_hh.shape[1]
    h, c = _first_state(h, x, width), _first_state(c, x, hidden)
    weights = (weight_ih, weight_hh)
    if state_qmax:
        rounded = on_affine_grid if state_affine else on_grid

        def step(gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            gates = gates + F.linear(rounded(h, state_qmax, state_scale), weight_hh, bias_hh)
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if weight_hr is not None:
                scale = 1 / state_qmax if state_scale is not None else None
                h = F.linear(rounded(h, state_qmax, scale), weight_hr)
            return h, c

        y, (_, c) = run_steps(F.linear(x, weight_ih, bias_ih), step, (h, c), reverse)
    elif len(x) == 1 and weight_hr is None:  # faster than the layer, which packs its weights in each call
        h, c = torch.lstm_cell(x[0], (h, c), *weights, bias_ih, bias_hh)
        return torch.stack((h, c)) if cell else h[None]
    else:
        projection = [weight_hr] if weight_hr is not None else []
        layer = partial(torch.lstm, hx=(h[None], c[None]), params=[*weights, *_present(bias_ih, bias_hh), *projection])
        y, c = _fused(layer, x, bias_ih is not None, reverse)
    return torch.cat([y, rows_of_cell(c, width)]) if cell else y


@row(traits=_traits("rzn", "weight_ih weight_hh", "h"), macs=_macs)
def gru(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    h: Tensor | None = None,
    *,
    reverse: bool = False,
    state_qmax: int = 0,
    state_scale: float | None = None,
) -> Tensor:
    """Hidden states (T, N, H) of a GRU layer; gates in the order reset, update, new.  Source: Cho et al. 2014."""
    h = _first_state(h, x, weight_hh.shape[1])
    weights = (weight_ih, weight_hh)
    if state_qmax:

        def step(gates: Tensor, h: Tensor) -> tuple[Tensor]:
            recurrent = F.linear(on_grid(h, state_qmax, state_scale), weight_hh, bias_hh).chunk(3, 1)
            reset, update, new = gates.chunk(3, 1)
            update = (update + recurrent[1]).sigmoid()
            new = (new + (reset + recurrent[0]).sigmoid() * recurrent[2]).tanh()
            return (new + update * (h - new),)

        return run_steps(F.linear(x, weight_ih, bias_ih), step, (h,), reverse)[0]
    if len(x) == 1:
        return torch.gru_cell(x[0], h, *weights, bias_ih, bias_hh)[None]
    layer = partial(torch.gru, hx=h[None], params=[*weights, *_present(bias_ih, bias_hh)])
    return _fused(layer, x, bias_ih is not None, reverse)[0]


@row(traits=_traits("", "weight_ih weight_hh", "h"), macs=_macs)
def rnn(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    h: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
    reverse: bool = False,
    state_qmax: int = 0,
    state_scale: float | None = None,
) -> Tensor:
    """Hidden states (T, N, H) of an RNN layer with the nonlinearity "tanh" or "relu".  Source: Elman 1990."""
    h = _first_state(h, x, weight_hh.shape[1])
    weights = (weight_ih, weight_hh)
    if state_qmax:
        function = torch.tanh if nonlinearity == "tanh" else torch.relu

        def step(gates: Tensor, h: Tensor) -> tuple[Tensor]:
            return (function(gates + F.linear(on_grid(h, state_qmax, state_scale), weight_hh, bias_hh)),)

        return run_steps(F.linear(x, weight_ih, bias_ih), step, (h,), reverse)[0]
    if len(x) == 1:
        cell = torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell
        return cell(x[0], h, *weights, bias_ih, bias_hh)[None]
    rnn_function = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    layer = partial(rnn_function, hx=h[None], params=[*weights, *_present(bias_ih, bias_hh)])
    return _fused(layer, x, bias_ih is not None, reverse)[0]


def _first_state(state: Tensor | None, x: Tensor, width: int) -> Tensor:
    """Initial state (N, width) of a layer with the input `x`; None: zeros.

    Raises:
        InputError: it has another shape, which PyTorch's functions read beyond its end, or broadcast.
    """
    if state is None:
        return x.new_zeros(x.shape[1], width)
    sizes = (*state.shape, x.shape[1])
    if all(type(size) is int for size in sizes) and sizes[:-1] != (sizes[-1], width):
        raise InputError(
            f"an initial state has shape {sizes[:-1]}; for this input the layer takes {(sizes[-1], width)}."
        )
    return state


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _fused(layer: Callable[..., Any], x: Tensor, has_biases: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    """Run a layer of PyTorch: return its hidden states, and its last state (the cell state for an LSTM)."""
    inputs = x.flip(0) if reverse else x
    y, *last = layer(
        inputs, has_biases=has_biases, num_layers=1, dropout=0.0, train=False, bidirectional=False, batch_first=False
    )
    return (y.flip(0) if reverse else y), last[-1][0]


def run_steps(
    gates: Tensor, step: StateStep, state: tuple[Tensor, ...], reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a recurrence: return the first state after each step, stacked, and all states after the last step.

    Args:
        gates: products of the input with its weight, (T, N, ...).
        step: computes the next states from the gates of one step and the current states.
        state: the states before the first step, (N, ...) each.
        reverse: whether to run from the last entry to the first.
    """
    order: Sequence[int] = range(len(gates))
    outputs: dict[int, Tensor] = {}
    for t in reversed(order) if reverse else order:
        state = step(gates[t], *state)
        outputs[t] = state[0]
    return torch.stack([outputs[t] for t in order]), state


def on_grid(h: Tensor, qmax: int, scale: float | None) -> Tensor:
    """Fake-quantize a hidden state (N, P) to the integers -qmax..qmax; `scale` None: a dynamic one per sample."""
    steps = h.abs().amax(1, keepdim=True).clamp(min=MIN_STATE_RANGE) / qmax if scale is None else scale
    return _rounding()(h / steps).clamp(-qmax, qmax) * steps


def on_affine_grid(h: Tensor, qmax: int, scale: float | None = None) -> Tensor:
    """Fake-quantize a hidden state (N, P) to the integers 0..qmax with a dynamic scale and zero point for all samples.

    Source: ONNX, DynamicQuantizeLinear.

    Raises:
        ValueError: a scale is given.
    """
    if scale is not None:
        raise ValueError("a state with a zero point has a dynamic scale; state_scale has to be None")
    low, high = dynamic_range(h, None)
    steps = dynamic_scale(low, high, qmax, symmetric=False)
    zero = dynamic_zero_point(low, steps, 0, nearest=True)
    return _rounding()(h / steps).add_(zero).clamp_(0, qmax).sub_(zero).mul_(steps)


@contextmanager
def states_rounded(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which states are rounded by another function of their values in steps, to vary values near a tie."""
    token = _ROUND.set(function)
    try:
        yield
    finally:
        _ROUND.reset(token)


_ROUND: ContextVar[Callable[[Tensor], Tensor]] = ContextVar("round", default=torch.round)


def _rounding() -> Callable[[Tensor], Tensor]:
    """The function that rounds states. torch's compiler cannot read a context variable, so it gets `torch.round`."""
    return torch.round if torch.compiler.is_compiling() else _ROUND.get()


MIN_STATE_RANGE = 1e-30
"""Lower limit of a dynamic range, so that a state of zeros has a scale."""


def rows_of_cell(c: Tensor, width: int) -> Tensor:
    """Reshape a cell state (N, H) to rows of `width` values, padded with zeros: (ceil(H / width), N, width)."""
    count = -(-c.shape[1] // width)
    return F.pad(c, (0, count * width - c.shape[1])).unflatten(1, (count, width)).transpose(0, 1)
