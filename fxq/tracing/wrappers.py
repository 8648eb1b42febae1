"""The model inside what it comes wrapped in: data parallel, `torch.compile`, an exported program."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn

from fxq.tracing.exported_program import Exported

log = logging.getLogger("fxq")

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def unwrapped(model: Any) -> Any:
    """The model itself: wrappers are taken off (the log says so), an exported program becomes a module.

    Raises:
        InputError: the exported program cannot be quantized (see `fxq/tracing/exported_program.py`).
    """
    export = sys.modules.get("torch.export")  # imported by whoever made a program; it takes long
    if export is not None and isinstance(model, export.ExportedProgram):
        return Exported(model)
    while (inside := wrapped(model)) is not None:
        log.info("the model is wrapped in a %s; quantizing the one inside", type(model).__name__)
        model = inside
    return model


def wrapped(module: Any) -> nn.Module | None:
    """The module inside a wrapper; None for a module that is no wrapper."""
    name = _WRAPPERS.get(type(module).__name__) if isinstance(module, nn.Module) else None
    return getattr(module, name) if name is not None else None
