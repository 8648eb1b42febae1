"""correct-bias: the mean error of a layer's integers goes into its bias, and its mean gain into the weight's scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.progress import progress_bar
from fxq.graph.info import info
from fxq.graph.query import arguments_of, constant, is_op, op_of, read_attribute
from fxq.graph.run import Modules, Runner
from fxq.graph.unit import calls_of, unit_of
from fxq.ledger.side_by_side import Program
from fxq.pipeline.context import Context
from fxq.pipeline.float_form import FloatForm
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class CorrectBias(Pass):
    """Fit every int8 layer to its float form: per channel, a factor on the weight's scale and a shift of the bias.

    Before: conv2d(x, w_int8 * scale, b)    After: conv2d(x, w_int8 * (k * scale), k * b + c)
    Keeps: the integers of the weight. k and c are the least-squares line from what the integers compute to what the
    float layer computes, on recorded samples. Both graphs run side by side, batch by batch, each layer behind those
    before it as they are corrected by what was seen so far: of all values only sums are kept.
    Layers that measure their ranges at run time, and recipes without calibration data, are left alone.
    Source: Nagel et al. 2019, section 4.2 and appendix D (empirical bias correction); the factor is the same idea for
    the second moment.

    Args:
        scale: fit the weight's scale too.
        least: layers with fewer values per channel in the recorded samples are left alone: a fit would follow noise.
        samples: how many samples to look at.
    """

    scale: bool = True
    least: int = 64
    samples: int = 64

    name: ClassVar[str] = "correct-bias"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def samples_read(self) -> int:
        return self.samples

    def run(self, rewriter: Rewriter) -> None:
        """Run the float and the integer graph side by side on the recorded samples, then write what was found."""
        context: Context = rewriter.context
        layers = {node: layer for node in rewriter.nodes() if (layer := self._layer(rewriter.gm, node)) is not None}
        if not layers or not context.samples:
            return
        with torch.no_grad(), progress_bar("correcting", len(context.samples), context.progress) as advance:
            weights = _weights(rewriter.gm)
            for batch in context.samples:
                modules = [Program(rewriter.gm, rewriter.graph).modules for _ in range(2)]  # what one keeps is its own
                integers, real = (
                    _Integers(rewriter.gm, batch, modules[0], layers, weights),
                    _Real(rewriter.gm, batch, modules[1], layers),
                )
                for node in rewriter.nodes():
                    real.step(node)
                    integers.step(node)
                advance()
        for node, layer in layers.items():
            if layer.line is not None:
                with rewriter.attributed("correct_bias", CorrectBias):
                    _write(rewriter, node, layer, *layer.line)
        if any(layer.line is not None for layer in layers.values()):
            rewriter.erase_unused()  # the biases and scales before

    def _layer(self, gm: fx.GraphModule, node: fx.Node) -> _Layer | None:
        """What is to be fitted of a node; None where that is nothing: one without a bias stays as it is."""
        plan, calls = info(node).plan, calls_of(gm, node)
        if plan is None or plan.fate != "int8" or not calls or (plan.reads and plan.reads.range == "measured"):
            return None
        call = calls[0]
        old, weight = (call.tensors.get(name or "") for name in (call.op.quant.bias, call.op.quant.weight))
        bias = constant(gm, old)
        if bias is None or not isinstance(old, fx.Node) or not isinstance(weight, fx.Node):
            return None
        scale = constant(gm, weight.kwargs.get("scale")) if is_op(weight, "dequantize") else None
        fitted = self.scale and scale is not None and len(weight.users) == 1
        return _Layer(old, bias, weight, call.op.quant.channels or 0, scale if fitted else None, self.least)


@dataclass
class _Layer:
    """What is known of a layer, and of the pairs of values that its integers and its float form compute.

    Attributes:
        old, bias: the node of its bias, and its values, (C,).
        weight: the node of its weight.
        axis: the axis of the channels in its result.
        scale: the scales of the weight; None where they are not fitted.
        least: of fewer pairs in a channel there is no line.
        moments: of the pairs.
        wanted: what its float form computed of the batch that is run.
        line: by channel, the factor of the scales and the shift behind it, float64; None before there are enough pairs.
    """

    old: fx.Node
    bias: Tensor
    weight: fx.Node
    axis: int
    scale: Tensor | None
    least: int
    moments: Moments = field(default_factory=lambda: Moments())
    wanted: Tensor | None = None
    line: tuple[Tensor, Tensor] | None = None

    def keep(self, wanted: Tensor) -> Tensor:
        """Take what the float form computes; the same."""
        self.wanted = wanted
        return wanted

    def correct(self, got: Tensor) -> Tensor:
        """Take what the integers compute; the same, corrected by what has been seen so far."""
        assert self.wanted is not None  # the float form runs first
        size = max(_AT_ONCE // max(got[:1].numel(), 1), 1) if got.dim() > 1 else len(got)
        for pair in zip(got.split(size), self.wanted.split(size), strict=True):
            self.moments.add(*pair, self.axis)
        self.wanted = None
        if self.moments.count < self.least:
            return got
        factor = self._factor()
        shift = self.moments.wanted - factor * self.moments.got
        self.line = factor, shift
        shape = [1] * got.dim()
        shape[self.axis] = -1
        return torch.addcmul(shift.to(got.dtype).view(shape), got, factor.to(got.dtype).view(shape))

    def _factor(self) -> Tensor:
        """The slope of the line through (got, wanted), by channel; 1 where there is none to fit.

        Groups of a transposed convolution share scales: one line fits the channels of all of them.
        """
        if self.scale is None:
            return torch.ones_like(self.moments.got)
        spread, together = (s.view(-1, len(self.scale)).sum(0) for s in (self.moments.spread, self.moments.together))
        slope = together / spread.clamp(min=1e-30)
        usable = (spread > 0) & ((slope - 1).abs() < _MOST)
        return torch.where(usable, slope, torch.ones_like(slope)).repeat(len(self.bias) // len(self.scale))


_AT_ONCE = 1 << 20
"""Values whose squares are held at a time."""
_MOST = 0.1
"""Factors further from 1 than this are no rounding error of an 8-bit weight: the layer's input is to blame."""


