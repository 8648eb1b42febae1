"""The model inside what it comes wrapped in: data parallel, `torch.compile`, an exported program."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from fxq.exported import Exported

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
        InputError: the exported program cannot be quantized (see `fxq/exported.py`).
    """
    if isinstance(model, ExportedProgram):
        return Exported(model)
    while isinstance(model, nn.Module) and (name := _WRAPPERS.get(type(model).__name__)) is not None:
        log.info("the model is wrapped in a %s; quantizing the one inside, model.%s", type(model).__name__, name)
        model = getattr(model, name)
    return model
