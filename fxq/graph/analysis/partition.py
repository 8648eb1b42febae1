"""Partition of the qdq graph into maximal connected regions that an engine runs.

A region must not depend on itself: no path may leave it and return. Every node gets a level, which never decreases
along an edge and increases where a path enters or leaves the engine. A path that leaves a region therefore returns on a
higher level, so connected engine nodes of one level can form a region. Then adjacent regions of different levels are
merged, unless a path outside leads from the first to the second. A search among the nodes between their levels finds
such paths.
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

MAX_SEARCHED_EDGES = 1000
"""Limit of the search for a path between two regions; if it is exceeded, the regions are not merged."""


def connected_regions(gm: fx.GraphModule, takes: Takes) -> Iterator[Region]:
    """Yield maximal regions of connected nodes that an engine supports, in an order in which they can run.

    Adjacent regions are merged, unless a path between them goes through a node that the engine does not support (the
    merged region would depend on itself), or the search for such a path exceeds `MAX_SEARCHED_EDGES`, which keeps the
    time linear in the graph.

    Reorders the nodes of `gm` so that the nodes of each region are adjacent. Each region is read only when it is
    yielded, so that it reads from the kernels that replaced earlier regions.

    Values that share memory with a value that is changed in place, and nodes that read them, belong to no region.

    Args:
        gm: module of a qdq graph.
        takes: whether the engine supports a node (an op, a unit, or a conversion of activations). Called for nodes
            whose value is a tensor, and for units of several outputs. Weights and sizes are included with the nodes
            that read them.
    """
    partition = _Partition(gm, takes)
    partition.join_levels()
    partition.join_neighbours()
    groups = partition.groups()
    for before, node in itertools.pairwise(partition.with_sizes(groups)):
        if before.next is not node:
            before.append(node)
    regions = (region_of(nodes) for nodes in groups if nodes[0] in partition.taken)
    return (region for region in regions if region.outputs)  # without regions whose values are not read


class _DisjointSets:
    """Disjoint sets of items (union-find). A set is identified by one of its items."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def find(self, item: Any) -> Any:
        """The item that identifies the set of `item`."""
        while (parent := self._parent.get(item, item)) is not item:
            self._parent[item] = self._parent.get(parent, parent)
            item = parent
        return item

    def join(self, item: Any, other: Any) -> None:
        """Merge the sets of two items; the first set's identifying item is kept."""
        self._parent[self.find(other)] = self.find(item)


