"""The model inside what it comes wrapped in: data parallel, `torch.compile`, an exported program."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.export import ExportedProgram

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
    if isinstance(model, ExportedProgram):
        return Exported(model)
    while (inside := wrapped(model)) is not None:
        log.info("the model is wrapped in a %s; quantizing the one inside", type(model).__name__)
        model = inside
    return model


def wrapped(module: Any) -> nn.Module | None:
    """The module inside a wrapper; None when it is none."""
    name = _WRAPPERS.get(type(module).__name__) if isinstance(module, nn.Module) else None
    return getattr(module, name) if name is not None else None
