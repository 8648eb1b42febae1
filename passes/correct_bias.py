"""correct-bias: the mean error of a layer's integers goes into its bias, and its mean gain into the weight's scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, pieces_of, samples_in
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import Agreement, tensors, token_weights
from fxq.common.progress import progress_bar
from fxq.graph.info import info
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import constant, is_op, swapped
from fxq.graph.run import Runner
from fxq.graph.unit import calls_of
from fxq.ledger.output_check import add_output
from fxq.paired.estimate import Estimate
from fxq.paired.used_rows import used_rows
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import CachedFloatForm, LayerValues, run_layer
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class CorrectBias(Pass):
    """Fit every int8 layer to its float form: per channel, a factor on the weight's scale and a shift of the bias.

    Before: conv2d(x, w_int8 * scale, b)    After: conv2d(x, w_int8 * (k * scale), k * b + c)
    Keeps: the integers of the weight. With k and c, what the integers compute has the mean and the deviation of what
    the float layer computes, on recorded samples. Both graphs run side by side, some samples at a time, each layer
    behind those before it as they are corrected by what was seen so far: of all values only sums are kept (but see
    `used_rows`, for batches that may hold padding). Both are pulled towards no correction by as much as parts of the
    samples disagree on them. Of few samples, it is fitted to half of them first: if the output for the other half gains
    little by it, or there is one alone, k is 1 and c is 0.
    So the graph is the same whatever the data is, and a state dict of one model fits the other.
    Tokens whose values are far larger than those of most count less, and padding does not count.
    Layers that measure their ranges at run time, and recipes without calibration data, are left alone.
    Source: Nagel et al. 2019, section 4.2 and appendix D (empirical bias correction); the factor is the same idea for
    the deviation; James and Stein 1961 for how far both are trusted.

    Args:
        scale: fit the weight's scale too.
        least: layers with fewer values per channel in the recorded samples are left alone: a fit would follow noise.
        samples: how many samples to look at; of a model that takes long for one, half of those that there are, but no
            fewer than 16 if there are so many: to run them in float and on integers takes about as long as calibration.
    """

    scale: bool = True
    least: int = 64
    samples: int = 64

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"least": (1, math.inf), "samples": (1, math.inf)}
    name: ClassVar[str] = "correct-bias"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def samples_read(self) -> int:
        return self.samples

    def run(self, rewriter: Rewriter) -> None:
        """Run the float and the integer graph side by side on the recorded samples, then write what was found."""
        context: Context = rewriter.context
        layers: Mapping[fx.Node, _Layer] = self._layers(rewriter)
        if not context.samples or not layers:
            return
        pieces = context.in_pieces(self.samples, _FEW, _PIECES)
        floats = context.floats.of(rewriter.gm, context)
        with torch.no_grad(), seeded():
            sample_count = sum(samples_in(piece) or 1 for piece in pieces)
            enough = sample_count >= _FEW if context.divisible else len(pieces) >= _PIECES
            layers = self._fitted(rewriter, pieces, floats) if enough else self._tried(rewriter, pieces, floats)
        for node, layer in layers.items():
            with rewriter.attributed("correct_bias", CorrectBias):
                _write(rewriter, node, layer)
        rewriter.erase_unused()  # the biases and scales before

    def _fitted(
        self, rewriter: Rewriter, pieces: Sequence[Batch], floats: LayerValues, count: int | None = None
    ) -> Mapping[fx.Node, _Layer]:
        """The layers, fitted to these samples, which are all or the first of `count` pieces."""
        layers = self._layers(rewriter)
        for layer in layers.values():
            layer.parts = -(-_PARTS // (count or len(pieces)))
        self._fit_more(rewriter, pieces, floats, layers)
        return layers

    def _fit_more(
        self, rewriter: Rewriter, pieces: Sequence[Batch], floats: LayerValues, layers: Mapping[fx.Node, _Layer]
    ) -> None:
        """Fit layers to further samples."""
        with progress_bar("correcting", len(pieces), rewriter.context.progress) as advance:
            for batch in pieces:
                _fit(rewriter.gm, batch, layers, floats)
                advance()

    def _tried(self, rewriter: Rewriter, pieces: Sequence[Batch], floats: LayerValues) -> Mapping[fx.Node, _Layer]:
        """The layers, fitted to few samples; not corrected unless a fit to half of them helps the other half.

        Very few samples are tried both ways round.
        """
        whole = len(pieces) == 1 and rewriter.context.divisible
        parts = pieces_of(pieces[0], 1) if whole else pieces
        halves = parts[::2], parts[1::2]
        if not halves[1]:
            return self._layers(rewriter)
        fits = []
        for few, others in (halves, halves[::-1])[: 1 if len(halves[1]) >= _SURE else 2]:
            fits.append(self._fitted(rewriter, few, floats, count=None if whole else len(parts)))
            for layer in fits[-1].values():
                layer.learns = False
            before, after = (_sqnr(rewriter.gm, others, layers, floats) for layers in ({}, fits[-1]))
            if not after > before + _GAIN:
                return self._layers(rewriter)
        if whole:  # a fit to the whole batch corrects later layers better than one to its samples in turn
            return self._fitted(rewriter, pieces, floats)
        for layer in fits[0].values():
            layer.learns = True
        self._fit_more(rewriter, halves[1], floats, fits[0])
        return fits[0]

    def _layers(self, rewriter: Rewriter) -> dict[fx.Node, _Layer]:
        """What is to be fitted, nothing known of it yet."""
        return {node: layer for node in rewriter.nodes() if (layer := self._layer(rewriter.gm, node)) is not None}

    def _layer(self, gm: fx.GraphModule, node: fx.Node) -> _Layer | None:
        """What is to be fitted of a node; None where that is nothing: one without a bias stays as it is."""
        plan, calls = info(node).plan, calls_of(gm, node)
        if plan is None or plan.precision != "int8" or not calls or (plan.reads and plan.reads.range == "dynamic"):
            return None
        call = calls[0]
        old, weight = (call.tensors.get(name or "") for name in (call.op.traits.bias, call.op.traits.weight))
        bias = constant(gm, old)
        if bias is None or not isinstance(old, fx.Node) or not isinstance(weight, fx.Node):
            return None
        scale = constant(gm, weight.kwargs.get("scale")) if is_op(weight, "dequantize") else None
        fitted = self.scale and scale is not None and len(weight.users) == 1
        return _Layer(old, bias, weight, call.op.traits.channels or 0, scale if fitted else None, self.least)


_FEW = 16
"""Of fewer samples it is tried out whether what is fitted to some of them holds for the others."""
_GAIN = 0.5
"""dB that the output has to gain by it there."""
_SURE = 4
"""Pieces that a fit to the others is tried on once. With fewer, either half is fitted and tried on the other."""
_PIECES = 8
"""So many times later layers see what earlier ones are corrected by; of a small model, the batches are not cut."""
_PARTS = 32
"""Of the samples, so many parts are compared, if there are values enough."""
_ENOUGH = 16
"""Values of each channel that make a part: how far fewer deviate says little."""
_VARIES = 1e-10
"""A channel whose values deviate less, squared and by the largest mean, does not vary: it is rounding in float32."""
_MOST = 0.1
"""Factors further from 1 than this are no rounding error of an 8-bit weight: the layer's input is to blame."""


