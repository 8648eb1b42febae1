"""Writing a file that a person asked for."""

from __future__ import annotations

import os
from pathlib import Path

from fxq.errors import InputError, RenderError


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path. Raises `InputError` where it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"the file to write is named by a str or a path, not by {path!r}.")
    return Path(path)


def write_file(path: Path, data: bytes) -> Path:
    """Write a file and make the folders above it that are missing; the path. Raises `RenderError` where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise RenderError(f"cannot write {path}: {error.strerror}.") from error
    except ValueError as error:  # a name that no file can have
        raise RenderError(f"cannot write {str(path)!r}: {error}.") from error
    return path


def replace_file(path: Path, data: bytes) -> Path:
    """The same as `write_file`; a reader, and who comes after a crash, finds the whole new file or the whole old one.

    It is written beside its place, under the same name with `.tmp` behind it.
    """
    beside = path.with_name(f"{path.name}.tmp")
    write_file(beside, data)
    try:
        with beside.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash may leave the new name with nothing in it
        os.replace(beside, path)
    except OSError as error:
        raise RenderError(f"cannot write {path}: {error.strerror}.") from error
    return path
