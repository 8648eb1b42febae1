"""Paired run: an integer graph and a float graph of the same model on the same batches, node by node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, op_of, options_of
from fxq.graph.run import Runner
from fxq.paired.used_rows import used_rows
from fxq.pipeline.float_values import CachedFloatForm, LayerValues, run_layer

MAX_WEIGHT_BYTES = 1 << 28
"""Memory for cached values of weights."""

Start = Callable[[IsolatedGraph, Batch], Runner]
"""Function that makes the runner of a graph on a copy of a batch."""


def _plain_run(program: IsolatedGraph, batch: Batch) -> Runner:
    return Runner(program.gm, copied(batch), program.graph, program.modules)  # it may change its inputs in place


class WeightValues:
    """Cache of the float values of integer weights, so that several runs of a graph compute them once.

    It holds the first ones that fit in `most` bytes. What they are computed from must not change between the runs.
    """

    def __init__(self, most: int = MAX_WEIGHT_BYTES) -> None:
        self._room, self._values = most, dict[fx.Node, Any]()

    def of(self, node: fx.Node, compute: Callable[[fx.Node], Any]) -> Any:
        """Return the cached value of a weight's node, or compute it."""
        if node in self._values:
            return self._values[node]
        value = compute(node)
        size = sum(tensor.nbytes for tensor in tensors(value)) if node.op != "get_attr" else 0
        if 0 < size <= self._room:
            self._room -= size
            self._values[node] = value
        return value


class Side:
    """Run of one graph on some batches that affects no other run.

    It has private copies of the batches and of stateful modules. It draws the random numbers that follow the state of
    PyTorch's generator at its construction, so that sides constructed together draw the same ones.

    Args:
        program: the graph.
        batches: the batches.
        start: function that makes the runner of a batch.
        wanted: nodes whose values `value` returns.
        see: function called with every node and its value for each batch.
        weights: cached values of weights, for several runs of the same graph.
    """

    def __init__(
        self,
        program: IsolatedGraph,
        batches: Sequence[Batch],
        start: Start = _plain_run,
        wanted: Collection[fx.Node] = (),
        see: Callable[[fx.Node, Any], None] | None = None,
        weights: WeightValues | None = None,
    ) -> None:
        self.program, self.batches, self._start, self._see = program, batches, start, see
        self._weights = None if program.overwrites else weights  # a weight's value may be overwritten, too
        self._rng_state, self._nodes = torch.get_rng_state(), iter(program.graph.nodes)
        self._wanted, self._waiting = set(wanted), dict[fx.Node, list[Any]]()

    @cached_property
    def runs(self) -> tuple[Runner, ...]:
        """Runner of each batch, with the values that are still needed."""
        return tuple(self._start(self.program, batch) for batch in self.batches)

    def step(self, node: fx.Node) -> list[Any]:
        """Run the next node for every batch, and return its values. Weights are computed only once."""
        torch.set_rng_state(self._rng_state)
        if _is_weight(node) and (len(self.runs) > 1 or self._weights is not None):
            compute = self.runs[0].compute
            weight = compute(node) if self._weights is None else self._weights.of(node, compute)
            values = [run.put(node, weight) for run in self.runs]
        else:
            values = [run.step(node) for run in self.runs]
        self._rng_state = torch.get_rng_state()
        if node in self._wanted:
            self._waiting[node] = [self.safe(value) for value in values]
        for value in values if self._see is not None else ():
            self._see(node, value)  # type: ignore[misc]
        return values

    def value(self, node: fx.Node) -> list[Any]:
        """Return the values of a wanted node, once, after running the graph as far as needed."""
        while node not in self._waiting:
            self.step(next(self._nodes))
        return self._waiting.pop(node)

    def run(self) -> list[Any]:
        """Run all nodes, and return the output for each batch."""
        *nodes, output = self.program.graph.nodes
        for node in nodes:
            self.step(node)
        return self.step(output)

    def finish(self) -> None:
        """Run the remaining nodes, if `see` needs them."""
        for node in self._nodes if self._see is not None else ():
            self.step(node)

    def put(self, node: fx.Node, value: Any) -> None:
        """Set the value of a node that has run, for every batch."""
        for run in self.runs:
            run.values[node] = value

    def safe(self, value: Any) -> Any:
        """Return a value that no later node changes in place: a copy if the graph may do so."""
        return copied(value) if self.program.overwrites else value


