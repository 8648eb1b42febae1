"""Readers of recurrent ONNX layers: LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.errors import warn
from fxq.onnx.reading.quantized_readers import grid_of_integers
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import refuse
from fxq.quant.qparams import QParams
from fxq.quant.stored_grids import store_grid


def _gates(weight: Tensor, order: Sequence[int]) -> Tensor:
    """Reorder the gates of a recurrent layer from ONNX's order to PyTorch's."""
    parts = weight.chunk(len(order), 0)
    return torch.cat([parts[i] for i in order], 0)


@dataclass(frozen=True)
class GateGrids:
    """Grids of a weight that a file holds as integers, one for each direction, with the gates in the file's order."""

    directions: tuple[QParams, ...]

    def store(self, layer: nn.Module, name: str, order: Sequence[int]) -> None:
        """Give the grids to the weights `name` of a layer, whose gates are in PyTorch's order."""
        for end, grid in zip(("_l0", "_l0_reverse"), self.directions, strict=False):
            if grid.axis is not None:
                scale, zero_point = (_gates(values, order) for values in (grid.scale, grid.zero_point))
                grid = replace(grid, scale=scale, zero_point=zero_point)
            store_grid(layer.get_parameter(name + end), grid)


def _check_sequences(steps: Any, lengths: Any, direction: str) -> None:
    """Refuse sequences of several lengths, and unknown directions."""
    refuse(lengths is not None and not isinstance(lengths, Tensor), "the lengths of its sequences are computed")
    if lengths is not None:
        refuse(varies(steps) or bool((lengths != steps).any()), "its sequences have several lengths")
    refuse(direction not in ("forward", "bidirectional", "reverse"), f"its direction is {direction!r}")


def _recurrent(
    r: Reader, layer_type: Callable[..., nn.Module], order: Sequence[int], x: Any, w: Any, rec: Any, bias: Any,
    lengths: Any, states: Sequence[Any], hidden_size: int, direction: str, layout: int, **options: Any,
) -> Any:  # fmt: skip
    refuse(not all(isinstance(v, Tensor) for v in (w, rec)), "its weights are computed")
    _check_sequences(r.shape_of(x)[1 if layout else 0], lengths, direction)
    both, backwards = direction == "bidirectional", direction == "reverse"
    inputs, notes = w.shape[2], {"weight_ih": r.notes.get(id(w)), "weight_hh": r.notes.get(id(rec))}
    grids = {name: note for name, note in notes.items() if isinstance(note, GateGrids)}

    def build() -> nn.Module:
        layer = layer_type(inputs, hidden_size, bias=bias is not None, bidirectional=both, **options)
        values = {}
        for i in range(2 if both else 1):
            end = "_l0_reverse" if i else "_l0"
            values[f"weight_ih{end}"], values[f"weight_hh{end}"] = _gates(w[i], order), _gates(rec[i], order)
            if bias is not None:
                first, second = bias[i].chunk(2)
                values[f"bias_ih{end}"], values[f"bias_hh{end}"] = _gates(first, order), _gates(second, order)
        layer.load_state_dict(values)
        for name, own in grids.items():
            own.store(layer, name, order)
        return layer

    if layout:
        x = r.call(torch.transpose, x, 0, 1)
        states = [None if state is None else r.call(torch.transpose, state, 0, 1) for state in states]
    if backwards:
        x = r.call(torch.flip, x, (0,))
    present = [state for state in states if state is not None]
    if present and len(present) < len(states):
        zeros = r.call(torch.zeros_like, present[0])
        present = [zeros if state is None else state for state in states]
    start = () if not present else (tuple(present),) if len(states) > 1 else (present[0],)
    key = ("recurrent", hidden_size, direction, id(rec), id(bias), *options.items())
    steps, batch, _ = r.shape_of(x)
    directions, dtype = 2 if both else 1, r.like(x).dtype
    state = r.sizes.empty((directions, batch, hidden_size), dtype)
    like = r.sizes.empty((steps, batch, directions * hidden_size), dtype)
    # PyTorch computes the shapes of recurrent layers step by step, for one number of steps.
    out, last = r.layer(key, w, build, x, *start, like=(like, (state,) * len(states) if len(states) > 1 else state))
    if backwards:
        out = r.call(torch.flip, out, (0,))
    apart = r.call(torch.reshape, out, (steps, batch, directions, hidden_size))
    outputs = [r.call(torch.permute, apart, (1, 0, 2, 3) if layout else (0, 2, 1, 3))]
    for final in last if isinstance(last, tuple) else (last,):
        outputs.append(r.call(torch.transpose, final, 0, 1) if layout else final)
    return tuple(outputs)


