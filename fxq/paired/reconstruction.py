"""Choosing the integers of weights layer by layer, so that the output of each comes close to that of its float form."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import token_weights
from fxq.common.progress import progress_bar
from fxq.errors import InputError
from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, op_of, options_of, read_attribute
from fxq.graph.unit import OpCall, calls_of
from fxq.paired.paired_run import PairedRun
from fxq.pipeline.context import Context
from fxq.quant.packing import pack, unpack
from fxq.quant.qparams import QParams, spread
from fxq.recipe.pass_base import Pass
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Reconstruction(Pass):
    """Base of the passes that choose integers by what a layer's output loses on recorded samples.

    Goes through the linear, convolutional and recurrent layers in order. What a layer reads comes from the graph as it
    is so far, with the integers chosen for the layers before; what it should compute is what its float form computes in
    the float graph. A subclass says in `choose` which integers come closest. Where they are not better than those that
    are there, channel by channel, these stay. A mean error does not count where correct-bias takes it away, and what
    follows is run without it.

    All tokens of a sequence count alike, padding not at all. Where a linear layer reads rounded tokens, their float
    values count: what rounding costs a few large ones says little of others.

    A weight with a scale for each channel gets scales, too: those with which its values, rounded to the nearest, make
    the least error, and then the ones that suit the chosen integers.

    Of a layer, no patches are kept but sums of their products: as many numbers as its weight has inputs, squared. Of
    large inputs these are patches at places drawn at random, many more than a weight has inputs. Of the samples, both
    graphs keep the values that are still read.

    Args:
        samples: how many recorded samples it looks at.
        trust: how much the float weight is trusted: as many patches as this for each input of the weight say that it is
            right. What is known from few patches alone does not hold for other data.
        scales: whether weights with a scale for each channel get other scales.
    """

    samples: int = 64
    trust: float = 4.0
    scales: bool = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"samples": (1, math.inf), "trust": (0.0, math.inf)}

    @property
    def samples_read(self) -> int:
        return self.samples

    @abstractmethod
    def choose(self, layer: WeightGrid, error: OutputError) -> Tensor:
        """The integers for the weight of a layer, of whole numbers in float32, (G, R, K)."""

    def run(self, rewriter: Rewriter) -> None:
        """Run the graph and its float form side by side, node by node."""
        context: Context = rewriter.context
        if not context.samples:
            raise InputError(
                f"{self.name} looks at what layers read, and no samples are recorded: give data, "
                "fxq.quantize(model, recipe, data=loader)."
            )
        nodes = rewriter.nodes()
        steps = {step.name: step for step in context.recipe.pipeline}
        least = steps["correct-bias"].options.get("least", 0) if "correct-bias" in steps else math.inf
        layers = {node: found for node in nodes if (found := [*self._layers(rewriter.gm, node)])}
        bar = progress_bar(self.name, sum(map(len, layers.values())), context.progress)
        with torch.no_grad(), seeded(), bar as advance:
            batches = context.some_samples(self.samples)
            tokens = {one.x for found in layers.values() for one in found if one.reads_tokens and not one.reads_state}
            runs, count = PairedRun(rewriter.gm, batches, tokens), sum(samples_in(batch) or 1 for batch in batches)
            for node in nodes:
                for layer in layers.get(node, ()):
                    self._improve(rewriter, layer, runs, count, least)
                    advance()
                runs.step(node)

    def _layers(self, gm: fx.GraphModule, node: fx.Node) -> Iterator[IntegerLayer]:
        """What a node runs with integer weights; of a recurrent one what reads the input, then what reads the state."""
        for call in calls_of(gm, node):
            recurrence, weight = call.op.traits.recurrence, call.op.traits.weight
            if weight is not None and (recurrence is not None or LayerMatrix.takes(call)):
                yield from self._layer(gm, node, call, weight, call.tensors.get(call.op.traits.inputs[0]))
            if recurrence is not None and op_of(node) is call.op:
                yield from self._layer(gm, node, call, "weight_hh", node)

    def _layer(self, gm: fx.GraphModule, node: fx.Node, call: OpCall, name: str, x: Any) -> Iterator[IntegerLayer]:
        """A weight of an op that is in integers; nothing where it is not, or somebody else reads it."""
        weight = call.tensors.get(name)
        if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and is_op(weight, "dequantize")):
            return
        grid, stored, path = grid_of(gm, weight), constant(gm, weight.args[0]), info(weight).stands_for
        if grid is None or stored is None or stored.is_floating_point() or len(weight.users) > 1 or not path:
            return
        real, bias = read_attribute(gm, path), call.tensors.get(call.op.traits.bias or "")
        form = LayerMatrix(call, tuple(real.shape))
        yield IntegerLayer(form, x, weight, real, grid, bias if _is_corrected(node, bias) else None, x is node)

    def _improve(self, rewriter: Rewriter, layer: IntegerLayer, runs: PairedRun, samples: int, least: float) -> None:
        grid, form, error = layer.on_rows(), layer.form, OutputError()
        most = math.ceil(max(_PATCHES, _PATCHES_PER_INPUT * grid.weight.shape[2]) / samples)
        for got, wanted in (runs.states if layer.reads_state else runs.values)(layer.x):
            got = wanted if layer.reads_rounded_tokens else got
            for x, real in zip(form.patches(got, most), form.patches(wanted, most), strict=True):
                y = real @ form.rows(layer.real).mT
                error.add(x, y, token_weights(y[0]) if layer.reads_tokens else None)
        bias = layer.bias if error.count >= least else None
        error.centred = bias is not None
        error.trust(grid.weight, self.trust)
        old, free = form.rows(layer.integers(rewriter.gm)), self.scales and layer.has_scale_of_channel
        tried = grid.rescaled(error) if free else grid
        new = self.choose(tried, error)
        tried = tried.fitted(new, error) if free else tried
        better = (error(tried.real(new)) < error(grid.real(old)))[:, :, None]
        new, tried = torch.where(better, new, old), replace(grid, scale=torch.where(better, tried.scale, grid.scale))
        if bias is not None:
            corrected = read_attribute(rewriter.gm, str(bias.target)) + error.shift(tried.real(new)).flatten()
            runs.put(bias, corrected)
        scale = tried.scale[:, :, 0].flatten().clone() if not torch.equal(tried.scale, grid.scale) else None
        if scale is not None or not torch.equal(new, old):
            with rewriter.attributed(self.name.replace("-", "_"), type(self)):
                layer.put(rewriter, form.weight(new), scale)
            runs.put(layer.weight, form.weight(tried.real(new)))


_PATCHES, _PATCHES_PER_INPUT = 4096, 32
"""How many patches are looked at, of all samples together: so many, or so many for each input of a weight."""


def _is_corrected(node: fx.Node, bias: Any) -> bool:
    """Whether correct-bias fits the bias of a layer that a node runs, and nobody else reads it."""
    plan = info(node).plan
    measured = plan is not None and plan.reads is not None and plan.reads.range == "dynamic"
    constant = isinstance(bias, fx.Node) and bias.op == "get_attr" and len(bias.users) == 1
    return constant and plan is not None and plan.precision == "int8" and not measured


@dataclass(frozen=True)
class IntegerLayer:
    """A layer whose weight is in integers.

    Attributes:
        form: how it multiplies.
        x: what it reads; of one that reads the state of a recurrent layer, that layer.
        weight: the node that dequantizes its weight.
        real: its float weight.
        grid: that of the integers.
        bias: its bias, where that is one that correct-bias fits.
        reads_state: whether it reads the hidden state of `x` in each step.
    """

    form: LayerMatrix
    x: fx.Node
    weight: fx.Node
    real: Tensor
    grid: QParams
    bias: fx.Node | None
    reads_state: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads sequences of tokens, a few of which may be far larger than the others."""
        return self.real.dim() == 2 and len(info(self.x).shape or ()) > 2

    @property
    def reads_rounded_tokens(self) -> bool:
        """Whether it is a linear layer that reads tokens from a grid."""
        return self.reads_tokens and self.form.call.op.name == "linear" and is_op(self.x, "dequantize")

    @property
    def has_scale_of_channel(self) -> bool:
        """Whether each row of the weight has a scale of its own, of a grid around 0."""
        own = self.grid.axis == 0 and self.grid.block is None and not self.form.is_transposed
        return own and not self.grid.zero_point.any()

    def on_rows(self) -> WeightGrid:
        """The weight and its grid as rows."""

        def rows(values: Tensor) -> Tensor:
            shaped = spread(values.to(self.real.device), self.real, self.grid.axis, self.grid.block)
            return self.form.rows(shaped.expand_as(self.real).float())

        scale, zero_point = rows(self.grid.scale), rows(self.grid.zero_point)
        return WeightGrid(self.form.rows(self.real.float()), scale, zero_point, self.grid.qmin, self.grid.qmax)

    def integers(self, gm: fx.GraphModule) -> Tensor:
        """Those that are there, float32, of the weight's shape."""
        stored = constant(gm, self.weight.args[0])
        assert stored is not None  # or it would be no such layer
        packed = options_of(self.weight)["packed"]
        return (stored if packed is None else unpack(stored, packed, self.grid.qmin < 0)).float()

    def put(self, rewriter: Rewriter, integers: Tensor, scale: Tensor | None) -> None:
        """Let the layer have other integers; and other scales (C,), unless there are none."""
        old: Any = self.weight.args[0]
        stored = integers.to(self.grid.dtype)
        stored = stored if options_of(self.weight)["packed"] is None else pack(stored)
        name = str(old.target).removeprefix("fxq_data.")
        made = rewriter.constant(stored, f"{name}_chosen", before=self.weight, like=old)
        rewriter.update(self.weight, args=(made, *self.weight.args[1:]))
        before: list[Any] = [old, self.weight.kwargs["scale"]]
        if scale is not None:
            scales = rewriter.constant(scale, f"{name}_scale_chosen", before=self.weight)
            rewriter.update(self.weight, kwargs={**self.weight.kwargs, "scale": scales})
        for node in before:
            if isinstance(node, fx.Node) and not node.users:
                rewriter.erase(node)


