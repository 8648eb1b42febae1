"""A progress bar for long work."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("fxq")

_LOG_EVERY = 20.0
"""Seconds between two messages about progress where no bar is shown."""


@contextmanager
def progress_bar(task_name: str, total: int | None, show: bool | None = None) -> Iterator[Callable[..., None]]:
    """Context with a progress bar on stderr; yields the function that advances it by one step, or by a number of steps.

    Where no bar is shown, long work logs how far it is, and how long the rest will take, at level INFO.

    Args:
        task_name: text next to the bar.
        total: number of steps; None if not known.
        show: whether to show it; None: if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield _Logged(task_name, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(task_name, total=total)
        yield lambda steps=1: bar.advance(task, steps)


class _Logged:
    """Progress of one task, written to the log from time to time."""

    def __init__(self, task_name: str, total: int | None) -> None:
        self._name, self._total, self._done = task_name, total, 0
        self._start = self._last = time.monotonic()

    def __call__(self, steps: int = 1) -> None:
        self._done += steps
        now = time.monotonic()
        if not self._total or now - self._last < _LOG_EVERY:
            return
        self._last = now
        left = (now - self._start) * (self._total - self._done) / max(self._done, 1)
        log.info("%s: %.0f %% done, about %.0f s left", self._name, 100 * self._done / self._total, left)
