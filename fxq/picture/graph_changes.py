"""What differs between two graphs, node by node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxq.graph.view import GraphView, NodeView

FIELDS = ("kind", "label", "body", "options", "shape", "dtype", "scale", "zero_point")
_SPOKEN = {"label": "op", "zero_point": "zero point"}


@dataclass(frozen=True)
class Change:
    """A node before and after; `fields` are the names of the fields of `NodeView` that differ."""

    before: NodeView
    after: NodeView
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """The node's name."""
        return self.after.name

    @property
    def by_field(self) -> dict[str, str]:
        """What changed, for each field: `dtype float32 → uint8`."""
        pairs = ((f, _text(getattr(self.before, f)), _text(getattr(self.after, f))) for f in self.fields)
        return {field: f"{_SPOKEN.get(field, field)} {old} → {new}" for field, old, new in pairs}


@dataclass(frozen=True, repr=False)
class GraphChanges:
    """What differs between two graphs. Nodes are the same when their names are.

    Attributes:
        before, after: the graphs.
        added: names of nodes that only `after` has, in its order.
        removed: names of nodes that only `before` has, in its order.
        changed: nodes whose op, options, value or kind differs, in the order of `after`.
        rewired: names of nodes whose inputs differ, in the order of `after`.
    """

    before: GraphView
    after: GraphView
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    rewired: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.changed or self.rewired)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes were added, removed, changed, rewired."""
        return {kind: len(getattr(self, kind)) for kind in ("added", "removed", "changed", "rewired")}

    @cached_property
    def became(self) -> dict[str, tuple[str, ...]]:
        """For each removed node, the added or changed nodes that stand for the same traced ops, if there are any.

        Of what became a region, that alone; a conversion around ops that all became one region did, too.
        """
        names = (*self.added, *(change.name for change in self.changed))
        found = self._heirs((name, _origins(self.after[name])) for name in names)
        regions = {name for name in names if self.after[name].is_region}
        found = {name: tuple(heir for heir in heirs if heir in regions) or heirs for name, heirs in found.items()}
        merged = {**found, **self._taken_along(found, regions)} if regions else found
        return {name: merged[name] for name in self.removed if name in merged}

    def _taken_along(self, found: dict[str, tuple[str, ...]], regions: set[str]) -> dict[str, tuple[str, ...]]:
        """Removed nodes without heirs, each with the region that all became that is around it and those next to it."""
        import networkx as nx

        results = {c.name: c.after.inputs for c in self.changed if "label" in c.fields}
        removed = {name for name in self.removed if self.before[name].kind != "constant"}
        arrows: nx.Graph[str] = nx.Graph((node.name, read) for node in self.before for read in node.inputs)
        taken: dict[str, tuple[str, ...]] = {}
        for part in nx.connected_components(arrows.subgraph(removed - found.keys())):
            around = {heir for name in part for near in arrows[name] for heir in found.get(near, results.get(near, ()))}
            if len(around) == 1 and around <= regions:
                taken.update(dict.fromkeys(part, (*around,)))
        return taken

    @cached_property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """For each other removed node, the rewired nodes that stand for it now besides their own ops, if there are any.

        A convolution stands for the batch norm that is folded into its weight.
        """
        both = ((name, self.before[name], self.after[name]) for name in self.rewired)
        gained = ((name, (o for o in _origins(new) if o not in _origins(old))) for name, old, new in both)
        return {name: heirs for name, heirs in self._heirs(gained).items() if name not in self.became}

    def reads(self, name: str) -> tuple[list[str], list[str]]:
        """What a node of both graphs no longer reads, and what it reads instead, by name."""
        old, new = self.before[name].inputs, self.after[name].inputs
        return [n for n in old if n not in new], [n for n in new if n not in old]

    def _heirs(self, stand_for: Iterable[tuple[str, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
        """For each removed node, which of the nodes stand for one of its origins; those without any are left out."""
        heirs: dict[str, list[str]] = {}
        for name, origins in stand_for:
            for origin in origins:
                heirs.setdefault(origin, []).append(name)
        found = {
            name: tuple(dict.fromkeys(heir for origin in _origins(self.before[name]) for heir in heirs.get(origin, ())))
            for name in self.removed
        }
        return {name: successors for name, successors in found.items() if successors}


def _origins(node: NodeView) -> tuple[str, ...]:
    return node.origins or (node.name,)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        numbers = all(isinstance(v, int) for v in value)
        return ("×" if numbers else "; ").join(map(str, value)) or "none"
    return str(value) if value not in ("", None) else "none"
