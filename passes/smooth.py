"""smooth: scale or rotate inputs of linear layers with outliers, or quantize their tokens dynamically."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fxq.common.metrics import Agreement
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import swapped
from fxq.paired.linear_inputs import Form, LinearInput, LinearLayer, seen_inputs
from fxq.pipeline.context import Context
from fxq.pipeline.float_moves import move_floats
from fxq.quant.dynamic_grid import DynamicGrid, Grid
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams, choose_qparams, quantize
from fxq.quant.rotation import rotated
from fxq.quant.spec import QuantConfig, TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Tried values of alpha in the paper: how much of the difference between channels moves into the weight."""


class _Variant(NamedTuple):
    """One way to quantize the input of linear layers.

    Attributes:
        strength: alpha in the paper; None: the input is not scaled.
        rows: whether each token has a dynamic grid.
        rotates: whether the input, scaled or not, is rotated.
    """

    strength: float | None = None
    rows: bool = False
    rotates: bool = False


MARGIN_DB = 6.0
"""Margin above the sufficient SQNR from which no other variants are tried: half the amplitude of the noise."""
UNCHANGED = _Variant()
SMOOTHED = tuple(map(_Variant, STRENGTHS))
PER_ROW = (_Variant(rows=True), _Variant(STRENGTHS[0], rows=True))
"""Variants with per-row ranges. They are not tried for inputs that are dynamic already."""
ROTATED = (_Variant(rotates=True), _Variant(STRENGTHS[0], rotates=True))
"""Variants with rotated tokens, for inputs that are dynamic already."""
ROTATED_TOGETHER = 32
"""Number of channels that are rotated together. A larger group lowers peaks further, and takes longer."""
MIN_OUTPUTS = 16 * ROTATED_TOGETHER
"""Minimum number of outputs of the layers that read an input, so that rotating it takes a small part of their time."""


