"""Rows of the op table: recurrent layers, one layer and one direction each.

Their tensors: x (T, N, I), time first; weight_ih (G*H, I) and weight_hh (G*H, P), the rows of G gates on top of each
other; bias_ih and bias_hh (G*H,), both or none; the initial states h (N, P) and c (N, H), zeros where not given;
weight_hr (P, H), a projection, without which P is H. All float32. They return the hidden states (T, N, P).

On integers, the product with the hidden state reads that from a grid. With `state_qmax` > 0 it is symmetric, with
the integers -state_qmax..state_qmax and the scale `state_scale`; None: measured in each step, for each sample of the
batch. (Kernels keep them unsigned, with the zero point state_qmax + 1.) With `state_affine` it has the integers
0..state_qmax, and scale and zero point are measured in each step, for all samples together.
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
    """Steps x samples x the values of all weights."""
    weight_hr = rest[4] if len(rest) > 4 else None
    weights = (weight_ih, weight_hh, *([weight_hr] if weight_hr is not None else []))
    return x[0] * x[1] * sum(rows * columns for rows, columns in weights)


def _bounded(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Where each step ends in tanh, and no initial state is given, which may be larger."""
    is_free = tensors.get("h") is not None or tensors.get("weight_hr") is not None
    return not is_free and options.get("nonlinearity", "tanh") == "tanh"


