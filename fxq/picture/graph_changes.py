"""Differences of two graphs, node by node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxq.graph.view import GraphView, NodeView

FIELDS = ("kind", "label", "body", "options", "shape", "dtype", "scale", "zero_point")
_FIELD_NAMES = {"label": "op", "zero_point": "zero point"}


@dataclass(frozen=True)
class Change:
    """Node before and after; `fields` names the fields of `NodeView` that differ."""

    before: NodeView
    after: NodeView
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.after.name

    @property
    def by_field(self) -> dict[str, str]:
        """Change of each field as text, such as `dtype float32 → uint8`."""
        pairs = ((f, _text(getattr(self.before, f)), _text(getattr(self.after, f))) for f in self.fields)
        return {field: f"{_FIELD_NAMES.get(field, field)} {old} → {new}" for field, old, new in pairs}


@dataclass(frozen=True, repr=False)
class GraphChanges:
    """Differences of two graphs. Nodes with the same name in both are compared.

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
        """Number of nodes that were added, removed, changed and rewired."""
        return {kind: len(getattr(self, kind)) for kind in ("added", "removed", "changed", "rewired")}

    @cached_property
    def became(self) -> dict[str, tuple[str, ...]]:
        """For each removed node, its heirs: the added or changed nodes with the same origins, if there are any.

        If a region is among the heirs, only regions count. A conversion around ops that all became one region became
        that region too.
        """
        names = (*self.added, *(change.name for change in self.changed))
        heirs_of = self._heirs((name, _origins(self.after[name])) for name in names)
        regions = {name for name in names if self.after[name].is_region}
        heirs_of = {name: tuple(h for h in heirs if h in regions) or heirs for name, heirs in heirs_of.items()}
        merged = {**heirs_of, **self._absorbed(heirs_of, regions)} if regions else heirs_of
        return {name: merged[name] for name in self.removed if name in merged}

    def _absorbed(self, heirs_of: dict[str, tuple[str, ...]], regions: set[str]) -> dict[str, tuple[str, ...]]:
        """Removed nodes without heirs whose neighbours all became one region, with that region."""
        import networkx as nx

        results = {c.name: c.after.inputs for c in self.changed if "label" in c.fields}
        removed = {name for name in self.removed if self.before[name].kind != "constant"}
        arrows: nx.Graph[str] = nx.Graph((node.name, read) for node in self.before for read in node.inputs)
        absorbed: dict[str, tuple[str, ...]] = {}
        for part in nx.connected_components(arrows.subgraph(removed - heirs_of.keys())):
            neighbours = [near for name in part for near in arrows[name]]
            around = {heir for near in neighbours for heir in heirs_of.get(near, results.get(near, ()))}
            if len(around) == 1 and around <= regions:
                absorbed.update(dict.fromkeys(part, (*around,)))
        return absorbed

    @cached_property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """For each other removed node, the rewired nodes that gained its origins, if there are any.

        A convolution gains the origins of the batch norm that is folded into its weight.
        """
        both = ((name, self.before[name], self.after[name]) for name in self.rewired)
        gained = ((name, (o for o in _origins(new) if o not in _origins(old))) for name, old, new in both)
        return {name: heirs for name, heirs in self._heirs(gained).items() if name not in self.became}

    def reads(self, name: str) -> tuple[list[str], list[str]]:
        """Names of the inputs that a node of both graphs no longer has, and of those that it gained."""
        old, new = self.before[name].inputs, self.after[name].inputs
        return [n for n in old if n not in new], [n for n in new if n not in old]

    def _heirs(self, origins_of: Iterable[tuple[str, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
        """Names of the nodes that share an origin with each removed node; removed nodes without any are left out.

        Args:
            origins_of: names of the candidates, with their origins.
        """
        by_origin: dict[str, list[str]] = {}
        for name, origins in origins_of:
            for origin in origins:
                by_origin.setdefault(origin, []).append(name)
        heirs_of = {
            name: tuple(dict.fromkeys(h for origin in _origins(self.before[name]) for h in by_origin.get(origin, ())))
            for name in self.removed
        }
        return {name: heirs for name, heirs in heirs_of.items() if heirs}


def _origins(node: NodeView) -> tuple[str, ...]:
    return node.origins or (node.name,)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        numbers = all(isinstance(v, int) for v in value)
        return ("×" if numbers else "; ").join(map(str, value)) or "none"
    return str(value) if value not in ("", None) else "none"
