"""Names that users give: torch.fx writes them into code, and a graph module has attributes of its own."""

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
    """Refuse a model in which a module or tensor has the name of something that a graph module of this kind has itself.

    Raises:
        InputError: names it, and says what to do.
    """
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    own = {*dir(kind), *declared, "meta"} - {*dir(nn.Module), *nn.Module.__annotations__}
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in own:
            raise InputError(
                f"the model has a module or tensor called {name!r}, a name that torch.fx or fxq needs for its own "
                f"{name!r} in the same place. Rename it, or wrap the model in a module that calls it."
            )


def in_short(names: Collection[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more
