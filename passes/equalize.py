"""equalize: neighbouring layers share the range of each channel between their weights. Optional."""

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
from fxq.pipeline.float_ops import divide_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

_ALIKE = ("relu", "leaky_relu", "prelu")
"""Functions f with f(c x) = c f(x) for each c > 0."""
_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
"""The same, of the values of one channel; behind each name stands over how many axes."""
_BOUNDED = ("relu6", "hardtanh")
_DONE = 1e-4
"""Factors that differ from 1 by less end the search."""
_WORTH = 1e-2
"""So near to 1, factors are for nothing."""
_MOST = 1e4
"""Nothing is scaled by more, or by less than the inverse."""


@dataclass(frozen=True)
class Equalize(Pass):
    """Scale the channels between two layers so that both weights have the same range in each of them.

    Before: conv2d(relu(conv2d(x, w, b)), v)    After: conv2d(relu(conv2d(x, w / s, b / s)), v * s)
    Keeps: the output, to rounding in float32. s is sqrt(range of w / range of v) by channel, found for all pairs of
    layers together; through relu, leaky_relu, prelu and pooling, where nothing else reads what is scaled. Where values
    are cut off at c, as relu6 does, that becomes minimum(relu(x), c / s), an op of its own. For weights with one scale
    for the whole tensor: channels that are small lose nothing to those that are large.
    In front of the passes that fuse: `Recipe.static(...).insert_pass(fxq.passes.Equalize(), after="fold-batch-norm")`.
    Source: Nagel et al. 2019 (arXiv 1906.04721), section 4.1.

    Args:
        rounds: over all pairs, at most.

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

    def run(self, rewriter: Rewriter) -> None:
        """Find the pairs and their factors, then write the layers."""
        layers = {node: layer for node in rewriter.nodes() if (layer := _Layer.of(rewriter.gm, node)) is not None}
        pairs = [pair for layer in layers.values() if (pair := _pair(rewriter.gm, layer, layers)) is not None]
        for _ in range(self.rounds):
            if max((pair.equalize() for pair in pairs), default=0.0) < _DONE:
                break
        if all(float(pair.factors.log().abs().max()) < _WORTH for pair in pairs):
            return
        divide_original(rewriter, {origin: by for pair in pairs for origin, by in pair.divided().items()})
        with rewriter.attributed("equalize", Equalize):
            for layer in layers.values():
                layer.write(rewriter)
            for pair in pairs:
                pair.write(rewriter)
        rewriter.erase_unused()


class _Layer:
    """A linear layer or convolution whose weight is its own.

    Attributes:
        node, call: its node, and the op with its options.
        matrix: the layer as a product of matrices.
        weight: its weight so far, (groups, outputs, inputs, values of the kernel), the middle two of one group.
        bias: so far; None without one.
        axis: of the channels, in what it reads and in what it makes, counted from the end.
        changed: whether anything was scaled.
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
        """A node as one; None where it is none, or shares its weight or bias with another."""
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
        """The largest weight of each output channel, (C,)."""
        return self.weight.abs().amax((2, 3)).flatten()

    @property
    def in_ranges(self) -> Tensor:
        """The largest weight of each input channel, (C,)."""
        return self.weight.abs().amax((1, 3)).flatten()

    def divide_outputs(self, by: Tensor) -> None:
        """Divide what each channel makes, (C,)."""
        groups, each = self.weight.shape[:2]
        self.weight = self.weight / by.view(groups, each, 1, 1)
        self.bias = self.bias / by if self.bias is not None else None
        self.changed = True

    def multiply_inputs(self, by: Tensor) -> None:
        """Multiply the weights of each input channel, (C,)."""
        groups, _, each, _ = self.weight.shape
        self.weight = self.weight * by.view(groups, 1, each, 1)
        self.changed = True

    def write(self, rewriter: Rewriter) -> None:
        """Put the new weight and bias into the graph, where they are new."""
        if not self.changed:
            return
        new = {"weight": self.matrix.weight(self.weight.flatten(2)), "bias": self.bias}
        for name, value in new.items():
            old: Any = self.call.tensors.get(name)
            if value is not None:
                path = str(old.target).removeprefix("fxq_data.")
                kept = constant(rewriter.gm, old)
                made = rewriter.constant(value.to(kept), f"{path}_equalized", before=self.node, like=old)
                rewriter.update(self.node, args=tuple(made if arg is old else arg for arg in self.node.args))


