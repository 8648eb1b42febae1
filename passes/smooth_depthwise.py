"""smooth-depthwise: scale the input channels of depthwise convolutions, so that each uses the whole grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, samples_in
from fxq.common.isolation import seeded
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import constant, is_op, plan_of, read_attribute, swapped
from fxq.graph.unit import calls_of
from fxq.ops import OPS
from fxq.paired.paired_run import float_side
from fxq.pipeline.context import Context
from fxq.pipeline.float_moves import move_floats
from fxq.pipeline.float_ops import divide_original
from fxq.pipeline.samples import on_samples
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

_CONVS = OPS.family("conv")
_KEPT_SCALING = ("relu", *OPS.with_slopes())
"""Functions f with f(c x) = c f(x) for each c > 0."""
SHARES = (1.0, 0.85, 0.7, 0.55)
"""Tried shares of the range of a channel. Values beyond it are clipped."""
MAX_CHANNEL_DB = 60.0
"""Largest SQNR of a channel that counts, in dB: some channels have few different values, which have no error."""
_MIN_FACTOR = 1e-3
"""Smallest factor. Channels that are smaller still would follow the noise of a few samples."""


@dataclass(frozen=True)
class SmoothDepthwise(Pass):
    """Divide the input channels of depthwise convolutions by factors that multiply the scales of their weights.

    Before: conv2d(dequantize(quantize(x)), dequantize(w_int8, scale=k), b)
    After: conv2d(dequantize(quantize(x * (1 / s))), dequantize(w_int8, scale=k * s), b)
    Or, without a multiplication, if x is relu(conv2d(y, dequantize(v_int8, scale=m), c)), with or without the relu:
    x becomes relu(conv2d(y, dequantize(v_int8, scale=m / s), c / s))
    Keeps: the integers of the weights, the grid of the input, and the output up to the rounding of the input.

    A depthwise convolution reads each channel with weights of its own, which have a scale of their own. So its input
    can have a scale for each channel, at no cost to the weights. In mobile networks, the ranges of channels often
    differ by a factor of ten, and with one scale the small ones have few bits.
    s is the range of a channel relative to the grid, or a share of it if that gives a smaller squared error: a few
    large values are worth clipping. s is 1 for channels that gain nothing. Other inputs are multiplied where they are
    computed in float.
    Half of the recorded samples determines the ranges, the other half the errors of the channels. If they gain too
    little on average, nothing is changed.
    Source: Xiao et al. 2023 (SmoothQuant, arXiv 2211.10438), equation 3, with alpha 1: exact for weights with a scale
    per input channel.

    Args:
        gain: minimum SQNR in dB that the channels of an input must gain on average.
        enough: mean SQNR of the channels in dB from which an input is left alone.
        samples: number of samples to use.
        least: minimum number of values per channel. With fewer, the ranges are not known well, and nothing changes.
    """

    gain: float = 3.0
    enough: float = 40.0
    samples: int = 64
    least: int = 512

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "gain": (0.0, math.inf),
        "enough": (-math.inf, math.inf),
        "samples": (1, math.inf),
        "least": (1, math.inf),
    }
    name: ClassVar[str] = "smooth-depthwise"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def samples_read(self) -> int:
        return self.samples

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        return any(config.activation is not None for config in configs)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Measure the ranges and errors of all inputs, and scale those that gain enough."""
        context = rewriter.context
        inputs = on_samples(context, self.samples, lambda batches: _seen(rewriter.gm, context, batches))
        for depthwise_input in inputs if context.samples else ():
            before, after = depthwise_input.sqnr
            depthwise_input.include_later()
            enough_values = depthwise_input.values >= self.least
            if enough_values and before < self.enough and after >= before + self.gain:
                with rewriter.attributed("smooth_depthwise", SmoothDepthwise):
                    _write(rewriter, depthwise_input)


