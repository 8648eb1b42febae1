"""fallback: ops without a kernel run in float, with the least conversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from fxq.graph import Plan, info, is_op
from fxq.passbase import Pass, Stage
from fxq.rewrite import Rewriter, make_unit


@dataclass(frozen=True)
class Fallback(Pass):
    """Place float ops so that no value is converted twice.

    Before: quantize(conv2d_prelu(dequantize(q), w, b, slope)), where the backend has no kernel for prelu
    After: quantize(prelu(conv2d(dequantize(q), w, b), slope)): the convolution emits float, prelu reads it as it is
    Also: a float op that reads dequantize(quantize(v)) of a float value v reads v itself.
    Keeps: the output up to rounding; what changes is more exact, as a rounding is left out.
    """

    name: ClassVar[str] = "fallback"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Open the units that no kernel runs whole, then let float ops read float values."""
        for node in rewriter.nodes():
            plan = info(node).plan
            if plan is not None and plan.kernel_ops is not None:
                _split(rewriter, node, plan)
        for node in rewriter.nodes("dequantize"):
            _read_float(rewriter, node)
        rewriter.erase_unused()


def _split(rewriter: Rewriter, node: fx.Node, plan: Plan) -> None:
    """Leave the ops that the kernel runs as a unit (or a single op), and take the others out."""
    with rewriter.attributed("open_unit", _split):
        ops = rewriter.open_unit(node)
        head = ops[: plan.kernel_ops]
        for rest in ops[len(head) :]:
            rewriter.describe(rest, plan=Plan("float", plan.reason))
        unit = head[0]
        if len(head) > 1:
            kind = "_".join(str(getattr(n.target, "__name__", "")) for n in head)
            unit = make_unit(rewriter, head, head[-1:], kind)
        rewriter.describe(unit, plan=replace(plan, reason="", kernel_ops=None))


def _read_float(rewriter: Rewriter, dequantize: fx.Node) -> None:
    """Let float readers of dequantize(quantize(v)) read v, where v is made by an op that emits float anyway."""
    q = dequantize.args[0]
    if not is_op(q, "quantize") or not isinstance(q, fx.Node):
        return
    value: Any = q.args[0]
    if not is_float(value):
        return
    if any(is_float(user) for user in dequantize.users):
        with rewriter.attributed("read_float", _read_float):
            rewriter.reroute(dequantize, value, only=is_float)


def is_float(node: fx.Node) -> bool:
    """Whether a node of the qdq graph computes in float: an input or output, or what annotate left in float."""
    if is_op(node, "quantize", "dequantize", "requantize"):
        return False
    plan = info(node).plan
    return plan is None or plan.fate == "float"
