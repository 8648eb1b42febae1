"""store-states: store states that grow, such as key-value caches, as integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import options_of, plan_of
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.packing import Packing
from fxq.quant.spec import LOW_BITS, TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.state_readers import is_returned, split_slices

_UNPACKED = "its integers of {} bits are unpacked in each call; compiled loops read 8 and 4 bits"


@dataclass(frozen=True)
class StoreStates(Pass):
    """Store states that grow from call to call as integers, where the recipe has a spec for them (role "state").

    Before: keys = append(past, new)
    After: integers = append(state_integers(past), quantize(new)), and so the scales and zero points; the model returns
    quantized_rows(integers, scale, zero_point), and its other ops read dequantize(integers, scale, zero_point)
    A slice of the state that is returned and also read by other ops becomes one slice of the integers, and one of the
    floats.
    Integers of 6 bits or fewer are packed into bytes, and unpacked before they are dequantized.
    Keeps: the output, up to rounding to the grid of each row, or of each block of a row if the spec has a block size.
    New entries are quantized once, when they are appended.
    """

    name: ClassVar[str] = "store-states"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Rewrite each `append` whose plan has a spec for its state."""
        for node in rewriter.nodes("append"):
            plan = plan_of(node)
            if plan is not None and plan.state is not None:
                with rewriter.attributed("store_state", _store):
                    _store(rewriter, node, plan.state)


def _store(rewriter: Rewriter, node: fx.Node, spec: TensorSpec) -> None:
    past, new = node.args
    assert isinstance(past, fx.Node) and isinstance(new, fx.Node)
    about, grid, name, dim = info(node), DynamicGrid.of(spec, -1), node.name, options_of(node)["dim"]
    plan = Plan(Decision("moves", decided_by=rewriter.name))
    size = int((about.shape or (0,))[-1])
    packing = Packing.of_grid(grid.qmin, grid.qmax, (size,))
    last_sizes = {"values": size, "grid": size // (spec.block or size), "q": packing.row_bytes if packing else size}
    width: dict[str, Any] = {"bits": packing.bits} if packing else {}
    block: dict[str, Any] = {"block": spec.block} if spec.block is not None else {}
    blocks = {"axis": -1, **block} if block else {}

    def call(op: str, part: str, like: fx.Node, *reads: fx.Node, **options: Any) -> fx.Node:
        """Insert a call that computes the integers, the scale or the zero point of the rows of `like`."""
        last = last_sizes[part if part in last_sizes else "grid"]
        typed = (*(info(like).shape or ())[:-1], last), torch.float32 if part == "scale" else spec.dtype
        new_node = rewriter.call(op, *reads, before=node, name=f"{like.name}_{part}", typed=typed, **options)
        rewriter.describe(new_node, path=about.path, source=about.source, plan=plan)
        return new_node

    past_scale = call("state_scale", "scale", past, past, steps=grid.steps, **block, **width)
    past_zero = call("state_zero_point", "zero_point", past, past, past_scale, **block, **width)
    past_q = call("state_integers", "q", past, past, past_scale, past_zero, qmax=grid.qmax, **block, **width)
    new_scale = call("choose_scale", "scale", new, new, steps=grid.steps, axis=-1, symmetric=False, **block)
    new_zero = call("state_zero_point", "zero_point", new, new, new_scale, **block, **width)
    rounding: dict[str, Any] = {"scale": new_scale, "zero_point": new_zero, "qmax": grid.qmax, "dtype": grid.dtype}
    new_q = call("quantize", "values" if packing else "q", new, new, **rounding, **blocks)
    if packing:
        new_q = call("pack_rows", "q", new, new_q, **width)
    scale = call("append", "scale", node, past_scale, new_scale, dim=dim)
    zero = call("append", "zero_point", node, past_zero, new_zero, dim=dim)
    integers = call("append", "q", node, past_q, new_q, dim=dim)
    floats = about.shape, torch.float32
    sizes = {"size": size, **width} if packing else {}
    stored = integers, scale, zero
    state = rewriter.call("quantized_rows", *stored, before=node, name=f"{name}_state", typed=floats, **sizes)
    rewriter.describe(state, path=about.path, source=about.source, plan=plan, origins=about.origins)
    if packing and packing.bits != LOW_BITS:
        rewriter.describe(state, note=_UNPACKED.format(packing.bits))
    values = call("unpack_rows", "values", node, integers, **sizes) if packing else integers
    options: dict[str, Any] = {"scale": scale, "zero_point": zero, "qmin": grid.qmin, "qmax": grid.qmax}
    dq = rewriter.call("dequantize", values, before=node, name=f"{name}_dq", typed=floats, **options, **blocks)
    rewriter.describe(dq, path=about.path, source=about.source)
    split_slices(rewriter, node)
    rewriter.reroute(node, state, only=is_returned)
    rewriter.reroute(node, dq)
    rewriter.erase(node)
    rewriter.rename(state, name)
    rewriter.erase_unused()
