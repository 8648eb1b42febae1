"""A progress bar for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None, show: bool | None = None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; yields the function that counts one more.

    Args:
        what: what is being done.
        total: how many steps it takes; None: not known.
        show: whether to show it; None: when stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
