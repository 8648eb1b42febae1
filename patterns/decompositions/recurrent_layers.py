"""Decompositions of recurrent layers and cells of torch.nn: one op for each layer and direction."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from fxq.graph.info import info
from fxq.rewriting.expansion import CannotExpand, Expand, Expansion

_ALL = slice(None)
_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
Pair = tuple[Any, ...]
"""Hidden state, and the cell state of an lstm."""


def _op(make: Expansion, module: nn.Module, op: str, suffix: str, x: fx.Node, states: Pair, **options: Any) -> fx.Node:
    """Add the op of one layer and direction. The parameters' names end in `suffix`, which is empty for a cell."""
    parameters = [(f"{name}{suffix}", getattr(module, f"{name}{suffix}", None)) for name in _PARAMETERS]
    tensors = [make.read(name, tensor) for name, tensor in parameters]
    projection = getattr(module, f"weight_hr{suffix}", None)
    if projection is not None:
        states = (*states, make.read(f"weight_hr{suffix}", projection))
    if op == "rnn":
        options["nonlinearity"] = module.nonlinearity
    return make.call(op, x, *tensors, *states, at=suffix.removeprefix("_"), **options)


def _initial_states(make: Expansion, hx: Any, shapes: tuple[tuple[int, ...], ...]) -> Pair:
    """Initial states from the argument `hx`, with these shapes; None for each if `hx` is None."""
    if hx is None:
        return (None,) * len(shapes)
    if len(shapes) == 1:
        return (hx,)
    if isinstance(hx, (tuple, list)):
        return tuple(hx)
    dtype = info(make.node).dtype or torch.float32
    parts = enumerate(shapes)
    node = make.rewriter.node
    return tuple(
        node("call_function", operator.getitem, (hx, i), like=make.node, typed=(shape, dtype)) for i, shape in parts
    )