def _differs(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Where the value holds the cell state, too, which is larger; or has been projected, which makes it smaller."""
    return bool(options.get("cell")) or tensors.get("weight_hr") is not None


def _quant(gates: str, weights: str, states: str, affine: str = "") -> OpTraits:
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


@row(traits=_quant("ifgo", "weight_ih weight_hh weight_hr", "h c", affine="state_affine"), macs=_macs)
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
    """The hidden states (T, N, P); gates in the order input, forget, cell, output.

    With `cell`, the last cell state stands behind them, in ceil(H / P) rows of P: (T + ceil(H / P), N, P). What the
    projection reads is on a grid as the hidden state is, with a measured scale or with 1 / state_qmax.
    Source: Hochreiter and Schmidhuber 1997; Sak et al. 2014 (projection).
    """
    hidden, width = weight_hh.shape[0] // 4, weight_hh.shape[1]
    h = x.new_zeros(x.shape[1], width) if h is None else h
    c = x.new_zeros(x.shape[1], hidden) if c is None else c
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
    elif len(x) == 1 and weight_hr is None:  # the layer packs its weights anew in each call
        h, c = torch.lstm_cell(x[0], (h, c), *weights, bias_ih, bias_hh)
        return torch.stack((h, c)) if cell else h[None]
    else:
        projection = [weight_hr] if weight_hr is not None else []
        layer = partial(torch.lstm, hx=(h[None], c[None]), params=[*weights, *_given(bias_ih, bias_hh), *projection])
        y, c = _fused(layer, x, bias_ih is not None, reverse)
    return torch.cat([y, rows_of_cell(c, width)]) if cell else y


@row(traits=_quant("rzn", "weight_ih weight_hh", "h"), macs=_macs)
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
    """The hidden states (T, N, H); gates in the order reset, update, new.  Source: Cho et al. 2014."""
    h = x.new_zeros(x.shape[1], weight_hh.shape[1]) if h is None else h
    weights = (weight_ih, weight_hh)
    if state_qmax:

        def step(gates: Tensor, h: Tensor) -> tuple[Tensor]:
            other = F.linear(on_grid(h, state_qmax, state_scale), weight_hh, bias_hh).chunk(3, 1)
            reset, update, new = gates.chunk(3, 1)
            update = (update + other[1]).sigmoid()
            new = (new + (reset + other[0]).sigmoid() * other[2]).tanh()
            return (new + update * (h - new),)

        return run_steps(F.linear(x, weight_ih, bias_ih), step, (h,), reverse)[0]
    if len(x) == 1:
        return torch.gru_cell(x[0], h, *weights, bias_ih, bias_hh)[None]
    layer = partial(torch.gru, hx=h[None], params=[*weights, *_given(bias_ih, bias_hh)])
    return _fused(layer, x, bias_ih is not None, reverse)[0]


@row(traits=_quant("", "weight_ih weight_hh", "h"), macs=_macs)
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
    """The hidden states (T, N, H), with the nonlinearity "tanh" or "relu".  Source: Elman 1990."""
    h = x.new_zeros(x.shape[1], weight_hh.shape[1]) if h is None else h
    weights = (weight_ih, weight_hh)
    if state_qmax:
        function = torch.tanh if nonlinearity == "tanh" else torch.relu

        def step(gates: Tensor, h: Tensor) -> tuple[Tensor]:
            return (function(gates + F.linear(on_grid(h, state_qmax, state_scale), weight_hh, bias_hh)),)

        return run_steps(F.linear(x, weight_ih, bias_ih), step, (h,), reverse)[0]
    if len(x) == 1:
        cell = torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell
        return cell(x[0], h, *weights, bias_ih, bias_hh)[None]
    whole = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    layer = partial(whole, hx=h[None], params=[*weights, *_given(bias_ih, bias_hh)])
    return _fused(layer, x, bias_ih is not None, reverse)[0]


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _fused(layer: Callable[..., Any], x: Tensor, has_biases: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's own layer: its hidden states, and of its last states the last one."""
    given = x.flip(0) if reverse else x
    y, *last = layer(
        given, has_biases=has_biases, num_layers=1, dropout=0.0, train=False, bidirectional=False, batch_first=False
    )
    return (y.flip(0) if reverse else y), last[-1][0]


def run_steps(
    gates: Tensor, step: StateStep, state: tuple[Tensor, ...], reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The first state behind each step, stacked, and all states behind the last one.

    Args:
        gates: what each step reads of the input, (T, N, ...).
        step: the next states from that and the states before.
        state: the states before the first step, (N, ...) each.
        reverse: whether the last entry is the first step.
    """
    order: Sequence[int] = range(len(gates))
    made: dict[int, Tensor] = {}
    for t in reversed(order) if reverse else order:
        state = step(gates[t], *state)
        made[t] = state[0]
    return torch.stack([made[t] for t in order]), state


def on_grid(h: Tensor, qmax: int, scale: float | None) -> Tensor:
    """A hidden state (N, P) rounded to the integers -qmax..qmax times the scale, or a measured one for each sample."""
    steps = h.abs().amax(1, keepdim=True).clamp(min=TINY) / qmax if scale is None else scale
    return _rounding()(h / steps).clamp(-qmax, qmax) * steps


def on_affine_grid(h: Tensor, qmax: int, scale: float | None = None) -> Tensor:
    """A hidden state (N, P) rounded to the integers 0..qmax times a scale, from a zero point, both of all samples.

    Raises:
        ValueError: there is a scale.  Source: ONNX, DynamicQuantizeLinear.
    """
    if scale is not None:
        raise ValueError("a state with a zero point has no scale but the measured one")
    low, high = dynamic_range(h, None)
    steps = dynamic_scale(low, high, qmax, symmetric=False)
    zero = dynamic_zero_point(low, steps, 0, nearest=True)
    return _rounding()(h / steps).add_(zero).clamp_(0, qmax).sub_(zero).mul_(steps)


@contextmanager
def states_rounded(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Round states by another function of their steps inside: how a value near a tie may go the other way."""
    token = _ROUND.set(function)
    try:
        yield
    finally:
        _ROUND.reset(token)


_ROUND: ContextVar[Callable[[Tensor], Tensor]] = ContextVar("round", default=torch.round)


def _rounding() -> Callable[[Tensor], Tensor]:
    """What states are rounded by. torch's compiler cannot look into a context variable."""
    return torch.round if torch.compiler.is_compiling() else _ROUND.get()


TINY = 1e-30
"""The least range that is measured, so that a state of zeros has a scale."""


def rows_of_cell(c: Tensor, width: int) -> Tensor:
    """A cell state (N, H) in rows of so many values, zeros behind the last: (ceil(H / width), N, width)."""
    count = -(-c.shape[1] // width)
    return F.pad(c, (0, count * width - c.shape[1])).unflatten(1, (count, width)).transpose(0, 1)
