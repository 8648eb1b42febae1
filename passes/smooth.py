"""smooth: what is large in few channels of a linear layer's input moves into its weight; in few tokens, is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fxq.common.metrics import Agreement
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import swapped
from fxq.paired.linear_inputs import Form, LinearInput, LinearLayer, seen_inputs
from fxq.pipeline.float_moves import move_floats
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams, choose_qparams, quantize
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""How much of the difference between channels moves into the weight, tried for each input: alpha in the paper."""


class _Way(NamedTuple):
    """How to round the input of layers.

    Attributes:
        strength: how much moves into the weight; None: nothing.
        rows: whether each token is on a grid of its own, which is measured when the model runs.
    """

    strength: float | None = None
    rows: bool = False


AS_IT_IS = _Way()
DIVIDED = tuple(map(_Way, STRENGTHS))
BY_ROW = (_Way(rows=True), _Way(STRENGTHS[0], rows=True))
"""These are not tried where the input is measured already."""


@dataclass(frozen=True)
class Smooth(Pass):
    """Divide the input of linear layers by factors, and multiply their weights with these; or measure each token.

    Before: linear(dequantize(quantize(x)), dequantize(w_int8), b)
    After: linear(dequantize(quantize(x * (1 / s))), dequantize(w_s_int8), b), with w_s = w * s
    Or, where that is not enough: linear(dequantize(quantize(x, scale=s)), ...), with s = choose_scale(x, axis=-1)
    Of a dynamic recipe that is given data, which measures its inputs: those are divided first, then measured.
    Keeps: the output up to rounding to the grids, of which the new ones fit better. How much moves is tried for each
    input: the ranges are those of one half of the recorded samples, the errors those of the other half. Where the
    layers that read it gain too little, nothing is changed. Each token counts alike: one whose values are large does
    not hide what the others lose; padding does not count.
    In transformers, some tokens hold values many times as large as all others, in what GELU returns most of all. No
    factors of channels help there. Such a layer measures the range of each token when the model runs, as in a dynamic
    recipe; where the backend cannot, `fallback` leaves it in float. Ops that only move data, in front of what is
    rounded anew, move floats: nothing is rounded twice.
    Source: Xiao et al. 2023 (SmoothQuant, arXiv 2211.10438), equations 3 and 4; Dettmers et al. 2022, section 2.1 (a
    scale for each row).

    Args:
        gain: dB that the layers have to gain: the factors cost a multiplication of each input.
        measure_gain: dB that they have to gain by measured ranges, which cost time in each call.
        enough: dB. Layers whose SQNR is above that are left alone.
        dynamic_gain, dynamic_enough: the same for inputs that a dynamic recipe measures, which are more exact already.
        samples: how many samples to look at.
        rows: how many tokens of them, for the errors.
        least: inputs with fewer tokens in the samples are left alone: what is large in them is not known.
    """

    gain: float = 3.0
    measure_gain: float = 5.0
    enough: float = 33.0
    dynamic_gain: float = 1.5
    dynamic_enough: float = 40.0
    samples: int = 64
    rows: int = 1024
    least: int = 512

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "gain": (0.0, math.inf),
        "measure_gain": (0.0, math.inf),
        "enough": (-math.inf, math.inf),
        "dynamic_gain": (0.0, math.inf),
        "dynamic_enough": (-math.inf, math.inf),
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

    def run(self, rewriter: Rewriter) -> None:
        """Find the ranges of all channels, and the best factors; then write those that are worth it."""
        for one in seen_inputs(rewriter.gm, rewriter.context, _Input, self.samples, self.rows, self.least):
            one.low, one.high = torch.minimum(one.low, one.later[0]), torch.maximum(one.high, one.later[1])
            way, why = one.best(self)
            if way != AS_IT_IS:
                with rewriter.attributed("smooth", Smooth):
                    _write(rewriter, one, way, why)


