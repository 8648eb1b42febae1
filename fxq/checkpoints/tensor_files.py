"""Tensors of safetensors files: one file, or a folder with several and an index, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxq.errors import FileError, words_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names of the files of a folder: the index of several files, or the only file."""

Tensors = dict[str, Callable[[], Tensor]]
"""Functions that read tensors, by name. A tensor is mapped into memory from its file."""


def open_tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file, or of a folder.

    Raises:
        FileError: a file is missing or damaged, the index names files outside of the folder, or a folder has none.
    """
    files = files_of(path)
    opened = {file: _opened(file) for file in dict.fromkeys(files.values())}
    return {name: partial(opened[file].get_tensor, name) for name, file in files.items()}


def files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor by name, see `open_tensors`."""
    if not path.is_dir():
        return dict.fromkeys(_opened(path).keys(), path)
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise FileError(f"cannot read {str(path)!r}: the folder has neither {SINGLE} nor {INDEX}.")
        return files_of(path / SINGLE)
    files = read_json(path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FileError(f"cannot read {str(path / INDEX)!r}: it has no weight_map from names to files.")
    outside = [name for name in files.values() if Path(name).name != name]
    if outside:
        raise FileError(f"cannot read {str(path / INDEX)!r}: it names {outside[0]!r}, which is outside of the folder.")
    stored = {name: set(_opened(path / name).keys()) for name in dict.fromkeys(files.values())}
    missing = [name for name, file in files.items() if name not in stored[file]]
    if missing:
        raise FileError(f"cannot read {str(path)!r}: {files[missing[0]]} has no tensor {missing[0]!r}.")
    return {name: path / file for name, file in files.items()}


def _opened(path: Path) -> Any:
    """Safetensors file whose header has been checked."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read {str(path)!r}: {words_of(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `FileError` if it is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"cannot read {str(path)!r}: {words_of(error)}") from error
    if not isinstance(content, dict):
        raise FileError(f"cannot read {str(path)!r}: it is no JSON object.")
    return content
