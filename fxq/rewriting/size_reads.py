"""Reads of sizes and devices moved from later values to the inputs of the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxq.graph.analysis.input_sizes import InputSize, InputSizes, axis_read
from fxq.graph.info import info
from fxq.graph.query import flat_nodes, is_size
from fxq.rewriting.rewriter import Rewriter

MAX_SEARCHED = 1000
"""Limit of the search for a path between two values; if it is exceeded, the read is not moved."""


def read_sizes_of_inputs(rewriter: Rewriter) -> None:
    """Read sizes and devices from inputs of the model, if something else than the value itself needs them.

    Before: arange(layer_norm(embedding(ids, w)).shape[1])    After: arange(ids.shape[1])

    What reads such a size, such as a mask, then does not wait for the value, and a region of an engine that holds the
    value need not end there. A size by which the value itself is reshaped is still read from the value.
    """
    nodes = rewriter.nodes()
    sizes, order = InputSizes(rewriter.gm), {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if axis_read(node) is not None:
            _move_size(rewriter, node, sizes, order)
        elif node.target is getattr and node.args[1] == "device":
            _move_device(rewriter, node, sizes, order)


def _move_device(rewriter: Rewriter, node: fx.Node, sizes: InputSizes, order: dict[fx.Node, int]) -> None:
    value = node.args[0]
    source = sizes.devices.get(value, value) if isinstance(value, fx.Node) else value
    if isinstance(value, fx.Node) and source is not value and _is_needed_elsewhere(node, value, order):
        with rewriter.attributed("read_sizes_of_inputs", read_sizes_of_inputs):
            rewriter.update(node, args=(source, "device"))


def _move_size(rewriter: Rewriter, node: fx.Node, sizes: InputSizes, order: dict[fx.Node, int]) -> None:
    read, size = axis_read(node), sizes.numbers.get(node)
    if read is None or not isinstance(size, InputSize) or size.limit is not None or read[0].op == "placeholder":
        return
    if _is_needed_elsewhere(node, read[0], order):
        with rewriter.attributed("read_sizes_of_inputs", read_sizes_of_inputs):
            rewriter.update(node, "size", (size.input, size.axis), op="call_method")


def _is_needed_elsewhere(size: fx.Node, value: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a size decides a value that is not computed from the value whose size it is."""
    return any(not _depends(reader, value, order) for reader in _readers(size))


def _readers(size: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that read a size, or numbers that are computed from it."""
    todo, seen = [size], {size}
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if is_size(user):
                todo.append(user)
            elif info(user).is_tensor:
                yield user


def _depends(node: fx.Node, value: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a node is computed from entries of a value; True if the search is cut off."""
    todo, seen = [node], {node}
    while todo and len(seen) <= MAX_SEARCHED:
        current = todo.pop()
        reads = flat_nodes([current.args, current.kwargs])
        new = {read for read in reads if not is_size(read) and order.get(read, -1) >= order[value]} - seen
        if value in new:
            return True
        seen |= new
        todo += new
    return bool(todo)
