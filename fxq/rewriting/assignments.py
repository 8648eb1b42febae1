"""Rewriting of assignments `x[index] = value` into calls that return the new tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxq.graph.info import info
from fxq.graph.run import Typed
from fxq.graph.updates import updated
from fxq.ops.selection import indexed
from fxq.rewriting.rewriter import Rewriter


def assigned(rewriter: Rewriter, x: fx.Node, index: Any, value: Any, like: fx.Node, before: fx.Node) -> fx.Node:
    """Add a node that computes `x` after `x[index] = value`.

    A bool mask becomes `where` or `masked_fill`, slices and numbers become `assign`, index tensors become `updated`.

    Args:
        rewriter: edits the graph.
        x: the tensor before the assignment.
        index: the index, which may hold nodes.
        value: the assigned node or number.
        like: node whose metadata the new nodes get.
        before: node before which to insert them.
    """
    typed: Typed = (info(x).shape, info(x).dtype)
    mask = _mask(x, index)
    if mask is not None and _fits(x, mask, value):
        if isinstance(value, fx.Node):
            value = cast(rewriter, value, info(x).dtype, like, before)
            return rewriter.call(
                "where", _aligned(rewriter, x, *mask, like, before), value, x, like=like, before=before, typed=typed
            )
        return rewriter.call(
            "masked_fill", x, _aligned(rewriter, x, *mask, like, before), value, like=like, before=before, typed=typed
        )
    normal = indexed(x, index)
    whole = not isinstance(normal, (str, dict)) and normal.op == "identity"
    if isinstance(normal, str):
        return rewriter.node("call_function", updated, (x, index, value), like=like, before=before, typed=typed)
    places = (
        ()
        if whole
        else normal["index"]
        if isinstance(normal, dict)
        else (*[slice(None)] * normal.arguments["dim"], None)
    )
    return rewriter.call("assign", x, value, index=places, like=like, before=before, typed=typed)


def cast(rewriter: Rewriter, value: fx.Node, dtype: torch.dtype | None, like: fx.Node, before: fx.Node) -> fx.Node:
    """Node with a value cast to a dtype; the value itself if it has that dtype."""
    about = info(value)
    if not about.is_tensor or about.dtype == dtype:
        return value
    return rewriter.node("call_method", "to", (value, dtype), like=like, before=before, typed=(about.shape, dtype))


def _mask(x: fx.Node, index: Any) -> tuple[fx.Node, int] | None:
    """Mask of an index that selects by one bool mask only, and the number of axes of `x` after those it covers."""
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    masks = [i for i, part in enumerate(parts) if isinstance(part, fx.Node) and info(part).dtype is torch.bool]
    others = [part for i, part in enumerate(parts) if i not in masks]
    if len(masks) != 1 or any(part is not Ellipsis and part != slice(None) for part in others):
        return None
    rank, covered = len(info(x).shape or ()), len(info(parts[masks[0]]).shape or ())
    trailing = len(parts) - masks[0] - 1
    if Ellipsis not in parts or parts.index(Ellipsis) > masks[0]:
        trailing = rank - covered - masks[0]
    return parts[masks[0]], trailing


def _fits(x: fx.Node, mask: tuple[fx.Node, int], value: Any) -> bool:
    """Whether a value is the same for every selected element, so that it broadcasts over the mask."""
    if not isinstance(value, fx.Node):
        whole = info(x).dtype is not None and not info(x).dtype.is_floating_point  # type: ignore[union-attr]
        return isinstance(value, (int, float)) and not (whole and isinstance(value, float))
    shape = info(value).shape
    return shape is not None and len(shape) <= mask[1]


def _aligned(rewriter: Rewriter, x: fx.Node, mask: fx.Node, trailing: int, like: fx.Node, before: fx.Node) -> fx.Node:
    """Append axes of size 1 to a mask, so that it broadcasts over the axes of `x` that it does not cover."""
    for _ in range(trailing):
        dim = len(info(mask).shape or ())
        mask = rewriter.call("unsqueeze", mask, dim=dim, like=like, before=before)
    return mask
