"""Recognition of sizes that a graph reads from tensors: the tensor and the axis of a size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from fxq.ops.registry import aten
from fxq.ops.table import shape_of

Axis = tuple[fx.Node, int]


def is_all_of(x: Any, sizes: Sequence[Any]) -> bool:
    """Whether sizes are those of the last axes of `x`, read from it: `x.size()[2:]`, `(x.size(2), x.size(3))`."""
    rank = len(shape_of(x) or ())
    return len(sizes) < rank and [_axis(size) for size in sizes] == [(x, rank - i) for i in range(len(sizes), 0, -1)]


def leads(x: Any, sizes: Sequence[Any]) -> bool:
    """Whether sizes are those of the first axes of `x`, but not of all, read from it: `(x.size(0),)`."""
    return 0 < len(sizes) < len(shape_of(x) or ()) and [_axis(size) for size in sizes] == [
        (x, i) for i in range(len(sizes))
    ]


def _axis(value: Any) -> Axis | None:
    """Tensor and axis whose size a node reads; None for other values."""
    if not isinstance(value, fx.Node):
        return None
    dim = value.kwargs.get("dim", value.args[1] if len(value.args) > 1 else None)
    if not isinstance(dim, int):
        return None
    axes = _axes(value.args[0]) if value.target is operator.getitem else None
    if value.target in ("size", aten.sym_size.int):
        axes = _all_axes(value.args[0])
    return axes[dim] if axes and -len(axes) <= dim < len(axes) else None


def _axes(value: Any) -> list[Axis]:
    """Tensor and axis of each size in a tuple of sizes; empty for other values."""
    if not isinstance(value, fx.Node):
        return []
    if (value.target == "size" and len(value.args) == 1) or (value.target is getattr and value.args[1] == "shape"):
        return _all_axes(value.args[0])
    part = value.args[1] if value.target is operator.getitem else None
    if not isinstance(part, slice) or any(isinstance(bound, fx.Node) for bound in (part.start, part.stop, part.step)):
        return []
    return _axes(value.args[0])[part]


def _all_axes(x: Any) -> list[Axis]:
    return [(x, i) for i in range(len(shape_of(x) or ()))]
