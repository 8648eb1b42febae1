"""decompose: replace modules such as attention by the ops that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import fx, nn

from fxq.common.hooks import forward_hooks
from fxq.graph.info import Decision, info
from fxq.graph.query import called_name, op_of, submodule, taken_part
from fxq.patterns.decompositions import attention, recurrent_functions
from fxq.patterns.decompositions.attention import ATTENTION
from fxq.patterns.decompositions.recurrent_layers import RECURRENT
from fxq.patterns.decompositions.undone_views import drop_undone_views
from fxq.pipeline.context import Context
from fxq.pipeline.float_ops import expand_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.expansion import CannotExpand, Expand, Expansion
from fxq.rewriting.rewriter import Rewriter

EXPANSIONS = {**ATTENTION, **RECURRENT}
FUNCTIONS: dict[Callable[..., Any], Callable[[Rewriter, fx.Node], Sequence[fx.Node]]] = {
    F.multi_head_attention_forward: attention.called_as_module,
    **dict.fromkeys(recurrent_functions.FUNCTIONS, recurrent_functions.called_as_module),
}
"""By function, how its call becomes a call of a module. Returns the nodes that this call no longer reads."""


@dataclass(frozen=True)
class Decompose(Pass):
    """Replace attention, encoder, decoder and recurrent layers of torch.nn by ops of the op table.

    Before: module MultiheadAttention(x, x, x)
    After: linear, chunk, unflatten and transpose, scaled_dot_product_attention, transpose and flatten, linear
    Before: module LSTM(x) of two layers    After: lstm(lstm(x, ...), ...)
    Keeps: the output, to 1e-5. Each op has the module path of the layer that it replaces. A layer that cannot be
    decomposed stays a module in float, with the reason.
    Refuses: overrides of the recipe that select nothing in the resulting graph.
    """

    name: ClassVar[str] = "decompose"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Expand module by module, then check that the recipe's selectors select something."""
        expanded: dict[str, list[fx.Node]] = {}
        dropped: list[fx.Node] = []
        for node in rewriter.nodes():
            if node.op == "call_function" and node.target in FUNCTIONS:
                dropped += _call_as_module(rewriter, node)
            module = submodule(rewriter.gm, node)
            if module is not None and isinstance(module, tuple(EXPANSIONS)) and not info(node).traced.kept:
                name = node.name
                ops = _expand(rewriter, node, module)
                if ops:
                    expanded[name] = ops
        dropped = [node for node in dict.fromkeys(dropped) if not node.users]
        for node in dropped:
            rewriter.erase(node)
        dropped += drop_undone_views(rewriter) if expanded else []
        rewriter.erase_unused()
        expanded = {name: [op for op in ops if not op._erased] for name, ops in expanded.items()}
        expanded |= {node.name: [] for node in dropped}
        if expanded:
            expand_original(rewriter, expanded)
        written = [(info(n).path, op.name) for n in rewriter.nodes() if (op := op_of(n)) is not None]
        rewriter.context.check_selectors(rewriter.context.written + written)


def _expand(rewriter: Rewriter, node: fx.Node, module: nn.Module) -> list[fx.Node]:
    """Replace the call of a module by ops, and return these; if that is impossible, record why and return none."""
    expansion = Expansion(rewriter, node)
    try:
        expand = _expansion_of(module)
        with rewriter.attributed(type(module).__name__, expand):
            expansion.replace_call(expand(expansion, module))
        return expansion.ops
    except CannotExpand as reason:
        for op in reversed(expansion.ops):
            rewriter.erase(op)
        _keep_whole(rewriter, node, type(module).__name__, reason)
        return []


def _call_as_module(rewriter: Rewriter, node: fx.Node) -> Sequence[fx.Node]:
    """Turn the call of a function into a call of a module, and return the nodes that it no longer reads.

    If that is impossible, the reason is recorded on the node.
    """
    try:
        return FUNCTIONS[node.target](rewriter, node)  # type: ignore[index]
    except CannotExpand as reason:
        _keep_whole(rewriter, node, called_name(node), reason)
        return ()


def _keep_whole(rewriter: Rewriter, node: fx.Node, name: str, reason: CannotExpand) -> None:
    """Record the reason why a call is not expanded, on it and on the nodes that take its results apart."""
    parts = [user for user in node.users if taken_part(user, node) is not None]
    for part in (node, *parts):
        decision = Decision("float", "unsupported", f"{name} stays as it is: {reason}", decided_by=rewriter.name)
        rewriter.describe(part, traced=info(part).traced._replace(kept=decision))


def _expansion_of(module: nn.Module) -> Expand:
    if any(map(forward_hooks, module.modules())):
        raise CannotExpand("it has forward hooks")
    if type(module) not in EXPANSIONS:
        base = next(cls for cls in type(module).__mro__ if cls in EXPANSIONS)
        raise CannotExpand(f"it is a subclass of {base.__name__}")
    return EXPANSIONS[type(module)]
