"""Comparison of two graphs of one model, run side by side: pairs of values that should be equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxq.common.data import Batch
from fxq.common.metrics import tensors
from fxq.graph.grid import grid_of
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, plan_of
from fxq.paired.paired_run import PairedRun, Side
from fxq.quant.qparams import QParams, dequantize, quantize


@dataclass(frozen=True)
class ComparedValue:
    """One value as both graphs compute it: float tensors of the same shapes, except for the output of a graph.

    Attributes:
        node: node of the compared graph.
        want: value in the reference.
        got: value in the compared graph.
        own: value that the node computes from the reference's inputs; None if it was not requested.
    """

    node: fx.Node
    want: list[Tensor]
    got: list[Tensor]
    own: list[Tensor] | None = None

    def at(self, rows: Tensor | None) -> ComparedValue:
        """Restrict the value to some rows, (n, C). All rows stay if the mask `rows` is None or does not fit."""
        if rows is None or len(self.want) != 1 or rows.shape != self.want[0].shape[:-1]:
            return self
        want, got, own = ([t[rows] for t in values or ()] for values in (self.want, self.got, self.own))
        return ComparedValue(self.node, want, got, None if self.own is None else own)


def side_by_side(
    reference: IsolatedGraph,
    compared: IsolatedGraph,
    pairs: Mapping[fx.Node, fx.Node],
    batch: Batch,
    own: bool = False,
    see: Callable[[fx.Node, Any], None] | None = None,
    used: Mapping[fx.Node, Tensor] | None = None,
) -> Iterator[ComparedValue]:
    """Run two graphs on a batch, and yield pairs of values in the order of the compared graph.

    Only values that are still needed are in memory: read each one before you request the next. All runs draw the same
    random numbers, and each has private copies of stateful modules.

    Args:
        reference: the float model, or another quantized one.
        compared: the integer model.
        pairs: nodes of `compared`, each with the node of `reference` that computes the same value. Each occurs once.
        batch: the inputs.
        own: whether to also run each node of `compared` on the values of `reference`, rounded to the grids that it
            reads. The result has only the error of this node.
        see: called with every node of `reference` and its value.
        used: masks of the rows to compare, by node of `reference`, see `used_rows`. Other nodes: all rows.

    Yields:
        `ComparedValue`s. Values that cannot be compared (no float tensors, another structure) are left out, and so are
        integer tensors among float ones.
    """
    ends = {rounded_at(node): rounded_at(end) for node, end in pairs.items()}
    run = PairedRun(Side(reference, [batch], wanted=ends.values(), see=see), Side(compared, [batch]), ends)
    alone = Side(compared.fresh, [batch]) if own else None
    sources = {rounded_at(node): node for node in pairs}
    for node in compared.graph.nodes:
        (pair,) = run.step(node)
        forced = alone.step(node)[0] if alone is not None else None
        value = _compared_value(run, node, sources[node], pair, forced) if node in sources else None
        if value is not None:
            yield value.at((used or {}).get(pairs[value.node]))
            if alone is not None:
                _overwrite(alone, node, value.want)
    run.reference.finish()


def corrected(
    reference: IsolatedGraph,
    compared: IsolatedGraph,
    pairs: Mapping[fx.Node, fx.Node],
    batch: Batch,
    exact: Collection[fx.Node],
) -> ComparedValue | None:
    """Output of a graph if some of its nodes had no error: they have the values of the reference.

    Args:
        reference: the float model, or another quantized one.
        compared: the integer model.
        pairs: nodes of `compared`, including its output, each with the node of `reference` for the same value.
        batch: the inputs.
        exact: nodes of `compared` that get the values of the reference, rounded to their grids.

    Returns:
        The outputs of both graphs, as `want` and `got`; None if they cannot be compared.
    """
    output = compared.graph.output_node()
    sources = {**{rounded_at(node): node for node in exact}, output: output}
    ends = {node: rounded_at(pairs[source]) for node, source in sources.items()}
    run = PairedRun(Side(reference, [batch], wanted=ends.values()), Side(compared, [batch]), ends)
    value = None
    for node in compared.graph.nodes:
        (pair,) = run.step(node)
        value = _compared_value(run, node, sources[node], pair) if node in sources else None
        if value is not None:
            _overwrite(run.compared, node, value.want)
    return value


def rounded_at(node: fx.Node) -> fx.Node:
    """Quantize of an integer op's value if it is the only reader, else the node itself."""
    reader = next(iter(node.users), None)
    plan = plan_of(node)
    integer = plan is not None and not plan.in_float
    return reader if integer and len(node.users) == 1 and is_op(reader, "quantize") and reader is not None else node


def _overwrite(side: Side, node: fx.Node, want: Sequence[Tensor]) -> None:
    """Replace the value of a node that is still read by the reference's tensors, rounded to the node's grid.

    Later nodes then have only their own errors. Values that the reference does not have (a conversion, a part of a
    unit) are computed from those that it has.
    """
    values = side.runs[0].values
    if node not in values:
        return
    leaves, structure = pytree.tree_flatten(values[node])
    if [t.shape for t in leaves if isinstance(t, Tensor)] == [t.shape for t in want]:
        new_tensors, qp = iter(want), grid_of(side.program.gm, node)
        leaves = [_like(side, v, next(new_tensors), qp) if isinstance(v, Tensor) else v for v in leaves]
        side.put(node, pytree.tree_unflatten(leaves, structure))


def _like(side: Side, own: Tensor, want: Tensor, qp: QParams | None) -> Tensor:
    """Return `want` in the dtype of `own`; `own` itself if it is an integer tensor without a grid."""
    if own.is_floating_point():
        return side.safe(want.to(own.dtype))
    return quantize(want.to(torch.float32), qp) if qp is not None else own


def _plain(value: Any, qp: QParams | None) -> list[Tensor]:
    """Tensors of a value, with integers dequantized."""
    return [dequantize(t, qp) if qp is not None and not t.is_floating_point() else t for t in tensors(value)]


def _compared_value(
    run: PairedRun, node: fx.Node, source: fx.Node, pair: tuple[Any, Any], own: Any = None
) -> ComparedValue | None:
    """Compared value of a node, with only its float tensors; None if structure or shapes differ.

    Args:
        run: the run of both graphs.
        node: the node that has run.
        source: node of the compared graph whose value it is, rounded.
        pair: its value, and the reference's.
        own: its value on inputs of the reference; None if it was not requested.
    """
    assert run.pairs is not None
    grid, reference_grid = grid_of(run.compared.program.gm, node), grid_of(run.reference.program.gm, run.pairs[node])
    versions = [_plain(pair[1], reference_grid), _plain(pair[0], grid), *([] if own is None else [_plain(own, grid)])]
    if any(len(version) != len(versions[0]) for version in versions):
        return None
    matching = enumerate(zip(*versions, strict=True))
    floats = [i for i, same in matching if all(t.is_floating_point() for t in same)]
    wants, gots, *owns = ([version[i] for i in floats] for version in versions)
    shapes = [[t.shape for t in version] for version in (wants, gots, *owns)]
    if not wants or (source.op != "output" and any(shape != shapes[0] for shape in shapes)):
        return None
    return ComparedValue(source, wants, gots, owns[0] if owns else None)
