"""Removal of wrappers around a model: data parallel, `torch.compile`, peft, an exported program."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn

from fxq.errors import InputError
from fxq.tracing.exported_program import Exported

log = logging.getLogger("fxq")

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def unwrapped(model: Any) -> Any:
    """Return the model inside its wrappers, which are logged, or a module that runs an exported program.

    Raises:
        InputError: the exported program cannot be quantized (see `fxq/tracing/exported_program.py`).
    """
    export = sys.modules.get("torch.export")  # not imported here, which is slow; whoever has a program has imported it
    if export is not None and isinstance(model, export.ExportedProgram):
        return Exported(model)
    while (inside := wrapped(model)) is not None:
        log.info("the model is wrapped in a %s; quantizing the model inside", type(model).__name__)
        model = inside
    return model


def wrapped(module: Any) -> nn.Module | None:
    """Module inside a wrapper; None if `module` is not a wrapper.

    Raises:
        InputError: the wrapper is a `PeftModel` whose adapter adds inputs, such as virtual tokens, in Python code.
    """
    if isinstance(module, nn.Module) and any(base.__name__ == "PeftModel" for base in type(module).__mro__):
        return _adapted(module)
    name = _WRAPPERS.get(type(module).__name__) if isinstance(module, nn.Module) else None
    return getattr(module, name) if name is not None else None


def _adapted(model: Any) -> nn.Module:
    """Model with adapters inside a `PeftModel` of peft."""
    if model.active_peft_config.is_prompt_learning:
        raise InputError(
            f"the adapter of the {type(model).__name__} adds virtual tokens in Python code, which a graph of the model "
            "does not hold. Quantize the model inside, model.get_base_model(), and add the tokens in your code."
        )
    inside: nn.Module = model.get_base_model()
    return inside
