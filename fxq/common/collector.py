"""Python's garbage collector while many objects are created that stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MIN_NEW_OBJECTS = 10_000
"""New objects after which the youngest ones are searched for garbage."""

_MAX_GROWTH = 1.25
"""Memory blocks relative to those after the last full search, above which all objects are searched again."""
_blocks_after_search = 0
"""Memory blocks of Python's allocator after the last full search, or at the start of the first context.

Their number is known at once, that of objects is not: the collector would count them one by one.
"""
_caller_freezes = False
"""Whether the caller has ever frozen objects, which is not asked again: the collector counts them one by one, too."""


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Context in which the garbage collector searches the objects created in it, and less often.

    Graphs are many objects, so that Python would search all objects of the process again and again: those of imported
    libraries and of the float model, too. Nothing changes if the caller has frozen objects itself (`gc.freeze`), or has
    turned the collector off. What a caller freezes or sets inside of the context is undone at its end.

    Python does not count the objects of earlier contexts as new, so that it might never search all objects: once
    their memory blocks are a quarter more than after the last full search, the next context begins with one.
    """
    global _blocks_after_search, _caller_freezes
    _caller_freezes = _caller_freezes or gc.get_freeze_count() > 0
    if _caller_freezes or not gc.isenabled():
        yield
        return
    before = gc.get_threshold()
    if _blocks_after_search and sys.getallocatedblocks() > _MAX_GROWTH * _blocks_after_search:
        gc.collect()
        _blocks_after_search = 0
    _blocks_after_search = _blocks_after_search or sys.getallocatedblocks()
    gc.freeze()
    gc.set_threshold(max(before[0], MIN_NEW_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
