"""Two graphs of one model, run side by side and node by node: values that should be equal, pair by pair."""

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
    """A run that is its own: other runs at the same time change neither its random numbers nor its modules."""

    def __init__(self, program: IsolatedGraph, batch: Batch) -> None:
        super().__init__(program.gm, copied(batch), program.graph, program.modules)  # it may change its inputs in place
        self.kept: Callable[[Any], Any] = copied if program.overwrites else lambda value: value
        self._random = torch.get_rng_state()

    def compute(self, node: fx.Node) -> Any:
        torch.set_rng_state(self._random)
        value = super().compute(node)
        self._random = torch.get_rng_state()
        return value


@dataclass(frozen=True)
class ComparedValue:
    """One value as both graphs compute it: tensors in floating point, of the same shapes but for what a graph returns.

    Attributes:
        node: the node of the graph that is compared.
        want: its reference.
        got: what the graph made.
        own: what the node makes of the reference's values of its inputs; None where that was not asked for.
    """

    node: fx.Node
    want: list[Tensor]
    got: list[Tensor]
    own: list[Tensor] | None = None

    def at(self, rows: Tensor | None) -> ComparedValue:
        """The same of some of its rows, (n, C): those where this is true; of all where it is None or does not fit."""
        if rows is None or len(self.want) != 1 or rows.shape != self.want[0].shape[:-1]:
            return self
        want, got, own = ([t[rows] for t in each or ()] for each in (self.want, self.got, self.own))
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
    """Run two graphs on a batch; their values, in the order in which the second one makes them.

    Only values that are still needed are kept. A value is to be read before the next one is asked for. All
    runs draw the same random numbers, and the modules of each keep what they keep from batch to batch to themselves.

    Args:
        reference: the float model, or another quantized one.
        compared: the integer model.
        pairs: nodes of `compared`, and the node of `reference` that makes the same value, each once.
        batch: the inputs.
        own: also run each node of `compared` on the values of `reference`, on the grids that it reads: its own
            error, without what it inherits.
        see: is called with every node of `reference` and its value.
        used: the rows of values of `reference` that are compared, see `used_rows`; all of the others.

    Yields:
        `ComparedValue`s. Values that cannot be compared (no float tensors, another structure) are left out, and so are
        the integers among others.
    """
    integer, alone = _Run(compared, batch), _Alone(compared.fresh, batch) if own else None
    real = _Wanted(reference, set(pairs.values()), batch, see)
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
    """What a graph returns when some of its nodes make no error: their values are those of the reference.

    Args:
        reference: the float model, or another quantized one.
        compared: the integer model.
        pairs: nodes of `compared`, and the node of `reference` that makes the same value, the one that returns as well.
        batch: the inputs.
        exact: the nodes of `compared` that others read the reference's values of, on the grids that they have.

    Returns:
        What both return, by the names `want` and `got`; None where that cannot be compared.
    """
    output = compared.graph.output_node()
    forced, wanted = _Alone(compared, batch), {pairs[node] for node in (*exact, output)}
    real, rounded = _Wanted(reference, wanted, batch, None), {rounded_at(node): node for node in exact}
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
    """The quantize that alone reads a value, else the node itself: the output of an op in qdq form."""
    reader = next(iter(node.users), None)
    plan = plan_of(node)
    integer = plan is not None and not plan.in_float
    return reader if integer and len(node.users) == 1 and is_op(reader, "quantize") and reader is not None else node


class _Wanted(_Run):
    """The values of the reference as they are asked for; those that were passed by are held until then."""

    def __init__(self, program: IsolatedGraph, wanted: set[fx.Node], batch: Batch, see: Any) -> None:
        super().__init__(program, batch)
        self._see, self._wanted = see, {rounded_at(node) for node in wanted}
        self._nodes, self._waiting = iter(program.graph.nodes), dict[fx.Node, Any]()

    def value(self, wanted: fx.Node) -> Any:
        """The value of a node, once; the graph runs as far as it must."""
        end = rounded_at(wanted)
        while end not in self._waiting:
            self.step(next(self._nodes))
        return self._waiting.pop(end)

    def finish(self) -> None:
        """Run what is left, where somebody wants to see it."""
        for node in self._nodes if self._see is not None else ():
            self.step(node)

    def step(self, node: fx.Node) -> Any:
        value = super().step(node)
        if node in self._wanted:
            self._waiting[node] = self.kept(value)
        if self._see is not None:
            self._see(node, value)
        return value


class _Alone(_Run):
    """The compared graph on the values of the reference: every node makes its own mistakes only.

    A value that the reference does not have (a conversion, a part of a unit) is computed from those that it has.
    """

    def overwrite(self, node: fx.Node, want: Sequence[Tensor]) -> None:
        """Let those that read the node read the reference's tensors instead, rounded to the node's grid."""
        if node not in self.values:
            return
        leaves, structure = pytree.tree_flatten(self.values[node])
        if [t.shape for t in leaves if isinstance(t, Tensor)] == [t.shape for t in want]:
            given, qp = iter(want), grid_of(self.gm, node)
            leaves = [self._like(v, next(given), qp) if isinstance(v, Tensor) else v for v in leaves]
            self.values[node] = pytree.tree_unflatten(leaves, structure)

    def _like(self, made: Tensor, want: Tensor, qp: QParams | None) -> Tensor:
        if made.is_floating_point():
            return self.kept(want.to(made.dtype))
        return quantize(want.to(torch.float32), qp) if qp is not None else made


def _plain(value: Any, qp: QParams | None) -> list[Tensor]:
    """The tensors of a value, integers as the floats that they stand for."""
    found = tensors(value)
    return [dequantize(t, qp) if qp is not None and not t.is_floating_point() else t for t in found]


def _comparable(node: fx.Node, wants: list[Tensor], qp: QParams | None, got: Any, own: Any) -> ComparedValue | None:
    found = [wants, _plain(got, qp), *([] if own is None else [_plain(own, qp)])]
    if any(len(each) != len(wants) for each in found):
        return None
    floats = [i for i, each in enumerate(zip(*found, strict=True)) if all(t.is_floating_point() for t in each)]
    wants, gots, *owns = ([each[i] for i in floats] for each in found)
    shapes = [[t.shape for t in each] for each in (wants, gots, *owns)]
    if not wants or (node.op != "output" and any(each != shapes[0] for each in shapes)):
        return None
    return ComparedValue(node, wants, gots, owns[0] if owns else None)
