"""correct-bias: the mean error of a layer's integers goes into its bias. Optional."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.data import Batch
from fxq.evaluate import inputs_for, value_of
from fxq.graph import constant, info, is_op, read_attribute
from fxq.passbase import Pass, Stage
from fxq.rewrite import Rewriter
from fxq.unit import OpCall, calls_of


@dataclass(frozen=True)
class CorrectBias(Pass):
    """Fit every int8 layer to its float form: per channel, a factor on the weight's scale and a shift of the bias.

    Before: conv2d(x, w_int8 * scale, b)    After: conv2d(x, w_int8 * (k * scale), b + c)
    Keeps: the integers of the weight. k and c are the least-squares line from what the integers compute to what the
    float layer computes, on the recorded samples, layer by layer behind the corrected ones. With `scale=False`, k is 1
    and c the mean error.
    In the pipeline of the preset "static_corrected": `Recipe.static(correct_bias=True)`.
    Source: Nagel et al. 2019, section 4.2 and appendix D (empirical bias correction); the factor is the same idea for
    the second moment.

    Args:
        scale: fit the weight's scale too.
        least: layers with fewer values per channel in the recorded samples are left alone: a fit would follow noise.
    """

    scale: bool = True
    least: int = 64

    name: ClassVar[str] = "correct-bias"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Run the float and the integer graph side by side on the recorded samples."""
        context = rewriter.context
        with torch.no_grad():
            runs = [_SideBySide(rewriter, batch) for batch in context.samples or [context.example]]
            for node in rewriter.nodes():
                plan = info(node).plan
                calls = calls_of(rewriter.gm, node) if plan is not None and plan.fate == "int8" else ()
                if calls and calls[0].op.quant.bias is not None:
                    self._correct(rewriter, node, calls[0], runs)
                for run in runs:
                    run.step(node)

    def _correct(self, rewriter: Rewriter, node: fx.Node, call: OpCall, runs: list[_SideBySide]) -> None:
        """Fit one layer. One without a bias stays as it is."""
        old = call.tensors.get(call.op.quant.bias or "")
        weight = call.tensors.get(call.op.quant.weight or "")
        bias = constant(rewriter.gm, old)
        if bias is None or not isinstance(weight, fx.Node):
            return
        pairs = [run.results(call, len(bias)) for run in runs]
        got, wanted = (torch.cat([pair[i] for pair in pairs], 1).double() - bias.double()[:, None] for i in (0, 1))
        if got.shape[1] < self.least:
            return
        factor = self._factor(got, wanted, weight)
        shift = (wanted - factor[:, None] * got).mean(1)
        with rewriter.attributed("correct_bias", CorrectBias):
            name = info(node).path or node.name
            new = rewriter.constant((bias + shift).to(bias.dtype), f"{name}.bias_corrected", before=node, like=node)
            rewriter.context.float_weights[new.name] = str(getattr(old, "target", ""))
            rewriter.update(node, args=fx.node.map_arg(node.args, lambda n: new if n is old else n))
            changed = [new]
            if bool((factor != 1).any()):
                changed += _rescale(rewriter, weight, factor)
        for run in runs:
            for made in changed:
                run.step(made)
            run.real[new] = bias  # the float layer keeps its own

    def _factor(self, got: Tensor, wanted: Tensor, weight: fx.Node) -> Tensor:
        """The slope of the line through (got, wanted), (C,); 1 where there is none to fit, or the weight is shared."""
        ones = torch.ones(len(got), dtype=torch.float64)
        if not self.scale or len(weight.users) > 1 or not is_op(weight, "dequantize_channel"):
            return ones
        centred = got - got.mean(1, keepdim=True)
        spread = (centred * centred).sum(1)
        slope = (centred * (wanted - wanted.mean(1, keepdim=True))).sum(1) / spread.clamp(min=1e-30)
        usable = (spread > 0) & ((slope - 1).abs() < _MOST)
        return torch.where(usable, slope, ones)


_MOST = 0.1
"""Factors further from 1 than this are no rounding error of an 8-bit weight: the layer's input is to blame."""


def _rescale(rewriter: Rewriter, weight: fx.Node, factor: Tensor) -> list[fx.Node]:
    """Multiply the scale of a dequantized weight, per channel; the nodes whose values changed."""
    qp = info(weight).qparams
    assert qp is not None
    scaled = replace(qp, scale=(qp.scale.double() * factor).to(torch.float32))
    values, _, zero = weight.args
    name = str(getattr(values, "target", weight.name)).removesuffix("_int8").removeprefix("fxq_data.")
    scale = rewriter.constant(scaled.scale, f"{name}_scale_corrected", before=weight)
    rewriter.update(weight, args=(values, scale, zero))
    rewriter.describe(weight, qparams=scaled)
    return [scale, weight]


class _SideBySide:
    """The values of one batch in integer arithmetic, and in float: conversions left out, weights as they were."""

    def __init__(self, rewriter: Rewriter, batch: Batch) -> None:
        self.gm, self.weights = rewriter.gm, rewriter.context.float_weights
        self.integer = inputs_for(self.gm.graph, batch)
        self.real = dict(self.integer)

    def step(self, node: fx.Node) -> None:
        """Compute a node in both."""
        if node.op == "placeholder":
            return
        self.integer[node] = value_of(self.gm, node, self.integer)
        if node.name in self.weights:
            self.real[node] = read_attribute(self.gm, self.weights[node.name])
        elif is_op(node, "quantize", "dequantize", "requantize"):
            self.real[node] = self.real[node.args[0]]  # type: ignore[index]
        else:
            self.real[node] = value_of(self.gm, node, self.real)

    def results(self, call: OpCall, channels: int) -> tuple[Tensor, Tensor]:
        """What a layer computes in integers and in float: (channels, values per channel) each."""

        def result(env: dict[fx.Node, Any]) -> Tensor:
            tensors = {k: env[v] if isinstance(v, fx.Node) else v for k, v in call.tensors.items()}
            made: Tensor = call.op.target(**tensors, **call.options)
            weight_rank = tensors[call.op.quant.weight or ""].dim()
            axis = -1 if call.op.name == "linear" else made.dim() - weight_rank + 1
            return made.movedim(axis, 0).reshape(channels, -1)

        return result(self.integer), result(self.real)
