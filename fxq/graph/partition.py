"""Cuts the qdq graph into regions that an engine runs at once: connected, and as large as can be.

A region must not wait for itself: no path may leave it and come back. So every node gets a level, which never falls
along an edge, and rises where the graph goes into the engine or out of it. A path that leaves a region comes back on a
higher level; what is connected on one level is therefore a region. Levels are first as low as can be, then as high: so
a branch that is read late joins what reads it. All of it takes time in proportion to the edges; the price is that in
graphs that go in and out of the engine by many ways, two regions may stay apart that could be one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from torch import fx

from fxq.graph.info import info
from fxq.graph.mutation import changes
from fxq.graph.query import is_pure, taken_part
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.unit import calls_of, unit_of

Takes = Callable[[fx.Node], bool]


def connected_regions(gm: fx.GraphModule, takes: Takes) -> Iterator[Region]:
    """The largest regions of connected nodes that an engine takes; none waits for a later one.

    The nodes of `gm` are brought into such an order, too: those of a region stand together. Each region is read when
    its turn comes, so that it reads from the kernels that took the place of those before it.

    What shares memory with a value that is changed in place belongs to no region, nor does what reads such a value.

    Args:
        gm: the module of a qdq graph.
        takes: whether the engine runs a node: an op, a unit, or a conversion of activations. It is asked of those whose
            value is a tensor, and of units of several outputs. Weights go along with who reads them.
    """
    levels = _Levels(gm, takes)
    levels.start_low()
    levels.raise_up()
    order = levels.order()
    if order != levels.nodes:
        for before, node in itertools.pairwise(order):
            if before.next is not node:
                before.append(node)
    regions: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node in levels.taken:
            regions.setdefault(levels.group(node), []).append(node)
    return (region for nodes in regions.values() if (region := region_of(nodes)).outputs)  # others nobody reads


class _Levels:
    """The nodes of a graph in groups, each on a level: of those that an engine takes, what is connected on one level.

    Attributes:
        nodes: the nodes, in order.
        taken: those that the engine takes.
        waits: the nodes that each must come behind: those that it reads, and for one that does more than to compute
            its value, or whose memory is changed in place, the last such one before it.
        level: of each group, by its first node.
    """

    def __init__(self, gm: fx.GraphModule, takes: Takes) -> None:
        self.nodes: list[fx.Node] = list(gm.graph.nodes)
        self.taken: set[fx.Node] = set()
        self.waits = {node: list(node.all_input_nodes) for node in self.nodes}
        self.level: dict[fx.Node, float] = dict.fromkeys(self.nodes, 0)
        self._place = {node: i for i, node in enumerate(self.nodes)}
        self._into = {node: node for node in self.nodes}  # union-find: a node before it in its group, or itself
        changed = {block for node in self.nodes for block in changes(node)}
        last: list[fx.Node] = []
        for node in self.nodes:
            if node.op == "placeholder" or is_weight(node):
                continue
            shared = any(not changed.isdisjoint(info(n).memory) for n in (node, *node.all_input_nodes))
            if _runs(gm, node, takes, self.taken) and not shared:
                self.taken.add(node)
            elif shared or not is_pure(gm, node):
                self.waits[node] += last
                last = [node]

    def group(self, node: fx.Node) -> fx.Node:
        """The first node of the group of a node."""
        while (into := self._into[node]) is not node:
            self._into[node] = self._into[into]
            node = into
        return node

    def start_low(self) -> None:
        """Give every node its lowest level, and join what is taken and connected."""
        for node in self.nodes:
            self.level[node] = max((self._least(node, read) for read in self.waits[node]), default=0)
        for node in self.nodes:
            self._join(node, self.waits[node])

    def raise_up(self) -> None:
        """Raise every group to the highest level that those behind it allow, and join what then is connected."""
        members: dict[fx.Node, list[fx.Node]] = {}
        readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            members.setdefault(self.group(node), []).append(node)
            for read in self.waits[node]:
                readers[read].append(node)
        for first in sorted(members, key=lambda node: (self.level[node], self._place[node]), reverse=True):
            behind = [user for node in members[first] for user in readers[node] if self.group(user) is not first]
            most = min((self.level[self.group(user)] - self._differ(user, first) for user in behind), default=math.inf)
            if 0 < self.level[first] < most < math.inf:  # on level 0 nothing comes behind the engine
                self.level[first] = most
                self._join(first, behind)

    def order(self) -> list[fx.Node]:
        """The nodes, those of a group together, each behind what it waits for."""
        place = self._place
        groups = {node: self.group(node) for node in self.nodes}
        return sorted(self.nodes, key=lambda node: (self.level[groups[node]], place[groups[node]], place[node]))

    def _differ(self, a: fx.Node, b: fx.Node) -> bool:
        return (a in self.taken) is not (b in self.taken)

    def _least(self, node: fx.Node, read: fx.Node) -> float:
        return self.level[read] + self._differ(node, read)

    def _join(self, node: fx.Node, others: list[fx.Node]) -> None:
        """Put a node that is taken into the groups of others on its level."""
        for other in others if node in self.taken else ():
            a, b = sorted((self.group(node), self.group(other)), key=self._place.__getitem__)
            if other in self.taken and self.level[a] == self.level[b]:
                self._into[b] = a


def _runs(gm: fx.GraphModule, node: fx.Node, takes: Takes, taken: set[fx.Node]) -> bool:
    """Whether an engine runs a node; the parts of a unit of several outputs go with the unit."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and unit_of(gm, source) is not None and taken_part(node, source) is not None:
        return source in taken
    is_value = info(node).is_tensor or unit_of(gm, node) is not None
    return is_value and bool(calls_of(gm, node)) and takes(node)
