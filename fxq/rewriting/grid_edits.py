"""Edits that put a value on a grid: quantize and dequantize, and what measures the grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxq.graph.info import info
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.rewriting.rewriter import Rewriter


def on_grid(
    rewriter: Rewriter,
    value: fx.Node,
    after: fx.Node,
    qp: QParams | DynamicGrid,
    name: str,
    like: fx.Node | None = None,
) -> tuple[fx.Node, fx.Node]:
    """quantize(value) and its dequantize, behind `after`; before them what measures its grid, if anything does."""
    about = info(like or value)
    shape = info(value).shape
    grid: dict[str, Any] = {"qmin": qp.qmin, "qmax": qp.qmax}
    if isinstance(qp, DynamicGrid):
        rows = (*(shape or ())[: qp.axis], *[1] * -qp.axis) if qp.axis is not None else ()
        asked: dict[str, Any] = {"steps": qp.steps, "axis": qp.axis, "symmetric": qp.symmetric}
        typed = rows, torch.float32
        after = scale = rewriter.call("choose_scale", value, after=after, name=f"{name}_scale", typed=typed, **asked)
        rewriter.describe(scale, path=about.path, source=about.source)
        grid |= {"scale": scale, "zero_point": qp.middle}
        if not qp.symmetric:
            asked = {"scale": scale, "qmin": qp.qmin, "axis": qp.axis}
            zero = f"{name}_zero_point"
            after = rewriter.call("choose_zero_point", value, after=scale, name=zero, typed=typed, **asked)
            rewriter.describe(after, path=about.path, source=about.source)
            grid["zero_point"] = after
    else:
        grid |= {"scale": qp.s, "zero_point": qp.z}
    q = rewriter.call("quantize", value, after=after, name=f"{name}_q", typed=(shape, qp.dtype), dtype=qp.dtype, **grid)
    dq = rewriter.call("dequantize", q, after=q, name=f"{name}_dq", typed=(shape, torch.float32), **grid)
    for node in (q, dq):
        rewriter.describe(node, path=about.path, source=about.source)
    return q, dq
