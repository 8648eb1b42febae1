"""A difference in few lines: one line for all nodes that changed alike, with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fxq.display.tables import Column, Table, row, text
from fxq.graph.view import NodeView
from fxq.picture.graph_changes import Change, GraphChanges

MARKS = {"removed": "-", "added": "+", "changed": "~", "rewired": ">"}
MOST = 30
"""Most lines of a summary."""

Alike = tuple[str, str, str, str]
"""The kind of change, the ops before and after, what else changed, and the pass and rule that did it."""

_COLUMNS = (Column(), Column(align="right"), Column(), Column(drop=1), Column(drop=2), Column(drop=3))


def summary(diff: GraphChanges) -> Table:
    """A line for all nodes that changed alike: how many, what became of what, and which; most frequent first."""
    ordered = alike(diff)
    rows = [
        row(text(MARKS[mark], mark), f"{len(names)} ×", what, how, text(_range(names), "quiet"), text(by, "quiet"))
        for (mark, what, how, by), names in ordered[:MOST]
    ]
    if len(ordered) > MOST:
        rows.append(row("", "", text(f"and {len(ordered) - MOST} more kinds of change", "quiet"), "", "", ""))
    return Table(_COLUMNS, rows)


def alike(diff: GraphChanges) -> list[tuple[Alike, list[str]]]:
    """The nodes that changed, by what happened to them; most frequent first."""
    groups: dict[Alike, list[str]] = {}
    for change, name in _events(diff):
        groups.setdefault(change, []).append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _events(diff: GraphChanges) -> Iterator[tuple[Alike, str]]:
    """Every change of a node that is no constant, and the name of its node. Each node counts once."""
    old, new = diff.before.by_name, diff.after.by_name
    changes = {change.name: change for change in diff.changed}
    place = {name: i for i, name in enumerate(old)}
    done: set[str] = set()
    for removed, heirs in _replaced(diff):
        done.update((*removed, *heirs))
        kept = [name for name in heirs if name in old]
        replaced = sorted((*removed, *kept), key=place.__getitem__)
        what = f"{_labels(old[name] for name in replaced)} → {_labels(new[name] for name in heirs)}"
        how = "; ".join(_how(changes[name]) for name in kept if name in changes)
        mark = "changed" if not changes.keys().isdisjoint(kept) else "rewired" if kept else "added"
        yield (mark, what, how, _by(diff, heirs[0])), heirs[0]
    for name in diff.removed:
        if name not in done and old[name].kind != "constant":
            yield ("removed", old[name].label, "", ""), name
    for name in diff.added:
        if name not in done and new[name].kind != "constant":
            yield ("added", new[name].label, "", _by(diff, name)), name
    for name, change in changes.items():
        if name not in done and new[name].kind != "constant":
            before, after = change.before.label, change.after.label
            what = after if before == after else f"{before} → {after}"
            yield ("changed", what, _how(change), _by(diff, name)), name
    for name in diff.rewired:
        if name not in done and name not in changes:
            yield ("rewired", new[name].label, _reads(diff, name), _by(diff, name)), name


def _replaced(diff: GraphChanges) -> Iterator[tuple[list[str], list[str]]]:
    """What was removed and what replaced it, in the order of their graphs; connected changes together."""
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
    """The ops, each once, with how many there are; `constants`: by the names of their weights."""
    counts = Counter(node.label if constants or node.kind != "constant" else "constant" for node in nodes)
    return ", ".join(label if count == 1 else f"{count} {label}" for label, count in counts.items())


def _how(change: Change) -> str:
    """What changed but the op, in words that nodes share: numbers of one node are left out."""
    told = (text.removeprefix(f"{key} ") for key, text in change.by_field.items() if key in ("kind", "dtype", "shape"))
    texts = list(told)
    if "scale" in change.fields or "zero_point" in change.fields:
        before, after = change.before.scale, change.after.scale
        texts.append("another scale" if before and after else "gets a scale" if after else "loses its scale")
    if "options" in change.fields and change.before.label == change.after.label:
        texts.append("options")
    return "; ".join(texts)


def _reads(diff: GraphChanges, name: str) -> str:
    """What a node reads instead of what, as ops."""
    lost, gained = diff.reads(name)
    if not lost and not gained:
        return "reads the same in another order"
    sides = [diff.before[n] for n in lost], [diff.after[n] for n in gained]
    return f"reads {' → '.join(_labels(nodes, constants=False) or 'nothing' for nodes in sides)}"


def _by(diff: GraphChanges, name: str) -> str:
    """The pass and rule that made a node what it is, without the rule's source line; "" where it was so before."""
    made = diff.after[name].made_by
    known = diff.before.by_name.get(name)
    return "" if known is not None and known.made_by == made else made.partition(" (")[0]


def _range(names: list[str]) -> str:
    return (
        names[0] if len(names) == 1 else f"{names[0]}, {names[1]}" if len(names) == 2 else f"{names[0]} … {names[-1]}"
    )
