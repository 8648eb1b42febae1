"""Constants that masks, pads and fills put among the values of a network: which of them a value may hold.

They are no data. Observers leave them out of the range that they look for, and `choose-grids` sees to it that one which
lies outside the grid is not clipped where somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.info import info
from fxq.graph.query import called_name, constant, fills_like, flat_nodes, op_of, options_of, taken_from, taken_part
from fxq.graph.unit import Calls, InnerValue, OpCall, calls_of
from fxq.ops.registry import as_tuple
from fxq.ops.traits import OpTraits

_VALUE_AT = {"new_full": 2, "full_like": 1}
_ONES = ("new_ones", "ones_like")
"""Calls that make a tensor of one value: at which place of their arguments it stands, or what it is."""


class FillConstants:
    """Which constants the values of a graph may hold besides data, found once per value.

    Zero is left out: every grid holds it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._known: dict[fx.Node, frozenset[float]] = {}

    def of(self, node: fx.Node) -> frozenset[float]:
        """The constants that the value of a node may hold. Ask for the nodes it reads before."""
        if node not in self._known:
            self._known[node] = frozenset(self._find(node)) - {0.0}
        return self._known[node]

    def added_by(self, node: fx.Node) -> frozenset[float]:
        """Those of them that the node itself brings in, whatever it reads."""
        if fills_like(node):
            return self.of(node)
        calls = calls_of(self.gm, taken_from(node))
        return frozenset(value for call in calls for value in self._brings(call, node)) - {0.0}

    def _find(self, node: fx.Node) -> Iterator[float]:
        if node.op == "get_attr":
            yield from _only_value(constant(self.gm, node))
        elif fills_like(node):
            yield from _filled(node)
        else:
            maker = taken_from(node)
            calls = calls_of(self.gm, maker)
            if calls:
                yield from self._of_calls(maker, calls)[calls.outputs[taken_part(node, maker) or 0]]
            else:
                yield -math.inf  # an input may be a mask for attention

    def _of_calls(self, node: fx.Node, calls: Calls) -> list[frozenset[float]]:
        """The same for each op that a node runs."""
        made: list[frozenset[float]] = []
        for call in calls:
            constants = set(self._brings(call, node))
            if hands_on(call.op.traits):
                for name in call.op.traits.inputs:
                    constants |= self._read(call.tensors.get(name), made)
            if call.op.traits.narrows and not any(flat_nodes(call.options)):  # limits of a call are not known here
                constants = {float(call.op.target(torch.tensor(value), **call.options)) for value in constants}
            made.append(frozenset(constants))
        return made

    def _read(self, value: Any, made: list[frozenset[float]]) -> frozenset[float]:
        values = value if isinstance(value, (tuple, list)) else (value,)
        found = [
            made[v.index] if isinstance(v, InnerValue) else self.of(v)
            for v in values
            if isinstance(v, (InnerValue, fx.Node))
        ]
        return frozenset().union(*found)

    def _brings(self, call: OpCall, node: fx.Node) -> Iterator[float]:
        for name in call.op.traits.fill_constants:
            value = call.tensors.get(name, call.options.get(name))
            if isinstance(value, (int, float)) and not _nobody_sees(node, value):
                yield float(torch.tensor(float(value)))  # as float32 has it
            for read in flat_nodes(value):
                if read.op == "get_attr" or fills_like(read):
                    yield from self.of(read)


def hands_on(quant: OpTraits) -> bool:
    """Whether an op hands on values of its inputs as they are, or clipped."""
    return quant.kind == "moves" or (quant.kind == "float" and bool(quant.fill_constants))


def _only_value(tensor: Tensor | None) -> Iterator[float]:
    """The value of a tensor that holds one only."""
    if tensor is not None and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
        low, high = torch.aminmax(tensor.detach())
        if low == high:
            yield float(low)


def _filled(node: fx.Node) -> Iterator[float]:
    name = called_name(node)
    value: Any = 1.0 if name in _ONES else None
    if name in _VALUE_AT:
        value = node.args[_VALUE_AT[name]] if _VALUE_AT[name] < len(node.args) else node.kwargs.get("fill_value")
    if isinstance(value, (int, float)):
        yield float(torch.tensor(float(value)))


def _nobody_sees(node: fx.Node, value: float) -> bool:
    """Whether what a pad brings in is below all data wherever it is read: by max pools whose windows all hold data.

    A grid holds zero and all data, so a negative number outside of it is below them, and its lowest integer does as
    well.
    """
    op = op_of(node)
    if value >= 0 or op is None or op.traits.surrounds is None or not node.users:
        return False
    sides = options_of(node)[op.traits.surrounds]
    readers = [(user, op_of(user)) for user in node.users]
    return all(op is not None and op.traits.maximum and _all_hold_data(node, sides, user) for user, op in readers)


def _all_hold_data(pad: fx.Node, sides: Any, pool: fx.Node) -> bool:
    """Whether every window of a max pool behind a pad reaches into what the pad was put around, whatever its size."""
    shape, options = info(pad).shape, options_of(pool)
    if shape is None or not all(isinstance(side, int) for side in sides):
        return False
    rank = len(options["kernel_size"])
    pairs = list(zip(sides[::2], sides[1::2], strict=False))
    if len(pairs) > rank:
        return False  # channels of nothing but padding
    pairs += [(0, 0)] * (rank - len(pairs))
    keys = ("kernel_size", "padding", "dilation")
    kernels, paddings, dilations = (as_tuple(options[key], rank) for key in keys)
    for (before, after), size, kernel, padding, dilation in zip(
        reversed(pairs), shape[-rank:], kernels, paddings, dilations, strict=True
    ):
        reach = (kernel - 1) * dilation
        if reach < padding + max(before, 0) or size - before - after < dilation:
            return False
        if after > 0 and (reach < padding + after or options["ceil_mode"]):  # a window may begin in the padding
            return False
    return True