@dataclass
class Moments:
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

    def add(self, got: Tensor, wanted: Tensor, axis: int) -> None:
        """Take in pairs: two tensors of one shape, with the channels on `axis`."""
        if got.numel() == 0:
            return
        others = [i for i in range(got.dim()) if i != axis % got.dim()]
        n = got.numel() // got.shape[axis]
        means = [_sum(x, others, keepdim=True) / n for x in (got, wanted)]
        centred = [x - mean.to(x.dtype) for x, mean in zip((got, wanted), means, strict=True)]
        total, share = self.count + n, self.count * n / (self.count + n)
        apart = means[0].flatten() - self.got, means[1].flatten() - self.wanted
        self.spread = self.spread + _sum(centred[0] * centred[0], others) + share * apart[0] ** 2
        self.together = self.together + _sum(centred[0] * centred[1], others) + share * apart[0] * apart[1]
        self.got, self.wanted = self.got + apart[0] * (n / total), self.wanted + apart[1] * (n / total)
        self.count = total


def _sum(x: Tensor, axes: list[int], keepdim: bool = False) -> Tensor:
    """The sum over some axes, which may be none, float64."""
    return x.sum(axes, keepdim, dtype=torch.float64) if axes else x.double()


class _Real(FloatForm):
    """One batch in float."""

    def __init__(self, gm: fx.GraphModule, batch: Batch, modules: Modules, layers: Mapping[fx.Node, _Layer]) -> None:
        super().__init__(gm, copied(batch), modules=modules)
        self._layers = layers

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        if node in self._layers:
            return _run_layer(self, node, self._layers[node].keep)
        return super().compute(node)


class _Integers(Runner):
    """One batch in integer arithmetic, each layer corrected by what has been seen so far.

    Args:
        weights: the values of what is computed of constants alone, the same for all batches.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        modules: Modules,
        layers: Mapping[fx.Node, _Layer],
        weights: Mapping[fx.Node, Tensor],
    ) -> None:
        super().__init__(gm, copied(batch), modules=modules)
        self._layers, self._weights = layers, weights

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        if node in self._weights:
            return self._weights[node]
        if node in self._layers:
            return _run_layer(self, node, self._layers[node].correct)
        return super().compute(node)


def _weights(gm: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The dequantized weights, by node."""
    dequantized = (node for node in gm.graph.nodes if is_op(node, "dequantize"))
    constants = [node for node in dequantized if all(read.op == "get_attr" for read in node.all_input_nodes)]
    read = {value: read_attribute(gm, str(value.target)) for node in constants for value in node.all_input_nodes}
    found = {}
    for node in constants:
        args, kwargs = arguments_of(node, read)
        found[node] = node.target(*args, **kwargs)
    return found


def _run_layer(runner: Runner, node: fx.Node, see: Callable[[Tensor], Tensor]) -> Any:
    """The value of a node whose first op is a layer; `see` is handed what the layer computes, and says what to take."""
    args, kwargs = arguments_of(node, runner.values)
    unit = unit_of(runner.gm, node)
    if unit is None:
        return see(node.target(*args, **kwargs))  # type: ignore[operator]
    inside = Runner(unit, Batch(tuple(args)))
    layer = next(inner for inner in unit.graph.nodes if op_of(inner) is not None)
    value = None
    for inner in unit.graph.nodes:
        value = inside.put(inner, see(inside.compute(inner))) if inner is layer else inside.step(inner)
    return value


def _write(rewriter: Rewriter, node: fx.Node, layer: _Layer, factor: Tensor, shift: Tensor) -> None:
    """Write the line of a layer into its bias and the scales of its weight."""
    name = info(node).path or node.name
    corrected = (factor * layer.bias.double().cpu() + shift.cpu()).to(layer.bias)
    new = rewriter.constant(corrected, f"{name}.bias_corrected", before=node, like=node)
    rewriter.describe(new, stands_for=str(getattr(layer.old, "target", "")))
    rewriter.update(node, args=fx.node.map_arg(node.args, lambda n: new if n is layer.old else n))
    if layer.scale is not None and bool((factor != 1).any()):
        weight, scale = layer.weight, layer.scale
        name = str(getattr(weight.args[0], "target", weight.name)).removesuffix("_int8").removeprefix("fxq_data.")
        scaled = (scale.double() * factor[: len(scale)].to(scale.device)).to(torch.float32)
        made = rewriter.constant(scaled, f"{name}_scale_corrected", before=weight)
        rewriter.update(weight, kwargs={**weight.kwargs, "scale": made})
