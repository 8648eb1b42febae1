"""insert-qdq: replace observers by quantize and dequantize, and float weights by integers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.errors import PassError
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Edge, IntegerForm, Plan, info
from fxq.graph.place import where
from fxq.graph.query import (
    argument,
    constant,
    flat_nodes,
    op_of,
    options_of,
    producer_of,
    reads_only_metadata,
    submodule,
    swapped,
)
from fxq.graph.region import is_weight_only
from fxq.graph.unit import calls_of, wanted_forms
from fxq.ops.traits import STATE_DYNAMIC
from fxq.pipeline.candidates import UNREAD
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.observer_base import Observer
from fxq.quant.packing import Packing
from fxq.quant.qparams import QParams, quantize, scale_dtype
from fxq.quant.stored_grids import stored_grid
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class InsertQdq(Pass):
    """Insert quantize and dequantize on every integer edge, with the scales and zero points of choose-grids.

    Before: conv2d(observer(x), w, b)
    After: conv2d(dequantize(quantize(x)), dequantize(w_int8), b); weight-only: conv2d(x, dequantize(w_int8), b)
    Also: packs weights of at most 6 bits of weight-only layers, and stores their scales of blocks in float16.
    Requantizes inputs of an op that only moves values to the grid of its result. Sets the grid of a recurrent layer's
    state as options of its op. Hidden states are passed to other recurrent layers, and returned by the model, in float.
    Keeps: the output up to rounding to the grids. The result is the portable reference: exact, on any device.
    Source: Jacob et al. 2018, section 2.
    """

    name: ClassVar[str] = "insert-qdq"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Remove the observers, then insert the conversions."""
        values = [value for value in rewriter.nodes() if info(value).edges]
        for value in values:
            if any(edge.qparams is None for edge in info(value).edges):
                raise PassError(
                    f"{where(rewriter.gm, value)}: its grid is not chosen. Run choose-grids after calibration."
                )
        for node in rewriter.nodes():
            if isinstance(submodule(rewriter.gm, node), Observer):
                rewriter.replace(node, node.args[0])
        wanted = {node: wanted_forms(rewriter.gm, node) for node in rewriter.nodes()}
        stored: dict[Hashable, tuple[Tensor, ...]] = {}
        for value in values:
            _convert_edges(rewriter, value, wanted, stored)
        float_states: dict[fx.Node, fx.Node | None] = {}
        for node in rewriter.nodes():
            _set_state_grid(rewriter, node)
            _pass_states_in_float(rewriter, node, float_states)
        for value in values:
            _requantize_inputs(rewriter, value, wanted[value])
            rewriter.describe(value, edges=())  # the conversions hold the grids now
        rewriter.erase_unused()


def _convert_edges(
    rewriter: Rewriter,
    value: fx.Node,
    wanted: Mapping[fx.Node, Mapping[fx.Node, IntegerForm]],
    stored: dict[Hashable, tuple[Tensor, ...]],
) -> None:
    """Insert the conversions of all edges of a value or weight.

    Args:
        rewriter: rewriter of the graph.
        value: the value or weight.
        wanted: integer forms that each node wants of its inputs.
        stored: integers of weights so far, see `_convert_weight`; updated.
    """
    current, readers = value, list(value.users)
    for edge in info(value).edges:
        own_readers = {reader: None for reader in readers if wanted[reader].get(value) == edge.form}
        if value.op != "get_attr":
            current = _convert(rewriter, value, current, edge, own_readers)
        elif own_readers:
            _convert_weight(rewriter, value, edge, own_readers, stored)


