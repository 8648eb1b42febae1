"""The float model as the ledger speaks of it: its ops before anything is folded or fused, and a graph of them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, fx

from fxq.graph.analysis.macs import macs_of
from fxq.graph.info import info
from fxq.graph.query import called_name, is_check, makes_no_tensor, submodule
from fxq.ops import OPS
from fxq.rewriting.rewriter import Rewriter

_LARGE = 100_000_000


@dataclass(frozen=True)
class FloatModelOp:
    """One op of the float model.

    Attributes:
        name: its node.
        path, source: module path, and `file:line` of the model.
        op: the op, or what is called where the op table does not know it.
        macs: multiply-accumulates, see `fxq/graph/analysis/macs.py`.
        gone: why it is not in the canonical graph; empty when it is.
    """

    name: str
    path: str
    op: str
    source: str
    macs: int
    gone: str = ""


@dataclass(frozen=True)
class FloatModelOps:
    """The float model.

    Attributes:
        ops: its ops in execution order, those without an effect included.
        gm: the module that has the weights, shared with the user's model.
        graph: its canonical graph, a copy that no pass edits.
        nodes: the nodes of that graph by the name of the op.
        by_origin: the op that each traced call became part of: what a node stands for, by its origins.
    """

    ops: tuple[FloatModelOp, ...]
    gm: fx.GraphModule
    graph: fx.Graph
    nodes: Mapping[str, fx.Node]
    by_origin: Mapping[str, str]

    @cached_property
    def is_large(self) -> bool:
        """Whether it multiplies so much for the example that few samples of it are looked at where that is enough."""
        return self.is_large_for(1)

    def is_large_for(self, samples: int) -> bool:
        """The same of one sample, where the example has so many."""
        return sum(op.macs for op in self.ops) > _LARGE * samples

    @cached_property
    def by_name(self) -> Mapping[str, FloatModelOp]:
        """The ops by name."""
        return {op.name: op for op in self.ops}


def keep_original(rewriter: Rewriter, called: Sequence[fx.Node], constants: Set[fx.Node]) -> None:
    """Keep the canonical graph in the context. Ops that were one call get origins of their own, to tell them apart.

    Args:
        rewriter: of the canonical graph.
        called: the calls in execution order before any was removed; removed ones included.
        constants: those of them that were replaced by their value.
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


def expand_original(rewriter: Rewriter, expanded: Mapping[str, Sequence[fx.Node]]) -> None:
    """Keep the graph anew, with other ops in the place of some: by name, what each became. They have origins alone."""
    known = rewriter.context.original
    if known is None:
        return
    ops: list[FloatModelOp] = []
    for op in known.ops:
        ops += [_op(rewriter, node, "") for node in expanded[op.name]] if op.name in expanded else [op]
    _keep(rewriter, ops)


def divide_original(rewriter: Rewriter, divided: Mapping[str, Tensor | None]) -> None:
    """Let values of the float model be compared with what a pass has made of them: divided, by the ops' origins.

    What stands for None is not compared.
    """
    known = rewriter.context.original
    if known is None:
        return
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(known.graph, copies))
    nodes = {name: copies[node] for name, node in known.nodes.items() if node in copies}
    by_name = {known.by_origin[origin]: by for origin, by in divided.items() if origin in known.by_origin}
    for name, by in by_name.items():
        if by is None:
            del nodes[name]
            continue
        with graph.inserting_after(nodes[name]):
            nodes[name] = graph.call_function(Divided(by), (nodes[name],))
    rewriter.context.original = replace(known, graph=graph, nodes=nodes)


class Divided:
    """Divides a tensor by another one."""

    __name__ = "divided"

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        """A value of the float model, as it is in the graph."""
        return x / self.by.to(x)


def _keep(rewriter: Rewriter, ops: Sequence[FloatModelOp]) -> None:
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
    """The nodes of the graph, and those that are gone where they were: behind the call that came before them."""
    behind: dict[fx.Node | None, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in called:
        if node in gone:
            behind.setdefault(last, []).append(node)
        elif not node._erased:
            last = node
    yield from behind.get(None, ())
    for node in nodes:
        yield node
        yield from behind.get(node, ())


def _is_op(node: fx.Node) -> bool:
    """Whether a node is an op of the model: a call that gives tensors, and not only takes one out of a tuple."""
    if not node.op.startswith("call") or is_check(node) or makes_no_tensor(node):
        return False
    taken = node.args[0] if node.target is operator.getitem else None
    return not (isinstance(taken, fx.Node) and info(taken).shape is None)


def _op(rewriter: Rewriter, node: fx.Node, gone: str) -> FloatModelOp:
    module = submodule(rewriter.gm, node)
    op = called_name(node) if module is None else OPS.leaf_name(module) or type(module).__name__
    macs = 0 if gone else macs_of(rewriter.gm, node)
    return FloatModelOp(node.name, info(node).path, op, info(node).source, macs, gone)
