"""Which ops pay as integers: a minimum cut between the ops that run in float and those that run on integers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxq.graph.info import Source

Key = Hashable
WINDOW, AHEAD = 800, 200
"""Undecided ops that are cut at once, and how many behind them are looked at: beyond, time would grow as the square."""


@dataclass(frozen=True)
class PricedOp:
    """An op that could run either way.

    Attributes:
        key: its name.
        int8, real: seconds on integers, and in float.
        source: origin of the seconds: "measured", "table" (`fxq/cost/price_table.py`), or "" if they are not known and
            only express a preference.
    """

    key: Key
    int8: float
    real: float
    source: Source = "measured"


@dataclass(frozen=True)
class PricedValue:
    """A value between ops, and what its conversions cost.

    Attributes:
        producer: the op that makes it; None when that runs in float whatever happens.
        readers: the ops that read it; None stands for readers that run in float whatever happens.
        quantize: seconds to make it integer, paid once, where its producer is float and a reader is not.
        dequantize: seconds to make it float, paid once, where its producer is integer and a reader is not.
        emits: its producer's kernel can hand out float as well as integers, so that float readers cost nothing unless
            others read integers.
    """

    producer: Key | None
    readers: tuple[Key | None, ...]
    quantize: float
    dequantize: float
    emits: bool = False

    @cached_property
    def distinct(self) -> frozenset[Key | None]:
        """Its readers, each once."""
        return frozenset(self.readers)

    def conversions(self, made: bool, read: int) -> float:
        """Seconds of its conversions where its producer is integer, or not, and so many of its readers are."""
        total = self.quantize if read and not made else 0.0
        mixed = read > 0 if self.emits else made
        return total + self.dequantize if mixed and read < len(self.distinct) else total


def seconds_of(integers: Collection[Key], ops: Iterable[PricedOp], values: Iterable[PricedValue]) -> float:
    """What a choice costs in all, in seconds: what `cheapest` minimizes.

    Args:
        integers: the ops that run on integers; all others run in float.
        ops: the ops that could run either way.
        values: the values that they make and read.
    """
    total = sum(op.int8 if op.key in integers else op.real for op in ops)
    for value in values:
        total += value.conversions(value.producer in integers, sum(reader in integers for reader in value.distinct))
    return total


def conversions_of(integers: Collection[Key], values: Iterable[PricedValue]) -> dict[Key, float]:
    """For each op, the seconds that conversions take with it on integers, less those with it in float.

    Args:
        integers: the ops that run on integers, as decided; but for the one that is asked about, all others do so.
        values: the values between ops.
    """
    found: dict[Key, float] = {}
    for value in values:
        made = value.producer in integers
        read = sum(reader in integers for reader in value.distinct)
        for key in {value.producer, *value.distinct} - {None}:
            reads = key in value.distinct
            others = read - (reads and key in integers)
            int8, real = (
                value.conversions(runs if key == value.producer else made, others + (reads and runs))
                for runs in (True, False)
            )
            found[key] = found.get(key, 0.0) + int8 - real
    return found


def cheapest(ops: Sequence[PricedOp], values: Sequence[PricedValue]) -> set[Key]:
    """The ops that run on integers in the cheapest choice (see `seconds_of`).

    Ops whose gain, or loss, is larger than all conversions around them are decided at once. What is left falls into
    small connected parts; each is cut at the minimum between source (integers) and sink (float). A part of more than a
    thousand ops is cut in pieces, in order, each with a look at what follows: cheap rather than cheapest.
    Source: Boykov, Kolmogorov 2004, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms", section 2.

    Args:
        ops: the ops that could run either way.
        values: the values that they make and read. Every key is an op's.
    """
    problem = _Problem(ops, values)
    for part in problem.parts():
        while part:
            problem.cut(part[: WINDOW + AHEAD], sure=WINDOW if len(part) > WINDOW + AHEAD else len(part))
            part = [key for key in part if key not in problem.decided]
    return {key for key, runs in problem.decided.items() if runs}


class _Problem:
    """The ops with what has been decided so far."""

    def __init__(self, ops: Sequence[PricedOp], values: Sequence[PricedValue]) -> None:
        self.ops = {op.key: op for op in ops}
        self.values: dict[Key, list[PricedValue]] = {key: [] for key in self.ops}
        for value in values:
            for key in dict.fromkeys((value.producer, *value.readers)):
                if key is not None:
                    self.values[key].append(value)
        self.decided: dict[Key, bool] = {}
        for op in ops:
            gain, most = op.real - op.int8, sum(v.quantize + v.dequantize for v in self.values[op.key])
            if abs(gain) >= most:
                self.decided[op.key] = gain >= 0

    def parts(self) -> list[list[Key]]:
        """The undecided ops, in connected parts, each in the order of the graph."""
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
                known = graph.get_edge_data(tail, head, {"capacity": 0.0})
                graph.add_edge(tail, head, capacity=known["capacity"] + capacity)

        for key in part:
            add(_SOURCE, self._end(key), self.ops[key].real)
            add(self._end(key), _SINK, self.ops[key].int8)
        for value in {id(v): v for key in part for v in self.values[key]}.values():
            # a node for "some reader is integer", and one for "all readers are"
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
        """The node of an op: an end of the network where the op is decided."""
        runs = False if key is None else self.decided.get(key)
        return ("op", key) if runs is None else _SOURCE if runs else _SINK


_SOURCE, _SINK = "integers", "float"
