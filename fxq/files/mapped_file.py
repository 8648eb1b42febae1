"""A large model's file while its tensors are mapped from it: what changes the file changes the model."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from fxq.errors import FileError


class MappedFile:
    """The file that tensors are mapped from, held open; `check` says whether it was written to since.

    A file that is replaced by another one under its name (`mv`, `qmodel.save`) stays as it was for who has it open.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._state = self._now()

    def check(self) -> None:
        """Raise `FileError` where the file was written to or cut off since it was opened."""
        if self._now() != self._state:
            raise FileError(
                f"{self._path} was changed in place while a model that was loaded from it is in use, whose tensors are "
                "mapped from it: the model is lost. fxq.load it again, and replace files of models by renaming another "
                "one to their name (`cp new.fxq m.tmp && mv m.tmp m.fxq`), as qmodel.save does."
            )

    def _now(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_size, about.st_mtime_ns

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFile:
        return self
