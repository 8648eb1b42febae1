"""insert-fake-quantizers: turn the qdq graph into a graph that can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fxq.common.names import in_short
from fxq.common.train_mode import different_in_train_mode
from fxq.errors import PassError, warn
from fxq.graph.grid import grid_of
from fxq.graph.info import ChosenGrids, info
from fxq.graph.place import where
from fxq.graph.query import is_op, op_of, read_attribute, reads_only_metadata
from fxq.graph.unit import unit_of
from fxq.pipeline.context import Context
from fxq.quant.fake_quantize import FakeQuantizeValue
from fxq.quant.qparams import QParams
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import open_unit
from fxq.training.trainable_layers import FOLDER, TrainableLayers, attach


@dataclass(frozen=True)
class InsertFakeQuantizers(Pass):
    """Replace conversions by fake quantizers, and constants by the model's parameters that they were computed from.

    Before: conv2d_relu(dequantize(quantize(x)), dequantize(w_int8), b')
    After: relu(bn(conv2d(fake_quantize(x), fake_quantize(w), b)))
    Keeps: in eval mode, with calibrated ranges, the output of the qdq graph, up to rounding.

    Weights are the model's parameters, and folded batch norms its modules. They are folded again when the trained model
    is converted. With per-channel weights, this does not change the integers. With one scale for several channels,
    weights are fake quantized as the batch norm will scale them, and its input is divided by that factor.
    Dropout is active again. Values on one grid share a fake quantizer, which also computes a relu before it. Values
    that were computed from parameters are computed in every forward. Other constants stay fixed, with a warning.
    Source: Jacob et al. 2018, section 3; Krishnamoorthi 2018, sections 3.2.1 and 3.2.2 (frozen statistics); Nagel et
    al. 2022, section 4.2 (frozen weights).

    Args:
        freeze_ranges_after: number of forwards in train mode after which the ranges of activations are fixed; 0: never.
        freeze_norms_after: number of forwards after which the statistics of batch norms are fixed; 0: never.
        freeze_weights_over: number of forwards over which weights that oscillate between integers are frozen; 0: never.
    """

    freeze_ranges_after: int = 0
    freeze_norms_after: int = 0
    freeze_weights_over: int = 0

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "freeze_ranges_after": (0, 2**62),
        "freeze_norms_after": (0, 2**62),
        "freeze_weights_over": (0, 2**62),
    }
    name: ClassVar[str] = "insert-fake-quantizers"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Split the units, then restore layers, batch norms and dropouts, and insert the fake quantizers."""
        context = rewriter.context
        if context.grids is None:
            raise PassError(f"{self.name} needs choose-grids before it; fxq.prepare runs both.")
        for node in rewriter.nodes():
            if unit_of(rewriter.gm, node) is not None:
                open_unit(rewriter, node)
        layers = TrainableLayers(rewriter, context.grids)
        for node in rewriter.nodes():
            layers.free(node)
        for node in rewriter.nodes("batch_norm"):
            layers.call_norm(node)
        _restore_dropouts(rewriter)
        _insert_quantizers(rewriter, context.grids)
        rewriter.erase_unused()
        untrained = {**_unread(rewriter), **layers.frozen}
        _warn(untrained, "are not trained: the graph does not use them, or only constants that were computed from them")
        _warn(layers.fixed_norms, "are batch norms called as functions, whose statistics are not updated")
        _warn(_without_mode(rewriter), "compute as in eval mode, although the model computes otherwise in train mode")


def _unread(rewriter: Rewriter[Context]) -> dict[str, None]:
    """Paths of the model's trainable parameters that the graph does not read."""
    context = rewriter.context
    read: set[int] = set()
    for node in rewriter.nodes():
        if node.op == "get_attr":
            read.add(id(read_attribute(rewriter.gm, str(node.target))))
        elif node.op == "call_module":
            read.update(map(id, rewriter.gm.get_submodule(str(node.target)).parameters()))
    own = context.model.named_parameters()
    return {path: None for path, tensor in own if tensor.requires_grad and id(tensor) not in read}


def _without_mode(rewriter: Rewriter[Context]) -> dict[str, None]:
    """Paths of modules that compute something else in train mode, and that the graph does not call as modules."""
    context = rewriter.context
    own, called = dict(context.model.named_modules(remove_duplicate=False)), list[nn.Module]()
    for node in rewriter.nodes():
        module = own.get(str(node.target)) if node.op == "call_module" else None
        if module is not None:
            same = rewriter.gm.get_submodule(str(node.target)) is module  # and not a batch norm in its place
            called += module.modules() if same else [module]
    paths = different_in_train_mode(context.model, context.example, called)
    return dict.fromkeys(path or "the model's forward" for path in paths)


def _warn(paths: Mapping[str, None], predicate: str) -> None:
    if paths:
        warn(f"in the model that is trained, {in_short(paths)} {predicate}.")


# ---- values


def _insert_quantizers(rewriter: Rewriter, grids: ChosenGrids) -> None:
    """Replace the conversions of values by fake quantizers, one for each grid."""
    edges = {_tag(edge.qparams): edge for _, value_edges in grids.values() for edge in value_edges}
    points: dict[int, list[fx.Node]] = {}
    moved: list[fx.Node] = []
    for q in rewriter.nodes("quantize", "requantize"):
        edge = edges.get(_tag(grid_of(rewriter.gm, q)))
        if edge is None:
            raise PassError(f"{where(rewriter.gm, q)}: choose-grids has chosen no such grid.")
        if _is_on_grid(rewriter.gm, q, grids):
            moved.append(q)
        else:
            points.setdefault(edge.group, []).append(q)
    for group, quantizes in points.items():
        edge = edges[_tag(grid_of(rewriter.gm, quantizes[0]))]
        grid, value = edge.qparams, quantizes[0].args[0]
        assert isinstance(grid, QParams) and isinstance(value, fx.Node)  # of a calibrated edge
        relus = grid.qmin == 0 and not edge.spec.symmetric and all(map(_quantizes_relu, quantizes))
        about = info(value)
        quantizer = FakeQuantizeValue(edge.spec, grid, f"%{value.name} ({about.path or 'the model'})", group, relus)
        target = rewriter.module(quantizer, value.name, FOLDER)
        for q in quantizes:
            source: Any = q.args[0]
            read, typed = (source.args[0] if relus else source), (info(q).shape, torch.float32)
            name = f"{source.name}_fq"
            rounded = rewriter.node("call_module", target, (read,), like=source, before=q, name=name, typed=typed)
            rewriter.reroute(q, source, only=reads_only_metadata)
            rewriter.replace(q, rounded)
    for q in moved:
        rewriter.replace(q, q.args[0])
    for dq in rewriter.nodes("dequantize"):
        read = dq.args[0]
        if isinstance(read, fx.Node) and read.op != "get_attr":
            rewriter.replace(dq, read)


def _is_on_grid(gm: fx.GraphModule, q: fx.Node, grids: ChosenGrids) -> bool:
    """Whether a quantize reads a value that was only moved from values on its grid."""
    value: Any = q.args[0]
    plan, edges = grids.get(value.name, (None, ()))
    if plan is None or plan.precision != "moves" or any(edge.constants for edge in edges):
        return False
    op = op_of(value)
    if op is None or (op.traits.narrows and not is_op(value, "relu")):  # a limit of others may lie between integers
        return False
    return all(_tag(grid_of(gm, read)) == _tag(grid_of(gm, q)) for read in value.all_input_nodes)


def _tag(grid: Any) -> tuple[float, int, int, int] | None:
    """Key of the grid of a value; None if it is not a calibrated grid with one scale."""
    return (grid.s, grid.z, grid.qmin, grid.qmax) if isinstance(grid, QParams) and grid.axis is None else None


def _quantizes_relu(q: fx.Node) -> bool:
    """Whether a quantize is the only reader of a relu."""
    value: Any = q.args[0]
    return is_op(q, "quantize") and is_op(value, "relu") and set(value.users) == {q}


# ---- dropout


def _restore_dropouts(rewriter: Rewriter[Context]) -> None:
    """Insert calls of the model's dropout modules after the values that they dropped from."""
    context = rewriter.context
    last: dict[str, fx.Node] = {}
    for node in rewriter.nodes():
        last.update(dict.fromkeys(info(node).origins or (node.name,), node))
    for path, origins in context.dropouts:
        if path and origins[-1] in last and all(op == "dropout" for at, op in context.written if at == path):
            attach(rewriter.gm, path, context.model.get_submodule(path))
            _insert_dropout(rewriter, path, last[origins[-1]])


def _insert_dropout(rewriter: Rewriter, path: str, value: fx.Node) -> None:
    """Insert a dropout between a value and its readers; if the value is quantized, after the quantize."""
    value = next((q for q in value.users if is_op(q, "quantize")), value)
    dropout = rewriter.node("call_module", path, (value,), after=value, typed=(info(value).shape, info(value).dtype))
    rewriter.describe(dropout, path=path)
    rewriter.reroute(value, dropout, only=lambda user: user is not dropout and not is_op(user, "quantize"))
