"""insert-fake-quantizers: the graph with integers becomes one that can be trained."""

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
from fxq.graph.info import Grids, info
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
    """Put fake quantizers in the place of integers, and what is trained in the place of what was made of it.

    Before: conv2d_relu(dequantize(quantize(x)), dequantize(w_int8), b')
    After: relu(bn(conv2d(fake_quantize(x), fake_quantize(w), b)))
    A weight is the model's own parameter again. A batch norm that was folded into a layer is its module again, which is
    folded when the model is converted: where each channel has a scale, that makes no difference to the integers. Where
    several channels have one, weights are rounded as the batch norm scales them, and its input is divided by that.
    Dropout is put back. Values on one grid share a fake quantizer; a relu whose values are rounded next is left to it.
    What was computed of parameters is computed in every forward. Weights made in another way stay as they are,
    with a warning.
    Keeps: in eval mode, once ranges are known, the output of the graph with integers, up to rounding.
    Source: Jacob et al. 2018, section 3; Krishnamoorthi 2018, sections 3.2.1 and 3.2.2 (statistics that are frozen);
    Nagel et al. 2022, section 4.2 (weights that are frozen).

    Options:
        freeze_ranges_after: forwards in train mode behind which the ranges of values stay as they are; 0: never.
        freeze_norms_after: those behind which the statistics of batch norms do; 0: never.
        freeze_weights_over: those over which weights that go back and forth between integers come to stay; 0: never.
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

    def run(self, rewriter: Rewriter) -> None:
        """Open the units, then go over layers, norms, dropouts and the values that are rounded."""
        context: Context = rewriter.context
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
        _put_dropout_back(rewriter)
        _put_quantizers(rewriter, context.grids)
        rewriter.erase_unused()
        left = {**_unread(rewriter), **layers.frozen}
        _warn(left, "are not trained: nothing is computed of them, or what was computed of them stays as it is")
        _warn(layers.fixed_norms, "are batch norms without a module of their own, whose statistics stay as they are")
        _warn(
            _without_mode(rewriter), "compute the same in train mode as in eval mode, which those of the model do not"
        )


def _unread(rewriter: Rewriter) -> dict[str, None]:
    """The parameters of the model that the graph does not read, and that training would change."""
    context: Context = rewriter.context
    read: set[int] = set()
    for node in rewriter.nodes():
        if node.op == "get_attr":
            read.add(id(read_attribute(rewriter.gm, str(node.target))))
        elif node.op == "call_module":
            read.update(map(id, rewriter.gm.get_submodule(str(node.target)).parameters()))
    own = context.model.named_parameters()
    return {path: None for path, tensor in own if tensor.requires_grad and id(tensor) not in read}


def _without_mode(rewriter: Rewriter) -> dict[str, None]:
    """What computes something else in the model's train mode, and is no module that the graph calls."""
    context: Context = rewriter.context
    own, kept = dict(context.model.named_modules(remove_duplicate=False)), list[nn.Module]()
    for node in rewriter.nodes():
        known = own.get(str(node.target)) if node.op == "call_module" else None
        if known is not None:
            same = rewriter.gm.get_submodule(str(node.target)) is known  # and not a batch norm in its place
            kept += known.modules() if same else [known]
    paths = different_in_train_mode(context.model, context.example, kept)
    return dict.fromkeys(path or "the model's forward" for path in paths)


def _warn(paths: Mapping[str, None], what: str) -> None:
    if paths:
        warn(f"in the model that is trained, {in_short(paths)} {what}.")


# ---- values


def _put_quantizers(rewriter: Rewriter, grids: Grids) -> None:
    """Put fake quantizers in the place of what makes integers of values, one for each grid, and take the others out."""
    edges = {_tag(edge.qparams): edge for _, found in grids.values() for edge in found}
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
    for group, found in points.items():
        edge = edges[_tag(grid_of(rewriter.gm, found[0]))]
        grid, value = edge.qparams, found[0].args[0]
        assert isinstance(grid, QParams) and isinstance(value, fx.Node)  # of a calibrated edge
        relus = grid.qmin == 0 and not edge.spec.symmetric and all(map(_is_relu_of, found))
        about = info(value)
        made = FakeQuantizeValue(edge.spec, grid, f"%{value.name} ({about.path or 'the model'})", group, relus)
        target = rewriter.module(made, value.name, FOLDER)
        for q in found:
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


def _is_on_grid(gm: fx.GraphModule, q: fx.Node, grids: Grids) -> bool:
    """Whether a quantize reads what was moved from values that are on its grid already."""
    value: Any = q.args[0]
    plan, edges = grids.get(value.name, (None, ()))
    if plan is None or plan.precision != "moves" or any(edge.constants for edge in edges):
        return False
    op = op_of(value)
    if op is None or (op.traits.narrows and not is_op(value, "relu")):  # a limit of others may lie between integers
        return False
    return all(_tag(grid_of(gm, read)) == _tag(grid_of(gm, q)) for read in value.all_input_nodes)


def _tag(grid: Any) -> tuple[float, int, int, int] | None:
    """What tells the grids of values apart."""
    return (grid.s, grid.z, grid.qmin, grid.qmax) if isinstance(grid, QParams) and grid.axis is None else None


def _is_relu_of(q: fx.Node) -> bool:
    """Whether a quantize alone reads a relu."""
    value: Any = q.args[0]
    return is_op(q, "quantize") and is_op(value, "relu") and set(value.users) == {q}


# ---- dropout


def _put_dropout_back(rewriter: Rewriter) -> None:
    """Let dropouts of the model that are modules drop values again, where these are read."""
    context: Context = rewriter.context
    last: dict[str, fx.Node] = {}
    for node in rewriter.nodes():
        last.update(dict.fromkeys(info(node).origins or (node.name,), node))
    for path, origins in context.dropouts:
        if path and origins[-1] in last and all(op == "dropout" for at, op in context.written if at == path):
            attach(rewriter.gm, path, context.model.get_submodule(path))
            _put_dropout(rewriter, path, last[origins[-1]])


def _put_dropout(rewriter: Rewriter, path: str, value: fx.Node) -> None:
    """Let what reads a value read what a dropout leaves of it; of one that is rounded, behind that."""
    value = next((q for q in value.users if is_op(q, "quantize")), value)
    made = rewriter.node("call_module", path, (value,), after=value, typed=(info(value).shape, info(value).dtype))
    rewriter.describe(made, path=path)
    rewriter.reroute(value, made, only=lambda user: user is not made and not is_op(user, "quantize"))
