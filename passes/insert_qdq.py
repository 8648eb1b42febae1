"""insert-qdq: observers become quantize and dequantize, weights become integers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.errors import PassError
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Edge, Plan, info
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
from fxq.graph.unit import WantedForm, calls_of, wanted_forms
from fxq.ops.traits import STATE_DYNAMIC
from fxq.pipeline.candidates import UNREAD
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.observer_base import Observer
from fxq.quant.packing import BITS, pack
from fxq.quant.qparams import QParams, quantize
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class InsertQdq(Pass):
    """Put quantize and dequantize on every edge that carries integers, with the parameters that calibration found.

    Before: conv2d(observer(x), w, b)
    After: conv2d(dequantize(quantize(x)), dequantize(w_int8), b)
    Where the weight alone is in integers: conv2d(x, dequantize(w_int8), b); of four bits, two values are in a byte.
    Also: a hidden state goes on to other recurrent layers, and out of the model, in float; what an op moves together
    with others is put onto the grid of its result, where it has one of its own; and the state of a recurrent layer is
    put onto a grid, by options of its op.
    Keeps: the output up to rounding to the grids. This is the portable reference: exact, on any device.
    Source: Jacob et al. 2018, section 2.
    """

    name: ClassVar[str] = "insert-qdq"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Take the observers out, and put conversions in."""
        chosen = [value for value in rewriter.nodes() if info(value).edges]
        missing = next((value for value in chosen if any(edge.qparams is None for edge in info(value).edges)), None)
        if missing is not None:
            raise PassError(
                f"{where(rewriter.gm, missing)}: its grid is not chosen. Run choose-grids behind calibration."
            )
        for node in rewriter.nodes():
            if isinstance(submodule(rewriter.gm, node), Observer):
                rewriter.replace(node, node.args[0])
        wishes = {node: wanted_forms(rewriter.gm, node) for node in rewriter.nodes()}
        results = {value: {e.spec: e.qparams for e in info(value).edges if not e.dynamic} for value in chosen}
        stored: dict[Hashable, tuple[Tensor, ...]] = {}
        for value in chosen:
            current, readers = value, list(value.users)
            for edge in info(value).edges:
                wish = {reader: None for reader in readers if wishes[reader].get(value) == (edge.spec, edge.axis)}
                if value.op != "get_attr":
                    current = _convert(rewriter, value, current, edge, wish)
                elif wish:
                    _convert_weight(rewriter, value, edge, wish, stored)
            rewriter.describe(value, edges=())
        for node in rewriter.nodes():
            _put_state_on_a_grid(rewriter, node)
        handed_on: dict[fx.Node, fx.Node | None] = {}
        for node in rewriter.nodes():
            _hand_on_states(rewriter, node, handed_on)
        for node, grids in results.items():
            _bring_together(rewriter, node, grids, wishes[node])
        rewriter.erase_unused()


def _convert(rewriter: Rewriter, value: fx.Node, current: fx.Node, edge: Edge, wish: Collection[fx.Node]) -> fx.Node:
    """Quantize and dequantize behind `current` (the value, or its previous integer form); the dequantize.

    `wish` are the readers that want this form. Every form is made from the value itself: made from a coarser form, it
    would have that one's error as well.
    """
    assert edge.qparams is not None  # all of them are chosen
    q, dq = on_grid(rewriter, value, current, edge.qparams, value.name)
    if edge.dynamic:
        rewriter.reroute(current, dq, only=lambda user: user in wish)
        return current

    def wants(user: fx.Node) -> bool:
        plan = info(user).plan
        return user not in (q, dq) and (user in wish or (current is value and not (plan is not None and plan.exact)))

    rewriter.reroute(current, q, only=lambda user: reads_only_metadata(user))
    rewriter.reroute(current, dq, only=wants)
    return dq


def _bring_together(
    rewriter: Rewriter,
    node: fx.Node,
    results: Mapping[TensorSpec, QParams | DynamicGrid | None],
    wishes: Mapping[fx.Node, WantedForm],
) -> None:
    """Put the inputs of an op that moves integers onto the grid of its result, those that have another one.

    From the integers that they are: such a grid is several times as fine.
    """
    plan = info(node).plan
    if plan is None or plan.precision != "moves":
        return
    for read in node.all_input_nodes:
        own = grid_of(rewriter.gm, read)
        value: Any = producer_of(read)
        wanted = results.get(wishes[value][0]) if value in wishes else None
        if isinstance(wanted, QParams) and own is not None and not wanted.same_as(own):
            _, dq = on_grid(rewriter, read, read, wanted, value.name, like=node)
            rewriter.update(node, args=swapped(node.args, {read: dq}))


