"""smooth: what is large in a few channels of a linear layer's input moves into its weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, samples_in
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import Agreement
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import is_op, plan_of, read_attribute
from fxq.graph.unit import calls_of
from fxq.ledger.side_by_side import Program
from fxq.pipeline.context import Context
from fxq.pipeline.float_form import FloatForm
from fxq.pipeline.samples import on_samples
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams, choose_qparams, dequantize, quantize
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""How much of the difference between channels moves into the weight, tried for each input: alpha in the paper."""


@dataclass(frozen=True)
class Smooth(Pass):
    """Divide the input of linear layers by a factor for each channel, and multiply their weights with it.

    Before: linear(dequantize(quantize(x)), dequantize(w_int8), b)
    After: linear(dequantize(quantize(x * (1 / s))), dequantize(w_s_int8), b), with w_s = w * s
    Keeps: the output up to rounding to the grids, of which the new ones are finer. How much moves is tried for each
    input: the ranges are those of one half of the recorded samples, the errors those of the other half. Where the
    layers that read it gain less than `gain`, nothing is changed. Each token counts alike: one whose values are large
    does not hide what the others lose.
    Source: Xiao et al. 2023 (SmoothQuant, arXiv 2211.10438), equations 3 and 4.

    Args:
        gain: dB that the layers have to gain: the factors cost a multiplication of each input.
        enough: dB. Layers whose error is below that already are left alone.
        samples: how many samples to look at.
        rows: how many tokens of them, for the errors.
        least: inputs with fewer tokens in the samples are left alone: what is large in them is not known.
    """

    gain: float = 3.0
    enough: float = 33.0
    samples: int = 64
    rows: int = 1024
    least: int = 512

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "gain": (0.0, math.inf),
        "enough": (-math.inf, math.inf),
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
        context: Context = rewriter.context

        def measured(batches: Sequence[Batch]) -> list[_Input]:
            found = {one.quantize: one for one in _inputs(rewriter.gm) if self._has_enough(one, context)}
            batches = [batch for batch in batches if samples_in(batch) != 0]
            for i, batch in enumerate(batches if found else ()):
                share = 0.5 if len(batches) == 1 else float(i < (len(batches) + 1) // 2)
                with torch.no_grad(), seeded():
                    _Floats(rewriter.gm, batch, found, share, self.rows).run()
            return list(found.values())

        for one in on_samples(context, self.samples, measured) if context.samples else ():
            one.low, one.high = torch.minimum(one.low, one.later[0]), torch.maximum(one.high, one.later[1])
            strength = one.best(self.gain, self.enough)
            if strength is not None:
                with rewriter.attributed("smooth", Smooth):
                    _write(rewriter, one, strength)

    def _has_enough(self, one: _Input, context: Context) -> bool:
        """Whether there are enough tokens of an input in the samples."""
        shape, size = info(one.quantize).shape or (), samples_in(context.example) or 1
        samples = sum(samples_in(batch) or size for batch in context.samples)
        return math.prod(shape[:-1]) * samples >= self.least * size


def _inputs(gm: fx.GraphModule) -> Iterator[_Input]:
    """The values that linear layers read as integers, with weights that have a scale for each channel."""
    for node in gm.graph.nodes:
        grid = grid_of(gm, node) if is_op(node, "quantize") else None
        if grid is None or grid.axis is not None:
            continue
        plan = plan_of(node.args[0])
        readers = [(user, back) for back in node.users if is_op(back, "dequantize") for user in back.users]
        layers = [layer for reader in readers if (layer := _Layer.of(gm, *reader)) is not None]
        if layers and (plan is None or plan.emits is None):
            yield _Input(node, grid, layers)


@dataclass(frozen=True)
class _Layer:
    """A linear layer.

    Attributes:
        node: the node that runs it, and perhaps what is fused to it.
        read: the value that it reads.
        weight: its dequantized weight.
        real: the float weight, (out, in).
        grid: of the weight: a scale for each row.
        reads, spec: the specs of what it reads and of its weight.
    """

    node: fx.Node
    read: fx.Node
    weight: fx.Node
    real: Tensor
    grid: QParams
    reads: TensorSpec
    spec: TensorSpec

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node, read: fx.Node) -> _Layer | None:
        """A node as one that reads this value; None where it is none, or reads the value otherwise."""
        plan, calls = info(node).plan, calls_of(gm, node)
        if plan is None or plan.fate != "int8" or not calls or calls[0].op.name != "linear":
            return None
        weight = calls[0].tensors.get("weight")
        if not isinstance(weight, fx.Node) or not is_op(weight, "dequantize") or len(weight.users) != 1:
            return None
        grid, name = grid_of(gm, weight), info(weight).stands_for
        elsewhere = calls[0].activations != (read,) or any(read in call.activations for call in calls[1:])
        if grid is None or grid.axis != 0 or grid.block is not None or not name or elsewhere:
            return None
        assert plan.reads is not None and plan.weight is not None  # as it runs on integers
        return cls(node, read, weight, read_attribute(gm, name), grid, plan.reads, plan.weight)

    def smoothed(self, factors: Tensor) -> tuple[Tensor, QParams]:
        """The weight times the factors, and its grid."""
        scaled = self.real * factors
        observer = observer_for(replace(self.spec, bits=self.grid.bits), axis=0)
        observer(scaled)
        return scaled, observer.qparams()