@dataclass
class _Input:
    """Quantized input of depthwise convolutions.

    Attributes:
        quantize: node that quantizes it.
        grid: its grid.
        source: layer that computes it, which takes the factors; None: it is multiplied.
        layers: the convolutions that read it.
        axis: axis of its channels, counted from the end.
        low: minimum of each channel, (C,).
        high: maximum of each channel, (C,), both in the samples for the ranges.
        noise: squared errors of each channel, float64, (1 + len(SHARES), C): on the grid, and with each share.
        power: squares of each channel, float64, (C,).
        values: number of values per channel so far.
        later: minimum and maximum of each channel, (2, C), in the samples for the errors.
    """

    quantize: fx.Node
    grid: QParams
    source: _Source | None
    layers: Sequence[_Layer]
    axis: int
    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    noise: Tensor = field(default_factory=lambda: torch.zeros(()))
    power: Tensor = field(default_factory=lambda: torch.zeros(()))
    values: int = 0
    later: Tensor = field(default_factory=lambda: torch.zeros(2))

    def see(self, x: Tensor, share: float) -> None:
        """Use the first `share` of the values for the ranges, and the others for the errors."""
        rows = x.movedim(self.axis, 0).flatten(1)
        self.values += rows.shape[1]
        for_ranges, for_errors = rows.tensor_split([round(share * rows.shape[1])], dim=1)
        if for_ranges.numel():
            self.low, self.high = _around(for_ranges, self.low, self.high)
        if for_errors.numel() and self.low.dim():
            self.noise = self.noise + torch.stack([self._noise(for_errors, factors) for factors in self.ways])
            self.power = self.power + for_errors.double().square().sum(1)
            self.later = _around(for_errors, *self.later)

    def include_later(self) -> None:
        """Widen the ranges to all samples, once the errors are known."""
        self.low, self.high = torch.minimum(self.low, self.later[0]), torch.maximum(self.high, self.later[1])

    def _noise(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Squared error of each channel of values (C, N) on the grid, divided by factors (C,): float64, (C,)."""
        by = factors[:, None]
        return (self.grid.rounded(rows / by) * by - rows).double().square().sum(1)

    @property
    def filled(self) -> Tensor:
        """Divisors of the channels, (C,), by which each fills the grid. A channel that was always zero has 1."""
        low, high = (float(self.grid.s * (q - self.grid.z)) for q in (self.grid.qmin, self.grid.qmax))
        filled = torch.stack([x / end for x, end in ((self.low, low), (self.high, high)) if end]).amax(0)
        return torch.where(filled > 0, filled.clamp(min=_MIN_FACTOR), 1.0)

    @property
    def ways(self) -> Tensor:
        """Tried divisors of the channels, (1 + len(SHARES), C): 1, and the shares of `filled`."""
        return torch.stack([torch.ones_like(self.filled), *(share * self.filled for share in SHARES)])

    @property
    def factors(self) -> Tensor:
        """Divisors of the channels, (C,): of 1 and the shares of `filled`, the one with the smallest error."""
        return self.ways.gather(0, self.noise.argmin(0, keepdim=True))[0]

    @property
    def sqnr(self) -> tuple[float, float]:
        """Mean SQNR of the channels in dB, without factors and with them, each at most `MAX_CHANNEL_DB`."""
        if not self.power.dim():
            return math.inf, math.inf
        noises = torch.stack([self.noise[0], self.noise.amin(0)])
        used = self.power > 0
        ratios = (self.power / noises.clamp(min=1e-300))[:, used].log10().clamp(max=MAX_CHANNEL_DB / 10)
        before, after = (10 * ratios.mean(1)).tolist()
        return before, after


@dataclass(frozen=True)
class _Layer:
    """Depthwise convolution with integer input and integer weight.

    Attributes:
        node: node that runs it, possibly with ops fused to it.
        weight: node of its dequantized weight.
        scale: scales of the weight, (O,).
        axis: axis of its channels, counted from the end.
    """

    node: fx.Node
    weight: fx.Node
    scale: Tensor
    axis: int

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node, read: fx.Node) -> _Layer | None:
        """Depthwise convolution of a node that reads `read` once, as its input; None if it is no such layer."""
        plan, calls = info(node).plan, calls_of(gm, node)
        if plan is None or plan.precision != "int8" or not calls or calls[0].op.name not in _CONVS:
            return None
        weight: Any = calls[0].tensors.get("weight")
        scale = _scale_by_channel(gm, weight)
        elsewhere = calls[0].activations != (read,) or any(read in call.activations for call in calls[1:])
        if scale is None or elsewhere or (info(weight).shape or ())[1:2] != (1,) or calls[0].options["groups"] < 2:
            return None
        return cls(node, weight, scale, calls[0].op.traits.channels or 0)


@dataclass(frozen=True)
class _Source:
    """Layer with a weight that has a scale per output channel, and with functions after it that keep scaling.

    Attributes:
        node: node that runs it, whose only reader is a quantize.
        weight: node of its dequantized weight.
        scale: scales of the weight, (C,).
        bias: node of its bias; None without one.
        axis: axis of its channels, counted from the end.
    """

    node: fx.Node
    weight: fx.Node
    scale: Tensor
    bias: fx.Node | None
    axis: int

    @classmethod
    def of(cls, gm: fx.GraphModule, node: Any) -> _Source | None:
        """Layer that computes a value; None if its scales cannot take factors of the value's channels."""
        calls = calls_of(gm, node) if isinstance(node, fx.Node) and len(node.users) == 1 else ()
        if not calls or calls[0].op.name not in _CONVS:
            return None
        weight: Any = calls[0].tensors.get("weight")
        bias: Any = calls[0].tensors.get("bias")
        scale = _scale_by_channel(gm, weight)
        kept = all(call.op.name in _KEPT_SCALING and len(call.activations) == 1 for call in calls[1:])
        if scale is None or not kept or (bias is not None and constant(gm, bias) is None):
            return None
        return cls(node, weight, scale, bias, calls[0].op.traits.channels or 0)

    def write(self, rewriter: Rewriter[Context], factors: Tensor) -> None:
        """Divide the output channels by factors, (C,)."""
        _multiply(rewriter, self.weight, self.scale, 1 / factors)
        if self.bias is not None:
            values = constant(rewriter.gm, self.bias)
            assert values is not None  # `of` checks it
            path = str(self.bias.target).removeprefix("fxq_data.").replace(".", "_")
            new = rewriter.constant(values / factors, f"{path}_smoothed", before=self.node, like=self.bias)
            rewriter.update(self.node, args=swapped(self.node.args, {self.bias: new}))
        divide_original(rewriter, dict.fromkeys(info(self.node).origins, _along(factors, self.axis)))


def _along(factors: Tensor, axis: int) -> Tensor:
    """Factors (C,) in a shape that broadcasts along an axis, which is counted from the end."""
    return factors.view(-1, *[1] * (-axis - 1))


def _scale_by_channel(gm: fx.GraphModule, weight: Any) -> Tensor | None:
    """Scales of a dequantized weight, (O,); None if it has no scale per output channel, or several readers."""
    if not is_op(weight, "dequantize") or len(weight.users) != 1 or not info(weight).stands_for:
        return None
    grid = grid_of(gm, weight)
    per_channel = grid is not None and grid.axis == 0 and grid.block is None
    return constant(gm, weight.kwargs.get("scale")) if per_channel else None


def _multiply(rewriter: Rewriter, weight: fx.Node, scale: Tensor, by: Tensor) -> None:
    """Multiply the scales of a weight, and the float weight, by a factor per output channel, (O,)."""
    name = info(weight).stands_for
    real = read_attribute(rewriter.gm, name)
    path = name.removeprefix("fxq_data.").replace(".", "_")
    new_real = rewriter.constant(real * by.view(-1, *[1] * (real.dim() - 1)), f"{path}_smoothed", before=weight)
    new_scale = rewriter.constant(scale * by, f"{path}_smoothed_scale", before=weight)
    rewriter.update(weight, kwargs={**weight.kwargs, "scale": new_scale})
    rewriter.describe(weight, stands_for=str(new_real.target))
    rewriter.erase(new_real)


def _around(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Minimum and maximum of each channel, (2, C), widened to hold the values, (C, N)."""
    return torch.stack([torch.minimum(low, rows.amin(1)), torch.maximum(high, rows.amax(1))])


def _seen(gm: fx.GraphModule, context: Context, batches: Sequence[Batch]) -> list[_Input]:
    """Inputs of the depthwise convolutions of a qdq graph, after they have seen recorded samples in float."""
    inputs = {x.quantize: x for node in gm.graph.nodes if (x := _input(gm, node)) is not None}
    batches = [batch for batch in batches if samples_in(batch) != 0]
    floats = context.floats.of(gm, context) if inputs and batches else None
    for i, batch in enumerate(batches if inputs else ()):
        share = 0.5 if len(batches) == 1 else float(i < (len(batches) + 1) // 2)
        with torch.no_grad(), seeded():
            side = float_side(gm, [batch], inputs, floats)
            for node in side.program.graph.nodes:
                for value in side.step(node):
                    if node in inputs:
                        inputs[node].see(value, share)
    return list(inputs.values())


def _input(gm: fx.GraphModule, node: fx.Node) -> _Input | None:
    """Input that a node quantizes, if only depthwise convolutions read it, and it can be divided; else None."""
    grid = grid_of(gm, node) if is_op(node, "quantize") else None
    if grid is None or grid.axis is not None:
        return None
    readers = [_Layer.of(gm, user, dq) for dq in node.users for user in dq.users]
    layers = [layer for layer in readers if layer is not None]
    if not layers or len(layers) < len(readers) or not all(is_op(dq, "dequantize") for dq in node.users):
        return None
    source, axis = _Source.of(gm, node.args[0]), layers[0].axis
    divisible = source.axis == axis if source is not None else _is_float(node.args[0])
    return _Input(node, grid, source, layers, axis) if divisible else None


def _is_float(value: Any) -> bool:
    """Whether a value is computed in float, apart from additions and multiplications of constants after it."""
    plan = plan_of(value)
    if plan is None or plan.in_float:
        return plan is not None
    if plan.emits is not None or not is_op(value, "add", "mul"):
        return False
    activations: list[Any] = [x for x in value.args if isinstance(x, fx.Node) and x.op != "get_attr"]
    if len(activations) != 1:
        return False
    (read,) = activations
    while is_op(read, "quantize", "dequantize"):
        read = read.args[0]
    return _is_float(read)


def _write(rewriter: Rewriter[Context], depthwise_input: _Input) -> None:
    """Divide an input by its factors, and multiply the scales of the weights by them."""
    factors, source = depthwise_input.factors, depthwise_input.source
    if source is not None:
        source.write(rewriter, factors)
    else:
        _insert_division(rewriter, depthwise_input, factors)
    for layer in depthwise_input.layers:
        _multiply(rewriter, layer.weight, layer.scale, factors.repeat_interleave(len(layer.scale) // len(factors)))
    rewriter.erase_unused()


def _insert_division(rewriter: Rewriter, depthwise_input: _Input, factors: Tensor) -> None:
    """Insert a multiplication of an input by the inverse factors."""
    old = depthwise_input.quantize
    value: Any = old.args[0]
    by = _along(1 / factors, depthwise_input.axis)
    inverse = rewriter.constant(by, f"{info(value).path or value.name}.smoothing", before=old)
    typed, name = (info(value).shape, torch.float32), f"{value.name}_smooth"
    product = rewriter.call("mul", value, inverse, before=old, name=name, typed=typed, like=old)
    why = "divides by the factors that multiply the scales of the weight after it"
    rewriter.describe(product, origins=(), plan=Plan(Decision("float", "", why)))
    rewriter.update(old, args=swapped(old.args, {value: product}))
    move_floats(rewriter, value)