def _shape(x: Any, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the input.

    Raises:
        CannotExpand: it is not a tensor, or its number of axes is not in `ranks`.
    """
    shape = info(x).shape if isinstance(x, fx.Node) else None
    if shape is None:
        raise CannotExpand("its input is a packed sequence, or is not a tensor")
    if len(shape) not in ranks:
        raise CannotExpand(f"its input has {len(shape)} axes")
    return shape


class _Layers:
    """Expands an nn.LSTM, nn.GRU or nn.RNN.

    Attributes:
        make: makes the ops.
        module: the module.
        width: features of the hidden state, P.
        reads_cell: whether the last cell states have users.
        reads_hidden: whether the last hidden states have users.
        batched: whether its input has a batch axis.
        last: last hidden (N, P) and cell (N, H) states of the layers so far.
    """

    def __init__(self, make: Expansion, module: nn.RNNBase) -> None:
        self.make, self.module = make, module
        self.op = type(module).__name__.lower()
        self.width = module.proj_size or module.hidden_size
        self.reads_cell = self.op == "lstm" and make.is_read(1, 1)
        self.reads_hidden = make.is_read(1, 0) if self.op == "lstm" else make.is_read(1)
        self.batched = True
        self.last: list[Pair] = []

    def value(self) -> Pair:
        """Add all ops. Returns (output, states), as the module does."""
        arguments, make = self.make.arguments, self.make
        x = arguments["input"]
        shape = _shape(x, (2, 3))
        self.batched, first = len(shape) == 3, self.module.batch_first
        if not self.batched:
            x = make.call("unsqueeze", x, dim=1)
        elif first:
            x = make.call("transpose", x, dim0=0, dim1=1)
        initial = self._initial(arguments["hx"], shape[1 - first : 2 - first] if self.batched else ())
        for layer in range(self.module.num_layers):
            x = self._layer(layer, x, initial)
        if not self.batched:
            x = make.call("getitem", x, index=(_ALL, 0))
        elif first:
            x = make.call("transpose", x, dim0=0, dim1=1)
        states = tuple(self._stacked(i) for i in range(2 if self.op == "lstm" else 1))
        return x, states if self.op == "lstm" else states[0]

    def _initial(self, hx: Any, batch: tuple[int, ...]) -> Pair:
        """Initial states of all layers. `batch` is the shape of their batch axis, or empty."""
        count = self.module.num_layers * (2 if self.module.bidirectional else 1)
        widths = (self.width, self.module.hidden_size) if self.op == "lstm" else (self.width,)
        shapes = tuple((count, *batch, width) for width in widths)
        return _initial_states(self.make, hx, shapes)

    def _layer(self, layer: int, x: fx.Node, initial: Pair) -> fx.Node:
        """Add the ops of a layer. Returns its hidden states (T, N, P), both directions concatenated (T, N, 2P)."""
        make, outputs = self.make, []
        for reverse in (False, True) if self.module.bidirectional else (False,):
            number = len(self.last)
            index = (number,) if self.batched else (number, None)
            states = tuple(make.call("getitem", s, index=index) if s is not None else None for s in initial)
            suffix = f"_l{layer}{'_reverse' if reverse else ''}"
            options = {"cell": True} if self.reads_cell else {}
            y = _op(make, self.module, self.op, suffix, x, states, reverse=reverse, **options)
            hidden, cell = self._split(y) if self.reads_cell else (y, None)
            end = make.call("getitem", hidden, index=(0 if reverse else -1,)) if self.reads_hidden else None
            self.last.append((end, cell))
            outputs.append(hidden)
        return make.call("cat", outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    def _split(self, y: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Split the value of an lstm that returns both into hidden states (T, N, P) and last cell state (N, H)."""
        make, rows = self.make, -(-self.module.hidden_size // self.width)
        hidden = make.call("getitem", y, index=(slice(None, -rows),))
        if rows == 1:
            return hidden, make.call("getitem", y, index=(-1,))
        cell = make.call("getitem", y, index=(slice(-rows, None),))
        cell = make.call("flatten", make.call("transpose", cell, dim0=0, dim1=1), start_dim=1)
        return hidden, make.call("getitem", cell, index=(_ALL, slice(None, self.module.hidden_size)))

    def _stacked(self, i: int) -> fx.Node | None:
        """Last states of all layers, stacked; None if they have no users."""
        parts = [states[i] for states in self.last]
        if None in parts:
            return None
        stacked = self.make.call("stack", parts)
        return stacked if self.batched else self.make.call("getitem", stacked, index=(_ALL, 0))


def layers(make: Expansion, module: nn.RNNBase) -> Pair:
    """Decompose an nn.LSTM, nn.GRU or nn.RNN. Returns (output, last states)."""
    return _Layers(make, module).value()


def cell(make: Expansion, module: nn.RNNCellBase) -> Any:
    """Decompose a cell, as a layer of one step. Returns its new states."""
    op = type(module).__name__.removesuffix("Cell").lower()
    x = make.arguments["input"]
    shape = _shape(x, (1, 2))
    batched = len(shape) == 2
    states = _initial_states(
        make, make.arguments["hx"], ((*shape[:-1], module.hidden_size),) * (2 if op == "lstm" else 1)
    )
    if not batched:
        x = make.call("unsqueeze", x, dim=0)
        states = tuple(make.call("unsqueeze", s, dim=0) if s is not None else None for s in states)
    options = {"cell": True} if op == "lstm" and make.is_read(1) else {}
    y = _op(make, module, op, "", make.call("unsqueeze", x, dim=0), states, **options)
    parts = [make.call("getitem", y, index=(i,) if batched else (i, 0)) for i in range(2 if options else 1)]
    return (parts[0], parts[1] if options else None) if op == "lstm" else parts[0]


RECURRENT: dict[type[nn.Module], Expand] = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), layers),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), cell),
}
"""Decomposition of each recurrent module."""
