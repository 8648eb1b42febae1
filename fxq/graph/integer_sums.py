"""The bound of integer sums: kernels, engines and files of other runtimes add products of integers in int32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.grid import moved_from
from fxq.graph.info import info
from fxq.graph.layer_matrix import LayerMatrix
from fxq.graph.region import Integers, integer_input, integer_weight
from fxq.graph.unit import OpCall, calls_of
from fxq.ops import OPS
from fxq.quant.qparams import QParams

INT32 = 2**31 - 1
ANY = 255
"""No integer of 8 bits is further from zero, nor from its zero point."""
_SUMS = frozenset({"mean", "sum", *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool")})
"""Ops whose result is a sum of integers, or a part of one."""
_PRODUCTS = frozenset({"matmul", "addmm", "baddbmm"})
"""Ops that multiply two activations, `x` and `other`."""


def largest_sum(rows: Tensor, x: QParams, bias: Tensor | None = None) -> float:
    """The largest magnitude of a sum of products that a layer can compute for an input on its grid.

    Kernels add the products of the integers as they are, or less their zero point, or moved to begin at zero, in any
    order. No such sum is larger than the positive part of a row, or the negative one, times the reach of the grid. That
    of a grid that is measured at run time is known beforehand, as its limits are.

    Args:
        rows: integers of the weight, (..., K); the products of the last axis are added.
        x: the grid of the input, per tensor.
        bias: what is added to the sums, in steps of the products; broadcasts with (...). None: nothing.

    Returns:
        The bound; or where it is within int32 for all integers of 8 bits, that of these, for which no weight is read.
    """
    whole = rows.shape[-1] * ANY * reach(x)
    if bias is None and whole <= INT32:
        return float(whole)
    real = rows.double()
    most = torch.maximum(real.clamp(min=0).sum(-1), real.clamp(max=0).sum(-1).neg()) * reach(x)
    most = most if bias is None else most + bias.double().abs()
    return float(most.max()) if most.numel() else 0.0


def reach(grid: QParams) -> int:
    """How far the integers of a grid are from zero, or from their zero point wherever that is."""
    return max(grid.qmax, grid.qmax - grid.qmin)


def beyond_int32(largest: float) -> str | None:
    """Why a sum as large as this is refused; None where int32 holds it."""
    return f"its sums can reach {largest:.2g}, beyond int32 (2.1e+09)" if largest > INT32 else None


def node_largest_sum(gm: fx.GraphModule, node: fx.Node) -> float:
    """The largest magnitude of an integer sum that a node of the qdq graph can compute; 0 where it reads no integers.

    It is that of whatever may compute the node on integers: the kernel of a backend, an engine, or a runtime that reads
    a file. Some of those need no more than integers before and a product behind.
    """
    return max((_largest_of(gm, call) for call in calls_of(gm, node)), default=0.0)


def node_refused(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Why the integer sums of a node of the qdq graph could leave int32; None where they cannot."""
    return beyond_int32(node_largest_sum(gm, node))


def _largest_of(gm: fx.GraphModule, call: OpCall) -> float:
    quant = call.op.quant
    x = _integers(gm, call.tensors.get(quant.inputs[0] if quant.inputs else ""))
    if call.op.name in _PRODUCTS:
        x, y = (_integers(gm, call.tensors.get(name)) for name in ("x", "other"))
        depth = (info(call.tensors["x"]).shape or (0,))[-1] if x is not None else 0
        return float(depth * reach(x.grid) * reach(y.grid)) if x is not None and y is not None else 0.0
    if x is None or call.computed is not None:
        return 0.0
    if call.op.name in _SUMS:
        return float(_added(call) * reach(x.grid))
    if LayerMatrix.takes(call):
        return _of_weight(gm, call, quant.weight or "", x.grid)
    if call.rounds_its_state and quant.recurrence is not None:
        steps, affine = call.options[quant.recurrence.steps], call.options.get(quant.recurrence.affine)
        state = QParams.per_tensor(1.0, 0, 0, steps if affine else 2 * steps + 1)
        first, *others = (quant.weight or "", *quant.more_weights)
        return max(_of_weight(gm, call, first, x.grid), *(_of_weight(gm, call, name, state) for name in others))
    return 0.0


def _integers(gm: fx.GraphModule, value: Any) -> Integers | None:
    """The integers behind an activation, which may have been moved since it was dequantized."""
    while isinstance(value, fx.Node) and (before := moved_from(value)) is not None:
        value = before
    integers = integer_input(gm, value)
    return integers if integers is not None and integers.values.op != "get_attr" else None


def _of_weight(gm: fx.GraphModule, call: OpCall, name: str, x: QParams) -> float:
    """The largest sum of a weight's products with integers on a grid; 0 where the weight is not in integers."""
    weight = integer_weight(gm, call.tensors.get(name))
    if weight is None or weight.stored.is_floating_point():
        return 0.0
    values, zeros = weight.values, weight.qparams.zero_point.abs().max()
    if zeros:  # a bound for the integers as they are, and less their zero points
        values = values.to(torch.int32).abs() + zeros.to(torch.int32)
    return largest_sum(LayerMatrix(call, tuple(values.shape)).rows(values) if values.dim() != 2 else values, x)


def _added(call: OpCall) -> int:
    """How many elements at most are added for a result of a pool or a reduction."""
    shape, options = info(call.tensors[call.op.quant.inputs[0]]).shape, call.options
    if shape is None:
        return 0
    if "kernel_size" in options:
        return math.prod(options["kernel_size"])
    if "output_size" in options:
        sizes = options["output_size"]
        return math.prod(-(-n // m) + bool(n % m) for n, m in zip(shape[-len(sizes) :], sizes, strict=False) if m)
    dims = options["dim"]
    return math.prod(shape[d] for d in ((dims,) if isinstance(dims, int) else dims))
