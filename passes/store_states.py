"""store-states: store states that grow, such as key-value caches, as integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxq.graph.info import info
from fxq.graph.query import is_op, options_of, plan_of, reads_only_metadata
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class StoreStates(Pass):
    """Store states that grow from call to call as integers, where the recipe has a spec for them (role "state").

    Before: keys = append(past, new)
    After: integers = append(state_integers(past), quantize(new)); scale = append(state_scale(past), choose_scale(new));
    the model returns quantized_rows(integers, scale), and its other ops read dequantize(integers, scale)
    Keeps: the output, up to rounding to the grid of each row. New entries are quantized once, when they are appended.
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
    about, grid, name = info(node), DynamicGrid.of(spec, -1), node.name
    plan = about.plan.decided(precision="moves", kind="", text="", decided_by=rewriter.name) if about.plan is not None else None

    def call(op: str, *reads: fx.Node, name: str, like: fx.Node, dtype: torch.dtype, **options: int) -> fx.Node:
        shape = info(like).shape or ()
        shape = (*shape[:-1], 1) if name.endswith("scale") else shape
        new_node = rewriter.call(op, *reads, before=node, name=name, typed=(shape, dtype), **options)
        rewriter.describe(new_node, path=about.path, source=about.source, plan=plan)
        return new_node

    floats, ints, dim = torch.float32, spec.dtype, options_of(node)["dim"]
    past_scale = call("state_scale", past, name=f"{past.name}_scale", like=past, dtype=floats, qmax=grid.qmax)
    past_q = call("state_integers", past, past_scale, name=f"{past.name}_q", like=past, dtype=ints, qmax=grid.qmax)
    new_q, _ = on_grid(rewriter, new, new, grid, new.name, like=node)
    scale = call("append", past_scale, new_q.kwargs["scale"], name=f"{name}_scale", like=node, dtype=floats, dim=dim)
    integers = call("append", past_q, new_q, name=f"{name}_q", like=node, dtype=ints, dim=dim)
    state = call("quantized_rows", integers, scale, name=f"{name}_state", like=node, dtype=floats)
    rewriter.describe(state, origins=about.origins)
    options = {"scale": scale, "zero_point": grid.middle, "qmin": grid.qmin, "qmax": grid.qmax}
    dq = rewriter.call("dequantize", integers, before=node, name=f"{name}_dq", typed=(about.shape, floats), **options)
    rewriter.describe(dq, path=about.path, source=about.source)
    rewriter.reroute(node, state, only=_is_returned)
    rewriter.reroute(node, dq)
    rewriter.erase(node)
    rewriter.rename(state, name)
    rewriter.erase_unused()


def _is_returned(user: fx.Node) -> bool:
    """Whether a reader of a state is the output of the model, returns a part of it, or reads its shape."""
    is_slice = is_op(user, "getitem") and all(reader.op == "output" for reader in user.users)
    return user.op == "output" or is_slice or reads_only_metadata(user)
