"""correct-bias: the mean error of a layer's integers goes into its bias. Optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, constant, is_op, read_attribute
from fxq.graph.run import Runner
from fxq.graph.unit import OpCall, calls_of
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class CorrectBias(Pass):
    """Fit every int8 layer to its float form: per channel, a factor on the weight's scale and a shift of the bias.

    Before: conv2d(x, w_int8 * scale, b)    After: conv2d(x, w_int8 * (k * scale), b + c)
    Keeps: the integers of the weight. k and c are the least-squares line from what the integers compute to what the
    float layer computes, on the recorded samples, layer by layer behind the corrected ones. With `scale=False`, k is 1
    and c the mean error.
    Behind insert-qdq with `Recipe.static(correct_bias=True)`.
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
        """Run the float and the integer graph side by side on all recorded samples, node by node."""
        context: Context = rewriter.context
        with torch.no_grad():
            gm = rewriter.gm
            batches = context.samples or [context.example]
            runs = [(_Run(gm, batch), _Run(gm, batch, real=True)) for batch in batches]
            for node in rewriter.nodes():
                plan = info(node).plan
                calls = calls_of(rewriter.gm, node) if plan is not None and plan.fate == "int8" else ()
                if calls and calls[0].op.quant.bias is not None:
                    self._correct(rewriter, node, calls[0], runs)
                _step(runs, node)

    def _correct(self, rewriter: Rewriter, node: fx.Node, call: OpCall, runs: Runs) -> None:
        """Fit one layer. One without a bias stays as it is."""
        old = call.tensors.get(call.op.quant.bias or "")
        weight = call.tensors.get(call.op.quant.weight or "")
        bias = constant(rewriter.gm, old)
        if bias is None or not isinstance(weight, fx.Node):
            return
        found = _Moments()
        for pair in runs:
            found.add(*(run.result(call, len(bias)) - bias.double()[:, None] for run in pair))
        if found.count < self.least:
            return
        factor = self._factor(rewriter, found, weight)
        shift = found.wanted - factor.repeat(len(bias) // len(factor)) * found.got
        with rewriter.attributed("correct_bias", CorrectBias):
            name = info(node).path or node.name
            new = rewriter.constant((bias + shift).to(bias.dtype), f"{name}.bias_corrected", before=node, like=node)
            rewriter.describe(new, stands_for=str(getattr(old, "target", "")))
            rewriter.update(node, args=fx.node.map_arg(node.args, lambda n: new if n is old else n))
            changed = [new]
            if bool((factor != 1).any()):
                changed += _rescale(rewriter, weight, factor)
        for made in changed:
            _step(runs, made)
        for _, real in runs:
            real.values[new] = bias  # the float layer keeps its own

    def _factor(self, rewriter: Rewriter, found: _Moments, weight: fx.Node) -> Tensor:
        """The slope of the line through (got, wanted) for each scale of the weight; 1 where there is none to fit.

        Groups of a transposed convolution share scales: one line fits the channels of all of them.
        """
        scale = constant(rewriter.gm, weight.kwargs.get("scale")) if is_op(weight, "dequantize") else None
        if not self.scale or scale is None or len(weight.users) > 1:
            return torch.ones(1, dtype=torch.float64)
        spread, together = (sums.view(-1, len(scale)).sum(0) for sums in (found.spread, found.together))
        slope = together / spread.clamp(min=1e-30)
        usable = (spread > 0) & ((slope - 1).abs() < _MOST)
        return torch.where(usable, slope, torch.ones_like(slope))


@dataclass
class _Moments:
    """Of pairs of values by channel, over any number of batches: nothing is kept but sums.

    Attributes:
        count: pairs in each channel.
        got, wanted: the means, float64, (C,).
        spread: sum of the squares of got - mean.
        together: sum of the products of (got - mean) and (wanted - mean).

    Source: Chan et al. 1983, "Algorithms for computing the sample variance", equation 1.5 (sums of two parts).
    """

    count: int = 0
    got: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    wanted: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    spread: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    together: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, got: Tensor, wanted: Tensor) -> None:
        """Take in pairs, float64, (C, n) each."""
        n, total = got.shape[1], self.count + got.shape[1]
        if n == 0:
            return
        means = got.mean(1), wanted.mean(1)
        centred = got - means[0][:, None]
        apart = means[0] - self.got, means[1] - self.wanted
        share = self.count * n / total
        self.spread = self.spread + (centred * centred).sum(1) + share * apart[0] ** 2
        self.together = self.together + (centred * wanted).sum(1) + share * apart[0] * apart[1]
        self.got, self.wanted = self.got + apart[0] * (n / total), self.wanted + apart[1] * (n / total)
        self.count = total


_MOST = 0.1
"""Factors further from 1 than this are no rounding error of an 8-bit weight: the layer's input is to blame."""


def _rescale(rewriter: Rewriter, weight: fx.Node, factor: Tensor) -> list[fx.Node]:
    """Multiply the scale of a dequantized weight, per channel; the nodes whose values changed."""
    old = constant(rewriter.gm, weight.kwargs["scale"])
    assert old is not None  # there is a factor for each
    name = str(getattr(weight.args[0], "target", weight.name)).removesuffix("_int8").removeprefix("fxq_data.")
    scaled = (old.double() * factor.to(old.device)).to(torch.float32)
    scale = rewriter.constant(scaled, f"{name}_scale_corrected", before=weight)
    rewriter.update(weight, kwargs={**weight.kwargs, "scale": scale})
    return [scale, weight]


class _Run(Runner):
    """One batch in integer arithmetic; or in float: conversions left out, weights as they were.

    Args:
        real: whether it is the one in float.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch, real: bool = False) -> None:
        super().__init__(gm, copied(batch))
        self._real = real

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        if self._real and info(node).stands_for:
            return read_attribute(self.gm, info(node).stands_for)
        if self._real and is_op(node, *CONVERSIONS):
            return self.values[node.args[0]]  # type: ignore[index]
        return super().compute(node)

    def free(self, node: fx.Node) -> None:
        """Let go of a value. A weight as the model holds it takes no memory, and may be read anew."""
        if node.op != "get_attr":
            super().free(node)

    def result(self, call: OpCall, channels: int) -> Tensor:
        """What a layer computes: float64, (channels, values per channel)."""
        tensors = {k: self.values[v] if isinstance(v, fx.Node) else v for k, v in call.tensors.items()}
        made: Tensor = call.op.target(**tensors, **call.options)
        axis = call.op.quant.channels or 0
        return made.movedim(axis, 0).reshape(channels, made.numel() // channels).double()


Runs = Sequence[tuple[_Run, _Run]]
"""Of every batch, the run in integers and the one in float."""


def _step(runs: Runs, node: fx.Node) -> None:
    """Compute a node for every batch; a weight once for all of them."""
    weight = node.op == "get_attr" or is_op(node, "dequantize")
    once = weight and all(read.op == "get_attr" for read in node.all_input_nodes)
    for side in zip(*runs, strict=True):
        value = side[0].compute(node) if once else None
        for run in side:
            if once:
                run.put(node, value)
            else:
                run.step(node)