class _Partition:
    """Groups of the nodes of a graph: merged nodes that the engine supports, and single other nodes.

    Attributes:
        nodes: the nodes, in order, without sizes.
        taken: the nodes that the engine supports.
        waits: the nodes that must run before each node: its inputs, with sizes replaced by the values that they are
            read from. A node with side effects, or whose memory is changed in place, also waits for the last such node.
    """

    def __init__(self, gm: fx.GraphModule, takes: Takes) -> None:
        self._index = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.nodes: list[fx.Node] = []
        self.taken: set[fx.Node] = set()
        self.waits: dict[fx.Node, list[fx.Node]] = {}
        self._sizes: dict[fx.Node, list[fx.Node]] = {}  # values that each size is read from
        self._groups = _DisjointSets()
        self._level: dict[fx.Node, int] = {}
        self._levels = _DisjointSets()  # levels that a merged group spans count as one
        changed = {block for node in self._index for block in changes(node)}
        last_effect: list[fx.Node] = []
        for node in self._index:
            waits = list(dict.fromkeys(n for read in node.all_input_nodes for n in self._sizes.get(read, (read,))))
            shared = any(not changed.isdisjoint(info(n).traced.memory) for n in (node, *waits))
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
                self.waits[node] += last_effect
                last_effect = [node]

    def join_levels(self) -> None:
        """Assign the lowest possible level to every node, and join connected engine nodes of the same level."""
        for node in self.nodes:
            differ = ((read in self.taken) is not (node in self.taken) for read in self.waits[node])
            levels = (self._level[read] + rises for read, rises in zip(self.waits[node], differ, strict=True))
            self._level[node] = max(levels, default=0)
            for read in self._taken_reads(node):
                if self._level[read] == self._level[node]:
                    self._groups.join(read, node)

    def join_neighbours(self) -> None:
        """Join groups of which one reads the other, unless a path through a third group connects them."""
        find = self._groups.find
        readers: dict[fx.Node, set[fx.Node]] = {find(node): set() for node in self.nodes}
        for node in self.nodes:
            for read in self.waits[node]:
                readers[find(read)].add(find(node))
        for node in self.nodes:
            for read in self._taken_reads(node):
                a, b = find(read), find(node)
                if a is b or self._may_have_detour(a, b, readers):
                    continue
                while (level := self._height(b)) != self._height(a):
                    self._levels.join(level - 1, level)
                smaller, larger = sorted((readers[a], readers.pop(b)), key=len)
                readers[a] = larger
                larger |= smaller
                self._groups.join(a, b)

    def _may_have_detour(self, a: fx.Node, b: fx.Node, readers: dict[fx.Node, set[fx.Node]]) -> bool:
        """Whether a path from group `a` to group `b` goes through a third group; True if the search is cut off."""
        visited, todo, edges, height = {a, b}, [a], 0, self._height(b)
        while todo:
            group = todo.pop()
            edges += len(readers[group])
            if edges > MAX_SEARCHED_EDGES:
                return True
            for reader in map(self._groups.find, readers[group]):
                if reader is b and group is not a:
                    return True
                if reader not in visited and self._height(reader) <= height:
                    visited.add(reader)
                    todo.append(reader)
        return False

    def _height(self, node: fx.Node) -> int:
        """Level of a node; the lowest level of its group if the group spans several."""
        level: int = self._levels.find(self._level[node])
        return level

    def groups(self) -> list[list[fx.Node]]:
        """Groups of engine nodes, and every other node as a group of its own, in an order in which they can run."""
        members: dict[fx.Node, list[fx.Node]] = {}
        readers: dict[fx.Node, list[fx.Node]] = {}
        waiting: Counter[fx.Node] = Counter()
        for node in self.nodes:
            group = self._groups.find(node)
            members.setdefault(group, []).append(node)
            for read in map(self._groups.find, self.waits[node]):
                if read is not group:
                    readers.setdefault(read, []).append(group)
                    waiting[group] += 1
        index = self._index
        ready = [(index[nodes[0]], group) for group, nodes in members.items() if not waiting[group]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            _, group = heapq.heappop(ready)
            ordered.append(members[group])
            for reader in readers.get(group, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (index[members[reader][0]], reader))
        return ordered

    def with_sizes(self, groups: list[list[fx.Node]]) -> Iterator[fx.Node]:
        """All nodes in the order of the groups; each size is in the group of the last value that it is read from."""
        rows = [list(group) for group in groups]
        row_of = {node: i for i, row in enumerate(rows) for node in row}
        for size in self._sizes:
            if size not in row_of:
                row_of[size] = max(row_of[read] for read in size.all_input_nodes)
                rows[row_of[size]].append(size)
        return (node for row in rows for node in sorted(row, key=self._index.__getitem__))

    def _taken_reads(self, node: fx.Node) -> list[fx.Node]:
        return [read for read in self.waits[node] if read in self.taken] if node in self.taken else []


def _runs(gm: fx.GraphModule, node: fx.Node, takes: Takes, taken: set[fx.Node]) -> bool:
    """Whether an engine runs a node; nodes that take an output of a unit follow the unit."""
    source = taken_from(node)
    if source is not node and unit_of(gm, source) is not None:
        return source in taken
    is_value = info(node).is_tensor or unit_of(gm, node) is not None
    return is_value and bool(calls_of(gm, node)) and takes(node)
