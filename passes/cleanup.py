"""cleanup: remove all nodes, modules and weights that the graph does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.graph.guards import make_output, own_copy
from fxq.graph.info import info
from fxq.graph.query import constant, flat_nodes
from fxq.graph.uncompiled import UncompiledModule
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.editor import DATA
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Cleanup(Pass):
    """Remove unused nodes, and the modules and weights that no node uses.

    Before: a lowered graph, with float weights and observers    After: the same graph, with only the data that it uses
    Also: weights in nested modules move into one flat module, since each level of attribute access takes time.
    Also: tensors that the float model creates in each call (`torch.zeros(3)`, `self.scale * 2`) are constants of the
    graph. They are copied where they are returned, as the caller may change them.
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "cleanup"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Erase unused nodes, then rebuild the module: torch.fx copies only the attributes that the graph names."""
        rewriter.erase_unused()
        for node in rewriter.nodes():
            if node.op == "get_attr" and str(node.target).count(".") > 1:
                _flatten_path(rewriter, node)
        _copy_constants(rewriter)
        rewriter.gm = UncompiledModule(rewriter.gm, rewriter.graph)


def _flatten_path(rewriter: Rewriter, node: fx.Node) -> None:
    """Move a weight of a nested module into the module `fxq_data`."""
    path = str(node.target)
    weight = constant(rewriter.gm, node)
    if weight is not None and not path.startswith(f"{DATA}."):
        flat = rewriter.constant(weight, path, before=node)
        rewriter.replace(node, flat)


def _copy_constants(rewriter: Rewriter) -> None:
    """Return copies of constants that the float model creates in every call."""
    output = rewriter.graph.output_node()
    constants: set[fx.Node] = set()
    for node in rewriter.graph.nodes:
        if _is_constant(rewriter, node, constants):
            constants.add(node)
    for maker in (*(n for n in output.all_input_nodes if _makes_container(n)), output):
        for value in flat_nodes((maker.args, maker.kwargs)):
            if value in constants:
                typed = info(value).shape, info(value).dtype
                copy = rewriter.node("call_function", own_copy, (value,), like=value, before=maker, typed=typed)
                rewriter.reroute(value, copy, only={maker}.__contains__)


def _is_constant(rewriter: Rewriter, node: fx.Node, constants: set[fx.Node]) -> bool:
    """Whether a value may share memory with a constant of the graph that is not a tensor of the model.

    Args:
        rewriter: rewriter of the graph.
        node: the node of the value.
        constants: earlier nodes for which this is true.
    """
    if node.op == "get_attr":
        is_new = str(node.target).startswith((f"{DATA}.", "_tensor_constant"))  # by folding, by torch.fx
        return is_new and constant(rewriter.gm, node) is not None
    if _makes_container(node):
        return False
    read = [n for n in node.all_input_nodes if n.op == "get_attr" or info(n).is_tensor]
    moved = node.op in ("call_function", "call_method") and node.target is not own_copy
    return moved and bool(read) and constants.issuperset(read)


def _makes_container(node: fx.Node) -> bool:
    """Whether a node constructs an output object: a named tuple, dataclass or mapping."""
    return node.op == "call_function" and (node.target is make_output or isinstance(node.target, type))