def _standard(activations: Any, expected: Sequence[str], rest: dict[str, Any]) -> None:
    names = [name.lower() for name in activations] if activations else []
    refuse(
        names and names != list(expected) * (len(names) // len(expected)),
        "its activation functions are not the usual ones",
    )
    refuse(rest.get("clip"), "it clips its gates")


@reads("LSTM")
def lstm(
    r: Reader, x: Any, w: Any, rec: Any, bias: Any = None, lengths: Any = None, h: Any = None, c: Any = None,
    peepholes: Any = None, *, hidden_size: int, direction: str = "forward", layout: int = 0, activations: Any = None,
    input_forget: int = 0, **rest: Any,
) -> Any:  # fmt: skip
    _standard(activations, ("sigmoid", "tanh", "tanh"), rest)
    refuse(peepholes is not None, "it has peephole connections")
    refuse(input_forget, "it couples its gates")
    return _recurrent(r, nn.LSTM, (0, 2, 3, 1), x, w, rec, bias, lengths, (h, c), hidden_size, direction, layout)


@reads("DynamicQuantizeLSTM")
def dynamic_quantize_lstm(
    r: Reader, x: Any, w: Any, rec: Any, bias: Any, lengths: Any, h: Any, c: Any, peepholes: Any, w_scale: Any,
    w_zero: Any, rec_scale: Any, rec_zero: Any, **attributes: Any,
) -> Any:  # fmt: skip
    """Read ONNX Runtime's LSTM with integer weights as one with float inputs, whose weights keep their grids."""
    weight, recurrent = _from_integers(r, w, w_scale, w_zero), _from_integers(r, rec, rec_scale, rec_zero)
    warn(
        f"{r.label!r} is read as an LSTM with float inputs and states, which ONNX Runtime rounds to 8 bits in each "
        "step. fxq.Recipe.dynamic() runs it on integers, with the weights of the file."
    )
    return lstm(r, x, weight, recurrent, bias, lengths, h, c, peepholes, **attributes)


def _from_integers(r: Reader, integers: Any, scale: Any, zero_point: Any) -> Tensor:
    """Float weight (D, gates, I) of integers (D, I, gates), whose scale is (D,) or (D, gates)."""
    refuse(not all(isinstance(part, Tensor) for part in (integers, scale, zero_point)), "its weights are computed")
    values, grids = [], []
    for q, own, zero in zip(integers.transpose(1, 2), scale, zero_point, strict=True):
        axis = 0 if own.dim() else None
        values.append(torch.ops.fxq.dequantize.tensor(q, own, zero.to(torch.int32).expand(own.shape), axis, None))
        grids.append(grid_of_integers(r, q, own, zero.expand(own.shape), axis, None))
    weight = torch.stack(values)
    if all(grid is not None for grid in grids):
        r.noted(GateGrids(tuple(grid for grid in grids if grid is not None)), weight)
    return weight


@reads("GRU")
def gru(
    r: Reader, x: Any, w: Any, rec: Any, bias: Any = None, lengths: Any = None, h: Any = None, *, hidden_size: int,
    direction: str = "forward", layout: int = 0, activations: Any = None, linear_before_reset: int = 0, **rest: Any,
) -> Any:  # fmt: skip
    _standard(activations, ("sigmoid", "tanh"), rest)
    if not linear_before_reset:
        return _reset_before(r, x, w, rec, bias, lengths, h, hidden_size, direction, layout)
    return _recurrent(r, nn.GRU, (1, 0, 2), x, w, rec, bias, lengths, (h,), hidden_size, direction, layout)


def gru_with_early_reset(
    x: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor | None, state: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Outputs and last states of a GRU that resets its state before the product, unlike PyTorch's GRU.

    Args:
        x: float[T, B, I].
        weight: float[D, 3 H, I], with the gates update, reset, hidden; a second direction runs backwards.
        recurrent: float[D, 3 H, H].
        bias: float[D, 6 H], of the inputs and of the states; None: 0.
        state: float[D, B, H]; None: 0.
        backwards: whether the first direction runs backwards.

    Returns:
        float[T, D, B, H] and float[D, B, H].
    """
    sequences, last = [], []
    for d in range(weight.shape[0]):
        turns = backwards or d == 1
        b, c = (None, None) if bias is None else bias[d].chunk(2)
        inputs = F.linear(x.flip(0) if turns else x, weight[d], b)
        rows, offset = recurrent[d].split([2 * recurrent.shape[2], recurrent.shape[2]])
        gates, shift = (None, None) if c is None else c.split([rows.shape[0], offset.shape[0]])
        h = x.new_zeros(x.shape[1], offset.shape[0]) if state is None else state[d]
        states = []
        for step in inputs:
            from_input, hidden = step.split([rows.shape[0], offset.shape[0]], 1)
            update, reset = torch.sigmoid(from_input + F.linear(h, rows, gates)).chunk(2, 1)
            h = update * h + (1 - update) * torch.tanh(hidden + F.linear(reset * h, offset, shift))
            states.append(h)
        last.append(h)
        sequences.append(torch.stack(states[::-1] if turns else states))
    return torch.stack(sequences, 1), torch.stack(last)


torch.fx.wrap("gru_with_early_reset")


def _reset_before(
    r: Reader, x: Any, w: Any, rec: Any, bias: Any, lengths: Any, h: Any, hidden_size: int, direction: str, layout: int
) -> Any:
    _check_sequences(r.shape_of(x)[1 if layout else 0], lengths, direction)
    if layout:
        x = r.call(torch.transpose, x, 0, 1)
        h = None if h is None else r.call(torch.transpose, h, 0, 1)
    steps, batch, _ = r.shape_of(x)
    dtype, directions = r.like(x).dtype, r.like(w).shape[0]
    like = (
        r.sizes.empty((steps, directions, batch, hidden_size), dtype),
        r.sizes.empty((directions, batch, hidden_size), dtype),
    )
    out, last = r.call_like(gru_with_early_reset, x, w, rec, bias, h, direction == "reverse", like=like)
    if layout:
        return r.call(torch.permute, out, (2, 0, 1, 3)), r.call(torch.transpose, last, 0, 1)
    return out, last


@reads("RNN")
def rnn(
    r: Reader, x: Any, w: Any, rec: Any, bias: Any = None, lengths: Any = None, h: Any = None, *, hidden_size: int,
    direction: str = "forward", layout: int = 0, activations: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    names = {name.lower() for name in activations or ["tanh"]}
    refuse(names not in ({"tanh"}, {"relu"}) or rest.get("clip"), "its activation functions are not the usual ones")
    return _recurrent(
        r, nn.RNN, (0,), x, w, rec, bias, lengths, (h,), hidden_size, direction, layout, nonlinearity=names.pop()
    )
