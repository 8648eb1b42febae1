"""Tuples of a traced call that are used whole: taken apart where that asks nothing new of sizes.

Then `torch.cat(x.split(2, 1))` is what `torch.cat([*x.split(2, 1)])` is: ops of one tensor each. And sizes are given
one by one: `F.avg_pool2d(x, x.size()[2:])` is `F.avg_pool2d(x, (x.size(2), x.size(3)))`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from fxq.graph.info import info
from fxq.ops import OPS
from fxq.tracing.proxies import found_in, is_value


def taken_apart(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of an op, with tuples in the place of traced ones: of tensors as of sizes."""
    found = OPS.of_call(target)
    if found is None or getattr(target, "__module__", None) == operator.add.__module__:  # x.size()[:-1] + (3,)
        return args, kwargs
    listed = _listed if found[0].traits.inputs == ("xs",) else _sizes
    return tuple(map(listed, args)), {key: listed(value) for key, value in kwargs.items()}


def _sizes(value: Any) -> Any:
    sizes = value._value if is_value(value) else None
    return tuple(value) if isinstance(sizes, (tuple, list)) and all(isinstance(n, int) for n in sizes) else value


def sliced(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Some of the parts of a tuple, as `x.chunk(2, 1)[::-1]` takes them; None where the call is not that."""
    if target is not operator.getitem or type(args[1]) is not slice or next(found_in(args[1]), None) is not None:
        return None
    parts = _listed(args[0])
    return parts[args[1]] if type(parts) is tuple else None  # not by isinstance: a traced tuple answers as one


def _listed(value: Any) -> Any:
    return tuple(value) if is_value(value) and isinstance(value._value, (tuple, list)) and _is_fixed(value) else value


def _is_fixed(value: Any) -> bool:
    """Whether inputs of other sizes have as many parts, as a rule: the graph will check that they do.

    So it is where the call says how many, or cuts the channels of images; but not along the batch.
    """
    node = value.node
    found = OPS.of_call(node.target)
    cuts = found is not None and found[1].pick is not None and found[0].traits.view  # several views are parts
    if found is None or not cuts or not all(isinstance(part, Tensor) for part in value._value):
        return False
    bound = found[0].bind_raw(found[1], node.args, node.kwargs)
    dim = bound.get("dim", 0) if isinstance(bound, dict) else None
    if not isinstance(bound, dict) or not isinstance(dim, int):
        return False
    rank = len(info(bound["x"]).shape or ())
    counted = "chunks" in bound or "sections" in bound or isinstance(bound.get("sizes"), (tuple, list))
    axis = dim % max(rank, 1)
    return axis > 0 and (counted or (axis == 1 and rank > 3))
