"""Root module around one part of a model, so that the names of the part's layers are those of the whole model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

ONE_OF_SEVERAL = "fxq_one_of_several"
"""Attribute of a model that is one of several programs with one recipe, whose overrides may select nothing in it."""


class PartShell(nn.Module):
    """Module whose only content is one submodule of a model, at the path that it has there, and whose forward calls it.

    The part is traced through this module, so that paths in overrides, ledger, tables and files are those of the whole
    model. It shares the part with the model.

    Args:
        path: path of the submodule in the model.
        part: the submodule.
    """

    def __init__(self, path: str, part: nn.Module) -> None:
        super().__init__()
        *above, name = path.split(".")
        parent: nn.Module = self
        for step in above:
            parent.add_module(step, nn.Module().eval())
            parent = parent.get_submodule(step)
        parent.add_module(name, part)
        self.training = False
        vars(self)["part_path"] = path

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.get_submodule(path)(*args, **kwargs)

        vars(forward)["__signature__"] = inspect.signature(part.forward)
        vars(self)["forward"] = forward
