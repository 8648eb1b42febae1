"""qdq graphs for TensorRT: checks of their grids, and activations that use all integers of int8."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from fxq.backends.tensorrt import fits_blocks
from fxq.errors import ExportError, warn
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import DYNAMIC_GRID_OPS, constant, is_op
from fxq.graph.unit import calls_of
from fxq.quant.qparams import QParams

_REMEDY = 'Quantize the float model with backend="tensorrt", which chooses grids and units as TensorRT takes them'
_INT8 = torch.iinfo(torch.int8)


def fit_tensorrt(path: Path, gm: fx.GraphModule) -> None:
    """Change a qdq graph in place to what TensorRT computes.

    TensorRT clamps activations to -128..127. A symmetric grid ends at -127, and a Clip for it would keep TensorRT from
    fusing ops, so activations use -128, too: for values below the calibrated range, the result differs by one step.

    Args:
        path: the file, for messages.
        gm: the qdq graph.

    Raises:
        ExportError: a range is dynamic, a grid is not symmetric int8, or an op reads integer weights that TensorRT
            takes in float; the message names the layer.
    """
    for node in gm.graph.nodes:
        reason = _refusal(gm, node)
        if reason:
            remedy = "Leave out the pass low-rank, whose factors have 8 bits" if info(node).corrects else _REMEDY
            raise ExportError(f"{path} cannot be written for TensorRT: {_place(node)} {reason}. {remedy}.")
        if is_op(node, "quantize", "requantize"):
            node.kwargs = {**node.kwargs, "qmin": _INT8.min}
    gm.recompile()
    fused = [node for node in gm.graph.nodes if _adds_to_layer(gm, node) and _reads_integers(gm, node)]
    if fused:
        warn(
            f"{path}: TensorRT adds in float in {len(fused)} places, the first at {_place(fused[0])}, where a sum "
            f"reads a layer's result before it is quantized. {_REMEDY}."
        )


def _place(node: fx.Node) -> str:
    """Layer that a node belongs to, or the value of the node, for messages."""
    return f"the layer {info(node).path!r}" if info(node).path else f"the value %{node.name}"


def _refusal(gm: fx.GraphModule, node: fx.Node) -> str:
    """Reason why TensorRT does not take a conversion; empty if it does, and for other nodes."""
    if is_op(node, *DYNAMIC_GRID_OPS):
        return "has a range that is computed at run time"
    if not is_op(node, "quantize", "requantize", "dequantize"):
        return ""
    grid = grid_of(gm, node)
    if grid is None:
        return "has a scale for each row"
    if is_op(node, "dequantize") and constant(gm, node.args[0]) is not None:
        return _weight_refusal(gm, node, grid)
    if bool((grid.zero_point != 0).any()):
        return "has activations with a zero point"
    fits = grid.dtype is torch.int8 and grid.qmax == _INT8.max and grid.qmin <= -_INT8.max and grid.axis is None
    return "" if fits else f"has activations from {grid.qmin} to {grid.qmax}, not symmetric int8 per tensor"


def _weight_refusal(gm: fx.GraphModule, node: fx.Node, grid: QParams) -> str:
    """Reason why TensorRT does not take a dequantized weight with this grid; empty if it does."""
    if grid.dtype is torch.float16:
        return ""
    if bool((grid.zero_point != 0).any()):
        return "has a weight with zero points"
    for reader in node.users:
        calls = calls_of(gm, reader)
        op = calls[0].op if calls else None
        if op is None or op.traits.weight is None or op.traits.table or op.traits.recurrence is not None:
            name = op.name if op is not None else reader.name
            return f"has an integer weight that {name} reads, which TensorRT computes in float"
        if _reads_integers(gm, reader):
            if grid.block is not None or grid.bits <= 4:
                return "has integer activations, and a weight in blocks or of 4 bits"
        elif grid.bits > 4 or grid.block is None or not fits_blocks(grid.block, grid.block * grid.scale.shape[-1]):
            return "has float activations, and a weight that is not int4 in several blocks of 64 or 128 per row"
    return ""


def _reads_integers(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node reads a dequantized activation."""
    return any(is_op(read, "dequantize") and constant(gm, read.args[0]) is None for read in node.all_input_nodes)


def _adds_to_layer(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a unit of a layer and a sum after it."""
    return any(call.op.name == "add" for call in calls_of(gm, node)[1:])
