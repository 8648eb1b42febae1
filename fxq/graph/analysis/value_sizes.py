"""Values that decide sizes: how many entries another value has, such as the durations of a voice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from fxq.graph.query import called_name, fills_like, flat_nodes, reads_only_metadata

_COUNTS = {"arange": 0, "repeat_interleave": 1}
"""Functions whose arguments decide the size of the result, with the position of the first such argument."""
_COUNT_NAMES = ("start", "end", "step", "repeats")
"""Names of such arguments."""
_LIKE_ANOTHER = ("to", "type_as", "expand_as", "view_as", "reshape_as")
"""Methods that may take the dtype, device or shape of a second tensor, and no value of it."""


def size_deciders(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes whose values decide the size of a result at run time, each with the result.

    A node decides a size if a count is computed from its value: the bounds of `torch.arange`, or the repetitions of
    `torch.repeat_interleave`. What is computed from shapes alone decides nothing, since no value is read. Sizes of
    other results, such as those of `torch.zeros(n)`, of masks and of `topk`, are not followed.
    """
    deciders: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        for read in _counts(node):
            deciders.setdefault(read, node)
        if node in deciders and not reads_only_metadata(node):
            for read in _values_read(node):
                deciders.setdefault(read, deciders[node])
    return deciders


def _values_read(node: fx.Node) -> Iterable[fx.Node]:
    """Nodes of which a node reads values, and not only the shape, dtype or device."""
    name = called_name(node).partition(".")[0]
    if fills_like(node) or name == "new_tensor":
        return flat_nodes([*node.args[1:], *node.kwargs.values()])
    if name in _LIKE_ANOTHER:
        return flat_nodes(node.args[:1])
    return node.all_input_nodes


def _counts(node: fx.Node) -> Iterator[fx.Node]:
    """Values that a node reads as the size of its result."""
    if node.op not in ("call_function", "call_method"):
        return
    first = _COUNTS.get(called_name(node).partition(".")[0])  # of an op of torch.library, without its overload
    if first is not None:
        named = [node.kwargs[name] for name in _COUNT_NAMES if name in node.kwargs]
        values = node.args[first:] if named or node.args[first:] else node.args  # repeats alone, without a tensor
        yield from flat_nodes([*values, *named])
