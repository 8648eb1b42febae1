"""equalize: balance the weight ranges of each channel between neighbouring layers. Optional."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.info import info
from fxq.graph.query import constant, is_op
from fxq.graph.unit import OpCall, calls_of
from fxq.ops import OPS
from fxq.pipeline.context import Context
from fxq.pipeline.float_ops import divide_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

_HOMOGENEOUS = ("relu", *OPS.with_slopes())
"""Functions f with f(c x) = c f(x) for each c > 0."""
_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
"""Pooling ops, without the suffix "1d" to "3d". They are homogeneous, too."""
_BOUNDED = ("relu6", "hardtanh")
_CONVERGED_LOG = 1e-4
"""Largest |log factor| of a round, below which the search ends."""
_MIN_LOG_FACTOR = 1e-2
"""Largest |log factor| in total, below which nothing is written: it would gain nothing."""
_MAX_FACTOR = 1e4
"""Largest factor of a channel; the smallest is its inverse."""


@dataclass(frozen=True)
class Equalize(Pass):
    """Scale the channels between two layers, so that the weights of both have the same range in each channel.

    Before: conv2d(relu(conv2d(x, w, b)), v)    After: conv2d(relu(conv2d(x, w / s, b / s)), v * s)
    Keeps: the output, to rounding in float32.

    It helps weights with one scale for the whole tensor, where channels with small weights lose precision, and
    activations with one scale, if channels with small values lose it.
    s is sqrt(range of w / range of v) by channel, chosen for all pairs of layers together. Between the layers there may
    be relu, functions with slopes and pooling, and no other op may read the scaled values. A function that clips at c,
    such as relu6, becomes minimum(relu(x), c / s), if the recipe's weights have one scale for the whole tensor: with a
    scale per channel these weights gain nothing, and one scale for all clipped values then has to hold different
    bounds.
    Insert it before `fuse`: `Recipe.static(...).insert_pass(fxq.passes.Equalize(), after="fold-batch-norm")`.
    Source: Nagel et al. 2019 (arXiv 1906.04721), section 4.1.

    Args:
        rounds: maximum number of rounds over all pairs.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> weight = fxq.TensorSpec(signed=True, symmetric=True)  # one scale for the tensor
        >>> recipe = fxq.Recipe.static(weight=weight).insert_pass(fxq.passes.Equalize(), after="fold-batch-norm")
        >>> qmodel = fxq.quantize(model, recipe, data=[torch.rand(4, 3, 8, 8)])
        >>> {edit.rule for edit in qmodel.history["equalize"].edits}
        {'equalize'}
    """

    rounds: int = 50

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"rounds": (1, math.inf)}
    name: ClassVar[str] = "equalize"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL
    latest: ClassVar[Stage | None] = Stage.CANONICAL

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Find the pairs and their factors, then write the layers."""
        layers = {node: layer for node in rewriter.nodes() if (layer := _Layer.of(rewriter.gm, node)) is not None}
        weight = rewriter.context.recipe.config.weight  # of overrides, no: `sensitivity` tries them on one calibration
        clips = weight is not None and weight.per == "tensor"
        pairs = [pair for layer in layers.values() if (pair := _pair(rewriter.gm, layer, layers, clips)) is not None]
        for _ in range(self.rounds):
            if max((pair.equalize() for pair in pairs), default=0.0) < _CONVERGED_LOG:
                break
        if all(float(pair.factors.log().abs().max()) < _MIN_LOG_FACTOR for pair in pairs):
            return
        divide_original(rewriter, {origin: by for pair in pairs for origin, by in pair.divided().items()})
        with rewriter.attributed("equalize", Equalize):
            for layer in layers.values():
                layer.write(rewriter)
            for pair in pairs:
                pair.write(rewriter)
        rewriter.erase_unused()


class _Layer:
    """Linear layer or convolution that shares its weight with no other.

    Attributes:
        node: its node.
        call: its op with options.
        matrix: the layer as a product of matrices.
        weight: its scaled weight, float64, (groups, outputs per group, inputs per group, kernel size).
        bias: its scaled bias, float64, (C,); None without one.
        axis: axis of the channels, in input and output, counted from the end.
        changed: whether weight or bias were scaled.
    """

    def __init__(self, node: fx.Node, call: OpCall, weight: Tensor, bias: Tensor | None) -> None:
        self.node, self.call = node, call
        self.matrix = LayerMatrix(call, tuple(weight.shape))
        self.axis = call.op.traits.channels or -1
        rows = self.matrix.rows(weight.detach().double())
        inputs = len(weight) // len(rows) if self.matrix.is_transposed else weight.shape[1]
        self.weight = rows.unflatten(2, (inputs, -1))
        self.bias = bias.detach().double() if bias is not None else None
        self.changed = False

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node) -> _Layer | None:
        """Layer of a node; None if it is no such layer, or if it shares weight or bias with another."""
        call = _call(gm, node)
        if call is None or not LayerMatrix.takes(call):
            return None
        own = [call.tensors.get(name) for name in ("weight", "bias")]
        weight, bias = (constant(gm, value) for value in own)
        targets = [str(n.target) for n in gm.graph.find_nodes(op="get_attr")]
        alone = all(v is None or (len(v.users) == 1 and targets.count(str(v.target)) == 1) for v in own)
        if weight is None or (own[1] is not None and bias is None) or not alone or not weight.is_floating_point():
            return None
        return cls(node, call, weight, bias)

    @property
    def out_ranges(self) -> Tensor:
        """Largest absolute weight of each output channel, (C,)."""
        return self.weight.abs().amax((2, 3)).flatten()

    @property
    def in_ranges(self) -> Tensor:
        """Largest absolute weight of each input channel, (C,)."""
        return self.weight.abs().amax((1, 3)).flatten()

    def divide_outputs(self, by: Tensor) -> None:
        """Divide each output channel by a factor, (C,)."""
        groups, outputs = self.weight.shape[:2]
        self.weight = self.weight / by.view(groups, outputs, 1, 1)
        self.bias = self.bias / by if self.bias is not None else None
        self.changed = True

    def multiply_inputs(self, by: Tensor) -> None:
        """Multiply the weights of each input channel by a factor, (C,)."""
        groups, _, inputs, _ = self.weight.shape
        self.weight = self.weight * by.view(groups, 1, inputs, 1)
        self.changed = True

    def write(self, rewriter: Rewriter) -> None:
        """Write the scaled weight and bias into the graph, if they were changed."""
        if not self.changed:
            return
        new = {"weight": self.matrix.weight(self.weight.flatten(2)), "bias": self.bias}
        for name, value in new.items():
            old: Any = self.call.tensors.get(name)
            if value is not None:
                path = str(old.target).removeprefix("fxq_data.")
                original = constant(rewriter.gm, old)
                scaled = rewriter.constant(value.to(original), f"{path}_equalized", before=self.node, like=old)
                rewriter.update(self.node, args=tuple(scaled if arg is old else arg for arg in self.node.args))


