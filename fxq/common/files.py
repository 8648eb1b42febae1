"""Writing a file that a person asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxq.errors import InputError, RenderError


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path. Raises `InputError` where it is none."""
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