@dataclass(frozen=True)
class Smooth(Pass):
    """Scale or rotate the inputs of linear layers, and the weights inversely, or quantize each token dynamically.

    Before: linear(dequantize(quantize(x)), dequantize(w_int8), b)
    After: linear(dequantize(quantize(x * (1 / s))), dequantize(w_s_int8), b), with w_s = w * s
    Or, if that is not enough: linear(dequantize(quantize(x, scale=s)), ...), with s = choose_scale(x, axis=-1)
    Also: with a dynamic recipe and calibration data, inputs are divided by factors before their ranges are computed, or
    rotated: linear(dequantize(quantize(rotate_rows(x * (1 / s)))), dequantize(w_r_int8), b), with w_r = rotated(w * s)
    Keeps: the output up to rounding to the new grids, which represent the values better.

    Several strengths are tried for each input, unless its layers are far more exact than `enough`. Half of
    the recorded samples determines the ranges, the other half the errors. If the layers that read the input gain too
    little, nothing is changed. All tokens have the same weight, so that tokens with large values do not hide the errors
    of others; padding does not count.
    In transformers, a few tokens can be many times as large as all others, most of all after GELU. Factors of channels
    do not help there. Such a layer gets a dynamic range for each token, as in a dynamic recipe; if the backend has no
    kernel for that, `fallback` moves it to float. Ops that only move data, between a float op and the new quantize,
    move floats, so that nothing is rounded twice.
    Nor do factors help where other channels are large in each token, as in the products of gated feed-forward layers.
    A rotation by a Hadamard matrix spreads each value over 32 channels, so that no token needs a wide range for one
    value. It is for inputs of a multiple of 32 channels that are read by layers with 512 outputs or more, in all.
    Source: Xiao et al. 2023 (SmoothQuant, arXiv 2211.10438), equations 3 and 4; Dettmers et al. 2022, section 2.1 (a
    scale for each row); Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456), section 4 (rotations in each call).

    Args:
        gain: minimum SQNR in dB that layers must gain by factors, which cost a multiplication of the input.
        measure_gain: minimum SQNR in dB that layers must gain by dynamic ranges, which cost time in each call.
        enough: SQNR in dB from which layers are left alone.
        dynamic_gain: as `gain`, for inputs that are dynamic already and thus more exact.
        dynamic_enough: as `enough`, for inputs that are dynamic already.
        rotation_gain: minimum SQNR in dB that layers must gain by a rotation over factors alone; it is a product with a
            matrix of 32 x 32 for each 32 values of the input.
        samples: number of samples to use.
        rows: maximum number of their tokens to use for the errors, drawn from all of them. Of large layers, fewer are
            used, but at least 256.
        least: minimum number of tokens in the samples. With fewer, the ranges are not known well, and nothing changes.
    """

    gain: float = 3.0
    measure_gain: float = 5.0
    enough: float = 33.0
    dynamic_gain: float = 1.5
    dynamic_enough: float = 40.0
    rotation_gain: float = 2.0
    samples: int = 64
    rows: int = 1024
    least: int = 512

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "gain": (0.0, math.inf),
        "measure_gain": (0.0, math.inf),
        "enough": (-math.inf, math.inf),
        "dynamic_gain": (0.0, math.inf),
        "dynamic_enough": (-math.inf, math.inf),
        "rotation_gain": (0.0, math.inf),
        "samples": (1, math.inf),
        "rows": (1, math.inf),
        "least": (1, math.inf),
    }
    name: ClassVar[str] = "smooth"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def samples_read(self) -> int:
        return self.samples

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        return any(config.activation is not None for config in configs)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Measure the errors of all variants, and write the best ones."""
        make = partial(_Input, options=self)
        for linear_input in seen_inputs(rewriter.gm, rewriter.context, make, self.samples, self.rows, self.least):
            linear_input.include_later()
            variant, why = linear_input.best()
            if variant != UNCHANGED:
                with rewriter.attributed("smooth", Smooth):
                    _write(rewriter, linear_input, variant, why)


@dataclass
class _Input(LinearInput):
    """Input of linear layers, with the errors of its variants.

    Attributes:
        options: the pass.
        low: minimum of each channel, (C,), in the samples for the ranges.
        high: maximum of each channel, (C,), in the samples for the ranges.
        later: minimum and maximum of each channel, (C,), in the samples for the errors.
        unchanged: error of the layers' results as they are, relative to the float results. With a dynamic per-tensor
            range, a tensor is the batch that runs at once.
        errors: error by variant; none if `unchanged` is above what is enough by a margin.
    """

    options: Smooth
    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    later: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(()), torch.zeros(())))
    unchanged: Agreement = field(default_factory=Agreement)
    errors: dict[_Variant, Agreement] = field(init=False)

    def __post_init__(self) -> None:
        others = PER_ROW if not self.is_dynamic else ROTATED if self.can_rotate else ()
        self.errors = {variant: Agreement() for variant in (UNCHANGED, *SMOOTHED, *others)}

    def see(self, x: Tensor, share: float) -> None:
        """Use the first `share` of the tokens x, (N, C), for the ranges, and the others for the errors."""
        for_ranges, for_errors = x.tensor_split([round(share * len(x))])
        self.low, self.high = _around(for_ranges, self.low, self.high)
        self.later = _around(for_errors, *self.later)
        self.keep(for_errors)

    def finish(self) -> None:
        """Compute the errors of all variants, or that of `UNCHANGED` alone if it is far above what is enough."""
        errors = self.errors_of(self._variants)
        first = next(errors, None)  # of UNCHANGED; None: there are no tokens
        if first is not None:
            self.unchanged = first
            if first.sqnr < self.enough + MARGIN_DB:
                self.errors = dict(zip(self.errors, chain([first], errors), strict=True))
        self.kept.clear()

    def include_later(self) -> None:
        """Widen the ranges to all samples, once the errors are known."""
        self.low, self.high = torch.minimum(self.low, self.later[0]), torch.maximum(self.high, self.later[1])

    def _variants(self, parts: Sequence[Tensor]) -> Iterator[Form]:
        """Yield the rounded tokens of all parts, and the rounded weights, of each variant."""
        for variant in self.errors:
            factors = self.factors(variant.strength)
            tokens = parts if factors is None else [part / factors for part in parts]
            tokens = [rotated(part, ROTATED_TOGETHER) for part in tokens] if variant.rotates else tokens
            weights = (_transformed_weight(layer, factors, variant.rotates) for layer in self.layers)
            rounded = torch.cat([self.grid_for(variant, factors).rounded(part) for part in tokens])
            yield rounded, [grid.rounded(weight) for weight, grid in weights]

    def factors(self, strength: float | None) -> Tensor | None:
        """Divisors of the channels, (C,). A channel that is zero in all samples gets the median of the others."""
        if strength is None:
            return None
        largest = torch.maximum(-self.low, self.high)
        weights = torch.stack([layer.real.abs().amax(0) for layer in self.layers]).amax(0)
        factors = largest**strength / weights.clamp(min=1e-12) ** (1 - strength)
        nonzero = factors[largest > 0]
        median = nonzero.median() if len(nonzero) else torch.ones(())
        return torch.where(largest > 0, factors, median).clamp(min=1e-6 * float(median))

    @property
    def spec(self) -> TensorSpec:
        """Spec of the input, with the number of bits of its grid."""
        return replace(self.layers[0].reads, bits=self.grid.bits)

    def grid_for(self, variant: _Variant, factors: Tensor | None) -> Grid:
        """Grid of the input in a variant with these `factors`, (C,) or None."""
        if variant.rows:
            return self.row_grid
        if factors is None or isinstance(self.grid, DynamicGrid):
            return self.grid
        return choose_qparams((self.low / factors).min(), (self.high / factors).max(), self.spec)

    @property
    def row_spec(self) -> TensorSpec:
        """Spec of the input with a dynamic range for each token."""
        return replace(self.spec, per="row", range="dynamic")

    @property
    def row_grid(self) -> DynamicGrid:
        """Grid of the input with a dynamic range for each token."""
        return DynamicGrid.of(self.row_spec, axis=-1)

    @property
    def is_dynamic(self) -> bool:
        """Whether the range of the input is dynamic already."""
        return isinstance(self.grid, DynamicGrid)

    @property
    def can_rotate(self) -> bool:
        """Whether the channels are a multiple of those that are rotated together, and the layers are large."""
        outputs = sum(len(layer.real) for layer in self.layers)
        return self.layers[0].real.shape[1] % ROTATED_TOGETHER == 0 and outputs >= MIN_OUTPUTS

    @property
    def enough(self) -> float:
        """SQNR in dB from which the layers are left alone."""
        return self.options.dynamic_enough if self.is_dynamic else self.options.enough

    def best(self) -> tuple[_Variant, str]:
        """Variant whose gain is worth its cost, by the options of the pass, and the reason for a per-row variant."""
        if not self.unchanged.sqnr < self.enough:
            return UNCHANGED, ""
        sqnr, best = {variant: error.sqnr for variant, error in self.errors.items()}, UNCHANGED
        smoothed = max(SMOOTHED, key=sqnr.__getitem__)
        if sqnr[smoothed] >= sqnr[best] + (self.options.dynamic_gain if self.is_dynamic else self.options.gain):
            best = smoothed
        if ROTATED[0] in sqnr and sqnr[best] < self.enough:
            plain, smoothed = ROTATED
            turned = smoothed if sqnr[smoothed] >= sqnr[plain] + self.options.dynamic_gain else plain
            best = turned if sqnr[turned] >= sqnr[best] + self.options.rotation_gain else best
        if sqnr[best] < self.enough and not self.is_dynamic:
            before = sqnr[best]
            plain, smoothed = PER_ROW
            per_row = smoothed if sqnr[smoothed] >= sqnr[plain] + self.options.gain else plain
            if sqnr[per_row] >= before + self.options.measure_gain:
                return per_row, f"one grid for all tokens gives {before:.1f} dB, one for each {sqnr[per_row]:.1f}"
        return best, ""


def _around(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of channels, (C,), widened to hold the tokens x, (N, C)."""
    return (torch.minimum(low, x.amin(0)), torch.maximum(high, x.amax(0))) if len(x) else (low, high)


