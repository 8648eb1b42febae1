"""Guard for memory-mapped model files: an in-place change of the file would change the model."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from fxq.errors import FileError


class MappedFile:
    """Open file that tensors are mapped from; `check` detects in-place changes.

    Replacing the file by renaming (`mv`, `qmodel.save`) is safe: the open file keeps its content.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._state = self._now()

    def check(self) -> None:
        """Raise `FileError` if the file was modified or truncated since it was opened."""
        if self._now() != self._state:
            raise FileError(
                f"{self._path} was changed in place, and the tensors of this model are mapped from it, so the model is "
                "invalid. Load it again with fxq.load. To update a model file, rename a new file over it "
                "(`cp new.fxq m.tmp && mv m.tmp m.fxq`), as qmodel.save does."
            )

    def _now(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_size, about.st_mtime_ns

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFile:
        return self
