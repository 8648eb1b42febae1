"""Recurrent layers and cells of torch.nn, written with ops: one for each layer and direction. For decompose."""

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
"""The hidden state, and the cell state where there is one."""


def _op(make: Expansion, module: nn.Module, op: str, suffix: str, x: fx.Node, states: Pair, **options: Any) -> fx.Node:
    """The op of one layer and direction; a cell's parameters have no suffix."""
    found = [(f"{name}{suffix}", getattr(module, f"{name}{suffix}", None)) for name in _PARAMETERS]
    tensors = [make.read(name, tensor) for name, tensor in found]
    projection = getattr(module, f"weight_hr{suffix}", None)
    if projection is not None:
        states = (*states, make.read(f"weight_hr{suffix}", projection))
    if op == "rnn":
        options["nonlinearity"] = module.nonlinearity
    return make.call(op, x, *tensors, *states, at=suffix.removeprefix("_"), **options)


def _given_states(make: Expansion, given: Any, shapes: tuple[tuple[int, ...], ...]) -> Pair:
    """The initial states, of these shapes; None where they are not given."""
    if given is None:
        return (None,) * len(shapes)
    if len(shapes) == 1:
        return (given,)
    if isinstance(given, (tuple, list)):
        return tuple(given)
    dtype = info(make.node).dtype or torch.float32
    parts = enumerate(shapes)
    node = make.rewriter.node
    return tuple(
        node("call_function", operator.getitem, (given, i), like=make.node, typed=(shape, dtype)) for i, shape in parts
    )


def _shape(x: Any, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the input, which has so many axes."""
    shape = info(x).shape if isinstance(x, fx.Node) else None
    if shape is None:
        raise CannotExpand("its input is a packed sequence, or another that is no tensor")
    if len(shape) not in ranks:
        raise CannotExpand(f"its input has {len(shape)} axes")
    return shape


class _Layers:
    """Expands a module of layers.

    Attributes:
        make: makes the ops.
        module: the module.
        batched: whether its input has a batch axis.
        last: the last states of the layers so far, (N, P) and (N, H).
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
        """(output, states), as the module returns them."""
        given, make = self.make.given, self.make
        x = given["input"]
        shape = _shape(x, (2, 3))
        self.batched, first = len(shape) == 3, self.module.batch_first
        if not self.batched:
            x = make.call("unsqueeze", x, dim=1)
        elif first:
            x = make.call("transpose", x, dim0=0, dim1=1)
        initial = self._initial(given["hx"], shape[1 - first : 2 - first] if self.batched else ())
        for layer in range(self.module.num_layers):
            x = self._layer(layer, x, initial)
        if not self.batched:
            x = make.call("getitem", x, index=(_ALL, 0))
        elif first:
            x = make.call("transpose", x, dim0=0, dim1=1)
        states = tuple(self._stacked(i) for i in range(2 if self.op == "lstm" else 1))
        return x, states if self.op == "lstm" else states[0]

    def _initial(self, given: Any, batch: tuple[int, ...]) -> Pair:
        """The initial states of all layers; `batch` is their batch axis, or empty."""
        count = self.module.num_layers * (2 if self.module.bidirectional else 1)
        widths = (self.width, self.module.hidden_size) if self.op == "lstm" else (self.width,)
        shapes = tuple((count, *batch, width) for width in widths)
        return _given_states(self.make, given, shapes)

    def _layer(self, layer: int, x: fx.Node, initial: Pair) -> fx.Node:
        """The hidden states of a layer, both directions side by side."""
        make, made = self.make, []
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
            made.append(hidden)
        return make.call("cat", made, dim=-1) if len(made) > 1 else made[0]

    def _split(self, y: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The hidden states (T, N, P) and the last cell state (N, H) of an lstm that returns both."""
        make, rows = self.make, -(-self.module.hidden_size // self.width)
        hidden = make.call("getitem", y, index=(slice(None, -rows),))
        if rows == 1:
            return hidden, make.call("getitem", y, index=(-1,))
        cell = make.call("getitem", y, index=(slice(-rows, None),))
        cell = make.call("flatten", make.call("transpose", cell, dim0=0, dim1=1), start_dim=1)
        return hidden, make.call("getitem", cell, index=(_ALL, slice(None, self.module.hidden_size)))

    def _stacked(self, i: int) -> fx.Node | None:
        """The last states of all layers, where somebody reads them."""
        parts = [states[i] for states in self.last]
        if None in parts:
            return None
        stacked = self.make.call("stack", parts)
        return stacked if self.batched else self.make.call("getitem", stacked, index=(_ALL, 0))


def layers(make: Expansion, module: nn.RNNBase) -> Pair:
    """(output, last states) of an nn.LSTM, nn.GRU or nn.RNN."""
    return _Layers(make, module).value()


def cell(make: Expansion, module: nn.RNNCellBase) -> Any:
    """The new states of a cell: a layer of one step."""
    op = type(module).__name__.removesuffix("Cell").lower()
    x = make.given["input"]
    shape = _shape(x, (1, 2))
    batched = len(shape) == 2
    states = _given_states(make, make.given["hx"], ((*shape[:-1], module.hidden_size),) * (2 if op == "lstm" else 1))
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
"""How recurrent modules are written with ops."""