@dataclass
class _Pair:
    """Two layers with nothing between them but functions that may be scaled.

    Attributes:
        first, second: the layers.
        between: the nodes between them.
        factors: what the channels between them are divided by, (C,).
    """

    first: _Layer
    second: _Layer
    between: Sequence[fx.Node]
    factors: Tensor

    def equalize(self) -> float:
        """Scale both once; how much, as the largest logarithm."""
        made, read = self.first.out_ranges, self.second.in_ranges
        factors = torch.where((made > 0) & (read > 0), (made / read.clamp(min=1e-300)).sqrt(), 1.0)
        factors = (self.factors * factors).clamp(1 / _MOST, _MOST) / self.factors
        self.factors = self.factors * factors
        self.first.divide_outputs(factors)
        self.second.multiply_inputs(factors)
        return float(factors.log().abs().max())

    def divided(self) -> dict[str, Tensor | None]:
        """By the origin of each value that is scaled, what it is divided by, of a shape that broadcasts.

        None for what is cut off next: the relu that is put behind it becomes part of the layer.
        """
        nodes, factors = (self.first.node, *self.between), self._spread(self.factors)
        cut = [i - 1 for i, node in enumerate(nodes) if i and is_op(node, *_BOUNDED)]
        return {o: None if i in cut else factors for i, node in enumerate(nodes) for o in info(node).origins}

    def write(self, rewriter: Rewriter) -> None:
        """Scale where values are cut off."""
        for node in self.between:
            (call,) = calls_of(rewriter.gm, node)
            if call.op.name in _BOUNDED:
                most = torch.full_like(self.factors, _bound(call)) / self.factors
                path = f"{info(node).path or node.name}.bound"
                bound = rewriter.constant(self._spread(most).float(), path, before=node)
                relu = rewriter.call("relu", node.args[0], like=node, name=f"{node.name}_relu")
                rewriter.describe(relu, origins=(relu.name,))  # it is not the op of the model
                made = rewriter.call("minimum", relu, bound, like=node, name=f"{node.name}_minimum")
                rewriter.replace(node, made)

    def _spread(self, factors: Tensor) -> Tensor:
        return factors.view(-1, *[1] * (-self.first.axis - 1))


def _pair(gm: fx.GraphModule, first: _Layer, layers: Mapping[fx.Node, _Layer]) -> _Pair | None:
    """A layer and the one that alone reads what it makes; None where there is none."""
    node, between = first.node, list[fx.Node]()
    while len(node.users) == 1:
        (user,) = node.users
        second, call = layers.get(user), _call(gm, user)
        if call is None or call.activations != (node,):
            return None
        if second is not None:
            ones = torch.ones_like(first.out_ranges)
            return _Pair(first, second, between, ones) if second.axis == first.axis else None
        if not _scales(call, first):
            return None
        between.append(user)
        node = user
    return None


def _call(gm: fx.GraphModule, node: fx.Node) -> OpCall | None:
    """The op that a node runs; None where it runs none, or several as one unit."""
    calls = calls_of(gm, node)
    return calls[0] if len(calls) == 1 else None


def _scales(call: OpCall, layer: _Layer) -> bool:
    """Whether a function of what a layer makes can be scaled channel by channel."""
    name = call.op.name
    if name in _BOUNDED:
        return call.run_time_option is None and _bound(call) > 0 and (name == "relu6" or call.options["min_val"] == 0)
    return name in _ALIKE or name in {f"{pool}{-layer.axis - 1}d" for pool in _POOLS}


def _bound(call: OpCall) -> float:
    """Where a function cuts values off."""
    return 6.0 if call.op.name == "relu6" else float(call.options["max_val"])
