"""Atomic writing of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fxq.errors import InputError, RenderError


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a `Path`. Raises `InputError` if it is neither a str nor a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"the file to write is named by a str or a path, not by {path!r}.")
    return Path(path)


def write_file(path: Path, data: bytes) -> Path:
    """Write a file atomically and return its path."""
    with replacing(path) as file:
        file.write(data)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context for writing a file: creates missing parent folders and translates OS errors.

    Raises:
        RenderError: the file cannot be written: no permission, a full disk, a folder of that name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RenderError(f"cannot write {path}: {error.strerror or error}.") from error
    except ValueError as error:  # a name that no file can have
        raise RenderError(f"cannot write {str(path)!r}: {error}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context for replacing a file atomically: readers find the complete old file or the complete new one.

    The same holds after a crash. The new file is written in the same folder, under a random name that starts with a
    dot, so that several threads and machines may write one path: the last one to finish wins. For a link, its target is
    replaced. Devices and pipes are written directly.

    Raises:
        RenderError: the file cannot be written; no part of it is left.
    """
    with writing(path):
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file() and not place.is_dir():
            with place.open("wb") as file:
                yield file
            return
        new = _beside(place)
        try:
            with os.fdopen(_created(new), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a crash may leave an empty file
            new.replace(place)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the long work that computes its content.

    Raises:
        RenderError: it cannot be written.
    """
    with writing(path):
        place = Path(os.path.realpath(path))
        if place.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if place.exists() and not place.is_file():
            return
        new = _beside(place)
        os.close(_created(new))
        new.unlink()


def _beside(place: Path) -> Path:
    return place.with_name(f".fxq-{secrets.token_hex(8)}")


def _created(path: Path) -> int:
    """Create a file and return its descriptor for writing. Raises `FileExistsError` if it exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