def float_side(
    gm: fx.GraphModule,
    batches: Sequence[Batch],
    values: Collection[fx.Node],
    floats: LayerValues | None = None,
    see: Mapping[fx.Node, Callable[[Tensor], object]] | None = None,
) -> Side:
    """Run of the float form of a qdq graph on some batches.

    Args:
        gm: the qdq graph.
        batches: the batches.
        values: nodes whose values are read.
        floats: cached float outputs of layers.
        see: by node, a function that receives the layer's float output before the ops fused to it.
    """

    def start(program: IsolatedGraph, batch: Batch) -> Runner:
        return CachedFloatForm(gm, batch, floats or LayerValues(), values, see or {}, program.modules)

    return Side(IsolatedGraph(gm, gm.graph), batches, start)


def integer_side(
    gm: fx.GraphModule,
    batches: Sequence[Batch],
    correct: Mapping[fx.Node, Callable[[Tensor], Tensor]] | None = None,
    weights: WeightValues | None = None,
) -> Side:
    """Run of a qdq graph on some batches.

    Args:
        gm: the qdq graph.
        batches: the batches.
        correct: by node, a function of the layer's output, before the ops fused to it, which returns its replacement.
        weights: cached values of weights, for several runs of the same graph.
    """

    def start(program: IsolatedGraph, batch: Batch) -> Runner:
        return _CorrectedRun(program, batch, correct or {})

    return Side(IsolatedGraph(gm, gm.graph), batches, start, weights=weights)