@dataclass
class _Input(LinearInput):
    """An input, and how it goes each way.

    Attributes:
        low, high: the range of each channel in the samples that are for it, (C,).
        later: the same of those that are for the errors.
        errors: of the layers' results, relative to the float ones, each way. A range that is measured for whole tensors
            is that of the samples that are run at once.
    """

    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    later: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(()), torch.zeros(())))
    errors: dict[_Way, Agreement] = field(init=False)

    def __post_init__(self) -> None:
        by_row = () if isinstance(self.grid, DynamicGrid) else BY_ROW
        self.errors = {way: Agreement() for way in (AS_IT_IS, *DIVIDED, *by_row)}

    def see(self, x: Tensor, share: float) -> None:
        """Take in tokens, (N, C): the ranges of the first half of the samples, the errors of the other."""
        for_ranges, others = x.tensor_split([round(share * len(x))])
        self.low, self.high = _around(for_ranges, self.low, self.high)
        self.later = _around(others, *self.later)
        self.compare(others, list(self.errors.values()), self._ways)

    def _ways(self, x: Tensor) -> Iterator[Form]:
        """Tokens and weights rounded each way."""
        for way in self.errors:
            factors = self.factors(way.strength)
            given = x if factors is None else x / factors
            weights = [grid.rounded(weight) for weight, grid in (_smoothed(layer, factors) for layer in self.layers)]
            yield self.grid_for(way, factors).rounded(given), weights

    def factors(self, strength: float | None) -> Tensor | None:
        """What each channel is divided by, (C,); one that was zero in all samples, by as much as most others."""
        if strength is None:
            return None
        largest = torch.maximum(-self.low, self.high)
        weights = torch.stack([layer.real.abs().amax(0) for layer in self.layers]).amax(0)
        factors = largest**strength / weights.clamp(min=1e-12) ** (1 - strength)
        known = factors[largest > 0]
        middle = known.median() if len(known) else torch.ones(())
        return torch.where(largest > 0, factors, middle).clamp(min=1e-6 * float(middle))

    @property
    def spec(self) -> TensorSpec:
        """That of the input, with as many bits as its grid has."""
        return replace(self.layers[0].reads, bits=self.grid.bits)

    def grid_for(self, way: _Way, factors: Tensor | None) -> QParams | DynamicGrid:
        """The grid of the input as it is rounded this way; `factors` are those of the way, or None."""
        if way.rows:
            return self.row_grid
        if factors is None or isinstance(self.grid, DynamicGrid):
            return self.grid
        return choose_qparams((self.low / factors).min(), (self.high / factors).max(), self.spec)

    @property
    def row_spec(self) -> TensorSpec:
        """The same, measured for each token."""
        return replace(self.spec, per="row", range="dynamic")

    @property
    def row_grid(self) -> DynamicGrid:
        """The grid of that."""
        return DynamicGrid.of(self.row_spec, axis=-1)

    def best(self, asked: Smooth) -> tuple[_Way, str]:
        """The way that is worth it, and why; what costs more has to gain more."""
        found = {way: error.sqnr for way, error in self.errors.items()}
        dynamic = isinstance(self.grid, DynamicGrid)
        enough, gain = (asked.dynamic_enough, asked.dynamic_gain) if dynamic else (asked.enough, asked.gain)
        best = AS_IT_IS
        if found[best] < enough:
            divided = max(DIVIDED, key=found.__getitem__)
            if found[divided] >= found[best] + gain:
                best = divided
        if found[best] < enough and not dynamic:
            before = found[best]
            plain, divided = BY_ROW
            by_row = divided if found[divided] >= found[plain] + asked.gain else plain
            if found[by_row] >= before + asked.measure_gain:
                return by_row, f"one grid for all tokens gives {before:.1f} dB, one for each {found[by_row]:.1f}"
        return best, ""


def _around(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of channels, made as wide as those of some tokens, (N, C)."""
    return (torch.minimum(low, x.amin(0)), torch.maximum(high, x.amax(0))) if len(x) else (low, high)


def _smoothed(layer: LinearLayer, factors: Tensor | None) -> tuple[Tensor, QParams]:
    """The weight of a layer times the factors, and its grid."""
    if factors is None:
        return layer.real, layer.grid
    scaled = layer.real * factors
    observer = observer_for(replace(layer.spec, bits=layer.grid.bits), axis=0)
    observer(scaled)
    return scaled, observer.qparams()


def _write(rewriter: Rewriter, one: _Input, way: _Way, why: str) -> None:
    """Put the multiplication in, if any, with conversions behind it for the layers, and the new weights."""
    old, read = one.quantize, one.quantize.args[0]
    assert isinstance(read, fx.Node)  # what is quantized is a value
    factors = one.factors(way.strength)
    grid = one.grid_for(way, factors)
    value = read if factors is None else _divided(rewriter, read, factors, old, way.strength)
    _, dq = on_grid(rewriter, value, value, grid, f"{value.name}_rows" if way.rows else value.name, like=old)
    for layer in one.layers:
        rewriter.update(layer.node, args=swapped(layer.node.args, {layer.read: dq}))
        if factors is not None:
            _write_weight(rewriter, layer, factors)
        if way.rows:
            rewriter.describe(layer.node, plan=replace(layer.plan, reads=one.row_spec), note=why)
    rewriter.erase_unused()
    move_floats(rewriter, read)


def _divided(rewriter: Rewriter, value: fx.Node, factors: Tensor, old: fx.Node, strength: float | None) -> fx.Node:
    """The value times the inverse of the factors, in front of what rounds it now."""
    inverse = rewriter.constant(1 / factors, f"{info(value).path or value.name}.smoothing", before=old)
    typed, name = (info(value).shape, torch.float32), f"{value.name}_smooth"
    made = rewriter.call("mul", value, inverse, before=old, name=name, typed=typed, like=old)
    why = f"divides by what moved into the weights behind it (alpha {strength:g})"
    rewriter.describe(made, origins=(), plan=Plan(Decision("float", "", why)))
    return made


def _write_weight(rewriter: Rewriter, layer: LinearLayer, factors: Tensor) -> None:
    """Put the weight times the factors in the place of a weight."""
    old, (weight, grid) = layer.weight, _smoothed(layer, factors)
    name = info(old).stands_for.removeprefix("fxq_data.").replace(".", "_")
    real = rewriter.constant(weight, f"{name}_smoothed", before=old)
    integers = rewriter.constant(quantize(weight, grid), f"{name}_smoothed_int8", before=old)
    scale = rewriter.constant(grid.scale, f"{name}_smoothed_scale", before=old)
    new: dict[str, Any] = {"scale": scale}
    if not layer.spec.symmetric:
        new["zero_point"] = rewriter.constant(grid.zero_point, f"{name}_smoothed_zero_point", before=old)
    rewriter.update(old, args=(integers, *old.args[1:]), kwargs={**old.kwargs, **new})
    rewriter.describe(old, stands_for=str(real.target))
    rewriter.erase(real)