def _transformed_weight(layer: LinearLayer, factors: Tensor | None, rotates: bool) -> tuple[Tensor, QParams]:
    """Weight of a layer times the factors, rotated or not, (O, C), and its grid."""
    if factors is None and not rotates:
        return layer.real, layer.grid
    weight = layer.real.detach() if factors is None else layer.real.detach() * factors
    weight = rotated(weight, ROTATED_TOGETHER) if rotates else weight
    observer = observer_for(replace(layer.spec, bits=layer.grid.bits), axis=0)
    observer(weight)
    return weight, observer.qparams()


def _write(rewriter: Rewriter, linear_input: _Input, variant: _Variant, why: str) -> None:
    """Write a variant: the multiplication and rotation, if any, new conversions of the input, and the new weights."""
    old, read = linear_input.quantize, linear_input.quantize.args[0]
    assert isinstance(read, fx.Node)  # a quantize reads a value
    factors = linear_input.factors(variant.strength)
    grid = linear_input.grid_for(variant, factors)
    value = read if factors is None else _divided(rewriter, read, factors, old, variant.strength)
    value = _rotated(rewriter, value, read, old) if variant.rotates else value
    _, dq = on_grid(rewriter, value, value, grid, f"{value.name}_rows" if variant.rows else value.name, like=old)
    for layer in linear_input.layers:
        rewriter.update(layer.node, args=swapped(layer.node.args, {layer.read: dq}))
        if factors is not None or variant.rotates:
            _write_weight(rewriter, layer, factors, variant.rotates)
        if variant.rows:
            rewriter.describe(layer.node, plan=replace(layer.plan, reads=linear_input.row_spec), note=why)
        elif variant.rotates:
            rewriter.describe(layer.node, note="its input is rotated in each call, so that outliers are spread")
    rewriter.erase_unused()
    move_floats(rewriter, read)