class PairedRun:
    """Run of a graph and of a reference on the same batches, node by node of the graph.

    Args:
        reference: side of a float graph, or of another quantized one.
        compared: side of the graph with integers.
        pairs: by node of `compared`, the node of `reference` for the same value, which `reference` wants; None: both
            sides have the same nodes.
        used: for each batch, masks of the rows that are not padding, by node, see `used_rows`; None: no padding.
    """

    def __init__(
        self,
        reference: Side,
        compared: Side,
        pairs: Mapping[fx.Node, fx.Node] | None = None,
        used: Sequence[Mapping[fx.Node, Tensor]] | None = None,
    ) -> None:
        self.reference, self.compared, self.pairs = reference, compared, pairs
        self.used = [{} for _ in compared.batches] if used is None else used

    @classmethod
    def with_float_form(
        cls,
        gm: fx.GraphModule,
        batches: Sequence[Batch],
        tokens: Collection[fx.Node] = (),
        floats: LayerValues | None = None,
        values: Collection[fx.Node] | None = None,
        see: Mapping[fx.Node, Callable[[Tensor], object]] | None = None,
        correct: Mapping[fx.Node, Callable[[Tensor], Tensor]] | None = None,
        at_once: int | None = None,
        weights: WeightValues | None = None,
    ) -> PairedRun:
        """Run of a qdq graph and its float form.

        Args:
            gm: the qdq graph.
            batches: the batches.
            tokens: nodes whose values are read without padding.
            floats: cached float outputs of layers.
            values: nodes whose values in float are read; None: all.
            see: by node, a function that receives the layer's float output before the ops fused to it.
            correct: by node, a function of the layer's output in the qdq graph, which returns its replacement. It is
                called after `see`.
            at_once: number of samples that are searched for padding at once, see `used_rows`.
            weights: cached values of the integer weights, for several runs of the same graph.
        """
        used = [used_rows(IsolatedGraph(gm, gm.graph), batch, tokens, at_once) for batch in batches]
        needed = list(gm.graph.nodes) if values is None else values
        compared = integer_side(gm, batches, correct, weights)
        return cls(float_side(gm, batches, needed, floats, see), compared, used=used)

    def step(self, node: fx.Node) -> list[tuple[Any, Any]]:
        """Run the next node, and the reference as far as its value there.

        Returns:
            For each batch, the value of the node and the reference's; None if the reference has none.
        """
        if self.pairs is None:
            wanted = self.reference.step(node)
        else:
            wanted = self.reference.value(self.pairs[node]) if node in self.pairs else [None] * len(self.used)
        return list(zip(self.compared.step(node), wanted, strict=True))

    def run(self) -> list[tuple[Any, Any]]:
        """Run all nodes, and return the outputs of both sides for each batch."""
        *nodes, output = self.compared.program.graph.nodes
        for node in nodes:
            self.step(node)
        return self.step(output)

    def values(self, node: fx.Node) -> Iterator[tuple[Any, Any]]:
        """Yield for each batch the value of a node that is still read, quantized and in float.

        If the node is among `tokens`, padding is left out: (n, C).
        """
        return zip(self._values(self.compared, node), self._values(self.reference, node), strict=True)

    def float_values(self, node: fx.Node) -> Iterator[Any]:
        """Yield for each batch the float value of a node that is still read, as in `values`."""
        return self._values(self.reference, node)

    def _values(self, side: Side, node: fx.Node) -> Iterator[Any]:
        for run, used in zip(side.runs, self.used, strict=True):
            yield run.values[node][used.get(node, ...)]

    def states(self, node: fx.Node) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each batch the hidden states that the next node, a recurrent op, multiplies with weight_hh.

        They are quantized and in float, without the steps whose input is padding.
        """
        x: Any = node.args[0]
        for run, float_run, used in zip(self.compared.runs, self.reference.runs, self.used, strict=True):
            chosen = used.get(x, ...)
            yield _states(node, run)[chosen], _states(node, float_run)[chosen]

    def float_steps(self, node: fx.Node) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield for each batch what the next node, a recurrent op, reads in float.

        This is its input (T, N, I), the hidden state before each step (T, N, P), and a mask of the steps that are not
        padding, bool (T, N); None: all.
        """
        x: Any = node.args[0]
        for run, used in zip(self.reference.runs, self.used, strict=True):
            yield run.values[x], _states(node, run), used.get(x)


class _CorrectedRun(Runner):
    """Run of a graph that replaces the outputs of layers, before the ops fused to them, by functions of them."""

    def __init__(
        self, program: IsolatedGraph, batch: Batch, correct: Mapping[fx.Node, Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__(program.gm, copied(batch), program.graph, program.modules)
        self._correct = correct

    def compute(self, node: fx.Node) -> Any:
        correct = self._correct.get(node)
        return super().compute(node) if correct is None else run_layer(self, node, correct)


def _is_weight(node: fx.Node) -> bool:
    """Whether a value depends on weights only, directly."""
    weight = node.op == "get_attr" or is_op(node, "dequantize")
    return weight and all(read.op == "get_attr" for read in node.all_input_nodes)


def _states(node: fx.Node, run: Runner) -> Tensor:
    """Hidden state before each step of a recurrent op, (T, N, P), not rounded."""
    op = op_of(node)
    assert op is not None and op.traits.recurrence is not None
    arguments: dict[str, Any] = dict(zip(op.tensors, node.args, strict=False))
    first = arguments.get(op.traits.recurrence.states[0])
    states = run.compute(node)[: len(run.values[arguments["x"]])]  # the cell state of an LSTM may follow
    before = torch.zeros_like(states[:1]) if first is None else run.values[first].expand_as(states[0])[None]
    return torch.cat([states[1:], before] if options_of(node)["reverse"] else [before, states[:-1]])
