"""The grid of a value, read from the graph: conversions have it as options, and a kernel ends in a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.bindable import Bindable
from fxq.graph.query import (
    CONVERSIONS,
    argument,
    constant,
    flat_nodes,
    is_op,
    measures_of,
    op_of,
    options_of,
    submodule,
    taken_part,
)
from fxq.ops import OPS
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams

Grids = dict[fx.Node, "QParams | None"]


def grid_of(gm: fx.GraphModule, node: fx.Node, known: Grids | None = None) -> QParams | None:
    """Scale, zero point and limits of the integers that a value is, or was until a dequantize.

    What an op that moves integers hands on has the grid of what it reads.

    Args:
        gm: the graph's module: scales per channel are its constants.
        node: the node.
        known: grids found before; read, and filled with this one.

    Returns:
        None for floats of no grid, for rows on grids of their own, and where the scale is computed at run time.
    """
    known = {} if known is None else known
    source = node
    while source not in known and (before := moved_from(source)) is not None:
        source = before
    if source not in known:
        known[source] = _own_grid(gm, source)
    if source is not node:
        known[node] = known[source] if _called(gm, source)[0] != "dequantize" else None
    return known[node]


def dynamic_grid_of(node: fx.Node) -> DynamicGrid | None:
    """The grid that a quantize measures when the model runs; None for any other node."""
    measures = measures_of(node) if is_op(node, "quantize") else ()
    if not measures:
        return None
    grid, measured = options_of(node), options_of(measures[0])
    return DynamicGrid(grid["qmin"], grid["qmax"], grid["dtype"], measured["axis"], measured["symmetric"])


def moved_from(node: fx.Node) -> fx.Node | None:
    """The first value that an op reads which moves integers as they are; None for any other node."""
    op = op_of(node)
    if op is None or not op.traits.layout:
        return None
    return next(flat_nodes([argument(node, name) for name in op.traits.inputs]), None)


def grid_from(gm: fx.GraphModule, options: Mapping[str, Any]) -> QParams | None:
    """The grid that the options of a conversion say, defaults included; None where the scale is no constant."""
    scale, zero_point = (_number(gm, options.get(key)) for key in ("scale", "zero_point"))
    if scale is None or zero_point is None:
        return None
    qmin, qmax = options["qmin"], options["qmax"]
    dtype = options.get("dtype") or (torch.int8 if qmin < 0 else torch.uint8)
    axis = options.get("axis")
    if isinstance(scale, Tensor):
        zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=scale.device).expand_as(scale)
        if axis is None and scale.numel() != 1:
            return None
        return QParams(scale, zero_point, qmin, qmax, dtype, axis, options.get("block"))
    return QParams.per_tensor(scale, zero_point, qmin, qmax, dtype)


def _number(gm: fx.GraphModule, value: Any) -> Any:
    return value if isinstance(value, (int, float)) else constant(gm, value)


def _own_grid(gm: fx.GraphModule, node: fx.Node) -> QParams | None:
    name, options = _called(gm, node)
    return grid_from(gm, {**OPS[name].options, **options}) if name in CONVERSIONS else None


def _called(gm: fx.GraphModule, node: fx.Node) -> tuple[str, Mapping[str, Any]]:
    """The op that a node calls, or its kernel ends in, with its options; an empty name for any other node.

    A value of a kernel of several is what that kernel ends in there.
    """
    module, part = submodule(gm, node), None
    source = node.args[0] if module is None and node.args else None
    if isinstance(source, fx.Node) and isinstance(taken_part(node, source), int):
        module, part = submodule(gm, source), taken_part(node, source)
    target, options = module.ends_in(part) if isinstance(module, Bindable) else (node.target, node.kwargs)
    op = OPS.of_target(target)
    return (op.name if op is not None else ""), options
