"""Python's garbage collector while many objects are created that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIN_NEW_OBJECTS = 10_000
"""New objects after which the youngest ones are searched for garbage."""


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Context in which the garbage collector searches the objects created in it, and less often.

    Graphs are many objects, so that Python would search all objects of the process again and again: those of imported
    libraries and of the float model, too. Nothing changes if the caller has frozen objects itself (`gc.freeze`), or has
    turned the collector off.
    """
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(before[0], MIN_NEW_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