def _convert(rewriter: Rewriter, value: fx.Node, current: fx.Node, edge: Edge, readers: Collection[fx.Node]) -> fx.Node:
    """Insert quantize and dequantize of a value, and return the node that its float readers read next.

    Args:
        rewriter: rewriter of the graph.
        value: the float value. Every form is quantized from it: from a coarser form it would have that error as well.
        current: the value, or the dequantize of its previous form.
        edge: the integer form, with its grid.
        readers: nodes that want this form.
    """
    assert edge.qparams is not None  # all of them are chosen
    q, dq = on_grid(rewriter, value, current, edge.qparams, value.name)
    if edge.dynamic:
        rewriter.reroute(current, dq, only=lambda user: user in readers)
        return current

    def wants(user: fx.Node) -> bool:
        plan = info(user).plan
        return user not in (q, dq) and (user in readers or (current is value and not (plan is not None and plan.exact)))

    rewriter.reroute(current, q, only=lambda user: reads_only_metadata(user))
    rewriter.reroute(current, dq, only=wants)
    return dq


def _requantize_inputs(rewriter: Rewriter, node: fx.Node, wanted: Mapping[fx.Node, IntegerForm]) -> None:
    """Requantize those inputs of an op that moves integers whose grid is not the grid of its result.

    Their integers are converted, not their floats: their grid is several times as fine.
    """
    plan = info(node).plan
    if plan is None or plan.precision != "moves":
        return
    results = {edge.form: edge.qparams for edge in info(node).edges if not edge.dynamic}
    for read in node.all_input_nodes:
        own = grid_of(rewriter.gm, read)
        value: Any = producer_of(read)
        grid = results.get(wanted[value]) if value in wanted else None
        if isinstance(grid, QParams) and own is not None and not grid.same_as(own):
            _, dq = on_grid(rewriter, read, read, grid, value.name, like=node)
            rewriter.update(node, args=swapped(node.args, {read: dq}))


def _set_state_grid(rewriter: Rewriter, node: fx.Node) -> None:
    """Set the grid to which a recurrent layer rounds its hidden state, as options of its op."""
    plan, op = info(node).plan, op_of(node)
    recurrence = op.traits.recurrence if op is not None else None
    if plan is None or plan.state is None or op is None or recurrence is None:
        return
    steps, scale = DynamicGrid.of(plan.state, None).steps, plan.state_scale
    if plan.state.range == "fixed":
        bounded = recurrence.bounded(dict(zip(op.tensors, node.args, strict=False)), options_of(node))
        scale = 1 / steps if bounded else None
        if not bounded:
            why = "a fixed one reaches from -1 to 1, and the state may be larger"
            rewriter.describe(node, note=STATE_DYNAMIC.format(why))
    rewriter.update(node, kwargs=recurrence.with_grid(node.kwargs, steps, scale, plan.state.symmetric))


def _pass_states_in_float(rewriter: Rewriter, node: fx.Node, float_states: dict[fx.Node, fx.Node | None]) -> None:
    """Let a recurrent layer, or the output of the model, read hidden states in float.

    On a grid, a state would be rounded once more in each step. `float_states` is the cache of `_in_float`.
    """
    op = op_of(node)
    recurrence = op.traits.recurrence if op is not None else None
    states = [argument(node, name) for name in recurrence.states] if recurrence is not None else []
    for value in flat_nodes(node.args if node.op == "output" else states):
        state = _in_float(rewriter, value, float_states)
        if state is not None and state is not value:
            rewriter.reroute(value, state, only=lambda user: user is node)