@dataclass
class _Pair:
    """Two layers with only functions between them that can be scaled.

    Attributes:
        first: the first layer.
        second: the only reader of its values.
        between: the nodes between them.
        factors: divisors of the channels between them, float64, (C,).
    """

    first: _Layer
    second: _Layer
    between: Sequence[fx.Node]
    factors: Tensor

    def equalize(self) -> float:
        """Balance both layers once. Returns the largest |log factor|."""
        written, read = self.first.out_ranges, self.second.in_ranges
        factors = torch.where((written > 0) & (read > 0), (written / read.clamp(min=1e-300)).sqrt(), 1.0)
        factors = (self.factors * factors).clamp(1 / _MAX_FACTOR, _MAX_FACTOR) / self.factors
        self.factors = self.factors * factors
        self.first.divide_outputs(factors)
        self.second.multiply_inputs(factors)
        return float(factors.log().abs().max())

    def divided(self) -> dict[str, Tensor | None]:
        """Divisor of each scaled value, by its origin, of a shape that broadcasts.

        None for a value before a bounded function: the relu of that function becomes part of the layer, so that the
        value is not in the graph any more.
        """
        nodes, factors = (self.first.node, *self.between), self._broadcastable(self.factors)
        before_bound = [i - 1 for i, node in enumerate(nodes) if i and is_op(node, *_BOUNDED)]
        return {o: None if i in before_bound else factors for i, node in enumerate(nodes) for o in info(node).origins}

    def write(self, rewriter: Rewriter) -> None:
        """Replace functions with a bound c by minimum(relu(x), c / factors)."""
        for node in self.between:
            (call,) = calls_of(rewriter.gm, node)
            if call.op.name in _BOUNDED:
                bounds = torch.full_like(self.factors, _bound(call)) / self.factors
                path = f"{info(node).path or node.name}.bound"
                bound = rewriter.constant(self._broadcastable(bounds).float(), path, before=node)
                relu = rewriter.call("relu", node.args[0], like=node, name=f"{node.name}_relu")
                rewriter.describe(relu, origins=(relu.name,))  # the model does not have this op
                minimum = rewriter.call("minimum", relu, bound, like=node, name=f"{node.name}_minimum")
                rewriter.replace(node, minimum)

    def _broadcastable(self, factors: Tensor) -> Tensor:
        return factors.view(-1, *[1] * (-self.first.axis - 1))


def _pair(gm: fx.GraphModule, first: _Layer, layers: Mapping[fx.Node, _Layer], clips: bool) -> _Pair | None:
    """Pair of a layer and the only layer that reads its values; None if there is none.

    Args:
        gm: module of the graph.
        first: the layer.
        layers: all layers by node.
        clips: whether functions between the two may clip.
    """
    node, between = first.node, list[fx.Node]()
    while len(node.users) == 1:
        (user,) = node.users
        second, call = layers.get(user), _call(gm, user)
        if call is None or call.activations != (node,):
            return None
        if second is not None:
            ones = torch.ones_like(first.out_ranges)
            return _Pair(first, second, between, ones) if second.axis == first.axis else None
        if not _scales(call, first) or (call.op.name in _BOUNDED and not clips):
            return None
        between.append(user)
        node = user
    return None


def _call(gm: fx.GraphModule, node: fx.Node) -> OpCall | None:
    """Op that a node runs; None if it runs none, or several as one unit."""
    calls = calls_of(gm, node)
    return calls[0] if len(calls) == 1 else None


def _scales(call: OpCall, layer: _Layer) -> bool:
    """Whether a function of a layer's values can be scaled channel by channel."""
    name = call.op.name
    if name in _BOUNDED:
        return call.run_time_option is None and _bound(call) > 0 and (name == "relu6" or call.options["min_val"] == 0)
    return name in _HOMOGENEOUS or name in {f"{pool}{-layer.axis - 1}d" for pool in _POOLS}


def _bound(call: OpCall) -> float:
    """Upper bound of a function that clips."""
    return 6.0 if call.op.name == "relu6" else float(call.options["max_val"])
