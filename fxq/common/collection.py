"""Python's garbage collection while a model is quantized."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Context in which the garbage collector visits only the objects that are created inside.

    Graphs are made of many objects that refer to each other, so that creating them starts full collections, and each of
    them would visit every object of the libraries that are imported, of which none has become garbage. Afterwards, all
    objects are visited again.

    If the program has frozen its objects itself (`gc.freeze`), they stay as they are.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
