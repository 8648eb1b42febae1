"""Axes of a model's inputs that vary in size, as given in the `dynamic` argument of exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from fxq.errors import InputError, unknown

Axes = Mapping[str, Mapping[int, str]]
"""Names of the sizes of varying axes, by input name and axis: `{"x": {0: "batch"}}`.

A size may be the sum of others, such as the length of a mask over cached and new tokens: `{"mask": {1: "past + new"}}`.
"""

Dynamic = bool | Axes
"""`Axes`, or True for the first axis of each input of the first input's length, or False for none."""


def inputs_of(arguments: Mapping[fx.Node, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors inside the arguments of placeholders, with the names of the exported inputs."""
    for node, value in arguments.items():
        yield from _tensors(value, str(node.target).lstrip("*"))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside nested containers, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, f"{name}_{plain_name(key)}")


def plain_name(key: Any) -> str:
    """Convert a key of a container to a part of an identifier."""
    return re.sub(r"\W", "_", str(key))


def varying_axes(tensors: Mapping[str, Tensor], dynamic: Dynamic) -> Axes:
    """Axes of inputs that vary in size, with the names of their sizes.

    Args:
        tensors: the inputs by name.
        dynamic: the argument of the export.

    Raises:
        InputError: `dynamic` has an unknown input or axis.

    Example:
        >>> varying_axes({"x": torch.rand(2, 3), "mask": torch.rand(2), "scale": torch.tensor(1.0)}, True)
        {'x': {0: 'batch'}, 'mask': {0: 'batch'}}
    """
    inputs = {name: x for name, x in tensors.items() if x.dim()}
    if isinstance(dynamic, bool):
        batch = next((len(x) for x in inputs.values()), None)
        return {name: {0: "batch"} for name, x in inputs.items() if len(x) == batch} if dynamic else {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(axes, Mapping) for axes in dynamic.values()):
        first = next(iter(inputs), "x")
        raise InputError(
            f'dynamic: expected True, False or a mapping such as {{{first!r}: {{0: "batch"}}}}, not {dynamic!r}.'
        )
    for name, axes in dynamic.items():
        if name not in inputs:
            raise InputError(f"dynamic: {unknown('input', name, inputs)}")
        for axis, label in axes.items():
            if not (type(axis) is int and 0 <= axis < inputs[name].dim() and isinstance(label, str)):
                raise InputError(
                    f"dynamic: {axis!r}: {label!r} is not an axis of {name!r} with a name of its size. It has axes 0 "
                    f'to {inputs[name].dim() - 1}; use {{0: "batch"}}, for example.'
                )
    _check_sizes(inputs, dynamic)
    return dynamic


def terms_of(label: str) -> list[str]:
    """Terms of a size's name: two for a sum such as "past + new", and one for the name of a single size."""
    return [term.strip() for term in label.split("+")]


def example_sizes(inputs: Mapping[str, Tensor], axes: Axes) -> dict[str, int]:
    """Sizes of the axes of some inputs by name, without sums."""
    labels = [(inputs[name].shape[axis], label) for name, named in axes.items() for axis, label in named.items()]
    return {label: size for size, label in reversed(labels) if len(terms_of(label)) == 1}


def _check_sizes(inputs: Mapping[str, Tensor], axes: Axes) -> None:
    """Raise `InputError` if axes with one name have several sizes, or a sum is not that of its terms."""
    sizes = example_sizes(inputs, axes)
    for name, named in axes.items():
        for axis, label in named.items():
            absent = next((term for term in terms_of(label) if term not in sizes), None)
            if absent is not None:
                raise InputError(f"dynamic: no axis has the size {absent!r} alone, of which {label!r} is a sum.")
            size, wanted = inputs[name].shape[axis], sum(sizes[term] for term in terms_of(label))
            if size != wanted:
                raise InputError(
                    f"dynamic: axis {axis} of {name!r} is {label!r}, which is {wanted} in the example, and has the "
                    f"size {size}. Give it a name of its own."
                )


def size_names(axes: Axes) -> str:
    """Names of the varying sizes, as text."""
    names = list(dict.fromkeys(label for labels in axes.values() for label in labels.values()))
    return " or ".join(map(repr, names))


FIXED_SIZE_REMEDY = (
    "Export it with dynamic=False, for inputs of the example's size, or name the axes that vary in dynamic=."
)
"""Remedy for a model that does not support varying sizes."""
