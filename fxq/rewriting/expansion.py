"""Expansion of the call of a module into the ops that it consists of, with the paths inside the module."""

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
    """Error for a module or call that cannot be expanded. Its message is the reason in the ledger."""


class Expansion:
    """Builder of the ops that replace the call of a module. They are inserted before it, with the paths inside it.

    Attributes:
        rewriter: edits the graph.
        node: the call.
        ops: nodes made so far.
    """

    def __init__(self, rewriter: Rewriter, node: fx.Node) -> None:
        self.rewriter = rewriter
        self.node = node
        self.ops: list[fx.Node] = []

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the call by name, including defaults."""
        module = self.rewriter.gm.get_submodule(str(self.node.target))
        bound = inspect.signature(module.forward).bind(*self.node.args, **self.node.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def is_read(self, *path: int) -> bool:
        """Whether a part of the module's value, a nested pair, has users. The first item of the second is `1, 0`."""
        values = [self.node]
        for index in path:
            users = [(user, taken_part(user, value)) for value in values for user in value.users]
            if any(part is None and not reads_only_metadata(user) for user, part in users):
                return True  # the whole value
            values = [user for user, part in users if part in (index, index - 2)]
        return any(value.users for value in values)

    def replace_call(self, value: Any) -> None:
        """Let all users of the module's value read `value`, a node or nested tuple, and erase the call."""
        self._replace(self.node, value)

    def _replace(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, tuple):
            for user in list(node.users):
                part = taken_part(user, node)
                if isinstance(part, int):
                    self._replace(user, value[part])
                elif reads_only_metadata(user):  # a check of the tuple's length, which holds
                    self.rewriter.erase(user)
        self.rewriter.replace(node, value)

    def call(self, op: str, *args: Any, at: str = "", **options: Any) -> fx.Node:
        """Add a call of an op. `at` is the path, inside the module, of the submodule that it belongs to."""
        path = ".".join(part for part in (info(self.node).path, at) if part)
        name = path.replace(".", "_") if at.rpartition(".")[2] not in ("", "self_attn") else op
        node = self.rewriter.call(op, *args, like=self.node, before=self.node, name=name, **options)
        self.rewriter.describe(node, path=path, origins=(node.name,))
        self.ops.append(node)
        return node

    def read(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """Add a read of a parameter of the module, by its path inside the module; None stays None."""
        if tensor is None:
            return None
        return self.rewriter.read(f"{self.node.target}.{path}", tensor, before=self.node, like=self.node)

    def constant(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """Add a constant, such as a slice of a parameter, by a path inside the module; None stays None."""
        if tensor is None:
            return None
        return self.rewriter.constant(tensor, f"{self.node.target}.{path}", before=self.node, like=self.node)

    def linear(self, x: fx.Node, layer: nn.Linear, at: str) -> fx.Node:
        """Add the call of a linear layer inside the module."""
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        return self.call("linear", x, weight, bias, at=at)

    def norm(self, x: fx.Node, layer: nn.Module, at: str) -> fx.Node:
        """Add the call of a layer norm inside the module.

        Raises:
            CannotExpand: it is no `nn.LayerNorm`.
        """
        if type(layer) is not nn.LayerNorm:
            raise CannotExpand(f"its norm is a {type(layer).__name__}")
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        shape = tuple(layer.normalized_shape)
        return self.call("layer_norm", x, weight, bias, at=at, normalized_shape=shape, eps=layer.eps)

    def activation(self, x: fx.Node, function: Any, at: str) -> fx.Node:
        """Add the call of an activation function inside the module, given as a module or a function.

        Raises:
            CannotExpand: the op table has no such function, or it has parameters.
        """
        is_module = isinstance(function, nn.Module)
        row = OPS.of_module(function) if is_module else OPS.of_call(function)
        name = getattr(function, "__name__", type(function).__name__)
        if row is None:
            raise CannotExpand(f"its activation {name} is not in the op table")
        op, spelling = row
        bound = op.bind_module(spelling, function, (x,), {}) if is_module else op.bind(spelling, (x,), {})
        if not isinstance(bound, dict) or any(isinstance(v, Tensor) for v in bound.values()):
            raise CannotExpand(f"its activation {name} has parameters or is not an elementwise function")
        return self.call(op.name, x, at=at, **{k: v for k, v in bound.items() if k in op.options})


Expand = Callable[[Expansion, Any], Any]
"""Function that makes the ops of a module and returns its value: a node or nested tuple, with None for unused parts."""
