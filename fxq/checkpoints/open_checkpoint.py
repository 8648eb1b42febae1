"""Opens checkpoints of any format: safetensors files and folders, with the formats of their config.json, and GGUF."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fxq.checkpoints import awq_files, compressed_tensors_files, gptq_files
from fxq.checkpoints.gguf_files import MAGIC, GgufFile
from fxq.checkpoints.grid_weight import GridWeight, StoredWeights
from fxq.checkpoints.tensor_files import Tensors, open_tensors, read_json
from fxq.common.files import as_path
from fxq.errors import FileError, unknown

Reader = Callable[[Tensors, Mapping[str, Any]], dict[str, Callable[[], Tensor | GridWeight]]]

METHODS: dict[str, Reader] = {
    "gptq": gptq_files.read,
    "awq": awq_files.read,
    "compressed-tensors": compressed_tensors_files.read,
}
"""Reader of each `quant_method` of config.json."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder whose config.json names a method of another tool."""
    if not path.is_dir():
        return is_gguf(path)
    if not (path / "config.json").is_file():
        return False
    own = read_json(path / "config.json").get("quantization_config")
    return isinstance(own, dict) and str(own.get("quant_method")) in METHODS


def open_checkpoint(path: str | os.PathLike[str]) -> StoredWeights:
    """Open the weights of a file or folder, by name. Nothing is read until a weight is asked for.

    Args:
        path: a GGUF file; a safetensors file; or a folder with one or several, and perhaps a config.json that names
            their format.

    Raises:
        FileError: a file is missing or damaged, or its format is unknown.
    """
    path = as_path(path)
    if is_gguf(path):
        return GgufFile(path)
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    own = config.get("quantization_config")
    tensors = open_tensors(path)
    if own is None:
        return StoredWeights(path, tensors)
    method = str(own.get("quant_method")) if isinstance(own, dict) else None
    if method not in METHODS:
        raise FileError(f"cannot read {str(path)!r}: {unknown('quant_method', method, METHODS)}")
    try:
        return StoredWeights(path, METHODS[method](tensors, own))
    except FileError as error:
        raise FileError(f"cannot read {str(path)!r}: {error}") from error
