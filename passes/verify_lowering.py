"""verify-lowering: every kernel against what it stands for. The reason to trust fxq."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.data import Batch
from fxq.errors import FxqError, FxqWarning
from fxq.graph import Plan, info
from fxq.passbase import Pass, Stage
from fxq.region import Region, run_region
from fxq.rewrite import Rewriter
from fxq.stages import where


@dataclass(frozen=True)
class VerifyLowering(Pass):
    """Run every lowered unit against its qdq form on recorded calibration inputs; put back what disagrees.

    Before: x86.conv(x)    After: the same, or quantize(conv2d(dequantize(x), ...)) where the kernel is wrong
    Keeps: every kernel that is right: never more than one step off, and that in no more elements than ties explain.
    Float results must agree to `float_tolerance` of the largest value.

    Args:
        samples: how many recorded batches to run.
        ties: the share of elements that may differ by one step; a few elements always may.
        float_tolerance: relative to the largest absolute value of the reference.
    """

    samples: int = 1
    ties: float = 0.01
    float_tolerance: float = 1e-4

    name: ClassVar[str] = "verify-lowering"
    needs: ClassVar[Stage] = Stage.LOWERED
    gives: ClassVar[Stage] = Stage.LOWERED

    def run(self, rewriter: Rewriter) -> None:
        """Find the kernels that disagree, and put their qdq form back."""
        context = rewriter.context
        wrong: dict[str, str] = {}
        for batch in (context.samples or [context.example])[: self.samples]:
            wrong.update(self._compare(rewriter, batch))
        by_name = {node.name: node for node in rewriter.nodes()}
        for name, why in wrong.items():
            node = by_name[name]
            kernel = f"the {_kernel_name(rewriter.gm, node)} kernel is wrong on this machine"
            message = f"{where(rewriter.gm, node)}: {kernel}: {why}. It runs in qdq form instead; please report it."
            warnings.warn(message, FxqWarning, stacklevel=6)
            with rewriter.attributed("put_back", "passes/verify_lowering.py"):
                put_back(rewriter, node, context.regions[name], f"its kernel failed verification: {why}")

    def _compare(self, rewriter: Rewriter, batch: Batch) -> dict[str, str]:
        """What is wrong with which kernel, on one batch."""
        context, wrong = rewriter.context, dict[str, str]()
        try:
            _Verifier(rewriter.gm, context.regions, self, wrong).run_batch(batch)
        except FxqError:
            raise
        except Exception:  # recorded are the first samples; where the first axis is none of samples, nothing fits them
            wrong.clear()
            _Verifier(rewriter.gm, context.regions, self, wrong).run_batch(context.example)
        return wrong


def _kernel_name(gm: fx.GraphModule, node: fx.Node) -> str:
    return (
        str(getattr(gm.get_submodule(str(node.target)), "name", node.target)) if node.op == "call_module" else node.name
    )


class _Verifier(fx.Interpreter):
    """Runs the lowered graph; next to every kernel, its qdq form on the same inputs."""

    def __init__(
        self, gm: fx.GraphModule, regions: dict[str, Region], rules: VerifyLowering, wrong: dict[str, str]
    ) -> None:
        super().__init__(gm)
        self.gm, self.regions, self.rules, self.wrong = gm, regions, rules, wrong

    def run_batch(self, batch: Batch) -> None:
        """Run on one recorded batch."""
        inputs = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        values: list[Any] = list(batch.args)
        values += [batch.kwargs.get(str(n.target), n.args[0] if n.args else None) for n in inputs[len(values) :]]
        with torch.no_grad():
            self.run(*values)

    def run_node(self, n: fx.Node) -> Any:
        """The kernel's value when it is right, the reference's when it is not."""
        region = self.regions.get(n.name)
        if region is None:
            return super().run_node(n)
        values = dict(zip(region.inputs, (self.env[m] for m in n.all_input_nodes), strict=True))
        expected = run_region(self.gm, region, values)
        try:
            got = super().run_node(n)
        except FxqError:
            raise
        except Exception as error:
            self.wrong.setdefault(n.name, f"it raised {type(error).__name__}: {error}")
            return expected
        why = disagreement(expected, got, self.rules.ties, self.rules.float_tolerance)
        if why is not None:
            self.wrong.setdefault(n.name, why)
            return expected
        return got


_FEW = 4
"""Elements that may differ by one step in a tensor too small for a share: that many ties are no proof."""


def disagreement(expected: Tensor, got: Tensor, ties: float, float_tolerance: float) -> str | None:
    """How `got` differs from `expected` beyond rounding; None when it does not.

    Args:
        expected: what the qdq form computes, any shape, integer or float.
        got: what the kernel computes.
        ties: share of elements that may differ by one step (integers).
        float_tolerance: of the largest absolute expected value (floats).
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"it returns {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if expected.numel() == 0:
        return None
    difference = (expected.double() - got.double()).abs()
    most = float(difference.max())
    if expected.dtype.is_floating_point:
        limit = float_tolerance * max(float(expected.abs().max()), 1e-30)
        return f"off by {most:.3g}, more than {limit:.3g}" if not most <= limit else None
    count = int((difference > 0).sum())
    if most > 1 or count > max(_FEW, ties * expected.numel()):
        return f"off by up to {most:.0f} steps, in {100 * count / expected.numel():.2g} % of the elements"
    return None


def put_back(rewriter: Rewriter, node: fx.Node, region: Region, reason: str) -> None:
    """Replace a kernel by the qdq form that it came from."""
    copies: dict[fx.Node, fx.Node] = {}
    inputs = iter(node.all_input_nodes)
    last = node
    for inner in region.graph.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(inputs)
        elif inner.op != "output":
            args, kwargs = (fx.node.map_arg(a, copies.__getitem__) for a in (inner.args, inner.kwargs))
            last = copies[inner] = rewriter.node(inner.op, inner.target, args, kwargs, like=node, name=inner.name)
            about = info(inner)
            rewriter.describe(
                last,
                shape=about.shape,
                dtype=about.dtype,
                qparams=about.qparams,
                plan=Plan("float", reason) if about.plan is not None else None,
            )
    rewriter.replace(node, last)
