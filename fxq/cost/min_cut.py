"""Which ops pay as integers: a minimum cut between the ops that run in float and those that run on integers."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

Key = Hashable
WINDOW, AHEAD = 800, 200
"""Undecided ops that are cut at once, and how many behind them are looked at: beyond, time would grow as the square."""
HAIR = 1.25
"""How much dearer one way may become and still be the cheaper one, where a decision is not by a hair."""


@dataclass(frozen=True)
class Priced:
    """An op that could run either way.

    Attributes:
        key: its name.
        int8, real: seconds on integers, and in float.
        measured: whether they were measured; else they stand for a wish.
    """

    key: Key
    int8: float
    real: float
    measured: bool = True


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


def seconds_of(integers: Collection[Key], ops: Iterable[Priced], values: Iterable[PricedValue]) -> float:
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


def cheapest(ops: Sequence[Priced], values: Sequence[PricedValue]) -> set[Key]:
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
    problem.decide_the_clear_ones()
    for part in problem.parts():
        while part:
            problem.cut(part[: WINDOW + AHEAD], sure=WINDOW if len(part) > WINDOW + AHEAD else len(part))
            part = [key for key in part if key not in problem.decided]
    return {key for key, runs in problem.decided.items() if runs}


def by_a_hair(ops: Sequence[Priced], values: Sequence[PricedValue]) -> set[Key]:
    """The ops that would run another way if all prices of the way they run were a little higher (`HAIR`)."""
    more = cheapest([replace(op, real=op.real * HAIR) for op in ops], values)
    return more - cheapest([replace(op, int8=op.int8 * HAIR) for op in ops], values)


class _Readers:
    """How many ops read a value, and how many of them are decided: it may have very many."""

    def __init__(self, value: PricedValue) -> None:
        self.count = len(set(value.readers))
        self.int8, self.real = 0, int(None in value.readers)

    @property
    def all_int8(self) -> bool:
        """Whether all of them run on integers."""
        return self.int8 == self.count

    @property
    def all_real(self) -> bool:
        """Whether all of them run in float."""
        return self.real == self.count

    def decide(self, runs: bool) -> bool:
        """Count one that is decided; whether that makes a difference to the others."""
        if runs:
            self.int8 += 1
            return self.int8 == 1
        self.real += 1
        return self.real in (1, self.count - 1)


class _Problem:
    """The ops with what has been decided so far."""

    def __init__(self, ops: Sequence[Priced], values: Sequence[PricedValue]) -> None:
        self.ops = {op.key: op for op in ops}
        self.decided: dict[Key, bool] = {}
        self.readers = {id(v): _Readers(v) for v in values}
        self.made: dict[Key, list[PricedValue]] = {key: [] for key in self.ops}
        self.read: dict[Key, list[PricedValue]] = {key: [] for key in self.ops}
        for value in values:
            if value.producer is not None:
                self.made[value.producer].append(value)
            for reader in dict.fromkeys(value.readers):
                if reader is not None:
                    self.read[reader].append(value)

    def is_int8(self, key: Key | None) -> bool:
        """Whether it is decided that an op runs on integers."""
        return key is not None and self.decided.get(key) is True

    def is_real(self, key: Key | None) -> bool:
        """Whether it is decided that an op runs in float."""
        return key is None or self.decided.get(key) is False

    def decide_the_clear_ones(self) -> None:
        """Decide ops that are cheaper one way whatever the others do, as long as there are any."""
        todo = deque(self.ops)
        waiting = set(todo)
        while todo:
            key = todo.popleft()
            waiting.discard(key)
            if key in self.decided:
                continue
            gain = self.ops[key].real - self.ops[key].int8
            if gain >= self._most_for_int8(key):
                found = self._decide(key, True)
            elif -gain >= self._most_for_real(key):
                found = self._decide(key, False)
            else:
                continue
            for near in found:
                if near not in self.decided and near not in waiting:
                    waiting.add(near)
                    todo.append(near)

    def _decide(self, key: Key, runs: bool) -> list[Key]:
        """Note the decision; the ops to which it makes a difference."""
        self.decided[key] = runs
        near = [reader for value in self.made[key] for reader in value.readers]
        for value in self.read[key]:
            near.append(value.producer)
            near += value.readers if self.readers[id(value)].decide(runs) else ()
        return [other for other in near if other is not None]

    def _most_for_int8(self, key: Key) -> float:
        """The most that conversions can cost more when this op goes from float to integers."""
        most = 0.0
        for value in self.read[key]:
            readers = self.readers[id(value)]
            if not readers.int8:
                most += 0.0 if self.is_int8(value.producer) else value.quantize
                if value.emits and readers.count > 1:
                    most += value.dequantize
        for value in self.made[key]:
            if not value.emits and not self.readers[id(value)].all_int8:
                most += value.dequantize
        return most

    def _most_for_real(self, key: Key) -> float:
        """The most that conversions can cost more when this op goes from integers to float."""
        most = 0.0
        for value in self.read[key]:
            readers = self.readers[id(value)]
            known = readers.real == readers.count - 1 if value.emits else self.is_real(value.producer)
            if not known and not readers.real:
                most += value.dequantize
        for value in self.made[key]:
            if not self.readers[id(value)].all_real:
                most += value.quantize
        return most

    def parts(self) -> list[list[Key]]:
        """The undecided ops, in connected parts, each in the order of the graph."""
        graph: nx.Graph[Key] = nx.Graph()
        graph.add_nodes_from(key for key in self.ops if key not in self.decided)
        for key in list(graph):
            for value in self.made[key]:
                graph.add_edges_from((key, r) for r in value.readers if r in graph)
            for value in self.read[key]:
                first = next(r for r in value.readers if r in graph)
                graph.add_edge(first, key)
        order = {key: i for i, key in enumerate(self.ops)}
        return [sorted(part, key=order.__getitem__) for part in nx.connected_components(graph)]

    def cut(self, part: list[Key], sure: int) -> None:
        """Decide the first `sure` ops of a part by a minimum cut. Source side: integers; sink side: float."""
        network = _Network(self)
        for key in part:
            network.add(_SOURCE, network.end(key), self.ops[key].real)
            network.add(network.end(key), _SINK, self.ops[key].int8)
        for value in {id(v): v for key in part for v in (*self.made[key], *self.read[key])}.values():
            network.add_value(value)
        flow = nx.algorithms.flow.boykov_kolmogorov
        _, (integers, _) = nx.minimum_cut(network.graph, _SOURCE, _SINK, flow_func=flow)
        self.decided.update({key: network.end(key) in integers for key in part[:sure]})


_SOURCE, _SINK = "integers", "float"


class _Network:
    """The flow network of a part. An edge is cut, and paid, when its tail is integer and its head is float."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.graph: nx.DiGraph[Key] = nx.DiGraph()
        self.graph.add_nodes_from((_SOURCE, _SINK))

    def end(self, key: Key | None) -> Key:
        """The node of an op: an end of the network where the op is decided."""
        if self.problem.is_int8(key):
            return _SOURCE
        return _SINK if self.problem.is_real(key) else ("op", key)

    def add(self, tail: Key, head: Key, capacity: float = float("inf")) -> None:
        """An edge, or more capacity for one that is there."""
        if tail in (head, _SINK) or head == _SOURCE:
            return
        known = self.graph.get_edge_data(tail, head, {"capacity": 0.0})
        self.graph.add_edge(tail, head, capacity=known["capacity"] + capacity)

    def add_value(self, value: PricedValue) -> None:
        """The conversions of a value, with a node for "some reader is integer" and one for "all readers are"."""
        producer, some, every = self.end(value.producer), ("some", id(value)), ("every", id(value))
        for reader in dict.fromkeys(map(self.end, value.readers)):
            self.add(reader, some)
            self.add(every, reader)
        self.add(some, producer, value.quantize)
        self.add(some if value.emits else producer, every, value.dequantize)
