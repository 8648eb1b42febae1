"""Choice between int8 and float for every op by a minimum cut: the cheapest total of ops and conversions."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxq.graph.info import Source

Key = Hashable
WINDOW, AHEAD = 800, 200
"""Ops that are decided in one cut, and ops after them that the cut includes. The time of a cut grows quadratically."""


@dataclass(frozen=True)
class PricedOp:
    """Op that could run on integers or in float, with both prices.

    Attributes:
        key: key of the op.
        int8, real: seconds on integers and in float.
        source: origin of the seconds: "measured", "table" (`fxq/cost/price_table.py`), or "" if they are not known and
            only express a preference.
    """

    key: Key
    int8: float
    real: float
    source: Source = "measured"


@dataclass(frozen=True)
class PricedValue:
    """Value between ops, with the prices of its conversions.

    Attributes:
        producer: the op that computes it; None if that always runs in float.
        readers: the ops that read it; None stands for readers that always run in float.
        quantize: seconds to quantize it, paid once if its producer is float and a reader is not.
        dequantize: seconds to dequantize it, paid once if its producer is integer and a reader is not.
        emits: whether its producer's kernel can return float instead of integers, so that float readers cost nothing
            unless other readers need integers.
    """

    producer: Key | None
    readers: tuple[Key | None, ...]
    quantize: float
    dequantize: float
    emits: bool = False

    @cached_property
    def distinct(self) -> frozenset[Key | None]:
        """Its readers without duplicates."""
        return frozenset(self.readers)

    def conversions(self, produced: bool, read: int) -> float:
        """Return the seconds of its conversions.

        Args:
            produced: whether its producer runs on integers.
            read: number of its readers that run on integers.
        """
        total = self.quantize if read and not produced else 0.0
        mixed = read > 0 if self.emits else produced
        return total + self.dequantize if mixed and read < len(self.distinct) else total


def seconds_of(integers: Collection[Key], ops: Iterable[PricedOp], values: Iterable[PricedValue]) -> float:
    """Return the total seconds of a choice, which `cheapest` minimizes.

    Args:
        integers: the ops that run on integers; all others run in float.
        ops: the ops that could run either way.
        values: the values that they compute and read.
    """
    total = sum(op.int8 if op.key in integers else op.real for op in ops)
    for value in values:
        total += value.conversions(value.producer in integers, sum(reader in integers for reader in value.distinct))
    return total


def conversions_of(integers: Collection[Key], values: Iterable[PricedValue]) -> dict[Key, float]:
    """Return, for each op, the seconds of conversions if it runs on integers minus those if it runs in float.

    Args:
        integers: the ops that run on integers; all ops but the one in question stay as decided.
        values: the values between ops.
    """
    extra: dict[Key, float] = {}
    for value in values:
        produced = value.producer in integers
        read = sum(reader in integers for reader in value.distinct)
        for key in {value.producer, *value.distinct} - {None}:
            reads = key in value.distinct
            other_reads = read - (reads and key in integers)
            int8, real = (
                value.conversions(runs if key == value.producer else produced, other_reads + (reads and runs))
                for runs in (True, False)
            )
            extra[key] = extra.get(key, 0.0) + int8 - real
    return extra


def cheapest(ops: Sequence[PricedOp], values: Sequence[PricedValue]) -> set[Key]:
    """Return the ops that run on integers in the cheapest choice (see `seconds_of`).

    Ops whose gain or loss exceeds all conversions around them are decided first. The remaining ops form small connected
    parts, and each is decided by a minimum cut between source (integers) and sink (float). A part of more than
    `WINDOW` + `AHEAD` ops is cut window by window, which is not always optimal.

    Args:
        ops: the ops that could run either way.
        values: the values that they compute and read. Every key is that of an op.

    Source: Boykov, Kolmogorov 2004, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms", section 2.
    """
    problem = _Problem(ops, values)
    for part in problem.parts():
        while part:
            problem.cut(part[: WINDOW + AHEAD], sure=WINDOW if len(part) > WINDOW + AHEAD else len(part))
            part = [key for key in part if key not in problem.decided]
    return {key for key, runs in problem.decided.items() if runs}


class _Problem:
    """Ops and values of a choice, with the decisions made so far."""

    def __init__(self, ops: Sequence[PricedOp], values: Sequence[PricedValue]) -> None:
        self.ops = {op.key: op for op in ops}
        self.values: dict[Key, list[PricedValue]] = {key: [] for key in self.ops}
        for value in values:
            for key in dict.fromkeys((value.producer, *value.readers)):
                if key is not None:
                    self.values[key].append(value)
        self.decided: dict[Key, bool] = {}
        for op in ops:
            gain, conversions = op.real - op.int8, sum(v.quantize + v.dequantize for v in self.values[op.key])
            if abs(gain) >= conversions:
                self.decided[op.key] = gain >= 0

    def parts(self) -> list[list[Key]]:
        """Return the connected parts of the undecided ops, each in the order of the graph."""
        import networkx as nx

        order = {key: i for i, key in enumerate(self.ops) if key not in self.decided}
        graph: nx.Graph[Key] = nx.Graph((("value", id(value)), key) for key in order for value in self.values[key])
        return [sorted(order.keys() & part, key=order.__getitem__) for part in nx.connected_components(graph)]

    def cut(self, part: list[Key], sure: int) -> None:
        """Decide the first `sure` ops of a part by a minimum cut. Source side: integers; sink side: float.

        An edge is cut, and paid, when its tail is integer and its head is float.
        """
        import networkx as nx

        graph: nx.DiGraph[Key] = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))

        def add(tail: Key, head: Key, capacity: float = float("inf")) -> None:
            if tail not in (head, _SINK) and head != _SOURCE:
                edge = graph.get_edge_data(tail, head, {"capacity": 0.0})
                graph.add_edge(tail, head, capacity=edge["capacity"] + capacity)

        for key in part:
            add(_SOURCE, self._end(key), self.ops[key].real)
            add(self._end(key), _SINK, self.ops[key].int8)
        for value in {id(v): v for key in part for v in self.values[key]}.values():
            # one node for "some reader is integer", another for "all readers are integer"
            producer, some, every = self._end(value.producer), ("some", id(value)), ("every", id(value))
            for reader in dict.fromkeys(map(self._end, value.readers)):
                add(reader, some)
                add(every, reader)
            add(some, producer, value.quantize)
            add(some if value.emits else producer, every, value.dequantize)
        flow = nx.algorithms.flow.boykov_kolmogorov
        _, (integers, _) = nx.minimum_cut(graph, _SOURCE, _SINK, flow_func=flow)
        self.decided.update({key: self._end(key) in integers for key in part[:sure]})

    def _end(self, key: Key | None) -> Key:
        """Node of an op in the flow network; source or sink if the op is decided."""
        runs = False if key is None else self.decided.get(key)
        return ("op", key) if runs is None else _SOURCE if runs else _SINK


_SOURCE, _SINK = "integers", "float"
