"""Ops of the float model before folding and fusion, and a graph of them, for the ledger."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, fx

from fxq.graph.analysis.macs import macs_of
from fxq.graph.info import info
from fxq.graph.query import called_name, is_check, makes_no_tensor, submodule
from fxq.ops import OPS
from fxq.rewriting.rewriter import Rewriter

if TYPE_CHECKING:
    from fxq.pipeline.context import Context

_MIN_LARGE_MACS = 100_000_000
"""Multiply-accumulates per sample from which a model is large."""


@dataclass(frozen=True)
class FloatModelOp:
    """One op of the float model.

    Attributes:
        name: name of its node.
        path: module path.
        op: name of the op, or of the called function or module if the op table does not have it.
        source: `file:line` of the model.
        macs: multiply-accumulates, see `fxq/graph/analysis/macs.py`.
        gone: reason why it is not in the canonical graph; empty if it is.
    """

    name: str
    path: str
    op: str
    source: str
    macs: int
    gone: str = ""


@dataclass(frozen=True)
class FloatModelOps:
    """Ops of the float model, with its canonical graph.

    Attributes:
        ops: ops in execution order, including those without an effect on the output.
        gm: module with the weights, shared with the user's model.
        graph: canonical graph, a copy that no pass edits.
        nodes: nodes of that graph by the name of the op.
        by_origin: name of the op that each traced call became part of. Origins are names of traced calls.
    """

    ops: tuple[FloatModelOp, ...]
    gm: fx.GraphModule
    graph: fx.Graph
    nodes: Mapping[str, fx.Node]
    by_origin: Mapping[str, str]

    @cached_property
    def is_large(self) -> bool:
        """Whether the whole example takes so many multiply-accumulates that it is run in pieces."""
        return self.is_large_for(1)

    def is_large_for(self, samples: float) -> bool:
        """Whether the multiply-accumulates of the example, divided by `samples`, are that many."""
        return sum(op.macs for op in self.ops) > _MIN_LARGE_MACS * samples

    @cached_property
    def by_name(self) -> Mapping[str, FloatModelOp]:
        """Ops by name."""
        return {op.name: op for op in self.ops}


def keep_original(rewriter: Rewriter[Context], called: Sequence[fx.Node], constants: Set[fx.Node]) -> None:
    """Store the canonical graph in the context. Several ops that were one call get separate origins.

    Args:
        rewriter: rewriter of the canonical graph.
        called: all calls in execution order, including removed ones.
        constants: calls that were replaced by their value.
    """
    nodes = rewriter.nodes()
    shared = Counter(origin for node in nodes for origin in info(node).origins)
    gone = {n for n in called if n._erased and not any(o in shared for o in info(n).origins)}
    for node in nodes:
        if any(shared[origin] > 1 for origin in info(node).origins):
            rewriter.describe(node, origins=(node.name,))
    ops = []
    for node in filter(_is_op, _merged(nodes, called, gone)):
        why = (
            ""
            if node not in gone
            else "its value is a constant"
            if node in constants
            else "has no effect on the output"
        )
        ops.append(_op(rewriter, node, why))
    _keep(rewriter, ops)


def expand_original(rewriter: Rewriter[Context], expanded: Mapping[str, Sequence[fx.Node]]) -> None:
    """Store the graph again after some ops were replaced.

    Args:
        rewriter: rewriter of the canonical graph.
        expanded: the nodes that replace an op, by its name. Each has a separate origin.
    """
    original = rewriter.context.original
    if original is None:
        return
    ops: list[FloatModelOp] = []
    for op in original.ops:
        ops += [_op(rewriter, node, "") for node in expanded[op.name]] if op.name in expanded else [op]
    _keep(rewriter, ops)


def divide_original(rewriter: Rewriter[Context], divided: Mapping[str, Tensor | None]) -> None:
    """Divide values of the stored graph as a pass has divided them in the model, so that both can be compared.

    Args:
        rewriter: rewriter of the graph.
        divided: divisor of each value, by an origin of its op; None: the value is not in the graph any more.
    """
    original = rewriter.context.original
    if original is None:
        return
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(original.graph, copies))
    nodes = {name: copies[node] for name, node in original.nodes.items() if node in copies}
    by_name = {original.by_origin[origin]: by for origin, by in divided.items() if origin in original.by_origin}
    for name, by in by_name.items():
        if by is None:
            del nodes[name]
            continue
        with graph.inserting_after(nodes[name]):
            nodes[name] = graph.call_function(DivideBy(by), (nodes[name],))
    rewriter.context.original = replace(original, graph=graph, nodes=nodes)


class DivideBy:
    """Function that divides a tensor by a constant one."""

    __name__ = "divided"

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        """Divide a value of the float model."""
        return x / self.by.to(x)


def _keep(rewriter: Rewriter[Context], ops: Sequence[FloatModelOp]) -> None:
    nodes = rewriter.nodes()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(rewriter.graph, copies))
    rewriter.context.original = FloatModelOps(
        tuple(ops),
        rewriter.gm,
        graph,
        {node.name: copies[node] for node in nodes if node in copies},
        {origin: node.name for node in nodes for origin in info(node).origins},
    )


def _merged(nodes: Sequence[fx.Node], called: Sequence[fx.Node], gone: Set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes of the graph, and each removed call after the remaining call that preceded it."""
    gone_after: dict[fx.Node | None, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in called:
        if node in gone:
            gone_after.setdefault(last, []).append(node)
        elif not node._erased:
            last = node
    yield from gone_after.get(None, ())
    for node in nodes:
        yield node
        yield from gone_after.get(node, ())


def _is_op(node: fx.Node) -> bool:
    """Whether a node is an op of the model: a call that returns tensors, except taking one out of a tuple."""
    if not node.op.startswith("call") or is_check(node) or makes_no_tensor(node):
        return False
    taken = node.args[0] if node.target is operator.getitem else None
    return not (isinstance(taken, fx.Node) and info(taken).shape is None)


def _op(rewriter: Rewriter, node: fx.Node, gone: str) -> FloatModelOp:
    module = submodule(rewriter.gm, node)
    op = called_name(node) if module is None else OPS.leaf_name(module) or type(module).__name__
    macs = 0 if gone else macs_of(rewriter.gm, node)
    return FloatModelOp(node.name, info(node).path, op, info(node).source, macs, gone)
