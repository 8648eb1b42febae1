"""`Printed`, base class of objects that `print` shows in colour in a terminal, and a notebook as tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from fxq.display.notebook import html
from fxq.display.tables import Part, plain
from fxq.display.terminal import shown


class Printed(ABC):
    """Base class of objects that show text and tables. A subclass implements `_parts` and `_short`.

    `str`, and therefore `print` and f-strings, uses colours and the width of the terminal if stdout is one. `to_text`
    returns the same plain text everywhere; `print` into a pipe or file writes it, too.
    """

    @abstractmethod
    def _parts(self) -> Sequence[Part]:
        """Return the complete content as lines and tables."""

    @abstractmethod
    def _short(self) -> str:
        """Return a one-line summary, for `repr`."""

    def _brief(self) -> Sequence[Part]:
        """Return the content for a terminal or a notebook; by default all of it."""
        return self._parts()

    def to_text(self) -> str:
        """Return the complete text, without colours, independent of the terminal."""
        return plain(self._parts())

    def __str__(self) -> str:
        return shown(self._parts, self._brief)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._short()}>"

    def __rich__(self) -> Text:
        """Return the text for `rich.print`, which would read a name such as "[red]" as markup."""
        return Text.from_ansi(str(self))

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        return html(self._brief())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print at the prompt of IPython."""
        printer.text(str(self))
