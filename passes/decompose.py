"""decompose: modules that hold several ops become these ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import fx, nn

from fxq.graph.info import Decision, info
from fxq.graph.query import called_name, op_of, submodule, taken_part
from fxq.patterns.decompositions import attention, recurrent_functions
from fxq.patterns.decompositions.attention import ATTENTION
from fxq.patterns.decompositions.recurrent_layers import RECURRENT
from fxq.pipeline.float_ops import expand_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.expansion import CannotExpand, Expand, Expansion
from fxq.rewriting.rewriter import Rewriter

EXPANSIONS = {**ATTENTION, **RECURRENT}
FUNCTIONS: dict[Callable[..., Any], Callable[[Rewriter, fx.Node], Sequence[fx.Node]]] = {
    F.multi_head_attention_forward: attention.called_as_module,
    **dict.fromkeys(recurrent_functions.FUNCTIONS, recurrent_functions.called_as_module),
}
"""What makes the call of a function that of a module; it returns what the call reads no more."""


@dataclass(frozen=True)
class Decompose(Pass):
    """Write attention, encoder, decoder and recurrent layers of torch.nn with ops of the table.

    Before: module MultiheadAttention(x, x, x)
    After: linear, chunk, unflatten and transpose, scaled_dot_product_attention, transpose and flatten, linear
    Before: module LSTM(x) of two layers    After: lstm(lstm(x, ...), ...)
    Keeps: the output, to 1e-5. Each op gets the module path of the layer that it stands for. What cannot be written so
    stays a module in float, with the reason.
    Refuses: selectors of the recipe that select nothing in the graph that this leaves.
    """

    name: ClassVar[str] = "decompose"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """Expand module by module, then check the recipe's selectors against what is there."""
        expanded: dict[str, list[fx.Node]] = {}
        dropped: list[fx.Node] = []
        for node in rewriter.nodes():
            if node.op == "call_function" and node.target in FUNCTIONS:
                dropped += _as_module(rewriter, node)
            module = submodule(rewriter.gm, node)
            if module is not None and isinstance(module, tuple(EXPANSIONS)) and not info(node).kept:
                name = node.name
                made = _expand(rewriter, node, module)
                if made:
                    expanded[name] = made
        dropped = [node for node in dict.fromkeys(dropped) if not node.users]
        for node in dropped:
            rewriter.erase(node)
        rewriter.erase_unused()
        expanded = {name: [op for op in made if not op._erased] for name, made in expanded.items()}
        expanded |= {node.name: [] for node in dropped}
        if expanded:
            expand_original(rewriter, expanded)
        ops = [(info(n).path, op.name) for n in rewriter.nodes() if (op := op_of(n)) is not None]
        rewriter.context.check_selectors(rewriter.context.written + ops)


def _expand(rewriter: Rewriter, node: fx.Node, module: nn.Module) -> list[fx.Node]:
    """Put a module's ops in the place of its call, or say why they cannot be; the ops."""
    made = Expansion(rewriter, node)
    try:
        expand = _expansion_of(module)
        with rewriter.attributed(type(module).__name__, expand):
            made.replace_call(expand(made, module))
        return made.ops
    except CannotExpand as reason:
        for op in reversed(made.ops):
            rewriter.erase(op)
        _stays(rewriter, node, type(module).__name__, reason)
        return []


def _as_module(rewriter: Rewriter, node: fx.Node) -> Sequence[fx.Node]:
    """Make the call of a function that of a module, or say why not; what is read no more."""
    try:
        return FUNCTIONS[node.target](rewriter, node)  # type: ignore[index]
    except CannotExpand as reason:
        _stays(rewriter, node, called_name(node), reason)
        return ()


def _stays(rewriter: Rewriter, node: fx.Node, name: str, reason: CannotExpand) -> None:
    parts = [user for user in node.users if taken_part(user, node) is not None]
    for left in (node, *parts):
        kept = Decision("float", "unsupported", f"{name} stays as it is: {reason}", decided_by=rewriter.name)
        rewriter.describe(left, kept=kept)


def _expansion_of(module: nn.Module) -> Expand:
    if any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()):
        raise CannotExpand("it has forward hooks")
    if type(module) not in EXPANSIONS:
        base = next(cls for cls in type(module).__mro__ if cls in EXPANSIONS)
        raise CannotExpand(f"it is a kind of {base.__name__} of its own")
    return EXPANSIONS[type(module)]
