"""Edits that insert quantize and dequantize for a value, and the ops that compute its grid if it is dynamic."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxq.graph.info import info
from fxq.quant.dynamic_grid import DynamicGrid, Grid
from fxq.rewriting.rewriter import Rewriter


def on_grid(
    rewriter: Rewriter,
    value: fx.Node,
    after: fx.Node,
    qp: Grid,
    name: str,
    like: fx.Node | None = None,
) -> tuple[fx.Node, fx.Node]:
    """Insert quantize(value) and its dequantize after `after`, with the ops that compute the grid if it is dynamic.

    Args:
        rewriter: edits the graph.
        value: float value.
        after: node to insert them after.
        qp: grid of the value.
        name: prefix of the names of the new nodes.
        like: node whose module path and source line they get; default: `value`.

    Returns:
        The quantize and the dequantize node.
    """
    about = info(like or value)
    shape = info(value).shape
    grid: dict[str, Any] = {"qmin": qp.qmin, "qmax": qp.qmax}
    if isinstance(qp, DynamicGrid):
        rows = (*(shape or ())[: qp.axis], *[1] * -qp.axis) if qp.axis is not None else ()
        options: dict[str, Any] = {"steps": qp.steps, "axis": qp.axis, "symmetric": qp.symmetric}
        typed = rows, torch.float32
        after = scale = rewriter.call("choose_scale", value, after=after, name=f"{name}_scale", typed=typed, **options)
        rewriter.describe(scale, path=about.path, source=about.source)
        grid |= {"scale": scale, "zero_point": qp.middle}
        if not qp.symmetric:
            options = {"scale": scale, "qmin": qp.qmin, "axis": qp.axis}
            zero = f"{name}_zero_point"
            after = rewriter.call("choose_zero_point", value, after=scale, name=zero, typed=typed, **options)
            rewriter.describe(after, path=about.path, source=about.source)
            grid["zero_point"] = after
    else:
        grid |= {"scale": qp.s, "zero_point": qp.z}
    q = rewriter.call("quantize", value, after=after, name=f"{name}_q", typed=(shape, qp.dtype), dtype=qp.dtype, **grid)
    dq = rewriter.call("dequantize", q, after=q, name=f"{name}_dq", typed=(shape, torch.float32), **grid)
    for node in (q, dq):
        rewriter.describe(node, path=about.path, source=about.source)
    return q, dq
