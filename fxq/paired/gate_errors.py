"""Mean errors that rounding leaves in the gates of recurrent layers, which their biases can correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.graph.grid import dynamic_grid_of, grid_of
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, op_of, options_of, plan_of, read_attribute
from fxq.graph.region import packing_of
from fxq.graph.unit import OpCall, calls_of
from fxq.ops.recurrent import on_affine_grid, on_grid
from fxq.paired.estimate import MIN_PART_VALUES, PARTS, ShrunkMean, WaitingPairs
from fxq.paired.paired_run import PairedRun
from fxq.pipeline.float_values import LayerValues
from fxq.quant.dynamic_grid import Grid
from fxq.quant.qparams import dequantize
from fxq.rewriting.rewriter import Rewriter


@dataclass
class _Product:
    """Product of the input or of the hidden state with its weight, for all gates.

    Attributes:
        path: path of its float bias.
        bias: values of its float bias, (gates * H,).
        real: float weight, (gates * H, C).
        rounded: weight on its grid, of the same shape.
        pairs: values that it reads and what they are rounded to, of steps that are too few for a part yet.
        error: mean of the float product minus the rounded one.
    """

    path: str
    bias: Tensor
    real: Tensor
    rounded: Tensor
    pairs: WaitingPairs = field(default_factory=lambda: WaitingPairs(axis=0))
    error: ShrunkMean = field(default_factory=ShrunkMean)

    @classmethod
    def of(cls, gm: fx.GraphModule, call: OpCall, weight_name: str, bias_name: str) -> _Product | None:
        """Product of a weight; None if the weight is not in integers, or the bias is not constant."""
        weight, bias = call.tensors.get(weight_name), call.tensors.get(bias_name)
        if constant(gm, bias) is None or not isinstance(bias, fx.Node) or not isinstance(weight, fx.Node):
            return None
        grid, path = grid_of(gm, weight), info(weight).stands_for
        stored = constant(gm, weight.args[0]) if is_op(weight, "dequantize") else None
        if grid is None or stored is None or not path:
            return None
        packing = packing_of(weight)
        integers = stored if packing is None else packing.unpack(stored)
        of_bias = info(bias).stands_for or str(bias.target)  # it may be corrected already
        real, rounded = read_attribute(gm, path).detach().double(), dequantize(integers, grid).double()
        return cls(of_bias, read_attribute(gm, of_bias).detach(), real, rounded)

    def add(self, x: Tensor, rounded: Tensor, parts: int) -> None:
        """Add values that the product reads, in float and rounded, float32 (steps, C), in at most `parts` parts."""
        joined = self.pairs.joined(x, rounded, len(x))
        if joined is None:
            return
        *pair, count = joined
        mean, mean_rounded = (
            torch.stack([part.double().mean(0) for part in rows.tensor_split(min(parts, count // MIN_PART_VALUES))])
            for rows in pair
        )
        self.error.add((mean - mean_rounded) @ self.real.T + mean_rounded @ (self.real - self.rounded).T)

    def corrected(self, least: int) -> Tensor:
        """Bias plus the mean error, shrunk by its noise; the bias alone, if there are fewer than `least` time steps."""
        return self.bias if self.pairs.count < least else (self.bias.double() + self.error()).to(self.bias)


@dataclass
class GateErrors:
    """Recurrent layer on integers, and the mean errors of its products.

    Attributes:
        node: the layer.
        x: its input.
        grid: grid of its input.
        products: product of the input, and of the hidden state.
    """

    node: fx.Node
    x: fx.Node
    grid: Grid
    products: tuple[_Product, _Product]

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node) -> GateErrors | None:
        """Errors of a node, none measured yet; None if it is no recurrent layer on integers with constant biases."""
        op, plan = op_of(node), plan_of(node)
        if op is None or op.traits.recurrence is None or plan is None or plan.precision != "int8":
            return None
        (call,) = calls_of(gm, node)
        x = call.tensors.get(op.traits.inputs[0])
        if not isinstance(x, fx.Node) or not is_op(x, "dequantize") or not isinstance(x.args[0], fx.Node):
            return None
        grid = dynamic_grid_of(x.args[0]) or grid_of(gm, x.args[0])
        weights, biases = (op.traits.weight or "", *op.traits.more_weights), op.traits.more_biases
        products = [_Product.of(gm, call, *names) for names in zip(weights, biases, strict=False)]
        if grid is None or len(products) != 2 or products[0] is None or products[1] is None:
            return None
        return cls(node, x, grid, (products[0], products[1]))

    def add(self, x: Tensor, states: Tensor, used: Tensor | None, parts: int) -> None:
        """Add the values that some time steps read in float, split into at most `parts` parts.

        Args:
            x: input, (T, N, I).
            states: hidden state before each step, (T, N, P).
            used: steps that are no padding, bool (T, N); None: all.
            parts: maximum number of parts.
        """
        rounded = torch.stack([self._rounded_state(h) for h in states])
        for product, pair in zip(self.products, ((x, self.grid.rounded(x)), (states, rounded)), strict=True):
            by_sample = [value.transpose(0, 1) for value in pair]
            rows = [value.flatten(0, 1) if used is None else value[used.T] for value in by_sample]
            product.add(rows[0], rows[1], parts)

    def _rounded_state(self, h: Tensor) -> Tensor:
        """Hidden state, (N, P), on its grid."""
        options = options_of(self.node)
        if not options["state_qmax"]:
            return h
        rounded = on_affine_grid if options.get("state_affine") else on_grid
        return rounded(h, options["state_qmax"], options["state_scale"])

    def write(self, rewriter: Rewriter, least: int) -> None:
        """Write the corrected biases. They stay equal if there were fewer than `least` time steps."""
        op = op_of(self.node)
        assert op is not None
        args = list(self.node.args)
        for name, product in zip(op.traits.more_biases, self.products, strict=True):
            path = f"{info(self.node).path or self.node.name}.{name}_corrected"
            new = rewriter.constant(product.corrected(least), path, before=self.node, like=self.node)
            rewriter.describe(new, stands_for=product.path)
            args[list(op.tensors).index(name)] = new
        rewriter.update(self.node, args=tuple(args))


def see_gates(gm: fx.GraphModule, batches: Sequence[Batch], floats: LayerValues, layers: Sequence[GateErrors]) -> None:
    """Measure the errors of recurrent layers on batches, with the graph run in float."""
    by_node = {layer.node: layer for layer in layers}
    inputs = {layer.x for layer in layers}
    for batch in batches:
        run = PairedRun.with_float_form(gm, [batch], inputs, floats, by_node)
        for node in run.reference.program.graph.nodes:
            if node in by_node:
                for steps in run.float_steps(node):
                    by_node[node].add(*steps, -(-PARTS // len(batches)))
            run.reference.step(node)
