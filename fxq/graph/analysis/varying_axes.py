"""Which axes of a graph's inputs vary in size, as the person who exports a model gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from fxq.errors import InputError, unknown

Axes = Mapping[str, Mapping[int, str]]
"""What the size of an axis of an input is called, by the name of the input; only of those that vary."""

Dynamic = bool | Axes
"""The same; True: the first axis of each input that has as many entries there as the first input; False: none."""


def inputs_of(given: Mapping[fx.Node, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among what placeholders are given, by the names of the inputs that they become."""
    for node, value in given.items():
        yield from _tensors(value, str(node.target).lstrip("*"))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested containers, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, f"{name}_{plain_name(key)}")


def plain_name(key: Any) -> str:
    """A key of a container as part of a name."""
    return re.sub(r"\W", "_", str(key))


def varying_axes(given: Mapping[str, Tensor], dynamic: Dynamic) -> Axes:
    """The axes that vary of inputs.

    Args:
        given: the inputs by name.
        dynamic: as a user says it.

    Raises:
        InputError: `dynamic` names no input or no axis of it.

    Example:
        >>> varying_axes({"x": torch.rand(2, 3), "mask": torch.rand(2), "scale": torch.tensor(1.0)}, True)
        {'x': {0: 'batch'}, 'mask': {0: 'batch'}}
    """
    inputs = {name: x for name, x in given.items() if x.dim()}
    if isinstance(dynamic, bool):
        batch = next((len(x) for x in inputs.values()), None)
        return {name: {0: "batch"} for name, x in inputs.items() if len(x) == batch} if dynamic else {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(axes, Mapping) for axes in dynamic.values()):
        first = next(iter(inputs), "x")
        raise InputError(f'dynamic: {dynamic!r} is neither True nor False, nor like {{{first!r}: {{0: "batch"}}}}.')
    for name, axes in dynamic.items():
        if name not in inputs:
            raise InputError(f"dynamic: {unknown('input', name, inputs)}")
        for axis, label in axes.items():
            if not (type(axis) is int and 0 <= axis < inputs[name].dim() and isinstance(label, str)):
                raise InputError(
                    f"dynamic: {axis!r}: {label!r} is no axis of {name!r} and a name for its size. It has axes 0 to "
                    f'{inputs[name].dim() - 1}; give {{0: "batch"}}, for example.'
                )
    return dynamic


def size_names(axes: Axes) -> str:
    """The names of the sizes, as text."""
    names = list(dict.fromkeys(label for own in axes.values() for label in own.values()))
    return " or ".join(map(repr, names))


FIXED_SIZE_REMEDY = (
    "Export it with dynamic=False, for inputs of the example's size, or name the axes that vary in dynamic=."
)
"""What to do where a model does not take sizes that vary."""
