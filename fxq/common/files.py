"""Writing files: each is complete or unchanged, whoever else writes it, and whatever fails."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fxq.errors import InputError, RenderError


def as_path(path: str | os.PathLike[str]) -> Path:
    """What was given, as a path. Raises `InputError` where it is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"the file to write is named by a str or a path, not by {path!r}.")
    return Path(path)


def write_file(path: Path, data: bytes) -> Path:
    """Write a file as `replacing` does; the path."""
    with replacing(path) as file:
        file.write(data)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For the block that writes a file: missing folders above it are made.

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
    """For the block that writes a file: the old one is there until the new one is complete.

    A reader, and who comes after a crash, finds the whole new file or the whole old one. It is written beside its
    place, under a random name that starts with a dot, so that any number of threads and machines may write one path:
    the last one to finish wins. What a link points to is replaced, not the link. Devices and pipes are written to.

    Raises:
        RenderError: the file cannot be written; nothing is left of it.
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
                os.fsync(file.fileno())  # else a crash may leave the name with nothing in it
            new.replace(place)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise


def check_writable(path: Path) -> None:
    """Try whether a file can be written, without writing it: for work that takes long before it does.

    Raises:
        RenderError: it cannot be.
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
    """A new file, open for writing. Raises `FileExistsError` where there is one of this name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
