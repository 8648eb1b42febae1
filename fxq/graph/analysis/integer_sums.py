"""Upper bounds of integer sums, which kernels, engines and other runtimes accumulate in int32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.grid import moved_from
from fxq.graph.info import info
from fxq.graph.region import IntegerInput, integer_input, integer_weight
from fxq.graph.unit import OpCall, calls_of
from fxq.ops import OPS
from fxq.quant.dynamic_grid import Grid
from fxq.quant.qparams import QParams

MAX_INT32 = 2**31 - 1
MAX_8BIT_REACH = 255
"""Largest distance of an 8-bit integer from zero or from its zero point."""
_SUMS = frozenset({"mean", "sum", *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool")})
"""Ops that sum or average integers."""
_PRODUCTS = frozenset({"matmul", "addmm", "baddbmm"})
"""Ops that multiply two activations, `x` and `other`."""


def largest_sum(rows: Tensor, x: Grid, bias: Tensor | None = None) -> float:
    """Upper bound of the magnitude of all partial sums of products that a layer can compute for inputs on its grid.

    Kernels add products of the raw integers, or with the zero point subtracted, or shifted to start at zero, in any
    order. No partial sum exceeds `reach(x)` times the larger of the sums of the positive and of the negative weights of
    a row. Dynamic grids have a fixed `qmin` and `qmax`, too.

    Args:
        rows: integer weight, (..., K), summed over the last axis.
        x: grid of the input, per tensor if it is static.
        bias: bias added to the sums, in units of the accumulator's scale, broadcastable to (...), or None.

    Returns:
        The bound. If no 8-bit weight could overflow int32, a looser one that does not read the weight.
    """
    any_weight = rows.shape[-1] * MAX_8BIT_REACH * reach(x)
    if bias is None and any_weight <= MAX_INT32:
        return float(any_weight)
    real = rows.double()
    bounds = torch.maximum(real.clamp(min=0).sum(-1), real.clamp(max=0).sum(-1).neg()) * reach(x)
    bounds = bounds if bias is None else bounds + bias.double().abs()
    return float(bounds.max()) if bounds.numel() else 0.0


def reach(grid: Grid) -> int:
    """Largest distance of a grid's integers from zero or from any zero point."""
    return max(grid.qmax, grid.qmax - grid.qmin)


def beyond_int32(largest: float) -> str | None:
    """Reason to refuse sums of this magnitude, or None if they fit in int32."""
    return f"its sums can reach {largest:.2g}, beyond int32 (2.1e+09)" if largest > MAX_INT32 else None


def node_largest_sum(gm: fx.GraphModule, node: fx.Node) -> float:
    """Largest magnitude of an integer sum that a node of the qdq graph can compute; 0 if it reads no integers.

    Holds for a kernel of a backend, an engine, or a runtime that reads an exported file. Some of these compute on
    integers whenever a product reads dequantized values.
    """
    return max((_largest_of(gm, call) for call in calls_of(gm, node)), default=0.0)


def node_refused(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Reason why the integer sums of a node of the qdq graph could overflow int32, or None if they cannot."""
    return beyond_int32(node_largest_sum(gm, node))


def _largest_of(gm: fx.GraphModule, call: OpCall) -> float:
    traits = call.op.traits
    x = _integers(gm, call.tensors.get(traits.inputs[0] if traits.inputs else ""))
    if call.op.name in _PRODUCTS:
        x, y = (_integers(gm, call.tensors.get(name)) for name in ("x", "other"))
        depth = (info(call.tensors["x"]).shape or (0,))[-1] if x is not None else 0
        return float(depth * reach(x.grid) * reach(y.grid)) if x is not None and y is not None else 0.0
    if x is None or call.run_time_option is not None:
        return 0.0
    if call.op.name in _SUMS:
        return float(_added(call) * reach(x.grid))
    if LayerMatrix.takes(call):
        return _of_weight(gm, call, traits.weight or "", x.grid)
    if call.rounds_its_state and traits.recurrence is not None:
        steps, affine = call.options[traits.recurrence.steps], call.options.get(traits.recurrence.affine)
        state = QParams.per_tensor(1.0, 0, 0, steps if affine else 2 * steps + 1)
        first, *others = (traits.weight or "", *traits.more_weights)
        return max(_of_weight(gm, call, first, x.grid), *(_of_weight(gm, call, name, state) for name in others))
    return 0.0


def _integers(gm: fx.GraphModule, value: Any) -> IntegerInput | None:
    """Integers that an activation was dequantized from, also through ops that only move values."""
    while isinstance(value, fx.Node) and (before := moved_from(value)) is not None:
        value = before
    integers = integer_input(gm, value)
    return integers if integers is not None and integers.values.op != "get_attr" else None


def _of_weight(gm: fx.GraphModule, call: OpCall, name: str, x: Grid) -> float:
    """Largest sum of products of a weight with integers on a grid; 0 for float weights."""
    weight = integer_weight(gm, call.tensors.get(name))
    if weight is None or weight.stored.is_floating_point():
        return 0.0
    values, zeros = weight.values, weight.qparams.zero_point.abs().max()
    if zeros:  # bounds both the raw integers and those minus their zero points
        values = values.to(torch.int32).abs() + zeros.to(torch.int32)
    return largest_sum(LayerMatrix(call, tuple(values.shape)).rows(values) if values.dim() != 2 else values, x)


def _added(call: OpCall) -> int:
    """Largest number of elements summed for one output of a pooling or reduction."""
    shape, options = info(call.tensors[call.op.traits.inputs[0]]).shape, call.options
    if shape is None:
        return 0
    if "kernel_size" in options:
        return math.prod(options["kernel_size"])
    if "output_size" in options:
        sizes = options["output_size"]
        return math.prod(-(-n // m) + bool(n % m) for n, m in zip(shape[-len(sizes) :], sizes, strict=False) if m)
    dims = options["dim"]
    return math.prod(shape[d] for d in ((dims,) if isinstance(dims, int) else dims))