def _put_state_on_a_grid(rewriter: Rewriter, node: fx.Node) -> None:
    """Let a recurrent layer round its hidden state: options of the op say to what."""
    plan, op = info(node).plan, op_of(node)
    recurrence = op.traits.recurrence if op is not None else None
    if plan is None or plan.state is None or op is None or recurrence is None:
        return
    steps, scale = DynamicGrid.of(plan.state, None).steps, plan.state_scale
    if plan.state.range == "fixed":
        bounded = recurrence.bounded(dict(zip(op.tensors, node.args, strict=False)), options_of(node))
        scale = 1 / steps if bounded else None
        if not bounded:
            why = "a fixed one reaches from -1 to 1, and the state may go further"
            rewriter.describe(node, note=STATE_DYNAMIC.format(why))
    rewriter.update(node, kwargs=recurrence.with_grid(node.kwargs, steps, scale, plan.state.symmetric))


def _hand_on_states(rewriter: Rewriter, node: fx.Node, known: dict[fx.Node, fx.Node | None]) -> None:
    """Let a recurrent layer begin with a hidden state in float, and the model return it so, for its next call.

    Within a layer it goes from step to step in float, too: on a grid, each step would round it once more.
    """
    op = op_of(node)
    recurrence = op.traits.recurrence if op is not None else None
    states = [argument(node, name) for name in recurrence.states] if recurrence is not None else []
    for value in flat_nodes(node.args if node.op == "output" else states):
        state = _in_float(rewriter, value, known)
        if state is not None and state is not value:
            rewriter.reroute(value, state, only=lambda user: user is node)


def _in_float(rewriter: Rewriter, value: fx.Node, known: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """A value as recurrent layers make it, moved by copies of what moves it; None where it is something else.

    `known` are those found before, by the node that makes the value on its grid.
    """
    made: fx.Node = producer_of(value)
    op = op_of(made)
    if op is None or op.traits.recurrence is not None:
        return made if op is not None else None
    if made not in known:
        read = list(flat_nodes(made.args)) if op.traits.layout else []
        real = {part: _in_float(rewriter, part, known) for part in read}
        known[made] = made if read and None not in real.values() else None
        if known[made] is not None and any(part is not real[part] for part in read):
            args = fx.node.map_arg(made.args, real.__getitem__)
            known[made] = copy = rewriter.node(made.op, made.target, args, dict(made.kwargs), like=made, after=made)
            rewriter.describe(copy, plan=Plan(_UNREAD))
    return known[made]


_UNREAD = Decision("float", "no integer neighbour", UNREAD, decided_by=InsertQdq.name)


def _convert_weight(
    rewriter: Rewriter,
    weight: fx.Node,
    edge: Edge,
    wish: Collection[fx.Node],
    made: dict[Hashable, tuple[Tensor, ...]],
) -> None:
    """Put the integer form of a weight, dequantized, behind the float one, for those that want it.

    `made` has the tensors of those before: layers that share a float weight share the integers.
    """
    tensor, qp = constant(rewriter.gm, weight), edge.qparams
    assert tensor is not None and isinstance(qp, QParams)  # choose-grids has seen it
    name = str(weight.target).removeprefix("fxq_data.").replace(".", "_")
    packs = (
        all(is_weight_only(user, calls_of(rewriter.gm, user)) for user in wish)
        and qp.dtype != torch.float16
        and qp.qmax - qp.qmin < 2**BITS
    )
    # Of layers with one spec, some may give up a bit, and learned scales differ.
    grids = tuple(t.cpu().numpy().tobytes() for t in (qp.scale, qp.zero_point))
    key = (id(tensor), edge.spec, edge.axis, qp.bits, packs, grids)
    values, scale, zero_point = made[key] = made.get(key) or _stored(tensor.detach(), qp, packs)
    kind = "float16" if values.dtype == torch.float16 else "int4" if packs else "int8"
    grid: dict[str, Any] = {"qmin": qp.qmin, "qmax": qp.qmax, "axis": qp.axis, "block": qp.block}
    grid |= {"scale": qp.s, "zero_point": qp.z} if qp.axis is None else {"zero_point": 0}
    grid |= {"packed": tuple(tensor.shape[1:])} if packs else {}
    integers = last = rewriter.constant(values, f"{name}_{kind}", before=weight.next)
    if qp.axis is not None:
        grid["scale"] = last = rewriter.constant(scale, f"{name}_scale", before=last.next)
    if qp.axis is not None and (qp.block is None or bool(zero_point.any())):
        grid["zero_point"] = last = rewriter.constant(zero_point, f"{name}_zero_point", before=last.next)
    typed = (tuple(tensor.shape), torch.float32)
    dq = rewriter.call("dequantize", integers, after=last, name=f"{name}_dq", typed=typed, **grid)
    about = info(next(iter(wish)))
    rewriter.describe(dq, path=about.path, source=about.source, stands_for=str(weight.target))
    rewriter.reroute(weight, dq, only=lambda user: user in wish)


def _stored(weight: Tensor, qp: QParams, packs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The values that are kept of a weight, two to a byte where it `packs`; scales and zero points."""
    kept = weight.to(torch.float16) if qp.dtype == torch.float16 else quantize(weight, qp)
    small = torch.int32 if qp.block is None else qp.dtype  # there is one for each few values
    home = weight.device
    return pack(kept) if packs else kept, qp.scale.to(home), qp.zero_point.to(home, small)
