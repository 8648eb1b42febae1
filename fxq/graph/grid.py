"""Grids of values, read from the options of conversions and from the last conversion of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.bindable import Bindable
from fxq.graph.query import (
    CONVERSIONS,
    activation_nodes,
    constant,
    dynamic_grid_ops,
    op_of,
    options_of,
    submodule,
    taken_part,
)
from fxq.ops import OPS
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams, as_zero_point

GridCache = dict[fx.Node, "QParams | None"]


def grid_of(gm: fx.GraphModule, node: fx.Node, cached: GridCache | None = None) -> QParams | None:
    """Grid of an integer value, or of the integers that a value was dequantized from.

    The value of an op that only moves values has the grid of the op's input.

    Args:
        gm: the graph's module, which holds per-channel scales as constants.
        node: the node of the value.
        cached: cache of grids by node, which is read and extended.

    Returns:
        The grid, or None for floats without a grid, for per-row grids and for scales computed at run time.
    """
    cached = {} if cached is None else cached
    source = node
    while source not in cached and (before := moved_from(source)) is not None:
        source = before
    if source not in cached:
        cached[source] = _own_grid(gm, source)
    if source is not node:
        cached[node] = cached[source] if _called(gm, source)[0] != "dequantize" else None
    return cached[node]


def dynamic_grid_of(node: fx.Node) -> DynamicGrid | None:
    """The dynamic grid of a quantize or dequantize; None for other nodes, and if no ops of the graph compute it."""
    grid_ops = dynamic_grid_ops(node)
    if not grid_ops:
        return None
    options, scale = options_of(node), options_of(grid_ops[0])
    dtype = options.get("dtype") or _dtype_of(options)
    grid = DynamicGrid(options["qmin"], options["qmax"], dtype, scale["axis"], scale["symmetric"])
    is_own = options["zero_point"] == grid.middle if grid.symmetric else len(grid_ops) == grid.inputs
    return grid if is_own else None


def moved_from(node: fx.Node) -> fx.Node | None:
    """The value that an op only moves (its first input); None if the op computes new values."""
    op = op_of(node)
    if op is None or not op.traits.layout:
        return None
    return next(iter(activation_nodes(node)), None)


def grid_from(gm: fx.GraphModule, options: Mapping[str, Any]) -> QParams | None:
    """Grid in the options of a conversion, defaults included; None if its scale is not a constant."""
    scale, zero_point = (_number(gm, options.get(key)) for key in ("scale", "zero_point"))
    if scale is None or zero_point is None:
        return None
    qmin, qmax = options["qmin"], options["qmax"]
    dtype = options.get("dtype") or _dtype_of(options)
    axis = options.get("axis")
    if isinstance(scale, Tensor):
        zero_point = as_zero_point(zero_point, scale.device).expand_as(scale)
        if axis is None and scale.numel() != 1:
            return None
        return QParams(scale.float(), zero_point, qmin, qmax, dtype, axis, options.get("block"))
    return QParams.per_tensor(scale, zero_point, qmin, qmax, dtype)


def _dtype_of(options: Mapping[str, Any]) -> torch.dtype:
    """Storage type of integers by their limits."""
    return torch.int8 if options["qmin"] < 0 else torch.uint8


def _number(gm: fx.GraphModule, value: Any) -> Any:
    return value if isinstance(value, (int, float)) else constant(gm, value)


def _own_grid(gm: fx.GraphModule, node: fx.Node) -> QParams | None:
    name, options = _called(gm, node)
    return grid_from(gm, {**OPS[name].options, **options}) if name in CONVERSIONS else None


def _called(gm: fx.GraphModule, node: fx.Node) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the op that a node calls, or of the last op of its kernel; an empty name if there is none.

    For one of several values of a kernel, the op is the last one on the way to that value.
    """
    module, part = submodule(gm, node), None
    source = node.args[0] if module is None and node.args else None
    if isinstance(source, fx.Node) and isinstance(taken_part(node, source), int):
        module, part = submodule(gm, source), taken_part(node, source)
    target, options = module.last_call(part) if isinstance(module, Bindable) else (node.target, node.kwargs)
    op = OPS.of_target(target)
    return (op.name if op is not None else ""), options
