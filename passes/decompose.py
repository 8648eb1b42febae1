"""decompose: modules that hold several ops become these ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from fxq.graph.info import Decision, info
from fxq.graph.query import op_of, reads_only_metadata, submodule, taken_part
from fxq.patterns.attention import EXPANSIONS, CannotExpand, Expansion
from fxq.pipeline.float_ops import expand_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Decompose(Pass):
    """Write attention and encoder layers of torch.nn with ops of the table, so that their linears can be quantized.

    Before: module MultiheadAttention(x, x, x)
    After: linear, chunk, unflatten and transpose, scaled_dot_product_attention, transpose and flatten, linear
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
        for node in rewriter.nodes():
            module = submodule(rewriter.gm, node)
            if module is not None and type(module) in EXPANSIONS and not info(node).kept:
                name = node.name
                made = _expand(rewriter, node, module)
                if made:
                    expanded[name] = made
        rewriter.erase_unused()
        if expanded:
            expand_original(rewriter, expanded)
        ops = [(info(n).path, op.name) for n in rewriter.nodes() if (op := op_of(n)) is not None]
        rewriter.context.check_selectors(rewriter.context.written + ops)


def _expand(rewriter: Rewriter, node: fx.Node, module: nn.Module) -> list[fx.Node]:
    """Put a module's ops in the place of its call, or say why they cannot be; the ops."""
    expand = EXPANSIONS[type(module)]
    several = info(node).shape is None
    checks = [user for user in node.users if reads_only_metadata(user)]  # that there are two outputs, as there are
    taken = {user: taken_part(user, node) for user in node.users if user not in checks} if several else {}
    made = Expansion(rewriter, node)
    try:
        if any(index not in (0, 1) for index in taken.values()):
            raise CannotExpand("its outputs are used as a whole")
        if any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()):
            raise CannotExpand("it has forward hooks")
        with rewriter.attributed(type(module).__name__, expand):
            weights = any(index == 1 and user.users for user, index in taken.items())
            values = expand(made, module, node, weights)
            for user, index in taken.items():
                rewriter.replace(user, values[index or 0])
            if several:
                for check in checks:
                    rewriter.erase(check)
            else:
                rewriter.reroute(node, values[0])
            rewriter.erase(node)
        return made.ops
    except CannotExpand as reason:
        for op in reversed(made.ops):
            rewriter.erase(op)
        text = f"{type(module).__name__} stays as it is: {reason}"
        for left in (node, *taken):
            rewriter.describe(left, kept=Decision("float", "unsupported", text, decided_by=rewriter.name))
        return []
