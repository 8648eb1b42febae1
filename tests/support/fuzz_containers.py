"""States in containers of every kind, a part of the vocabulary of `tests/support/fuzz_programs.py`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxq.common.container_types import register_container
from fxq.common.containers import ContainerNames, Structure, taken_apart

STATE_OPS = (
    "append", "keep", "replace", "add", "count", "in place", "part", "crop", "reorder", "alias", "cat in place"
)  # fmt: skip
"""Changes of a tensor of the state by a program."""


class Box:
    """Registered container whose parts the model replaces."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __repr__(self) -> str:
        return f"Box({self.items!r})"


register_container(Box, lambda box: ({"items": box.items}, None), lambda parts, _: Box(parts["items"]))


class Leafed:
    """Container that is registered as a pytree."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __repr__(self) -> str:
        return f"Leafed({self.first!r}, {self.second!r})"


pytree.register_pytree_node(Leafed, lambda c: ([c.first, c.second], None), lambda parts, _: Leafed(*parts))


class Table(dict[str, Any]):
    """Subclass of dict."""


class Layers(list[Any]):
    """Subclass of list."""


class Named(NamedTuple):
    """Named tuple with containers."""

    keys: Any
    values: Any


@dataclass
class Pair:
    """Dataclass with containers."""

    first: Any
    second: Any


@dataclass(frozen=True)
class StatePlan:
    """Containers that a program takes, and what it does to their tensors.

    Attributes:
        tree: containers, with a number in place of each tensor.
        ops: of `STATE_OPS`, in turn for each tensor.
        returns: whether the program returns the state; otherwise it changes the containers that it takes.
    """

    tree: Any
    ops: tuple[str, ...]
    returns: bool

    def new(self, samples: int, rows: int, width: int) -> Any:
        """State at the first call of a stream: three rows of `rows` or fewer in each tensor."""
        numbers = iter(range(100))
        shape = samples, min(3, rows), width
        return rebuilt(copy.deepcopy(self.tree), lambda _: torch.full(shape, 0.1 * next(numbers)))

    def step(self, state: Any, h: Tensor) -> tuple[Tensor, Any]:
        """Sum of the means of all tensors, and the state for the next call.

        Args:
            state: containers with tensors, (samples, any number of rows, width).
            h: value that ops write, (samples, rows, width).
        """
        ops, total, news = iter(self.ops * 4), list[Tensor](), list[Tensor]()

        def changed(tensor: Tensor) -> Tensor:
            total.append(tensor.mean(1, keepdim=True))
            news.append(_changed(next(ops), tensor, h, news))
            return news[-1]

        new = rebuilt(state, changed)
        return sum(total, torch.zeros(())), new


def rebuilt(value: Any, by: Callable[[Any], Any]) -> Any:
    """Containers with `by()` of each tensor, changed in place where they can be."""
    if isinstance(value, Box):
        value.items = rebuilt(value.items, by)
    elif isinstance(value, list):
        value[:] = [rebuilt(part, by) for part in value]
    elif isinstance(value, dict):
        for key in value:
            value[key] = rebuilt(value[key], by)
    elif isinstance(value, (Pair, Leafed)):
        value.first, value.second = rebuilt(value.first, by), rebuilt(value.second, by)
    elif isinstance(value, Named):
        return Named(*(rebuilt(part, by) for part in value))
    else:
        return tuple(rebuilt(part, by) for part in value) if isinstance(value, tuple) else by(value)
    return value


def _changed(op: str, tensor: Tensor, h: Tensor, before: list[Tensor]) -> Tensor:
    if op == "append":
        return torch.cat([tensor, h], 1)
    if op == "in place":
        return tensor.mul_(0.5)
    if op == "part":
        tensor[:, :1] += h[:, :1] * 0.5
        return tensor
    if op == "cat in place":
        return torch.cat([tensor.mul_(0.9), h], 1).add_(0.1)
    if op == "alias":  # of another tensor of the state, with its values or a view of them
        return before[-1][:, :1] if before else tensor[:, -1:]
    if op == "crop":
        return tensor[:, -2:]
    if op == "reorder":
        return tensor.index_select(0, torch.arange(len(h) - 1, -1, -1))
    if op == "count":
        return tensor * (tensor.shape[1] / (tensor.shape[1] + 2))
    return {"keep": tensor, "replace": h, "add": tensor * 0.5 + 0.1}[op]


def containers_of(state: Any) -> dict[str, Any]:
    """The containers that can be changed, by name."""
    names = ContainerNames()
    taken_apart(state, "state", {}, containers=names)
    return names.values


def leaves_of(state: Any) -> tuple[Structure, dict[str, Any]]:
    """Structure of a state, and its tensors by name."""
    leaves: dict[str, Any] = {}
    return taken_apart(state, "state", leaves), leaves


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Pair,
    "pytree": Leafed,
    "dict subclass": lambda first, second: Table(first=first, second=second),
    "list subclass": lambda first, second: Layers([first, second]),
    "nested": lambda first, second: Box([Named(first, {"second": second})]),
    "named": Named,
    "ordered": lambda first, second: OrderedDict(first=first, second=second),
    "dict": lambda first, second: {"first": first},
    "tuple": lambda first, second: (first, second),
}
"""Containers of the two values that a program returns."""
