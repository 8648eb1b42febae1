"""Difference of two graphs: nodes added, removed, changed and rewired, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text
from torch import fx

from fxq.display.notebook import folded, html
from fxq.display.printed import Printed
from fxq.display.tables import Column, Part, Table, line, plain, row, text
from fxq.errors import InputError
from fxq.graph.view import GraphView, view
from fxq.picture.diff_picture import picture
from fxq.picture.diff_summary import MARKS, summary
from fxq.picture.graph_changes import FIELDS, Change, GraphChanges
from fxq.picture.writing import picture_html, write


@dataclass(frozen=True, repr=False)
class Diff(GraphChanges, Printed):
    """Difference of two graphs (fields: `GraphChanges`); falsy if there is none.

    Terminals and notebooks show a long difference as a summary, with one line for all nodes that changed alike.
    `to_text()` lists every node; `print` writes it to pipes and files.
    """

    def __bool__(self) -> bool:
        return not self.is_empty

    def _short(self) -> str:
        return plain([self._title()])

    def to_text(self, full: bool = True) -> str:
        """Return the difference as plain text: every node, or if not `full` the summary."""
        return plain(self._parts() if full else self._brief())

    def _title(self) -> Text:
        counts = [text(f"{number} {kind}", kind) for kind, number in self.counts.items() if number]
        return line(f"{self._names}: ", Text(", ").join(counts) if counts else "no difference")

    @property
    def _names(self) -> str:
        return f"{self.before.name or 'before'} → {self.after.name or 'after'}"

    def _parts(self) -> list[Part]:
        return self._titled(list(self._rows()))

    def _brief(self) -> list[Part]:
        rows = list(self._rows())
        if len(rows) <= _MAX_LISTED_ROWS:
            return self._titled(rows)
        constants = list(self._constants())
        how = text('every node: print(diff.to_text()); a picture: diff.render("diff.svg")', "quiet")
        return [self._title(), summary(self), *([Table(_COLUMNS, constants)] if constants else []), how]

    def _titled(self, rows: list[list[Text]]) -> list[Part]:
        return [self._title(), *([Table(_COLUMNS, rows)] if rows else [])]

    def _repr_html_(self) -> str:
        """HTML with the counts, the changes as a table, and the picture."""
        title, *rest = self._brief()
        image = picture_html(picture(self, 1, self._names), self.to_text(full=False), 'diff.render("diff.svg")')
        return html([title]) + (folded("changes", html(rest), opened=True) if rest else "") + image

    def render(self, path: str | Path, *, radius: int = 1, title: str = "") -> Path:
        """Draw the changes and their neighbourhood to a file: `.svg`, `.png`, `.pdf` or `.dot`.

        Args:
            path: file to write. Its folder is created if missing.
            radius: maximum distance, in arrows, of unchanged nodes from a change; nodes further away are drawn as
                "… n unchanged nodes".
            title: title of the picture; default: the names of the two graphs.

        Returns:
            The path of the file.

        Raises:
            InputError: `radius` is negative.
            RenderError: the suffix is none of these, `dot` is missing, or the file cannot be written.
        """
        if radius < 0:
            raise InputError(f"radius must be 0 or more, got {radius}.")
        return write(picture(self, radius, title or self._names), path)

    def _rows(self) -> Iterator[list[Text]]:
        """Lines of the text: mark, name, op, change. Constants come last, in one line per mark."""
        outcomes = {name: f"became {', '.join(heirs)}" for name, heirs in self.became.items()}
        outcomes |= {name: f"went into {', '.join(heirs)}" for name, heirs in self.joined.items()}
        for name in self.removed:
            node = self.before[name]
            if node.kind != "constant":
                yield _row("removed", name, node.label, outcomes.get(name, ""))
        for name in self.added:
            node = self.after[name]
            if node.kind != "constant":
                yield _row("added", name, node.label, f"reads {', '.join(node.inputs)}" if node.inputs else "")
        for change in self.changed:
            if change.after.kind != "constant":
                yield _row("changed", change.name, change.after.label, "; ".join(change.by_field.values()))
        for name in self.rewired:
            old, new = ", ".join(self.before[name].inputs), ", ".join(self.after[name].inputs)
            yield _row("rewired", name, self.after[name].label, f"reads {old or 'nothing'} → {new or 'nothing'}")
        yield from self._constants()

    def _constants(self) -> Iterator[list[Text]]:
        for mark, names in (
            ("removed", [n for n in self.removed if self.before[n].kind == "constant"]),
            ("added", [n for n in self.added if self.after[n].kind == "constant"]),
            ("changed", [c.name for c in self.changed if c.after.kind == "constant"]),
        ):
            if names:
                yield _row(
                    mark, f"{len(names)} constants" if len(names) > 1 else names[0], "constant", _first_names(names)
                )


_MAX_LISTED_ROWS = 24
"""Rows up to which a terminal or notebook lists every node; longer differences are summarized."""

_COLUMNS = (Column(),) * 4


def _row(mark: str, name: str, op: str, change: str) -> list[Text]:
    return row(text(MARKS[mark], mark), name, op, change)


def diff(before: Any, after: Any) -> Diff:
    """Compare two graphs. Nodes of one name are compared with each other.

    Args:
        before: a `Snapshot` of a history, a `GraphModule`, or a `GraphView`.
        after: a graph of one of these types.

    Returns:
        The difference, to `print` or `render`.

    Raises:
        InputError: an argument is none of these.

    Example:
        >>> from fxq.graph.view import GraphView, NodeView
        >>> before = GraphView((NodeView("a", "op", "relu", dtype="float32"),))
        >>> after = GraphView((NodeView("a", "int8", "relu", dtype="uint8"),))
        >>> print(diff(before, after))
        before → after: 1 changed
        ~  a  relu  kind op → int8; dtype float32 → uint8
    """
    old, new = _view_of(before, "before"), _view_of(after, "after")
    both = [(old.by_name[node.name], node) for node in new if node.name in old.by_name]
    changed = []
    for left, right in both:
        fields = tuple(field for field in FIELDS if getattr(left, field) != getattr(right, field))
        if fields:
            changed.append(Change(left, right, fields))
    return Diff(
        before=old,
        after=new,
        added=tuple(node.name for node in new if node.name not in old.by_name),
        removed=tuple(node.name for node in old if node.name not in new.by_name),
        changed=tuple(changed),
        rewired=tuple(right.name for left, right in both if left.inputs != right.inputs),
    )


def _view_of(graph: Any, which: str) -> GraphView:
    if isinstance(graph, GraphView):
        return graph
    if isinstance(graph, fx.GraphModule):
        return view(graph)
    inner = getattr(graph, "graph", None)
    if isinstance(inner, GraphView):
        return inner
    raise InputError(
        f"diff: {which} is a {type(graph).__name__}; it must be a snapshot of a history, a torch.fx GraphModule, or a "
        "GraphView. Trace a plain module first: torch.fx.symbolic_trace(module)."
    )


def _first_names(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "") if len(names) > 1 else ""
