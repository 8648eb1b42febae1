"""Writing a file that a person asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fxq.errors import InputError, RenderError


def as_path(path: str | os.PathLike[str]) -> Path:
    """What was given, as a path. Raises `InputError` where it is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"the file to write is named by a str or a path, not by {path!r}.")
    return Path(path)


def write_file(path: Path, data: bytes) -> Path:
    """Write a file and make the folders above it that are missing; the path. Raises `RenderError` where it cannot."""
    with writing(path):
        path.write_bytes(data)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For the block that writes a file: folders above it that are missing are made. Raises `RenderError` as above."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RenderError(f"cannot write {path}: {error.strerror}.") from error
    except ValueError as error:  # a name that no file can have
        raise RenderError(f"cannot write {str(path)!r}: {error}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """For the block that writes a new file in the place of an old one, which is there until the new one is complete.

    A reader, and who comes after a crash, finds the whole new file or the whole old one. It is written beside its
    place, under a name with a dot in front. Raises `RenderError` as above.
    """
    with writing(path):
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with new.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a crash may leave the name with nothing in it
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