def _in_float(rewriter: Rewriter, value: fx.Node, float_states: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """Float form of a hidden state, moved by copies of the ops that move it; None if the value is not such a state.

    Args:
        rewriter: rewriter of the graph.
        value: the value, or a conversion of it.
        float_states: results of earlier calls, by the node that computes or moves the value; updated.
    """
    maker: fx.Node = producer_of(value)
    op = op_of(maker)
    if op is None or op.traits.recurrence is not None:
        return maker if op is not None else None
    if maker not in float_states:
        read = list(flat_nodes(maker.args)) if op.traits.layout else []
        real = {part: _in_float(rewriter, part, float_states) for part in read}
        float_states[maker] = maker if read and None not in real.values() else None
        if float_states[maker] is not None and any(part is not real[part] for part in read):
            args = fx.node.map_arg(maker.args, real.__getitem__)
            copy = rewriter.node(maker.op, maker.target, args, dict(maker.kwargs), like=maker, after=maker)
            rewriter.describe(copy, plan=Plan(_UNREAD))
            float_states[maker] = copy
    return float_states[maker]


_UNREAD = Decision("float", "no integer neighbour", UNREAD, decided_by=InsertQdq.name)


def _convert_weight(
    rewriter: Rewriter,
    weight: fx.Node,
    edge: Edge,
    readers: Collection[fx.Node],
    stored: dict[Hashable, tuple[Tensor, ...]],
) -> None:
    """Insert the dequantized integers of a weight, for the readers that want this form.

    Args:
        rewriter: rewriter of the graph.
        weight: node of the float weight.
        edge: the integer form, with its grid.
        readers: nodes that want this form.
        stored: tensors of earlier calls, so that layers with one float weight share the integers; updated.
    """
    tensor, qp = constant(rewriter.gm, weight), edge.qparams
    assert tensor is not None and isinstance(qp, QParams)  # choose-grids has seen it
    name = str(weight.target).removeprefix("fxq_data.").replace(".", "_")
    weight_only = all(is_weight_only(user, calls_of(rewriter.gm, user)) for user in readers)
    is_packed = weight_only and qp.dtype != torch.float16
    packing = Packing.of_grid(qp.qmin, qp.qmax, tuple(tensor.shape[1:])) if is_packed else None
    stored_scale = qp.scale
    if weight_only and qp.block is not None:
        own = stored_grid(tensor)
        exact = own is not None and torch.equal(own.scale, qp.scale)
        stored_scale = qp.scale.to(scale_dtype(qp.scale, exact))
    qp = replace(qp, scale=stored_scale.float())
    # the spec does not determine the grid: reduce_range may apply to some layers only, and trained scales differ
    grids = tuple(t.cpu().numpy().tobytes() for t in (qp.scale, qp.zero_point))
    key = (id(tensor), edge.spec, edge.axis, qp.bits, packing, grids)
    if key not in stored:
        stored[key] = _stored_tensors(tensor.detach(), qp, stored_scale, packing)
    values, scale, zero_point = stored[key]
    kind = "float16" if values.dtype == torch.float16 else f"int{8 if packing is None else packing.bits}"
    grid: dict[str, Any] = {"qmin": qp.qmin, "qmax": qp.qmax, "axis": qp.axis, "block": qp.block}
    grid |= {"scale": qp.s, "zero_point": qp.z} if qp.axis is None else {"zero_point": 0}
    grid |= {} if packing is None else {"packed": packing.row, "bits": packing.bits}
    integers = last = rewriter.constant(values, f"{name}_{kind}", before=weight.next)
    if qp.axis is not None:
        grid["scale"] = last = rewriter.constant(scale, f"{name}_scale", before=last.next)
    if qp.axis is not None and (qp.block is None or bool(zero_point.any())):
        grid["zero_point"] = last = rewriter.constant(zero_point, f"{name}_zero_point", before=last.next)
    typed = (tuple(tensor.shape), torch.float32)
    dq = rewriter.call("dequantize", integers, after=last, name=f"{name}_dq", typed=typed, **grid)
    about = info(next(iter(readers)))
    rewriter.describe(dq, path=about.path, source=about.source, stands_for=str(weight.target))
    rewriter.reroute(weight, dq, only=lambda user: user in readers)


def _stored_tensors(
    weight: Tensor, qp: QParams, scale: Tensor, packing: Packing | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of a weight in its integer form, packed if there is a packing; its scales; its zero points."""
    values = weight.to(torch.float16) if qp.dtype == torch.float16 else quantize(weight, qp)
    dtype = torch.int32 if qp.block is None else qp.dtype  # groups have many zero points: small ones save memory
    dtype = torch.float32 if qp.zero_point.is_floating_point() else dtype
    device = weight.device
    return values if packing is None else packing.pack(values), scale.to(device), qp.zero_point.to(device, dtype)