@dataclass(frozen=True)
class WeightGrid:
    """A weight as rows, (G, R, K) as `LayerMatrix.rows` gives them, with the grid of each value.

    Attributes:
        weight: the float weight.
        scale: of each value.
        zero_point: of each value.
        qmin, qmax: the smallest and the largest integer.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int

    def real(self, integers: Tensor) -> Tensor:
        """The weight that integers stand for."""
        return (integers - self.zero_point) * self.scale

    def steps(self) -> Tensor:
        """The float weight as a number of steps above the integer 0, not rounded and not clamped."""
        return self.weight / self.scale + self.zero_point

    def nearest(self) -> Tensor:
        """The integers that the float weight is rounded to."""
        return self.steps().round_().clamp_(self.qmin, self.qmax)

    def rescaled(self, error: OutputError) -> WeightGrid:
        """With the scale of each row, of some smaller and larger ones, whose nearest integers make the least error."""
        factors = torch.logspace(_SCALES[0], _SCALES[1], _SCALES[2], base=2, device=self.scale.device)
        tried = [replace(self, scale=self.scale * factor) for factor in factors]
        best = torch.stack([error(grid.real(grid.nearest())) for grid in tried]).argmin(0)
        return replace(self, scale=self.scale * factors[best][:, :, None])

    def fitted(self, integers: Tensor, error: OutputError) -> WeightGrid:
        """With the scale of each row with which these integers make the least error, where it is much the same."""
        weight = self.real(integers)
        power = ((weight @ error.gram) * weight).sum(2)
        factor = (weight * error.cross.mT).sum(2) / power.clamp(min=_SMALLEST)
        factor = torch.where((factor - 1).abs() < _MOST, factor, 1.0)
        return replace(self, scale=self.scale * factor[:, :, None])


_SCALES = -1.2, 0.2, 29
"""The factors of scales that are tried: from and to, in octaves, and how many."""
_MOST = 0.3
"""Factors further from 1 than this follow noise."""
_SMALLEST = 1e-30


class OutputError:
    """The squared error of a layer's outputs as a function of its weight, from sums over all patches.

    Attributes:
        count: patches seen.
        centred: whether the mean error of each channel is left out: the bias takes it away.
    """

    def __init__(self, centred: bool = False) -> None:
        self.count, self.centred = 0, centred
        self._sums: tuple[Tensor, ...] = ()

    def add(self, x: Tensor, wanted: Tensor, counts: Tensor | None = None) -> None:
        """Take in patches (G, n, K), and what the layer should make of them, (G, n, R); each counts so much, (n,)."""
        self.count += x.shape[1]
        by = torch.ones(x.shape[1], 1, device=x.device) if counts is None else (counts / counts.mean())[:, None]
        less, more = x * by, wanted * by
        sums = less.mT @ x, less.mT @ wanted, less.sum(1), more.sum(1), (more * wanted).sum(1)
        self._sums = tuple(a.add_(b) for a, b in zip(self._sums, sums, strict=True)) if self._sums else sums

    def trust(self, weight: Tensor, patches: float) -> None:
        """Take in so many patches for each input, (G, R, K), of inputs as large as usual that do not depend on another.

        For them, what a float weight makes of them is right.
        """
        gram, cross, _, _, power = self._sums
        size = patches * weight.shape[2] * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] / max(self.count, 1)
        gram += size * torch.eye(weight.shape[2], device=gram.device)
        cross += size * weight.mT
        power += size[:, :, 0] * weight.square().sum(2)

    def shift(self, weight: Tensor) -> Tensor:
        """The mean of what is missing in each channel with a weight (G, R, K): (G, R)."""
        _, _, x, wanted, _ = self._means()
        return wanted - (weight @ x[:, :, None])[:, :, 0]

    @property
    def gram(self) -> Tensor:
        """The mean of the product of each two values of a patch: (G, K, K). Where it is `centred`, their covariance."""
        gram, _, x, _, _ = self._means()
        return gram - x[:, :, None] * x[:, None] if self.centred else gram

    @property
    def cross(self) -> Tensor:
        """The mean of the product of each value of a patch with each wanted one, or their covariance: (G, K, R)."""
        _, cross, x, wanted, _ = self._means()
        return cross - x[:, :, None] * wanted[:, None] if self.centred else cross

    def __call__(self, weight: Tensor) -> Tensor:
        """The mean squared error of each channel with a weight (G, R, K): (G, R)."""
        _, _, _, wanted, power = self._means()
        alone = power - wanted.square() if self.centred else power
        return (weight * (weight @ self.gram - 2 * self.cross.mT)).sum(2) + alone

    def _means(self) -> tuple[Tensor, ...]:
        return tuple(total / max(self.count, 1) for total in self._sums)
