"""Cuts the qdq graph into regions that an engine runs at once: connected, and as large as can be.

A region must not wait for itself: no path may leave it and come back. So every node gets a level, which never falls
along an edge, and rises where the graph goes into the engine or out of it. A path that leaves a region comes back on a
higher level; what is connected on one level is therefore a region. Then neighbours on two levels become one where no
path outside leads from the first to the second: a search among what is on the levels from the one to the other says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from fxq.graph.analysis.mutation import changes
from fxq.graph.info import info
from fxq.graph.query import is_pure, is_size, taken_from
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.unit import calls_of, unit_of

Takes = Callable[[fx.Node], bool]

SEARCHED = 1000
"""How many edges the search between two neighbours may take; those that it does not tell about stay apart."""


def connected_regions(gm: fx.GraphModule, takes: Takes) -> Iterator[Region]:
    """The largest regions of connected nodes that an engine takes; none waits for a later one.

    Two regions stay apart although one reads the other only where a path between them goes through a node that the
    engine does not take (one region of both would wait for itself), or where more than `SEARCHED` edges would have to
    be looked at to know that there is none: the time is in proportion to the graph.

    The nodes of `gm` are brought into such an order, too: those of a region stand together. Each region is read when
    its turn comes, so that it reads from the kernels that took the place of those before it.

    What shares memory with a value that is changed in place belongs to no region, nor does what reads such a value.

    Args:
        gm: the module of a qdq graph.
        takes: whether the engine runs a node: an op, a unit, or a conversion of activations. It is asked of those whose
            value is a tensor, and of units of several outputs. Weights, and sizes that are read off values, go along
            with the nodes that read them.
    """
    parts = _Partition(gm, takes)
    parts.join_levels()
    parts.join_neighbours()
    found = parts.regions()
    for before, node in itertools.pairwise(parts.with_sizes(found)):
        if before.next is not node:
            before.append(node)
    regions = (region_of(nodes) for nodes in found if nodes[0] in parts.taken)
    return (region for region in regions if region.outputs)  # others nobody reads


class _Joined:
    """Things in sets that only grow (union-find)."""

    def __init__(self) -> None:
        self._into: dict[Any, Any] = {}

    def first(self, thing: Any) -> Any:
        """What the set of a thing goes by."""
        while (into := self._into.get(thing, thing)) is not thing:
            self._into[thing] = self._into.get(into, into)
            thing = into
        return thing

    def join(self, thing: Any, other: Any) -> None:
        """Make one set of two; it goes by what the first did."""
        self._into[self.first(other)] = self.first(thing)


class _Partition:
    """The nodes of a graph in groups: those that an engine takes, with others that it takes.

    Attributes:
        nodes: the nodes, in order. What reads a size comes behind the value that it is the size of.
        taken: those that the engine takes.
        waits: the nodes that each must come behind: those that it reads, and for one that does more than to compute
            its value, or whose memory is changed in place, the last such one before it.
    """

    def __init__(self, gm: fx.GraphModule, takes: Takes) -> None:
        self._place = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.nodes: list[fx.Node] = []
        self.taken: set[fx.Node] = set()
        self.waits: dict[fx.Node, list[fx.Node]] = {}
        self._sizes: dict[fx.Node, list[fx.Node]] = {}  # what each is read off
        self._groups = _Joined()
        self._level: dict[fx.Node, int] = {}
        self._levels = _Joined()  # of a group on several: those count as one
        changed = {block for node in self._place for block in changes(node)}
        last: list[fx.Node] = []
        for node in self._place:
            waits = list(dict.fromkeys(n for read in node.all_input_nodes for n in self._sizes.get(read, (read,))))
            shared = any(not changed.isdisjoint(info(n).memory) for n in (node, *waits))
            if is_size(node):
                self._sizes[node] = [*waits, node] if shared else waits
                if not shared:
                    continue
            self.nodes.append(node)
            self.waits[node] = waits
            if node.op == "placeholder" or is_weight(node):
                continue
            if _runs(gm, node, takes, self.taken) and not shared:
                self.taken.add(node)
            elif shared or not is_pure(gm, node):
                self.waits[node] += last
                last = [node]

    def join_levels(self) -> None:
        """Give every node its lowest level, and join what is taken and connected on one."""
        for node in self.nodes:
            differ = ((read in self.taken) is not (node in self.taken) for read in self.waits[node])
            levels = (self._level[read] + rises for read, rises in zip(self.waits[node], differ, strict=True))
            self._level[node] = max(levels, default=0)
            for read in self._taken_reads(node):
                if self._level[read] == self._level[node]:
                    self._groups.join(read, node)

    def join_neighbours(self) -> None:
        """Join groups where one reads the other, and no third one leads from it to the other."""
        first = self._groups.first
        behind: dict[fx.Node, set[fx.Node]] = {first(node): set() for node in self.nodes}
        for node in self.nodes:
            for read in self.waits[node]:
                behind[first(read)].add(first(node))
        for node in self.nodes:
            for read in self._taken_reads(node):
                a, b = first(read), first(node)
                if a is b or self._may_lead_on(a, b, behind):
                    continue
                while (level := self._height(b)) != self._height(a):
                    self._levels.join(level - 1, level)
                few, many = sorted((behind[a], behind.pop(b)), key=len)
                behind[a] = many
                many |= few
                self._groups.join(a, b)

    def _may_lead_on(self, a: fx.Node, b: fx.Node, behind: dict[fx.Node, set[fx.Node]]) -> bool:
        """Whether a third group leads from one to another; also where a search does not tell."""
        seen, todo, edges, height = {a, b}, [a], 0, self._height(b)
        while todo:
            group = todo.pop()
            edges += len(behind[group])
            if edges > SEARCHED:
                return True
            for reader in map(self._groups.first, behind[group]):
                if reader is b and group is not a:
                    return True
                if reader not in seen and self._height(reader) <= height:
                    seen.add(reader)
                    todo.append(reader)
        return False

    def _height(self, node: fx.Node) -> int:
        """The level of a node; of several that a group stands on, the lowest one."""
        level: int = self._levels.first(self._level[node])
        return level

    def regions(self) -> list[list[fx.Node]]:
        """The groups of what is taken, and every other node as one, each behind what it waits for."""
        members: dict[fx.Node, list[fx.Node]] = {}
        behind: dict[fx.Node, list[fx.Node]] = {}
        waiting: Counter[fx.Node] = Counter()
        for node in self.nodes:
            group = self._groups.first(node)
            members.setdefault(group, []).append(node)
            for read in map(self._groups.first, self.waits[node]):
                if read is not group:
                    behind.setdefault(read, []).append(group)
                    waiting[group] += 1
        place = self._place
        ready = [(place[nodes[0]], group) for group, nodes in members.items() if not waiting[group]]
        heapq.heapify(ready)
        found = []
        while ready:
            _, group = heapq.heappop(ready)
            found.append(members[group])
            for reader in behind.get(group, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (place[members[reader][0]], reader))
        return found

    def with_sizes(self, groups: list[list[fx.Node]]) -> Iterator[fx.Node]:
        """All nodes in this order; each size stands as before among the group of the last value that it is read off."""
        rows = [list(group) for group in groups]
        row_of = {node: i for i, row in enumerate(rows) for node in row}
        for size in self._sizes:
            if size not in row_of:
                row_of[size] = max(row_of[read] for read in size.all_input_nodes)
                rows[row_of[size]].append(size)
        return (node for row in rows for node in sorted(row, key=self._place.__getitem__))

    def _taken_reads(self, node: fx.Node) -> list[fx.Node]:
        return [read for read in self.waits[node] if read in self.taken] if node in self.taken else []


def _runs(gm: fx.GraphModule, node: fx.Node, takes: Takes, taken: set[fx.Node]) -> bool:
    """Whether an engine runs a node; the parts of a unit of several outputs go with the unit."""
    source = taken_from(node)
    if source is not node and unit_of(gm, source) is not None:
        return source in taken
    is_value = info(node).is_tensor or unit_of(gm, node) is not None
    return is_value and bool(calls_of(gm, node)) and takes(node)
