"""What shows itself: `print`ed in colour in a terminal and plain elsewhere, and as a table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from fxq.display.notebook import html
from fxq.display.tables import Part, plain
from fxq.display.terminal import shown


class Printed(ABC):
    """A base for what is made to be read. A subclass says what there is to read (`_parts`, `_short`).

    `str`, and so `print` and f-strings, gives colours where stdout is a terminal, as wide as that. For a file there is
    `to_text`, which is the same everywhere; it is also what `print` gives into a pipe.
    """

    @abstractmethod
    def _parts(self) -> Sequence[Part]:
        """Everything, as lines and tables."""

    @abstractmethod
    def _short(self) -> str:
        """What is most worth knowing, for `repr`."""

    def _brief(self) -> Sequence[Part]:
        """What to show a person; by default everything."""
        return self._parts()

    def to_text(self) -> str:
        """The complete text, without colours, the same everywhere."""
        return plain(self._parts())

    def __str__(self) -> str:
        return shown(self._parts, self._brief)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._short()}>"

    def __rich__(self) -> Text:
        """For `rich.print`, which would take a name like "[red]" for markup."""
        return Text.from_ansi(str(self))

    def _repr_html_(self) -> str:
        """In a notebook."""
        return html(self._brief())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """At the prompt of IPython."""
        printer.text(str(self))
