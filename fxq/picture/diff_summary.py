"""Summary of a difference: one line, with a count, for all nodes that changed alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fxq.display.tables import Column, Table, row, text
from fxq.graph.view import NodeView
from fxq.picture.graph_changes import Change, GraphChanges

MARKS = {"removed": "-", "added": "+", "changed": "~", "rewired": ">"}
MAX_SUMMARY_LINES = 30

ChangeKind = tuple[str, str, str, str]
"""Key of changes that are alike: mark, ops before and after, other changes, and the pass and rule that made them."""

_COLUMNS = (Column(), Column(align="right"), Column(), Column(drop=1), Column(drop=2), Column(drop=3))


def summary(diff: GraphChanges) -> Table:
    """Table with one line for all nodes that changed alike: count, ops, changes and names; most frequent first."""
    ordered = grouped_changes(diff)
    rows = [
        row(text(MARKS[mark], mark), f"{len(names)} ×", ops, how, text(_range(names), "quiet"), text(by, "quiet"))
        for (mark, ops, how, by), names in ordered[:MAX_SUMMARY_LINES]
    ]
    more = len(ordered) - MAX_SUMMARY_LINES
    if more > 0:
        rows.append(row("", "", text(f"and {more} more kinds of change", "quiet"), "", "", ""))
    return Table(_COLUMNS, rows)


def grouped_changes(diff: GraphChanges) -> list[tuple[ChangeKind, list[str]]]:
    """Names of the nodes that changed, grouped by kind of change; most frequent first."""
    groups: dict[ChangeKind, list[str]] = {}
    for change, name in _events(diff):
        groups.setdefault(change, []).append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _events(diff: GraphChanges) -> Iterator[tuple[ChangeKind, str]]:
    """Change and name of each node that differs and is no constant. Each node counts once."""
    old, new = diff.before.by_name, diff.after.by_name
    changes = {change.name: change for change in diff.changed}
    place = {name: i for i, name in enumerate(old)}
    done: set[str] = set()
    for removed, heirs in _replaced(diff):
        done.update((*removed, *heirs))
        in_both = [name for name in heirs if name in old]
        replaced = sorted((*removed, *in_both), key=place.__getitem__)
        ops = f"{_labels(old[name] for name in replaced)} → {_labels(new[name] for name in heirs)}"
        how = "; ".join(_how(changes[name]) for name in in_both if name in changes)
        mark = "changed" if not changes.keys().isdisjoint(in_both) else "rewired" if in_both else "added"
        yield (mark, ops, how, _by(diff, heirs[0])), heirs[0]
    for name in diff.removed:
        if name not in done and old[name].kind != "constant":
            yield ("removed", old[name].label, "", ""), name
    for name in diff.added:
        if name not in done and new[name].kind != "constant":
            yield ("added", new[name].label, "", _by(diff, name)), name
    for name, change in changes.items():
        if name not in done and new[name].kind != "constant":
            before, after = change.before.label, change.after.label
            ops = after if before == after else f"{before} → {after}"
            yield ("changed", ops, _how(change), _by(diff, name)), name
    for name in diff.rewired:
        if name not in done and name not in changes:
            yield ("rewired", new[name].label, _reads(diff, name), _by(diff, name)), name


def _replaced(diff: GraphChanges) -> Iterator[tuple[list[str], list[str]]]:
    """Names of removed nodes and of the nodes that replaced them, for each connected group of changes."""
    import networkx as nx

    heirs_of = {**diff.became, **diff.joined}
    graph: nx.Graph[str] = nx.Graph((name, heir) for name, heirs in heirs_of.items() for heir in heirs)
    part_of = {name: i for i, part in enumerate(nx.connected_components(graph)) for name in part}
    parts: dict[int, tuple[list[str], list[str]]] = {}
    for side, view in enumerate((diff.before, diff.after)):
        for node in view:
            if node.name in part_of and (side or node.name not in diff.after.by_name):
                parts.setdefault(part_of[node.name], ([], []))[side].append(node.name)
    yield from parts.values()


def _labels(nodes: Iterable[NodeView], constants: bool = True) -> str:
    """Ops of nodes with their counts. `constants`: whether constants are listed by name."""
    counts = Counter(node.label if constants or node.kind != "constant" else "constant" for node in nodes)
    return ", ".join(label if count == 1 else f"{count} {label}" for label, count in counts.items())


def _how(change: Change) -> str:
    """Changes other than of the op, without the numbers of a single node, so that nodes that changed alike match."""
    fields = {key: text for key, text in change.by_field.items() if key in ("kind", "dtype", "shape")}
    texts = [text.removeprefix(f"{key} ") for key, text in fields.items()]
    if "scale" in change.fields or "zero_point" in change.fields:
        before, after = change.before.scale, change.after.scale
        texts.append("another scale" if before and after else "gets a scale" if after else "loses its scale")
    if "options" in change.fields and change.before.label == change.after.label:
        texts.append("options")
    return "; ".join(texts)


def _reads(diff: GraphChanges, name: str) -> str:
    """Ops that a node no longer reads, and ops that it reads instead."""
    lost, gained = diff.reads(name)
    if not lost and not gained:
        return "reads the same values in another order"
    sides = [diff.before[n] for n in lost], [diff.after[n] for n in gained]
    return f"reads {' → '.join(_labels(nodes, constants=False) or 'nothing' for nodes in sides)}"


def _by(diff: GraphChanges, name: str) -> str:
    """Pass and rule that last changed a node, without the rule's source line; "" if it was before the difference."""
    author = diff.after[name].made_by
    before = diff.before.by_name.get(name)
    return "" if before is not None and before.made_by == author else author.partition(" (")[0]


def _range(names: list[str]) -> str:
    return (
        names[0] if len(names) == 1 else f"{names[0]}, {names[1]}" if len(names) == 2 else f"{names[0]} … {names[-1]}"
    )
