"""Sizes of values as sizes of the model's inputs, wherever the ops between them prove that these are equal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import fx

from fxq.graph.guards import check_fixed
from fxq.graph.info import info
from fxq.graph.query import constant, op_of, options_of


class InputSize(NamedTuple):
    """Size of an axis of an input of the model.

    Attributes:
        input: placeholder of the input.
        axis: axis of the input.
        limit: if given, the smaller one of this number and the input's size is meant.
    """

    input: fx.Node
    axis: int
    limit: int | None = None


Size = InputSize | int | None
"""Size of one axis; None if it is not known to be a number or a size of an input."""
Shape = tuple[Size, ...]


class InputSizes:
    """Sizes of the values of a graph as sizes of its inputs, and the inputs that are on the same device.

    Equal sizes are proven for all inputs that the ops accept; values of the example are not used. Inputs count only if
    the graph checks their number of axes.

    Attributes:
        shapes: shapes of values.
        numbers: sizes that nodes read from shapes.
        devices: for each value, an input on its device.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.shapes: dict[fx.Node, Shape] = {}
        self.numbers: dict[fx.Node, Size] = {}
        self.devices: dict[fx.Node, fx.Node] = {}
        self._gm = gm
        checked = _inputs_of_fixed_rank(gm.graph)
        for node in gm.graph.nodes:
            if node in checked:
                rank = len(info(node).shape or ())
                self.shapes[node], self.devices[node] = tuple(InputSize(node, i) for i in range(rank)), node
            elif (read := axis_read(node)) is not None and (shape := self.shapes.get(read[0])) is not None:
                self.numbers[node] = shape[read[1]] if -len(shape) <= read[1] < len(shape) else None
            elif node.target is operator.add and node.args[1] == 0:
                self.numbers[node] = self._size(node.args[0])
            else:
                self._op(node)

    def _op(self, node: fx.Node) -> None:
        op = op_of(node)
        if op is None or not node.args or not isinstance(node.args[0], fx.Node):
            return
        is_unary = op.tensors == ("x",) and (op.traits.pointwise or op.traits.narrows)
        keeps = is_unary or op.name in _KEEP_SHAPE
        infer = InputSizes._of_first if keeps else _SHAPES.get(op.name)
        shape = infer(self, node) if infer is not None else None
        if shape is not None:
            self.shapes[node] = shape
        if shape and self._shape(node.args[0]) and node.args[0] in self.devices:  # a number's device may differ
            self.devices[node] = self.devices[node.args[0]]

    def _shape(self, node: Any) -> Shape | None:
        """Shape of a value; of a constant, its numbers."""
        tensor = constant(self._gm, node)
        return tuple(tensor.shape) if tensor is not None else self.shapes.get(node)

    def _size(self, value: Any) -> Size:
        return self.numbers.get(value) if isinstance(value, fx.Node) else value if type(value) is int else None

    def _of_first(self, node: fx.Node) -> Shape | None:
        return self._shape(node.args[0])

    def _broadcast(self, node: fx.Node) -> Shape | None:
        operands = [read for read in node.args if isinstance(read, fx.Node) and info(read).is_tensor]
        shapes = [shape for operand in operands if (shape := self._shape(operand)) is not None]
        return reduce(_broadcast_shapes, shapes) if len(shapes) == len(operands) else None

    def _embedding(self, node: fx.Node) -> Shape | None:
        ids, table = self._shape(node.args[0]), self._shape(node.args[1])
        return (*ids, table[1]) if ids is not None and table is not None else None

    def _expand(self, node: fx.Node) -> Shape | None:
        x, sizes = self._shape(node.args[0]) or (), options_of(node)["sizes"]
        if not isinstance(sizes, (tuple, list)):
            return None
        kept = (None,) * (len(sizes) - len(x)) + x
        return tuple(old if size == -1 else self._size(size) for size, old in zip(sizes, kept, strict=True))

    def _slice(self, node: fx.Node) -> Shape | None:
        x, index = self._shape(node.args[0]), options_of(node)["index"]
        if x is None or not isinstance(index, tuple) or not all(isinstance(part, slice) for part in index):
            return None
        return tuple(self._sliced(size, part) if part is not None else size for size, part in zip_longest(x, index))

    def _sliced(self, size: Size, part: slice) -> Size:
        if part == slice(None):
            return size
        stop = self._size(part.stop)
        if not isinstance(size, int) or part.start not in (None, 0) or part.step not in (None, 1):
            return None
        if isinstance(stop, InputSize):
            return stop._replace(limit=size if stop.limit is None else min(size, stop.limit))
        return min(size, stop) if stop is not None and stop >= 0 else None


_KEEP_SHAPE = frozenset({"layer_norm", "rms_norm", "softmax", "cast", "contiguous", "dropout", "identity"})
_SHAPES: Mapping[str, Callable[[InputSizes, fx.Node], Shape | None]] = {
    **dict.fromkeys(("add", "sub", "mul", "div"), InputSizes._broadcast),
    "embedding": InputSizes._embedding,
    "expand": InputSizes._expand,
    "getitem": InputSizes._slice,
}


def axis_read(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The value and the axis whose size a node reads, as `x.shape[0]` or `x.size(0)`; None for any other node."""
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        value, axis = node.args
    elif node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _reads_shape(node.args[0]):
        value, axis = node.args[0].args[0], node.args[1]
    else:
        return None
    return (value, axis) if isinstance(value, fx.Node) and type(axis) is int else None


def _reads_shape(node: fx.Node) -> bool:
    is_attribute = node.target is getattr and node.args[1] == "shape"
    return is_attribute or (node.op == "call_method" and node.target == "size" and len(node.args) == 1)


def _inputs_of_fixed_rank(graph: fx.Graph) -> set[fx.Node]:
    """Inputs whose number of axes the graph checks."""
    checks = [node.args for node in graph.nodes if node.target is check_fixed]
    return {
        value
        for arguments, expected in checks
        for name, value in arguments.items()
        if isinstance(value, fx.Node) and value.op == "placeholder" and " with " in str(expected[name])
    }


def _broadcast_shapes(a: Shape, b: Shape) -> Shape:
    pairs = zip_longest(reversed(a), reversed(b), fillvalue=1)
    return tuple(reversed([_broadcast_sizes(*pair) for pair in pairs]))


def _broadcast_sizes(a: Size, b: Size) -> Size:
    """Size of an axis of a sum, if the sizes of its terms can be broadcast at all."""
    if a == 1 or a == b:
        return b
    if b == 1 or isinstance(a, int):
        return a
    if isinstance(b, int):
        return b
    if a is None or b is None or a[:2] != b[:2] or 0 in (a.limit, b.limit):
        return None
    # the smaller one is equal to the larger one, or 1
    return a if b.limit is not None and (a.limit is None or a.limit > b.limit) else b