@dataclass
class _Layer:
    """What is known of a layer, and of how what its integers compute differs from what its float form computes.

    Attributes:
        old, bias: the node of its bias, and its values, (C,).
        weight: the node of its weight.
        axis: the axis of the channels in its result.
        scale: the scales of the weight; None where they are not fitted.
        least: of fewer values in a channel there is no line.
        parts: into how many the values of a batch are cut, if there are enough.
        waiting: what both forms computed of each channel, (1, C, N), until it is enough for a part.
        values: in each channel, in the parts so far.
        level: the mean of what the integers compute.
        shift: how much lower that is than what the float form computes.
        gain: the logarithm of how much less it deviates from the mean; groups of a transposed convolution share scales.
        learns: whether values that are computed are taken in.
        wanted: what its float form computed of the samples that are run.
        used: which rows of these, without the axis of the channels, are not padding; None: all.
        line: by channel, the factor of the scales and the shift behind it, float64; None: 1 and 0.
    """

    old: fx.Node
    bias: Tensor
    weight: fx.Node
    axis: int
    scale: Tensor | None
    least: int
    parts: int = 1
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    values: int = 0
    level: Estimate = field(default_factory=Estimate)
    shift: Estimate = field(default_factory=Estimate)
    gain: Estimate = field(default_factory=Estimate)
    learns: bool = True
    wanted: Tensor | None = None
    used: Tensor | None = None
    line: tuple[Tensor, Tensor] | None = None

    def correct(self, got: Tensor) -> Tensor:
        """Take what the integers compute; the same, corrected by what has been seen so far."""
        if self.learns and got.numel():
            assert self.wanted is not None  # the float form ran first
            self._compare(got, self.wanted)
        self.wanted = None
        if self.line is None:
            return got
        factor, shift = self.line
        shape = [1] * got.dim()
        shape[self.axis] = -1
        return torch.addcmul(shift.to(got.dtype).view(shape), got, factor.to(got.dtype).view(shape))

    def _compare(self, got: Tensor, wanted: Tensor) -> None:
        """Take in what both forms compute, as soon as there is enough for a part."""
        self.waiting.append((self._by_channel(got), self._by_channel(wanted)))
        count = sum(rows[:, 0].numel() for rows, _ in self.waiting)
        if count < _ENOUGH:
            return
        pair = [torch.cat(rows, 2) if len(rows) > 1 else rows[0] for rows in zip(*self.waiting, strict=True)]
        self.waiting.clear()
        self.values += count
        cut = 0 if len(pair[0]) > 1 else 2
        parts = min(self.parts, count // _ENOUGH)
        for less, more in zip(*(rows.tensor_split(parts, cut) for rows in pair), strict=True):
            counts = token_weights(more[0].T) if self.axis == -1 and got.dim() > 2 else None
            self._add(_moments(less, counts), _moments(more, counts))
        if self.values >= self.least:
            factor = self._factor()
            self.line = factor, self.shift() + (1 - factor) * self.level.mean

    def _by_channel(self, x: Tensor) -> Tensor:
        """The values of each channel in a row, (1, C, N).

        Where whole samples can be the parts, in a row for each sample: (samples, C, N), which needs no copy of `x`.
        """
        whole = self.axis % x.dim() == 1 and self.used is None and not self.waiting
        if whole and len(x) >= self.parts and x[0, 0].numel() >= _ENOUGH:
            return x.flatten(2)
        rows = x.movedim(self.axis, 0)
        known = self.used is not None and self.used.shape == rows.shape[1:]  # a unit may return less than its layer
        return (rows[:, self.used] if known else rows.reshape(len(rows), -1))[None]

    def _add(self, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
        """Take in the mean and the deviation of a part, in both forms."""
        (mean, spread), (mean_wanted, spread_wanted) = got, wanted
        self.level.add(mean)
        self.shift.add(mean_wanted - mean)
        if self.scale is not None:
            less, more = (x.view(-1, len(self.scale)).sum(0) for x in (spread, spread_wanted))
            known = (less > _VARIES * mean.square().max()) & (more > 0)
            self.gain.add(torch.where(known, more / less, 1.0).log() / 2)

    def _factor(self) -> Tensor:
        """What the scale of each channel is multiplied by; 1 where that is not known."""
        if self.scale is None:
            return torch.ones_like(self.level.mean)
        factor = self.gain().exp()
        usable = (factor - 1).abs() < _MOST
        return torch.where(usable, factor, torch.ones_like(factor)).repeat(len(self.bias) // len(self.scale))


def _moments(rows: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean of each channel of (samples, C, N), and the mean square of what deviates from it, (C,) in float64.

    `counts`, (N,), says how much each column counts; None: all alike.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    counts = None if counts is None else counts / counts.mean()
    weighted = rows if counts is None else rows * counts
    mean = weighted.mean(2, keepdim=True).mean(0)
    squares = (rows - mean).square_()
    return mean[:, 0].double(), (squares if counts is None else squares.mul_(counts)).mean(2).mean(0).double()


def _fit(gm: fx.GraphModule, batch: Batch, layers: Mapping[fx.Node, _Layer], floats: LayerValues) -> None:
    """Run the float and integer forms on some samples, so that the layers collect their errors."""
    with_tokens = [node for node, layer in layers.items() if layer.axis == -1]
    used = used_rows(IsolatedGraph(gm, gm.graph), batch, with_tokens)
    for node, layer in layers.items():
        layer.used = used.get(node)
    _side_by_side(_Real(gm, batch, floats, (), layers), _Integers(gm, batch, layers))


def _sqnr(gm: fx.GraphModule, batches: Sequence[Batch], layers: Mapping[fx.Node, _Layer], floats: LayerValues) -> float:
    """dB of the integer graph's output, layers corrected; of several outputs, of the one that is furthest off."""
    agreements: dict[int, Agreement] = {}
    for batch in batches:
        runs = _Real(gm, batch, floats, [gm.graph.output_node()], {}), _Integers(gm, batch, layers)
        for place, (wanted, got) in enumerate(zip(*map(tensors, _side_by_side(*runs)), strict=True)):
            if wanted.is_floating_point():
                add_output(agreements, place, wanted, got)
    return min((output.sqnr for output in agreements.values()), default=math.nan)


def _side_by_side(real: _Real, integers: _Integers) -> tuple[Any, Any]:
    """Run the float and integer forms node by node, and return both outputs."""
    outputs = None, None
    for node in integers.graph.nodes:
        drawn = torch.get_rng_state()
        wanted = real.step(node)
        torch.set_rng_state(drawn)  # so that both draw the same random numbers
        outputs = wanted, integers.step(node)
    return outputs


class _Real(CachedFloatForm):
    """Runs samples in float and passes the outputs of layers to `_Layer.wanted`."""

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        floats: LayerValues,
        values: Collection[fx.Node],
        layers: Mapping[fx.Node, _Layer],
    ) -> None:
        super().__init__(gm, batch, floats, values, layers, IsolatedGraph(gm, gm.graph).modules)
        self._learning = layers

    def see_layer(self, node: fx.Node, value: Tensor) -> None:
        """Store the float output of a layer."""
        self._learning[node].wanted = value


class _Integers(Runner):
    """Some samples in integer arithmetic, each layer corrected by what has been seen so far."""

    def __init__(self, gm: fx.GraphModule, batch: Batch, layers: Mapping[fx.Node, _Layer]) -> None:
        super().__init__(
            gm, copied(batch), modules=IsolatedGraph(gm, gm.graph).modules
        )  # copied modules, so that their state is private
        self._layers = layers

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        if node in self._layers:
            return run_layer(self, node, self._layers[node].correct)
        return super().compute(node)


def _write(rewriter: Rewriter, node: fx.Node, layer: _Layer) -> None:
    """Write the line of a layer into its bias and the scales of its weight."""
    factor, shift = layer.line or (torch.ones(len(layer.bias)).double(), torch.zeros(len(layer.bias)).double())
    name = info(node).path or node.name
    corrected = (factor * layer.bias.double().cpu() + shift.cpu()).to(layer.bias)
    new = rewriter.constant(corrected, f"{name}.bias_corrected", before=node, like=node)
    rewriter.describe(new, stands_for=str(getattr(layer.old, "target", "")))
    rewriter.update(node, args=swapped(node.args, {layer.old: new}))
    if layer.scale is not None:
        weight, scale = layer.weight, layer.scale
        name = str(getattr(weight.args[0], "target", weight.name)).removesuffix("_int8").removeprefix("fxq_data.")
        scaled = (scale.double() * factor[: len(scale)].to(scale.device)).to(torch.float32)
        made = rewriter.constant(scaled, f"{name}_scale_corrected", before=weight)
        rewriter.update(weight, kwargs={**weight.kwargs, "scale": made})
