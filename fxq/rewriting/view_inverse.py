"""Inverses of view ops: the base tensor after a write to one of its views."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from fxq.graph.info import info
from fxq.graph.query import flat_nodes
from fxq.graph.updates import updated_view
from fxq.ops import OPS
from fxq.ops.table import Redirect
from fxq.rewriting.in_place import name_in_place
from fxq.rewriting.rewriter import Rewriter

_SAME_ELEMENTS = (
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "reshape_as",
    "contiguous",
    "identity",
    "dropout",
)


def view_of(rewriter: Rewriter, view: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """Op name and arguments of a node that returns a view, or None if the op table has no such op."""
    if view.op == "call_module":
        module = rewriter.gm.get_submodule(str(view.target))
        spelled = OPS.of_module(module)
        bound = spelled[0].bind_module(spelled[1], module, view.args, view.kwargs) if spelled is not None else ""
    else:
        spelled = OPS.of_call(view.target)
        bound = spelled[0].bind(spelled[1], view.args, view.kwargs) if spelled is not None else ""
    if isinstance(bound, Redirect):
        return bound.op, bound.arguments
    return (spelled[0].name, bound) if spelled is not None and isinstance(bound, dict) else None


def cut_along(tuple_of_views: fx.Node) -> tuple[str, int] | None:
    """Op ("cat" or "stack") and axis that join the views of a split, chunk or unbind again; None for other calls."""
    spelled = OPS.of_call(tuple_of_views.target)
    if spelled is None or spelled[1].pick is None:
        return None
    bound = spelled[0].bind_raw(spelled[1], tuple_of_views.args, tuple_of_views.kwargs)
    dim = bound.get("dim", 0) if isinstance(bound, dict) else None
    return ("stack" if spelled[0].name == "getitem" else "cat", dim) if isinstance(dim, int) else None


def written_back(rewriter: Rewriter, whole: fx.Node, view: fx.Node, value: fx.Node, before: fx.Node) -> fx.Node | None:
    """Add a node that computes a tensor after a write to a view of it; None if the view has no inverse.

    Args:
        rewriter: edits the graph.
        whole: the tensor before the write.
        view: node that returns the view.
        value: new value of the view.
        before: node before which to insert.
    """
    spelled = view_of(rewriter, view)
    options: dict[str, Any] = {"like": view, "before": before}
    typed = info(whole).shape, info(whole).dtype
    if spelled is not None:
        name, bound = spelled
        if name == "getitem":
            return rewriter.call("assign", whole, value, index=bound["index"], typed=typed, **options)
        if name == "permute" and all(isinstance(dim, int) for dim in bound["dims"]):
            rank = len(bound["dims"])
            dims = [dim % rank for dim in bound["dims"]]
            return rewriter.call("permute", value, dims=tuple(map(dims.index, range(rank))), typed=typed, **options)
        if name == "transpose":
            first, second = bound["dim0"], bound["dim1"]
            return rewriter.call("transpose", value, dim0=first, dim1=second, typed=typed, **options)
        if name in _SAME_ELEMENTS:
            return rewriter.call("reshape_as", value, whole, typed=typed, **options)
    method, rest = name_in_place(view), view.args[1:]
    if view.target is operator.getitem:
        method = "__getitem__"
    if view.op == "call_module" or not callable(getattr(Tensor, method, None)) or view.args[:1] != (_source(view),):
        return None
    args = (whole, value, method, rest, dict(view.kwargs))
    return rewriter.node("call_function", updated_view, args, typed=typed, **options)


def _source(view: fx.Node) -> fx.Node | None:
    return next(flat_nodes(view.args), None)
