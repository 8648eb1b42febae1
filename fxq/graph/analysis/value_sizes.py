"""Values that decide sizes: how many entries another value has, such as the durations of a voice."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxq.graph.query import called_name, flat_nodes, reads_only_metadata

_COUNTS = {"arange": 0, "repeat_interleave": 1}
"""Functions whose arguments decide the size of the result, with the position of the first such argument."""
_COUNT_NAMES = ("start", "end", "step", "repeats")
"""Names of such arguments."""


def size_deciders(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes whose values decide the size of a result at run time, each with the result.

    A node decides a size if a count is computed from its value: the bounds of `torch.arange`, or the repetitions of
    `torch.repeat_interleave`. What is computed from shapes alone decides nothing, since no value is read.
    """
    deciders: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        for read in _counts(node):
            deciders.setdefault(read, node)
        if node in deciders and not reads_only_metadata(node):
            for read in node.all_input_nodes:
                deciders.setdefault(read, deciders[node])
    return deciders


def _counts(node: fx.Node) -> Iterator[fx.Node]:
    """Values that a node reads as the size of its result."""
    if node.op not in ("call_function", "call_method"):
        return
    first = _COUNTS.get(called_name(node).partition(".")[0])  # of an op of torch.library, without its overload
    if first is not None:
        named = [node.kwargs[name] for name in _COUNT_NAMES if name in node.kwargs]
        values = node.args[first:] if named or node.args[first:] else node.args  # repeats alone, without a tensor
        yield from flat_nodes([*values, *named])
