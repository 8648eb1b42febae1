"""Python's garbage collector while many objects are created that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIN_NEW_OBJECTS = 10_000
"""New objects after which the youngest ones are searched for garbage."""

_MAX_GROWTH = 1.25
"""Number of objects relative to that after the last full search, above which all are searched again."""
_count_after_search = 0
"""Number of objects after the last search of all, or at the start of the first context."""


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Context in which the garbage collector searches the objects created in it, and less often.

    Graphs are many objects, so that Python would search all objects of the process again and again: those of imported
    libraries and of the float model, too. Nothing changes if the caller has frozen objects itself (`gc.freeze`), or has
    turned the collector off. What a caller freezes or sets inside of the context is undone at its end.

    Python does not count the objects of earlier contexts as new, so that it might never search all objects: once they
    are a quarter more than after the last full search, the next context begins with one.
    """
    global _count_after_search
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    if _count_after_search and gc.get_freeze_count() > _MAX_GROWTH * _count_after_search:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _count_after_search = 0
    _count_after_search = _count_after_search or gc.get_freeze_count()
    gc.set_threshold(max(before[0], MIN_NEW_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
