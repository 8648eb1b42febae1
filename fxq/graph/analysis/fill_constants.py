"""Fill constants: numbers, such as -inf, that masks, pads and fills write among the values of a network.

They are not data: observers leave them out of the range, and `choose-grids` prevents that one outside the grid is
clipped if its value matters.
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
"""Calls that create a tensor of one value: the index of the argument that gives the value."""
_ONES = ("new_ones", "ones_like")
"""Calls that create a tensor of ones."""


class FillConstants:
    """Fill constants that the values of a graph may hold, computed once per value.

    Zero is left out, since every grid contains it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._constants: dict[fx.Node, frozenset[float]] = {}

    def of(self, node: fx.Node) -> frozenset[float]:
        """Fill constants that the value of a node may hold. Recursive: call it for the nodes in graph order."""
        if node not in self._constants:
            self._constants[node] = frozenset(self._find(node)) - {0.0}
        return self._constants[node]

    def added_by(self, node: fx.Node) -> frozenset[float]:
        """Fill constants that the node itself writes, without those of its inputs."""
        if fills_like(node):
            return self.of(node)
        calls = calls_of(self.gm, taken_from(node))
        return frozenset(value for call in calls for value in self._added_by_call(call, node)) - {0.0}

    def _find(self, node: fx.Node) -> Iterator[float]:
        if node.op == "get_attr":
            yield from _only_value(constant(self.gm, node))
        elif fills_like(node):
            yield from _filled(node)
        else:
            source = taken_from(node)
            calls = calls_of(self.gm, source)
            if calls:
                yield from self._of_calls(source, calls)[calls.outputs[taken_part(node, source) or 0]]
            else:
                yield -math.inf  # an input may be a mask for attention

    def _of_calls(self, node: fx.Node, calls: Calls) -> list[frozenset[float]]:
        """Fill constants that the value of each op in a node may hold."""
        constants_of_ops: list[frozenset[float]] = []
        for call in calls:
            constants = set(self._added_by_call(call, node))
            if passes_values(call.op.traits):
                for name in call.op.traits.inputs:
                    constants |= self._of_argument(call.tensors.get(name), constants_of_ops)
            if call.op.traits.narrows and not any(flat_nodes(call.options)):  # else the limits are run-time values
                constants = {float(call.op.target(torch.tensor(value), **call.options)) for value in constants}
            constants_of_ops.append(frozenset(constants))
        return constants_of_ops

    def _of_argument(self, value: Any, constants_of_ops: list[frozenset[float]]) -> frozenset[float]:
        values = value if isinstance(value, (tuple, list)) else (value,)
        constants = [
            constants_of_ops[v.index] if isinstance(v, InnerValue) else self.of(v)
            for v in values
            if isinstance(v, (InnerValue, fx.Node))
        ]
        return frozenset().union(*constants)

    def _added_by_call(self, call: OpCall, node: fx.Node) -> Iterator[float]:
        for name in call.op.traits.fill_constants:
            value = call.tensors.get(name, call.options.get(name))
            if isinstance(value, (int, float)) and not _is_never_selected(node, value):
                yield float(torch.tensor(float(value)))  # rounded to float32
            for read in flat_nodes(value):
                if read.op == "get_attr" or fills_like(read):
                    yield from self.of(read)


def passes_values(traits: OpTraits) -> bool:
    """Whether an op returns values of its inputs unchanged or clipped."""
    return traits.kind == "moves" or (traits.kind == "float" and bool(traits.fill_constants))


def _only_value(tensor: Tensor | None) -> Iterator[float]:
    """Yield the value of a tensor whose elements are all equal."""
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


def _is_never_selected(node: fx.Node, value: float) -> bool:
    """Whether the fill constant of a pad is never the result of its readers: max pools with data in every window.

    A grid contains zero and all data. A negative constant below it is clipped to the lowest integer, which is still not
    above the data.
    """
    op = op_of(node)
    if value >= 0 or op is None or op.traits.surrounds is None or not node.users:
        return False
    sides = options_of(node)[op.traits.surrounds]
    readers = [(user, op_of(user)) for user in node.users]
    return all(op is not None and op.traits.maximum and _all_hold_data(node, sides, user) for user, op in readers)


def _all_hold_data(pad: fx.Node, sides: Any, pool: fx.Node) -> bool:
    """Whether every window of a max pool after a pad contains elements of the pad's input."""
    shape, options = info(pad).shape, options_of(pool)
    if shape is None or not all(isinstance(side, int) for side in sides):
        return False
    rank = len(options["kernel_size"])
    pairs = list(zip(sides[::2], sides[1::2], strict=False))
    if len(pairs) > rank:
        return False  # pads other axes, too: whole windows may be padding
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
