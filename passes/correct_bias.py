"""correct-bias: correct the mean error of each int8 layer in its bias, and its mean gain in the weight's scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, pieces_of, samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import Agreement, tensors, token_weights
from fxq.common.progress import progress_bar
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, swapped
from fxq.graph.unit import calls_of
from fxq.ledger.output_check import add_output
from fxq.paired.estimate import MIN_PART_VALUES, PARTS, ShrunkMean, WaitingPairs
from fxq.paired.gate_errors import GateErrors, see_gates
from fxq.paired.paired_run import PairedRun, WeightValues, float_side, integer_side
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import LayerValues
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class CorrectBias(Pass):
    """Fit every int8 layer to its float form, per channel: a factor k on the weight's scale and a shift c of the bias.

    Before: conv2d(x, w_int8 * scale, b)    After: conv2d(x, w_int8 * (k * scale), k * b + c)
    Keeps: the integers of the weight, and the nodes of the graph for any data, so that state dicts stay compatible.

    On the recorded samples, k and c give the integer result the mean and the standard deviation of the float result.
    The float and the integer graph run side by side. Each layer is fitted with the layers before it already corrected.
    Only sums are stored, not activations (but see `used_rows` for batches that may hold padding).
    k is shrunk towards 1 and c towards 0, the more, the less parts of the samples agree on them. With few samples, a
    fit to one half is tested on the other half. If the output gains little, or if there is only one sample, k is 1
    and c is 0.
    Tokens with unusually large values count less, and padding does not count.
    The two biases of a recurrent layer get the mean errors of the products with its input and with its hidden state,
    over all time steps in float, also if their ranges are dynamic. These are shrunk, too, but k is 1, and nothing is
    tested. Other layers with dynamic ranges, and recipes without calibration data, are left alone.
    Source: Nagel et al. 2019, section 4.2 and appendix D (empirical bias correction); the factor applies the same idea
    to the standard deviation; James and Stein 1961 for the shrinkage.

    Args:
        scale: whether to fit the weight's scale, too.
        least: number of values per channel, below which a layer is left alone: a fit would follow noise.
        samples: number of samples to use. Large models use half of the recorded samples, but at least 16 (8 if not
            `tested`), since a run in float and on integers takes about as long as calibration.
        tested: whether a fit to few samples is tested on held-out samples. Else it is used as it is, shrunk.
        pieces: number of runs in which a large model takes its samples, so that few values are in memory at a time.
    """

    scale: bool = True
    least: int = 64
    samples: int = 64
    tested: bool = True
    pieces: int = 8

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = dict.fromkeys(("least", "samples", "pieces"), (1, math.inf))
    name: ClassVar[str] = "correct-bias"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def samples_read(self) -> int:
        return self.samples

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        return any(config.activation is not None for config in configs)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Run the float and the integer graph side by side on the recorded samples, then write the corrections."""
        context = rewriter.context
        recurrent = [errors for node in rewriter.nodes() if (errors := GateErrors.of(rewriter.gm, node)) is not None]
        layers: Mapping[fx.Node, _Layer] = self._layers(rewriter)
        if not context.samples or not (layers or recurrent):
            return
        pieces = context.in_pieces(self.samples, _MIN_SAMPLES if self.tested else _MIN_SAMPLES // 2, self.pieces)
        floats = context.floats.of(rewriter.gm, context)
        with torch.no_grad(), seeded():
            self._correct_gates(rewriter, pieces, floats, recurrent)
            sample_count = sum(samples_in(piece) or 1 for piece in pieces)
            enough = sample_count >= _MIN_SAMPLES if context.divisible else len(pieces) >= _MIN_BATCHES
            fit = self._fitted if enough or not self.tested else self._validated
            layers = fit(rewriter, pieces, floats) if layers else layers
        for node, layer in layers.items():
            with rewriter.attributed("correct_bias", CorrectBias):
                _write(rewriter, node, layer)
        rewriter.erase_unused()  # the old biases and scales

    def _correct_gates(
        self,
        rewriter: Rewriter[Context],
        pieces: Sequence[Batch],
        floats: LayerValues,
        layers: Sequence[GateErrors],
    ) -> None:
        """Correct the biases of recurrent layers, so that the layers after them are fitted to what they return then."""
        if layers:
            see_gates(rewriter.gm, pieces, floats, layers)
        for layer in layers:
            with rewriter.attributed("correct_bias", CorrectBias):
                layer.write(rewriter, self.least)
        rewriter.erase_unused()

    def _fitted(
        self, rewriter: Rewriter[Context], pieces: Sequence[Batch], floats: LayerValues, count: int | None = None
    ) -> Mapping[fx.Node, _Layer]:
        """Fit new layers to pieces of the samples. `count` is the number of all pieces; None: these are all."""
        layers = self._layers(rewriter)
        for layer in layers.values():
            layer.parts = -(-PARTS // (count or len(pieces)))
        self._fit_more(rewriter, pieces, floats, layers)
        return layers

    def _fit_more(
        self,
        rewriter: Rewriter[Context],
        pieces: Sequence[Batch],
        floats: LayerValues,
        layers: Mapping[fx.Node, _Layer],
    ) -> None:
        """Fit layers to more samples."""
        weights = WeightValues()
        with progress_bar("correcting", len(pieces), rewriter.context.progress) as advance:
            for batch in pieces:
                _fit(rewriter.gm, batch, layers, floats, weights)
                advance()

    def _validated(
        self, rewriter: Rewriter[Context], pieces: Sequence[Batch], floats: LayerValues
    ) -> Mapping[fx.Node, _Layer]:
        """Fit layers to few samples. They stay uncorrected unless a fit to one half improves the other half.

        With very few samples, each half is fitted and tested on the other.
        """
        whole = len(pieces) == 1 and rewriter.context.divisible
        parts = pieces_of(pieces[0], 1) if whole else pieces
        halves = parts[::2], parts[1::2]
        if not halves[1]:
            return self._layers(rewriter)
        fits = []
        for fitted, held_out in (halves, halves[::-1])[: 1 if len(halves[1]) >= _MIN_TEST_PIECES else 2]:
            fits.append(self._fitted(rewriter, fitted, floats, count=None if whole else len(parts)))
            for layer in fits[-1].values():
                layer.learns = False
            sqnr_before, sqnr_after = _sqnrs(rewriter.gm, held_out, ({}, fits[-1]), floats)
            if not sqnr_after > sqnr_before + _MIN_GAIN_DB:
                return self._layers(rewriter)
        if whole:  # a fit to the whole batch corrects later layers better than a fit to one sample after the other
            return self._fitted(rewriter, pieces, floats)
        for layer in fits[0].values():
            layer.learns = True
        self._fit_more(rewriter, halves[1], floats, fits[0])
        return fits[0]

    def _layers(self, rewriter: Rewriter) -> dict[fx.Node, _Layer]:
        """New fits of all layers that can be corrected."""
        return {node: layer for node in rewriter.nodes() if (layer := self._layer(rewriter.gm, node)) is not None}

    def _layer(self, gm: fx.GraphModule, node: fx.Node) -> _Layer | None:
        """New fit of a layer; None if the node is not an int8 layer with a calibrated input and a constant bias."""
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


_MIN_SAMPLES = 16
"""Number of samples from which a fit is used without a test on held-out samples."""
_MIN_GAIN_DB = 0.5
"""SQNR that the output must gain on the held-out half, in dB."""
_MIN_TEST_PIECES = 3
"""Number of held-out pieces from which one test is enough. With fewer, each half is tested on the other."""
_MIN_BATCHES = 8
"""Number of batches from which a fit is used without a test, where batches cannot be divided into samples."""
_MIN_RELATIVE_VARIANCE = 1e-10
"""Variance relative to the largest squared mean, below which a channel is constant up to float32 rounding."""
_MAX_CORRECTION = 0.1
"""Largest |k - 1| that the rounding of an 8-bit weight explains. With more, the cause is the layer's input."""


@dataclass
class _Layer:
    """Fit of one layer: statistics of the difference between its integer and its float result.

    Attributes:
        old: node of its bias.
        bias: values of its bias, (C,).
        weight: node of its weight.
        axis: axis of the channels in its result.
        scale: scales of the weight, (C,) or one per group of channels; None if they are not fitted.
        least: number of values per channel from which the layer is corrected.
        parts: number of parts that the values of a batch are split into, if there are enough.
        pairs: integer and float results, (1, C, N) each, that are not enough for a part yet.
        level: mean of the integer result, by channel.
        shift: mean of the float result minus that of the integer result, by channel.
        gain: logarithm of the standard deviation of the float result relative to the integer result, for each scale.
        learns: whether further results update the fit.
        wanted: float result for the current samples.
        used: bool, the shape of the result without the axis of the channels: rows that are not padding; None: all.
        line: factor and shift by channel, float64, (C,) each; None: 1 and 0.
    """

    old: fx.Node
    bias: Tensor
    weight: fx.Node
    axis: int
    scale: Tensor | None
    least: int
    parts: int = 1
    pairs: WaitingPairs = field(default_factory=lambda: WaitingPairs(axis=2))
    level: ShrunkMean = field(default_factory=ShrunkMean)
    shift: ShrunkMean = field(default_factory=ShrunkMean)
    gain: ShrunkMean = field(default_factory=ShrunkMean)
    learns: bool = True
    wanted: Tensor | None = None
    used: Tensor | None = None
    line: tuple[Tensor, Tensor] | None = None

    def see(self, wanted: Tensor) -> None:
        """Store the float result for the current samples."""
        self.wanted = wanted

    def correct(self, got: Tensor) -> Tensor:
        """Return an integer result, corrected by the fit so far. While the layer learns, the result updates the fit."""
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
        """Update the fit with an integer and a float result, once there are enough values for a part."""
        rows = self._by_channel(got)
        joined = self.pairs.joined(rows, self._by_channel(wanted), rows[:, 0].numel())
        if joined is None:
            return
        *pair, count = joined
        parts = min(self.parts, count // MIN_PART_VALUES)
        chunks = -(-parts // len(pair[0]))  # of each sample
        moments: list[tuple[Tensor, ...]] = []
        for got_chunk, wanted_chunk in zip(*(rows.tensor_split(chunks, 2) for rows in pair), strict=True):
            counts = token_weights(wanted_chunk[0].T) if self.axis == -1 and got.dim() > 2 else None
            moments.append((*_moments(got_chunk, parts, counts), *_moments(wanted_chunk, parts, counts)))
        mean, variance, mean_wanted, variance_wanted = (
            torch.stack(of_chunks, 1).flatten(0, 1) for of_chunks in zip(*moments, strict=True)
        )
        self._add((mean, variance), (mean_wanted, variance_wanted))
        if self.pairs.count >= self.least:
            factor = self._factor()
            self.line = factor, self.shift() + (1 - factor) * self.level.mean

    def _by_channel(self, x: Tensor) -> Tensor:
        """Values by channel, (1, C, N); (samples, C, N) if no part has values of two samples, which copies nothing."""
        if self.axis % x.dim() == 1 and self.used is None and not self.pairs.waiting:
            chunks, size = max(self.parts // len(x), 1), x[0, 0].numel()
            divides = self.parts in (chunks * len(x), math.gcd(self.parts, len(x)))
            if divides and size % chunks == 0 and size >= MIN_PART_VALUES * chunks:
                return x.flatten(2)
        rows = x.movedim(self.axis, 0)
        fits = self.used is not None and self.used.shape == rows.shape[1:]  # a unit may return less than its layer
        return (rows[:, self.used] if fits else rows.reshape(len(rows), -1))[None]

    def _add(self, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
        """Update the fit with mean and variance of parts, (parts, C) each, in both forms."""
        (mean, variance), (mean_wanted, variance_wanted) = got, wanted
        self.level.add(mean)
        self.shift.add(mean_wanted - mean)
        if self.scale is not None:
            # groups of a transposed convolution share scales
            own, target = (x.unflatten(1, (-1, len(self.scale))).sum(1) for x in (variance, variance_wanted))
            varies = (own > _MIN_RELATIVE_VARIANCE * mean.square().amax(1, keepdim=True)) & (target > 0)
            self.gain.add(torch.where(varies, target / own, 1.0).log() / 2)

    def _factor(self) -> Tensor:
        """Factor of the scale of each channel, (C,); 1 if it cannot be fitted."""
        if self.scale is None:
            return torch.ones_like(self.level.mean)
        factor = self.gain().exp()
        usable = (factor - 1).abs() < _MAX_CORRECTION
        return torch.where(usable, factor, torch.ones_like(factor)).repeat(len(self.bias) // len(self.scale))


def _moments(rows: Tensor, parts: int, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel in each part, float64, (parts, C) each.

    Args:
        rows: values, (samples, C, N).
        parts: number of parts, which divides the number of samples. With more parts, each sample is one.
        counts: weights of the columns, (N,); None: all equal.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    rows = rows.unflatten(0, (min(parts, len(rows)), -1))
    counts = None if counts is None else counts / counts.mean()
    weighted = rows if counts is None else rows * counts
    mean = weighted.mean(3, keepdim=True).mean(1, keepdim=True)
    squares = (rows - mean).square_()
    variance = (squares if counts is None else squares.mul_(counts)).mean(3).mean(1)
    return mean[:, 0, :, 0].double(), variance.double()


def _fit(
    gm: fx.GraphModule,
    batch: Batch,
    layers: Mapping[fx.Node, _Layer],
    floats: LayerValues,
    weights: WeightValues,
) -> None:
    """Run the float and the integer form on a batch, so that the layers are fitted to it."""
    with_tokens = [node for node, layer in layers.items() if layer.axis == -1]
    see = {node: layer.see for node, layer in layers.items()}
    correct = {node: layer.correct for node, layer in layers.items()}
    run = PairedRun.with_float_form(gm, [batch], with_tokens, floats, (), see, correct, weights=weights)
    for node, layer in layers.items():
        layer.used = run.used[0].get(node)
    run.run()


def _sqnrs(
    gm: fx.GraphModule, batches: Sequence[Batch], fits: Sequence[Mapping[fx.Node, _Layer]], floats: LayerValues
) -> list[float]:
    """SQNR of the integer graph's output in dB, by fit of its layers; the lowest of several outputs."""
    agreements: list[dict[int, Agreement]] = [{} for _ in fits]
    corrections = [{node: layer.correct for node, layer in layers.items()} for layers in fits]
    for batch in batches:
        reference = float_side(gm, [batch], [gm.graph.output_node()], floats)
        sides = [integer_side(gm, [batch], correct) for correct in corrections]
        wanted_outputs = list(tensors(reference.run()))
        for of_fit, side in zip(agreements, sides, strict=True):
            for place, (wanted, got) in enumerate(zip(wanted_outputs, tensors(side.run()), strict=True)):
                if wanted.is_floating_point():
                    add_output(of_fit, place, wanted, got)
    return [min((output.sqnr for output in of_fit.values()), default=math.nan) for of_fit in agreements]


def _write(rewriter: Rewriter, node: fx.Node, layer: _Layer) -> None:
    """Write the fit of a layer into its bias and the scales of its weight."""
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
        corrected_scale = rewriter.constant(scaled, f"{name}_scale_corrected", before=weight)
        rewriter.update(weight, kwargs={**weight.kwargs, "scale": corrected_scale})
