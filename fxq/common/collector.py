"""Python's garbage collector while many objects are created that stay."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MIN_NEW_OBJECTS = 10_000
"""New objects after which the youngest ones are searched for garbage."""

_MAX_GROWTH, _MAX_NEW_BLOCKS = 0.25, 200_000
"""Growth of the memory blocks, as a share and as a number, above which all objects are searched again."""
_blocks_after_search = 0
"""Memory blocks of Python's allocator after the last full search, or at the start of a context if they were fewer."""
_caller_freezes = False
"""Whether the caller has ever frozen objects.

If so, `gc.get_freeze_count` is not called again: it counts them one by one.
"""
_open = threading.Lock()
"""Held by the context that has frozen the objects, if there is one."""


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Context in which the garbage collector searches the objects created in it, and less often.

    Graphs are many objects, so that Python would search all objects of the process again and again: those of imported
    libraries and of the float model, too. Nothing changes if the caller has ever frozen objects itself (`gc.freeze`),
    or has turned the collector off, or in another context. What a caller freezes or sets inside of the context is
    undone at its end.

    Python does not count the objects of earlier contexts as new, so that it might never search all objects: once
    memory blocks are a quarter more than after the last full search, or 200,000 more, the next context begins with one.
    """
    if not _open.acquire(blocking=False):
        yield
        return
    try:
        if _is_left_alone():
            yield
            return
        before = gc.get_threshold()
        _search_if_grown()
        gc.freeze()
        gc.set_threshold(max(before[0], MIN_NEW_OBJECTS) if before[0] else 0, *before[1:])
        try:
            yield
        finally:
            gc.set_threshold(*before)
            gc.unfreeze()
    finally:
        _open.release()


def _is_left_alone() -> bool:
    global _caller_freezes
    _caller_freezes = _caller_freezes or gc.get_freeze_count() > 0
    return _caller_freezes or not gc.isenabled()


def _search_if_grown() -> None:
    """Search all objects for garbage if there are many more memory blocks than after the last search."""
    global _blocks_after_search
    blocks = _memory_blocks()
    _blocks_after_search = min(_blocks_after_search or blocks, blocks)
    if blocks - _blocks_after_search > min(_MAX_GROWTH * _blocks_after_search, _MAX_NEW_BLOCKS):
        gc.collect()
        _blocks_after_search = _memory_blocks()


def _memory_blocks() -> int:
    """Number of memory blocks of Python's allocator; if Python uses another allocator, of the collector's objects.

    Reading the first number is fast; the collector counts its objects one by one.
    """
    return sys.getallocatedblocks() or len(gc.get_objects())
