"""Errors about behavior of a module that a graph cannot reproduce, such as some changes in place."""

from __future__ import annotations

from itertools import takewhile

from torch import fx

from fxq.graph.info import info


class CannotTrace(Exception):
    """Behavior of a module that a graph cannot reproduce. `path` is the path of the innermost module that has it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


def cannot_change(node: fx.Node, value: fx.Node, why: str) -> CannotTrace:
    """Return the error for a node that changes a value in place."""
    return CannotTrace(
        around(node),
        f"%{node.name} ({info(node).source}) changes %{value.name} in place: {why}. Write the change out of place "
        "(x = x + y, nn.ReLU(inplace=False)).",
    )


def around(*nodes: fx.Node) -> str:
    """Path of the innermost module whose forward contains all of these nodes; empty for the model itself."""
    stacks = [[path for path, _ in n.meta.get("nn_module_stack", {}).values()] for n in nodes]
    stacks = [stack[:-1] if n.op == "call_module" else stack for n, stack in zip(nodes, stacks, strict=True)]
    same = takewhile(lambda paths: len(set(paths)) == 1, zip(*stacks, strict=False))
    return next((str(paths[0]) for paths in reversed(list(same))), "")
