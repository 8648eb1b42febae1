"""Grids of weights in a folder, from which an interrupted quantization resumes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fxq.common.files import as_path, write_file
from fxq.errors import FileError, words_of
from fxq.quant.qparams import QParams

_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def resuming_grids(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Context in which `resumed_grid` writes to a folder and reads from it; None: the context has no effect."""
    token = _FOLDER.set(None if folder is None else as_path(folder))
    try:
        yield
    finally:
        _FOLDER.reset(token)


def resumed_grid(weight: Tensor, how: str, compute: Callable[[], QParams]) -> QParams:
    """Return the grid of a weight: from the folder of `resuming_grids`, else computed and written there.

    The name of its file is a checksum of everything that the grid depends on: all values of the weight, how the grid is
    computed, and the versions of fxq and PyTorch.

    Args:
        weight: the weight.
        how: text with all options of the computation.
        compute: the computation.

    Raises:
        FileError: the file is damaged.
        RenderError: the file cannot be written.
    """
    folder = _FOLDER.get()
    if folder is None:
        return compute()
    key = hashlib.sha256(f"{version('fxq')} {torch.__version__} {how} {weight.dtype} {[*weight.shape]} ".encode())
    key.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    path = folder / f"{key.hexdigest()}.safetensors"
    if path.exists():
        return _read(path, weight.device)
    grid = compute()
    about = {"qmin": grid.qmin, "qmax": grid.qmax, "axis": grid.axis, "block": grid.block}
    numbers = {name: str(value) for name, value in about.items() if value is not None}
    tensors = {"scale": grid.scale, "zero_point": grid.zero_point, "dtype": torch.zeros(0, dtype=grid.dtype)}
    write_file(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, numbers))
    return grid


def _read(path: Path, device: torch.device) -> QParams:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = {name: int(value) for name, value in file.metadata().items()}
            scale, zero_point, dtype = (file.get_tensor(name) for name in ("scale", "zero_point", "dtype"))
            axis, block = about.get("axis"), about.get("block")
            return QParams(scale.clone(), zero_point.clone(), about["qmin"], about["qmax"], dtype.dtype, axis, block)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise FileError(f"cannot read {str(path)!r}: {words_of(error)} Delete the file to compute it again.") from error
