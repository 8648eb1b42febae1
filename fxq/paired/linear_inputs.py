"""What linear layers read as integers, and what it costs to round it, and their weights: token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, pieces_of, samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import Agreement, token_weights
from fxq.graph.grid import dynamic_grid_of, grid_of
from fxq.graph.info import Plan, info
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, plan_of, read_attribute
from fxq.graph.unit import calls_of
from fxq.paired.used_rows import AT_ONCE, used_rows
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import CachedFloatForm, LayerValues
from fxq.pipeline.samples import on_samples
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer.

    Attributes:
        node: the node that runs it, and perhaps what is fused to it.
        read: the value that it reads.
        weight: its dequantized weight.
        real: the float weight, (out, in).
        grid: of the weight: a scale for each row.
        plan: what is decided of it.
        reads, spec: the specs of what it reads and of its weight.
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
        """A node as one that reads this value; None where it is none, or reads the value otherwise."""
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
        assert plan.reads is not None and plan.weight is not None  # as it runs on integers
        return cls(node, read, weight, read_attribute(gm, name), grid, plan, plan.reads, plan.weight)


Form = tuple[Tensor, Sequence[Tensor]]
"""Tokens, (N, C), and the weights of the layers that read them, (out, C)."""


@dataclass
class LinearInput(ABC):
    """A value that linear layers read as integers.

    Attributes:
        quantize: the node that makes integers of it.
        grid: that node's grid, or the one that it measures when the model runs.
        layers: those that read it.
        most: how many of its tokens to compare.
        tokens: how many it was shown, without padding.
    """

    quantize: fx.Node
    grid: QParams | DynamicGrid
    layers: list[LinearLayer]
    most: int
    tokens: int = field(default=0, init=False)

    @abstractmethod
    def see(self, x: Tensor, share: float) -> None:
        """Take in tokens, (N, C); so much of them, from the first on, is of the first half of the samples."""

    def compare(self, x: Tensor, errors: Sequence[Agreement], ways: Callable[[Tensor], Iterable[Form]]) -> None:
        """Add errors on tokens, (N, C), to those of several ways to round, relative to the layers' float results.

        Each token counts alike: one whose values are large does not hide what the others lose. No more than `most` are
        compared in all.

        Args:
            x: the tokens.
            errors: those before, of each way.
            ways: gives the tokens, and the layers' weights, as they are rounded each way.
        """
        x = x[: self.most]
        self.most -= len(x)
        if not len(x):
            return
        wanted = [x @ layer.real.T for layer in self.layers]
        weights = [token_weights(y).sqrt()[:, None] for y in wanted]
        for error, (given, made) in zip(errors, ways(x), strict=True):
            for weight, want, by in zip(made, wanted, weights, strict=True):
                error.add(want * by, (given @ weight.T) * by)


Input = TypeVar("Input", bound=LinearInput)


def seen_inputs(
    gm: fx.GraphModule, context: Context, kind: type[Input], samples: int, rows: int, least: int
) -> list[Input]:
    """The inputs of linear layers with weights of a scale for each channel, which have seen recorded samples in float.

    Args:
        gm: the qdq graph.
        context: has the samples; without any, nothing is found.
        kind: what is made of each.
        samples: how many samples to show.
        rows: how many tokens of them to compare.
        least: inputs with fewer tokens in these samples are left out: what is large in them is not known.
    """
    size = samples_in(context.example)

    def run(batches: Sequence[Batch]) -> list[Input]:
        count = sum(samples_in(batch) or 1 for batch in batches)
        inputs = {
            linear_input.quantize: linear_input
            for linear_input in _inputs(gm, kind, rows)
            if count >= least or not _is_one(linear_input, size)
        }
        batches = [batch for batch in batches if samples_in(batch) != 0]
        if context.divisible:
            batches = [piece for batch in batches for piece in pieces_of(batch, AT_ONCE)]
        floats = context.floats.of(gm, context) if inputs else LayerValues()
        for i, batch in enumerate(batches if inputs else ()):
            share = 0.5 if len(batches) == 1 else float(i < (len(batches) + 1) // 2)
            with torch.no_grad(), seeded():
                _Floats(gm, batch, floats, inputs, share).run()
        return [linear_input for linear_input in inputs.values() if linear_input.tokens >= least]

    return on_samples(context, samples, run) if context.samples else []


def _inputs(gm: fx.GraphModule, kind: type[Input], rows: int) -> Iterable[Input]:
    for node in gm.graph.nodes:
        grid = (dynamic_grid_of(node) or grid_of(gm, node)) if is_op(node, "quantize") else None
        whole = grid is not None and grid.axis is None
        by_token = isinstance(grid, DynamicGrid) and grid.axis == -1
        if grid is None or not (whole or by_token):
            continue
        plan = plan_of(node.args[0])
        readers = [(user, back) for back in node.users if is_op(back, "dequantize") for user in back.users]
        layers = [layer for reader in readers if (layer := LinearLayer.of(gm, *reader)) is not None]
        if layers and (plan is None or plan.emits is None):
            yield kind(node, grid, layers, rows)


def _is_one(linear_input: LinearInput, size: int | None) -> bool:
    """Whether an input has one token per sample; `size` is the number of samples in the example."""
    shape = info(linear_input.quantize).shape or ()
    return len(shape) == 2 and shape[0] == size


class _Floats(CachedFloatForm):
    """Runs the graph on a batch in float, and shows the inputs what is quantized, but for padding."""

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, floats: LayerValues, inputs: Mapping[fx.Node, LinearInput], share: float
    ) -> None:
        super().__init__(gm, batch, floats, inputs, modules=IsolatedGraph(gm, gm.graph).modules)
        self._inputs, self._share = inputs, share
        self._used = used_rows(IsolatedGraph(gm, gm.graph), batch, inputs)

    def compute(self, node: fx.Node) -> Any:
        value = super().compute(node)
        if node in self._inputs:
            tokens, used, one = value.reshape(-1, value.shape[-1]), self._used.get(node), self._inputs[node]
            seen = tokens if used is None else tokens[used.flatten()]
            one.tokens += len(seen)
            one.see(seen, self._share)
        return value
