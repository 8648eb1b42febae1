"""Unpacking of tuples that a traced call returns and another call takes whole, if their length does not vary.

Then `torch.cat(x.split(2, 1))` is traced like `torch.cat([*x.split(2, 1)])`, as ops of one tensor each, and
`F.avg_pool2d(x, x.size()[2:])` like `F.avg_pool2d(x, (x.size(2), x.size(3)))`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from fxq.graph.info import info
from fxq.ops import OPS
from fxq.tracing.proxies import is_value, traced_values


def unpacked(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an op's call with traced tuples unpacked: tuples of tensors or of sizes."""
    row = OPS.of_call(target)
    if row is None or getattr(target, "__module__", None) == operator.add.__module__:  # x.size()[:-1] + (3,)
        return args, kwargs
    unpack = _listed if row[0].traits.inputs == ("xs",) else _sizes
    return tuple(map(unpack, args)), {key: unpack(value) for key, value in kwargs.items()}


def _sizes(value: Any) -> Any:
    sizes = value._value if is_value(value) else None
    return tuple(value) if isinstance(sizes, (tuple, list)) and all(isinstance(n, int) for n in sizes) else value


def sliced(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Parts of a traced tuple that a slice selects, as in `x.chunk(2, 1)[::-1]`; None for any other call."""
    if target is not operator.getitem or type(args[1]) is not slice or next(traced_values(args[1]), None) is not None:
        return None
    parts = _listed(args[0])
    return parts[args[1]] if type(parts) is tuple else None  # not isinstance, which is true for a traced tuple


def _listed(value: Any) -> Any:
    return tuple(value) if is_value(value) and isinstance(value._value, (tuple, list)) and _is_fixed(value) else value


def _is_fixed(value: Any) -> bool:
    """Whether inputs of other sizes usually give as many parts. The graph checks that they do.

    This holds if the call gives the number of parts, or splits the channels of images; never along the batch.
    """
    node = value.node
    row = OPS.of_call(node.target)
    splits = row is not None and row[1].pick is not None and row[0].traits.view  # several views are parts
    if row is None or not splits or not all(isinstance(part, Tensor) for part in value._value):
        return False
    bound = row[0].bind_raw(row[1], node.args, node.kwargs)
    dim = bound.get("dim", 0) if isinstance(bound, dict) else None
    if not isinstance(bound, dict) or not isinstance(dim, int):
        return False
    rank = len(info(bound["x"]).shape or ())
    counted = "chunks" in bound or "sections" in bound or isinstance(bound.get("sizes"), (tuple, list))
    axis = dim % max(rank, 1)
    return axis > 0 and (counted or (axis == 1 and rank > 3))
