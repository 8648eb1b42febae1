"""What takes the place of the call of a module that holds several ops: these ops, under the paths inside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.graph.query import reads_only_metadata, taken_part
from fxq.ops import OPS
from fxq.rewriting.rewriter import Rewriter


class CannotExpand(Exception):
    """A module in a form that has no expansion; the message is the reason that the ledger gives."""


class Expansion:
    """Ops in the place of the call of one module: made before it, under the paths of the modules inside it.

    Attributes:
        ops: those made so far.
    """

    def __init__(self, rewriter: Rewriter, node: fx.Node) -> None:
        self.rewriter = rewriter
        self.node = node
        self.ops: list[fx.Node] = []

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the call by name, defaults included."""
        module = self.rewriter.gm.get_submodule(str(self.node.target))
        bound = inspect.signature(module.forward).bind(*self.node.args, **self.node.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def is_read(self, *place: int) -> bool:
        """Whether anybody reads a part of the module's value, a nested pair: the first of the second is `1, 0`."""
        values = [self.node]
        for index in place:
            users = [(user, taken_part(user, value)) for value in values for user in value.users]
            if any(part is None and not reads_only_metadata(user) for user, part in users):
                return True  # all of it
            values = [user for user, part in users if part in (index, index - 2)]
        return any(value.users for value in values)

    def put(self, value: Any) -> None:
        """Let everybody who reads the module's value read this one, a nested tuple, and erase the call."""
        self._put(self.node, value)

    def _put(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, tuple):
            for user in list(node.users):
                part = taken_part(user, node)
                if isinstance(part, int):
                    self._put(user, value[part])
                elif reads_only_metadata(user):  # that there are so many, as there are
                    self.rewriter.erase(user)
        self.rewriter.replace(node, value)

    def call(self, op: str, *args: Any, at: str = "", **options: Any) -> fx.Node:
        """A call of an op; `at` is the path, inside the module, of what makes it."""
        path = ".".join(part for part in (info(self.node).path, at) if part)
        name = path.replace(".", "_") if at.rpartition(".")[2] not in ("", "self_attn") else op
        made = self.rewriter.call(op, *args, like=self.node, before=self.node, name=name, **options)
        self.rewriter.describe(made, path=path, origins=(made.name,))
        self.ops.append(made)
        return made

    def read(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """A parameter of the module, by its path inside it; None stays None."""
        if tensor is None:
            return None
        return self.rewriter.read(f"{self.node.target}.{path}", tensor, before=self.node, like=self.node)

    def part(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """A part of a parameter, as a constant of that name."""
        if tensor is None:
            return None
        return self.rewriter.constant(tensor, f"{self.node.target}.{path}", before=self.node, like=self.node)

    def linear(self, x: fx.Node, layer: nn.Linear, at: str) -> fx.Node:
        """A linear layer inside the module."""
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        return self.call("linear", x, weight, bias, at=at)

    def norm(self, x: fx.Node, layer: nn.Module, at: str) -> fx.Node:
        """A layer norm inside the module."""
        if type(layer) is not nn.LayerNorm:
            raise CannotExpand(f"its norm is a {type(layer).__name__}")
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        shape = tuple(layer.normalized_shape)
        return self.call("layer_norm", x, weight, bias, at=at, normalized_shape=shape, eps=layer.eps)

    def activation(self, x: fx.Node, function: Any, at: str) -> fx.Node:
        """A function inside the module: a module or a plain function that the table knows."""
        is_module = isinstance(function, nn.Module)
        found = OPS.of_module(function) if is_module else OPS.of_call(function)
        name = getattr(function, "__name__", type(function).__name__)
        if found is None:
            raise CannotExpand(f"its activation {name} is not in the op table")
        op, spelling = found
        bound = op.bind_module(spelling, function, (x,), {}) if is_module else op.bind(spelling, (x,), {})
        if not isinstance(bound, dict) or any(isinstance(v, Tensor) for v in bound.values()):
            raise CannotExpand(f"its activation {name} is no plain function")
        return self.call(op.name, x, at=at, **{k: v for k, v in bound.items() if k in op.options})


Expand = Callable[[Expansion, Any], Any]
"""Makes the ops of a module, and returns its value: a node, or a nested tuple; None what nobody reads."""
