"""Shell of a quantized model of transformers: the modules of the float model, with placeholders for their weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxq.errors import InputError
from fxq.parts.absent import AbsentTensor

PROGRAMS = "programs"
"""Name of the submodule that runs the graphs of a quantized module."""

CHANGED_TOO_LATE = (
    "the weights and layers of a quantized model are in its graphs, where this has no effect: change the float model, "
    "or add the adapter to it, and quantize that."
)
"""Message for changes of weights or layers."""


class FixedTable(dict[str, Any]):
    """Table of the submodules, parameters or buffers of a shell, which takes no new ones."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the programs. Refuse anything else.

        Raises:
            InputError: a submodule or a weight is set, which the graphs would not use.
        """
        if name != PROGRAMS:
            raise InputError(f"{name!r} is set, but {CHANGED_TOO_LATE}")
        super().__setitem__(name, value)

    def __reduce__(self) -> Any:
        return FixedTable, (dict(self),)


def shell_of(model: nn.Module) -> Any:
    """Copy of a model without tensors: for each parameter and buffer, its modules have a placeholder as attribute."""
    memo: dict[int, Any] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        memo[id(tensor)] = AbsentTensor.like(tensor, name, advice="Call the whole model.")
    shell = copy.deepcopy(model, memo)
    for module in shell.modules():
        for table in (module._parameters, module._buffers):
            vars(module).update({name: table.pop(name) for name in [*table] if table[name] is not None})
        for name in ("_modules", "_parameters", "_buffers"):
            vars(module)[name] = FixedTable(vars(module)[name])
    return shell


def placeholders(module: Any) -> Iterator[AbsentTensor]:
    """Placeholders for the weights and buffers of a module. Tied ones are repeated."""
    return (value for inner in module.modules() for value in vars(inner).values() if isinstance(value, AbsentTensor))