@dataclass
class _Input:
    """A value that linear layers read as integers, and how it goes with each strength.

    Attributes:
        quantize: the node that makes integers of it.
        grid: that node's grid.
        layers: those that read it.
        low, high: the range of each channel in the samples that are for it, (C,).
        later: the same of those that are for the errors.
        seen: how many tokens were compared.
        errors: of the layers' results, relative to the float ones: as it is, and with each of `STRENGTHS`.
    """

    quantize: fx.Node
    grid: QParams
    layers: list[_Layer]
    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    later: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(()), torch.zeros(())))
    seen: int = 0
    errors: list[Agreement] = field(default_factory=lambda: [Agreement() for _ in (None, *STRENGTHS)])

    def see(self, x: Tensor, share: float, most: int) -> None:
        """Take in tokens, (N, C): the ranges of the first, so many of them, and the errors of up to `most` others."""
        for_ranges, others = x.tensor_split([round(share * len(x))])
        self.low, self.high = _around(for_ranges, self.low, self.high)
        self.later = _around(others, *self.later)
        others = others[: max(most - self.seen, 0)]
        self.seen += len(others)
        if len(others):
            self._compare(others)

    def _compare(self, x: Tensor) -> None:
        """Take in the layers' errors on some tokens."""
        wanted = [x @ layer.real.T for layer in self.layers]
        weights = [_by_token(y) for y in wanted]
        for strength, error in zip((None, *STRENGTHS), self.errors, strict=True):
            if strength is None:
                given, made = _rounded(x, self.grid), [_rounded(layer.real, layer.grid) for layer in self.layers]
            else:
                factors = self.factors(strength)
                given = _rounded(x / factors, self.smoothed_grid(factors))
                made = [_rounded(*layer.smoothed(factors)) for layer in self.layers]
            for weight, want, by in zip(made, wanted, weights, strict=True):
                error.add(want * by, (given @ weight.T) * by)

    def factors(self, strength: float) -> Tensor:
        """What each channel is divided by, (C,)."""
        largest = torch.maximum(-self.low, self.high)
        weights = torch.stack([layer.real.abs().amax(0) for layer in self.layers]).amax(0)
        factors = largest**strength / weights.clamp(min=1e-12) ** (1 - strength)
        return torch.where(largest > 0, factors, torch.ones_like(factors)).clamp(min=1e-6)

    def smoothed_grid(self, factors: Tensor) -> QParams:
        """The grid for all values that were seen, divided by the factors."""
        spec = replace(self.layers[0].reads, bits=self.grid.bits)
        return choose_qparams((self.low / factors).min(), (self.high / factors).max(), spec)

    def best(self, gain: float, enough: float) -> float | None:
        """The strength with the least error; None where that is hardly less than without."""
        before, *after = (error.sqnr for error in self.errors)
        best = max(range(len(after)), key=after.__getitem__)
        return STRENGTHS[best] if before < enough and after[best] >= before + gain else None


