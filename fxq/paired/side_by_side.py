"""Comparison of two graphs of one model, run side by side: pairs of values that should be equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.graph.grid import grid_of
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, plan_of
from fxq.graph.run import Runner
from fxq.quant.qparams import QParams, dequantize, quantize


class _Run(Runner):
    """Independent run: other runs at the same time change neither its random numbers nor its modules."""

    def __init__(self, program: IsolatedGraph, batch: Batch) -> None:
        super().__init__(program.gm, copied(batch), program.graph, program.modules)  # it may change its inputs in place
        self.safe: Callable[[Any], Any] = copied if program.overwrites else lambda value: value
        self._rng_state = torch.get_rng_state()

    def compute(self, node: fx.Node) -> Any:
        torch.set_rng_state(self._rng_state)
        value = super().compute(node)
        self._rng_state = torch.get_rng_state()
        return value


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
    integer, alone = _Run(compared, batch), _IsolatedRun(compared.fresh, batch) if own else None
    real = _ReferenceRun(reference, set(pairs.values()), batch, see)
    rounded = {rounded_at(node): node for node in pairs}
    for node in compared.graph.nodes:
        got = integer.step(node)
        forced = alone.step(node) if alone is not None else None
        source = rounded.get(node)
        if source is not None:
            want = _plain(real.value(pairs[source]), grid_of(reference.gm, rounded_at(pairs[source])))
            value = _comparable(source, want, grid_of(compared.gm, node), got, forced)
            if value is not None:
                yield value.at((used or {}).get(pairs[source]))
            if alone is not None and value is not None:
                alone.overwrite(node, value.want)
    real.finish()


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
    forced, wanted = _IsolatedRun(compared, batch), {pairs[node] for node in (*exact, output)}
    real, rounded = _ReferenceRun(reference, wanted, batch, None), {rounded_at(node): node for node in exact}
    for node in compared.graph.nodes:
        got = forced.step(node)
        source = rounded.get(node, output if node is output else None)
        if source is None:
            continue
        want = _plain(real.value(pairs[source]), grid_of(reference.gm, rounded_at(pairs[source])))
        value = _comparable(source, want, grid_of(compared.gm, node), got, None)
        if node is output:
            return value
        if value is not None:
            forced.overwrite(node, value.want)
    return None


def rounded_at(node: fx.Node) -> fx.Node:
    """Quantize of an integer op's value if it is the only reader, else the node itself."""
    reader = next(iter(node.users), None)
    plan = plan_of(node)
    integer = plan is not None and not plan.in_float
    return reader if integer and len(node.users) == 1 and is_op(reader, "quantize") and reader is not None else node


class _ReferenceRun(_Run):
    """Run of the reference on demand. Wanted values that it has passed are stored until they are requested."""

    def __init__(self, program: IsolatedGraph, wanted: set[fx.Node], batch: Batch, see: Any) -> None:
        super().__init__(program, batch)
        self._see, self._wanted = see, {rounded_at(node) for node in wanted}
        self._nodes, self._waiting = iter(program.graph.nodes), dict[fx.Node, Any]()

    def value(self, wanted: fx.Node) -> Any:
        """Return the value of a node, once, after running the graph as far as needed."""
        end = rounded_at(wanted)
        while end not in self._waiting:
            self.step(next(self._nodes))
        return self._waiting.pop(end)

    def finish(self) -> None:
        """Run the remaining nodes, if `see` needs them."""
        for node in self._nodes if self._see is not None else ():
            self.step(node)

    def step(self, node: fx.Node) -> Any:
        value = super().step(node)
        if node in self._wanted:
            self._waiting[node] = self.safe(value)
        if self._see is not None:
            self._see(node, value)
        return value


class _IsolatedRun(_Run):
    """Run of the compared graph on the values of the reference, so that every value has only the error of its node.

    Values that the reference does not have (a conversion, a part of a unit) are computed from those that it has.
    """

    def overwrite(self, node: fx.Node, want: Sequence[Tensor]) -> None:
        """Replace the value of a node by the reference's tensors, rounded to the node's grid."""
        if node not in self.values:
            return
        leaves, structure = pytree.tree_flatten(self.values[node])
        if [t.shape for t in leaves if isinstance(t, Tensor)] == [t.shape for t in want]:
            new_tensors, qp = iter(want), grid_of(self.gm, node)
            leaves = [self._like(v, next(new_tensors), qp) if isinstance(v, Tensor) else v for v in leaves]
            self.values[node] = pytree.tree_unflatten(leaves, structure)

    def _like(self, own: Tensor, want: Tensor, qp: QParams | None) -> Tensor:
        """Return `want` in the dtype of `own`; `own` itself if it is an integer tensor without a grid."""
        if own.is_floating_point():
            return self.safe(want.to(own.dtype))
        return quantize(want.to(torch.float32), qp) if qp is not None else own


def _plain(value: Any, qp: QParams | None) -> list[Tensor]:
    """Tensors of a value, with integers dequantized."""
    return [dequantize(t, qp) if qp is not None and not t.is_floating_point() else t for t in tensors(value)]


def _comparable(node: fx.Node, wants: list[Tensor], qp: QParams | None, got: Any, own: Any) -> ComparedValue | None:
    """Compared value of a node, with only its float tensors; None if structure or shapes differ."""
    versions = [wants, _plain(got, qp), *([] if own is None else [_plain(own, qp)])]
    if any(len(version) != len(wants) for version in versions):
        return None
    matching = enumerate(zip(*versions, strict=True))
    floats = [i for i, same in matching if all(t.is_floating_point() for t in same)]
    wants, gots, *owns = ([version[i] for i in floats] for version in versions)
    shapes = [[t.shape for t in version] for version in (wants, gots, *owns)]
    if not wants or (node.op != "output" and any(shape != shapes[0] for shape in shapes)):
        return None
    return ComparedValue(node, wants, gots, owns[0] if owns else None)
