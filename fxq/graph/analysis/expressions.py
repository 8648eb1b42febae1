"""Value numbering across graphs: nodes with the same number compute the same float value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.checksums import bit_sum, checksum
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, is_op, op_of, read_attribute, submodule
from fxq.graph.unit import Unit, unit_of
from fxq.quant.observer_base import Observer


class Expressions:
    """Value numbers of nodes: one number per distinct expression over the model's inputs and float weights.

    Conversions and observers count as their input, integer weights as the float ones, and a unit as the ops in its
    body. So a layer keeps its number through all passes that do not change what it computes in float. Nodes that
    cannot be compared, such as calls of modules, get a unique number.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._weights: dict[Hashable, Tensor] = {}  # kept alive, so that their addresses are not reused
        self._unique_count = 0

    def of(self, gm: fx.GraphModule) -> dict[fx.Node, int]:
        """Value number of each node of a graph at a stage from `canonical` to `qdq`.

        A unit gets the number of the first op in its body, not of its result.
        """
        whole: dict[fx.Node, int] = {}
        first: dict[fx.Node, int] = {}
        for node in gm.graph.nodes:
            unit = unit_of(gm, node)
            if unit is not None:
                whole[node], first[node] = self._unit(unit, node, whole)
            else:
                whole[node] = first[node] = self._node(gm, node, whole)
        return first

    def _node(self, gm: fx.GraphModule, node: fx.Node, numbers: Mapping[fx.Node, int]) -> int:
        if node.op == "placeholder":
            return self._number(("input", str(node.target)))
        path = info(node).stands_for or (str(node.target) if node.op == "get_attr" else "")
        if path:
            return self._weight(read_attribute(gm, path))
        read: Any = node.args[0] if node.args else None
        converts_activation = is_op(node, *CONVERSIONS) and read.op != "get_attr"
        if converts_activation or isinstance(submodule(gm, node), Observer):
            return numbers[read]
        return self._call(node, numbers) if node.op == "call_function" else self._number(None)

    def _unit(self, unit: Unit, node: fx.Node, numbers: Mapping[fx.Node, int]) -> tuple[int, int]:
        """Value numbers of a unit's result and of its first op."""
        inside: dict[fx.Node, Any] = {}
        arguments = zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True)
        for parameter, value in arguments:
            inside[parameter] = numbers[value] if isinstance(value, fx.Node) else self._number(_as_key(value, numbers))
        first = None
        for inner in unit.graph.nodes:
            if inner.op == "call_function":
                inside[inner] = self._call(inner, inside)
                first = inside[inner] if first is None and op_of(inner) is not None else first
        result = unit.graph.output_node().args[0]
        whole = inside[result] if isinstance(result, fx.Node) else self._number(("results", _as_key(result, inside)))
        return whole, self._number(None) if first is None else first

    def _call(self, node: fx.Node, numbers: Mapping[fx.Node, int]) -> int:
        op, options = op_of(node), dict(node.kwargs)
        if op is not None and op.traits.recurrence is not None:
            options = op.traits.recurrence.without_grid(options)
        return self._number(("call", node.target, _as_key(node.args, numbers), _as_key(options, numbers)))

    def _weight(self, tensor: Any) -> int:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return self._number(None)
        address = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        key = *address, checksum(tensor), bit_sum(tensor)  # versions do not count writes through `.data`
        self._weights.setdefault(key, tensor)
        return self._number(("weight", *key))

    def _number(self, key: Hashable) -> int:
        """Number of an expression; a unique number if the key is None."""
        try:
            number = self._numbers.get(key) if key is not None else None
        except TypeError:  # an argument is not hashable
            key = number = None
        if number is None:
            number = len(self._numbers) + self._unique_count
            self._unique_count += key is None
            if key is not None:
                self._numbers[key] = number
        return number


def _as_key(value: Any, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Hashable form of nested arguments, with nodes replaced by their numbers. Includes types, since 1 == True."""
    if isinstance(value, fx.Node):
        return ("node", numbers[value])
    if isinstance(value, Mapping):
        return ("dict", *((key, _as_key(part, numbers)) for key, part in sorted(value.items())))
    if isinstance(value, (tuple, list)):
        return ("list", *(_as_key(part, numbers) for part in value))
    if isinstance(value, slice):
        return ("slice", *(_as_key(part, numbers) for part in (value.start, value.stop, value.step)))
    return (type(value), value)