def _divided(rewriter: Rewriter, value: fx.Node, factors: Tensor, old: fx.Node, strength: float | None) -> fx.Node:
    """Insert a multiplication of a value by the inverse factors, before its quantize `old`."""
    inverse = rewriter.constant(1 / factors, f"{info(value).path or value.name}.smoothing", before=old)
    typed, name = (info(value).shape, torch.float32), f"{value.name}_smooth"
    product = rewriter.call("mul", value, inverse, before=old, name=name, typed=typed, like=old)
    why = f"divides by the factors that multiply the weights after it (alpha {strength:g})"
    rewriter.describe(product, origins=(), plan=Plan(Decision("float", "", why)))
    return product


def _rotated(rewriter: Rewriter, value: fx.Node, read: fx.Node, old: fx.Node) -> fx.Node:
    """Insert a rotation of a value, which is computed from `read`, before its quantize `old`."""
    typed, name = (info(read).shape, torch.float32), f"{read.name}_rotated"
    rotation = rewriter.call("rotate_rows", value, size=ROTATED_TOGETHER, before=old, name=name, typed=typed, like=old)
    why = "divides outliers among the values of a token, before its range is computed"
    rewriter.describe(rotation, origins=(), plan=Plan(Decision("float", "", why)))
    return rotation


def _write_weight(rewriter: Rewriter, layer: LinearLayer, factors: Tensor | None, rotates: bool) -> None:
    """Replace a weight by the weight times the factors, rotated or not."""
    old, (weight, grid) = layer.weight, _transformed_weight(layer, factors, rotates)
    name = info(old).stands_for.removeprefix("fxq_data.").replace(".", "_")
    name = f"{name}_{'rotated' if rotates else 'smoothed'}"
    real = rewriter.constant(weight, name, before=old)
    integers = rewriter.constant(quantize(weight, grid), f"{name}_int8", before=old)
    scale = rewriter.constant(grid.scale, f"{name}_scale", before=old)
    new: dict[str, Any] = {"scale": scale}
    if not layer.spec.symmetric:
        new["zero_point"] = rewriter.constant(grid.zero_point, f"{name}_zero_point", before=old)
    rewriter.update(old, args=(integers, *old.args[1:]), kwargs={**old.kwargs, **new})
    rewriter.describe(old, stands_for=str(real.target))
    rewriter.erase(real)
