"""Checks of names in the user's model, which torch.fx writes into code and a graph module has as attributes."""

from __future__ import annotations

import keyword
from collections.abc import Collection

from torch import fx, nn

from fxq.errors import InputError

_UNWRITABLE = frozenset('"\\\n\r\0')


def is_writable(path: str) -> bool:
    """Whether torch.fx can write the dotted path of a module or tensor into code."""
    return not _UNWRITABLE.intersection(path) and not any(map(keyword.iskeyword, path.split(".")))


def check_names(model: nn.Module, kind: type[fx.GraphModule]) -> None:
    """Check that no module or tensor of a model has the name of an attribute of the graph module class `kind`.

    Raises:
        InputError: one has such a name.
    """
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    own = {*dir(kind), *declared, "meta"} - {*dir(nn.Module), *nn.Module.__annotations__}
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in own:
            raise InputError(
                f"the model has a module or tensor called {name!r}, a name that torch.fx or fxq needs for its own "
                f"{name!r} in the same place. Rename it, or wrap the model in a module that calls it."
            )


def in_short(names: Collection[str], count: int = 5) -> str:
    """Return the first `count` names, and the number of further ones, as text."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(list(names)[:count]) + more
