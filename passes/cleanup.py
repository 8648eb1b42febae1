"""cleanup: nothing in the model that its graph does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.graph.guards import make_output, own_copy
from fxq.graph.info import info
from fxq.graph.query import constant, flat_nodes
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.editor import DATA
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Cleanup(Pass):
    """Erase nodes that nobody reads, and drop the modules and weights that no node uses.

    Before: a lowered graph beside float weights and observers    After: the same graph, with what it uses
    Also: a weight inside modules inside modules is kept with fxq's own: reading it through several of them takes time.
    Also: what a forward makes anew in each call (`torch.zeros(3)`, `self.scale * 2`) is a constant of the graph. It is
    copied where it is returned, as the caller may change it.
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "cleanup"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Erase, then make a module anew from the graph: it takes along only what the graph names."""
        rewriter.erase_unused()
        for node in rewriter.nodes():
            if node.op == "get_attr" and str(node.target).count(".") > 1:
                _bring_near(rewriter, node)
        _copy_constants(rewriter)
        rewriter.gm = fx.GraphModule(rewriter.gm, rewriter.graph)


def _bring_near(rewriter: Rewriter, node: fx.Node) -> None:
    """Read a weight from where it takes one step."""
    path = str(node.target)
    weight = constant(rewriter.gm, node)
    if weight is not None and not path.startswith(f"{DATA}."):
        near = rewriter.constant(weight, path, before=node)
        rewriter.replace(node, near)


def _copy_constants(rewriter: Rewriter) -> None:
    """Return copies of constants that the float model makes anew in every call."""
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
        rewriter: holds the graph.
        node: the node.
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
