"""A progress bar for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(task_name: str, total: int | None, show: bool | None = None) -> Iterator[Callable[[], None]]:
    """Context with a progress bar on stderr; yields the function that advances it by one step.

    Args:
        task_name: text next to the bar.
        total: number of steps; None if not known.
        show: whether to show it; None: if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(task_name, total=total)
        yield lambda: bar.advance(task)
