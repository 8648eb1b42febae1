"""Quantized inputs of linear layers, and the errors of ways to round them and the weights, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, pieces_of, samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import Agreement, token_weights
from fxq.graph.grid import dynamic_grid_of, grid_of
from fxq.graph.info import Plan, info
from fxq.graph.query import is_op, plan_of, read_attribute
from fxq.graph.unit import calls_of
from fxq.paired.paired_run import PairedRun
from fxq.paired.used_rows import AT_ONCE
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import LayerValues
from fxq.pipeline.samples import on_samples
from fxq.quant.dynamic_grid import DynamicGrid, Grid
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec


@dataclass(frozen=True)
class LinearLayer:
    """Linear layer with integer input and integer weight.

    Attributes:
        node: node that runs it, possibly with ops fused to it.
        read: node of its input.
        weight: node of its dequantized weight.
        real: float weight, (out, in).
        grid: grid of the weight, per row.
        plan: plan of the node.
        reads: spec of its input.
        spec: spec of its weight.
    """

    node: fx.Node
    read: fx.Node
    weight: fx.Node
    real: Tensor
    grid: QParams
    plan: Plan
    reads: TensorSpec
    spec: TensorSpec

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node, read: fx.Node) -> LinearLayer | None:
        """Linear layer of a node whose only activation is `read`; None if it is no such layer."""
        plan, calls = info(node).plan, calls_of(gm, node)
        if plan is None or plan.precision != "int8" or not calls or calls[0].op.name != "linear":
            return None
        weight = calls[0].tensors.get("weight")
        if not isinstance(weight, fx.Node) or not is_op(weight, "dequantize") or len(weight.users) != 1:
            return None
        grid, name = grid_of(gm, weight), info(weight).stands_for
        elsewhere = calls[0].activations != (read,) or any(read in call.activations for call in calls[1:])
        if grid is None or grid.axis != 0 or grid.block is not None or not name or elsewhere:
            return None
        assert plan.reads is not None and plan.weight is not None  # since it runs on integers
        return cls(node, read, weight, read_attribute(gm, name), grid, plan, plan.reads, plan.weight)


Form = tuple[Tensor, Sequence[Tensor]]
"""Rounded tokens, (N, C), and rounded weights of the layers that read them, (out, C) each."""
MAX_MACS = 1 << 29
"""Multiply-accumulates for all tokens of an input that are compared, if these are more than `MIN_COMPARED`."""
MIN_COMPARED = 256
"""Number of tokens that are compared however large the layers are, if there are as many."""


@dataclass
class LinearInput(ABC):
    """Quantized value that linear layers read.

    Attributes:
        quantize: node that quantizes it.
        grid: its grid, calibrated or dynamic.
        layers: layers that read it.
        most: maximum number of tokens to compare.
        tokens: number of tokens seen so far, without padding.
        kept: tokens to compare, float32, (N, C) each: of each batch if a batch has a range of its own, else of all
            batches; none after `finish`.
    """

    quantize: fx.Node
    grid: Grid
    layers: list[LinearLayer]
    most: int
    tokens: int = field(default=0, init=False)
    kept: list[Tensor] = field(default_factory=list, init=False)
    _ranks: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)  # of the tokens of all batches, random
    _draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), init=False)

    @abstractmethod
    def see(self, x: Tensor, share: float) -> None:
        """Process tokens, float32, (N, C). The first `share` of them, 0 to 1, is of the first half of the samples."""

    @abstractmethod
    def finish(self) -> None:
        """Compare the tokens that were kept, after all have been seen, and drop them."""

    def keep(self, x: Tensor) -> None:
        """Keep some of the tokens of a batch, float32, (N, C), for `errors_of`.

        They are drawn from all tokens alike, with a fixed seed. Where each batch has a range of its own, the first ones
        are kept, batch by batch.
        """
        compared = min(self.most, max(MIN_COMPARED, MAX_MACS // sum(layer.real.numel() for layer in self.layers)))
        if isinstance(self.grid, DynamicGrid) and self.grid.axis is None:
            first = x[: compared - sum(map(len, self.kept))]
            self.kept += [first.clone()] if len(first) else []
            return
        tokens = torch.cat([*self.kept, x])
        ranks = torch.cat([self._ranks, torch.rand(len(x), generator=self._draw)])
        chosen = ranks.topk(min(len(ranks), compared)).indices.sort().values
        self.kept, self._ranks = [tokens[chosen.to(x.device)]], ranks[chosen]

    def errors_of(self, ways: Callable[[Sequence[Tensor]], Iterable[Form]]) -> Iterator[Agreement]:
        """Yield the error of each way to round the tokens that were kept, relative to the layers' float results.

        All tokens have the same weight, so that tokens with large values do not hide the errors of others.

        Args:
            ways: function of `kept` that yields the rounded tokens of all parts, (N, C), and weights of each way.
        """
        if not sum(map(len, self.kept)):
            return
        x = torch.cat(self.kept)
        wanted = [x @ layer.real.T for layer in self.layers]
        weights = [token_weights(y).sqrt()[:, None] for y in wanted]
        for rounded, rounded_weights in ways(self.kept):
            error = Agreement()
            for rounded_weight, want, by in zip(rounded_weights, wanted, weights, strict=True):
                error.add(want * by, (rounded @ rounded_weight.T) * by)
            yield error


Input = TypeVar("Input", bound=LinearInput)


def seen_inputs(
    gm: fx.GraphModule, context: Context, make: Callable[..., Input], samples: int, rows: int, least: int
) -> list[Input]:
    """Inputs of linear layers with per-channel weights, after they have seen recorded samples in float.

    Args:
        gm: the qdq graph.
        context: context with the samples; without samples, there are no inputs.
        make: makes an input of the first four attributes of `LinearInput`.
        samples: number of samples to run.
        rows: maximum number of tokens to compare; of large layers, at least 256 are compared.
        least: minimum number of tokens of an input in these samples. With fewer, its ranges are not known well.
    """
    size = samples_in(context.example)

    def run(batches: Sequence[Batch]) -> list[Input]:
        count = sum(samples_in(batch) or 1 for batch in batches)
        inputs = {
            linear_input.quantize: linear_input
            for linear_input in _inputs(gm, make, rows)
            if count >= least or not _has_one_token_per_sample(linear_input, size)
        }
        batches = [batch for batch in batches if samples_in(batch) != 0]
        if context.divisible:
            batches = [piece for batch in batches for piece in pieces_of(batch, AT_ONCE)]
        floats = context.floats.of(gm, context) if inputs else LayerValues()
        for i, batch in enumerate(batches if inputs else ()):
            share = 0.5 if len(batches) == 1 else float(i < (len(batches) + 1) // 2)
            with torch.no_grad(), seeded():
                _see(PairedRun.with_float_form(gm, [batch], inputs, floats, inputs), inputs, share)
        with torch.no_grad():
            for linear_input in inputs.values():
                linear_input.finish()
        return [linear_input for linear_input in inputs.values() if linear_input.tokens >= least]

    return on_samples(context, samples, run) if context.samples else []


def _inputs(gm: fx.GraphModule, make: Callable[..., Input], rows: int) -> Iterable[Input]:
    """Yield the inputs of a graph whose grid is per tensor, or dynamic per row."""
    for node in gm.graph.nodes:
        grid = (dynamic_grid_of(node) or grid_of(gm, node)) if is_op(node, "quantize") else None
        whole = grid is not None and grid.axis is None
        by_token = isinstance(grid, DynamicGrid) and grid.axis == -1
        if grid is None or not (whole or by_token):
            continue
        plan = plan_of(node.args[0])
        readers = [(user, dq) for dq in node.users if is_op(dq, "dequantize") for user in dq.users]
        layers = [layer for reader in readers if (layer := LinearLayer.of(gm, *reader)) is not None]
        if layers and (plan is None or plan.emits is None):
            yield make(node, grid, layers, rows)


def _has_one_token_per_sample(linear_input: LinearInput, size: int | None) -> bool:
    """Whether an input has one token per sample. `size` is the number of samples in the example."""
    shape = info(linear_input.quantize).shape or ()
    return len(shape) == 2 and shape[0] == size


def _see(run: PairedRun, inputs: Mapping[fx.Node, LinearInput], share: float) -> None:
    """Run the float form, and pass the tokens of inputs to them, except padding."""
    for node in run.reference.program.graph.nodes:
        run.reference.step(node)
        for tokens in run.float_values(node) if node in inputs else ():
            tokens = tokens.reshape(-1, tokens.shape[-1])
            inputs[node].tokens += len(tokens)
            inputs[node].see(tokens, share)