def _around(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of channels, made as wide as those of some tokens, (N, C)."""
    return (torch.minimum(low, x.amin(0)), torch.maximum(high, x.amax(0))) if len(x) else (low, high)


def _rounded(x: Tensor, grid: QParams) -> Tensor:
    return dequantize(quantize(x, grid), grid)


def _by_token(y: Tensor) -> Tensor:
    """What makes the rows of (N, C) alike in power, (N, 1); those near zero are not made large."""
    power = y.square().sum(1, keepdim=True)
    return (power + power.median()).clamp(min=1e-30).rsqrt()


class _Floats(FloatForm):
    """Runs the graph on a batch in float, and shows the inputs what is quantized."""

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, inputs: Mapping[fx.Node, _Input], share: float, most: int
    ) -> None:
        super().__init__(gm, copied(batch), modules=Program(gm, gm.graph).modules)
        self._inputs, self._share, self._most = inputs, share, most

    def compute(self, node: fx.Node) -> Any:
        value = super().compute(node)
        if node in self._inputs:
            self._inputs[node].see(value.reshape(-1, value.shape[-1]), self._share, self._most)
        return value


def _write(rewriter: Rewriter, one: _Input, strength: float) -> None:
    """Put the multiplication in, with conversions behind it for the layers, and the new weights."""
    old, value = one.quantize, one.quantize.args[0]
    assert isinstance(value, fx.Node)  # what is quantized is a value
    about, factors, grid = info(value), one.factors(strength), one.smoothed_grid(one.factors(strength))
    inverse = rewriter.constant(1 / factors, f"{about.path or value.name}.smoothing", before=old)
    made = rewriter.call("mul", value, inverse, before=old, name=f"{value.name}_smooth", like=old)
    plan = Plan(Decision("float", "", f"divides by what moved into the weights behind it (alpha {strength:g})"))
    rewriter.describe(made, origins=(), plan=plan)
    given: dict[str, Any] = {key: old.kwargs[key] for key in ("qmin", "qmax") if key in old.kwargs}
    given |= {"scale": grid.s, "zero_point": grid.z}
    typed = (about.shape, grid.dtype)
    q = rewriter.call(
        "quantize", made, before=old, name=f"{made.name}_q", like=old, typed=typed, dtype=grid.dtype, **given
    )
    dq = rewriter.call("dequantize", q, before=old, name=f"{made.name}_dq", like=old, **given)
    for layer in one.layers:
        rewriter.update(layer.node, args=_swap(layer.node.args, layer.read, dq))
        _write_weight(rewriter, layer, factors)
    rewriter.erase_unused()


def _write_weight(rewriter: Rewriter, layer: _Layer, factors: Tensor) -> None:
    """Put the weight times the factors in the place of a weight."""
    old, (weight, grid) = layer.weight, layer.smoothed(factors)
    name = info(old).stands_for.removeprefix("fxq_data.").replace(".", "_")
    real = rewriter.constant(weight, f"{name}_smoothed", before=old)
    integers = rewriter.constant(quantize(weight, grid), f"{name}_smoothed_int8", before=old)
    scale = rewriter.constant(grid.scale, f"{name}_smoothed_scale", before=old)
    rewriter.update(old, args=(integers, *old.args[1:]), kwargs={**old.kwargs, "scale": scale})
    rewriter.describe(old, stands_for=str(real.target))
    rewriter.erase(real)


def _swap(args: Any, old: fx.Node, new: fx.Node) -> Any:
    return fx.node.map_arg(args, lambda n: new if n is old else n)
