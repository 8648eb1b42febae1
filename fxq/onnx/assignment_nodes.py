"""ONNX form of assignments: the result is concatenated from the assigned part and the slices around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fxq.graph.updates import updated
from fxq.onnx.function_nodes import calls
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes

_LAST = 2**31 - 1


@writes("assign")
def assign(w: Writer, x: Value, value: Any, *, index: Any) -> str:
    parts = [part for part in index if part is not None]
    refuse(not all(type(part) in (int, slice) for part in parts), "its index is computed, not constant")
    slices = [part if isinstance(part, slice) else slice(part, part + 1 or None) for part in parts]
    result = x.like[index].shape
    inner = x.like[tuple(slices)].shape
    new = _spread(w, value, x, result)
    if len(inner) != len(result) or None in index:
        new = w.reshaped(Value(new, w.empty(result, x.dtype)), inner)
    return _put(w, x, new, [_span(part, x.shape[axis]) for axis, part in enumerate(slices)], 0, x.rank)


class _Places(NamedTuple):
    """Positions along an axis, and the size of the axis."""

    places: list[int]
    size: int


def _span(part: slice, size: Any) -> Any:
    """Start and stop of a slice of an axis, or its positions if its step is not 1."""
    varied = any(map(varies, (size, part.start, part.stop)))
    if part.step not in (None, 1):
        refuse(varied, "it assigns with a step to an axis whose size varies")
        return _Places(list(range(int(size)))[part], int(size))
    if varied:
        return part.start or 0, _LAST if part.stop is None else part.stop
    start, stop, _ = part.indices(int(size))
    return start, _LAST if stop >= size else max(start, stop)


def _put(w: Writer, x: Operand, new: str, spans: list[Any], axis: int, rank: int) -> str:
    """Write `x` with the given spans of its axes, from `axis` on, replaced by `new`."""
    while axis < len(spans) and spans[axis] == (0, _LAST):
        axis += 1
    if axis == len(spans):
        return new
    if isinstance(spans[axis], _Places):
        places, size = spans[axis].places, spans[axis].size
        middle = _put(w, w.emit("Gather", x, torch.tensor(places), axis=axis), new, spans, axis + 1, rank)
        source, mask = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
        source[places], mask[places] = torch.arange(len(places)), True
        mask = mask.view(size, *[1] * (rank - axis - 1))
        return w.emit("Where", mask, w.emit("Gather", middle, source, axis=axis), x)
    start, stop = spans[axis]
    middle = _put(w, w.cut(x, axis, start, stop), new, spans, axis + 1, rank)
    before = [] if isinstance(start, int) and start == 0 else [w.cut(x, axis, 0, start)]
    behind = [] if isinstance(stop, int) and stop == _LAST else [w.cut(x, axis, stop, _LAST)]
    return w.joined([*before, middle, *behind], axis)


def _spread(w: Writer, value: Any, x: Value, shape: Any) -> str:
    """Write the assigned value, cast to the dtype of `x` and expanded to a shape."""
    if not isinstance(value, Value):
        refuse(not isinstance(value, (int, float)), "the assigned value is neither a tensor nor a number")
        return w.emit("Expand", w.number(value, x), w.ints(shape))
    while value.rank > len(shape):  # leading axes of size 1
        value = Value(w.reshaped(value, value.shape[1:]), value.like[0])
    operand: Operand = value if value.dtype == x.dtype else w.cast(value, x.dtype)
    return w.emit("Expand", operand, w.ints(shape))


@calls(updated)
def _put_at(w: Writer, x: Value, index: Any, value: Any) -> Value:
    places = index if isinstance(index, tuple) else (index,)
    whole = all(isinstance(place, Value) and place.dtype in (torch.int32, torch.int64) for place in places)
    refuse(not whole, "its index holds more than integer tensors for the first axes")
    shape = torch.broadcast_shapes(*(place.shape for place in places))
    parts = [w.reshaped(Value(w.emit("Expand", place, w.ints(shape)), place.like), (*shape, 1)) for place in places]
    at = w.cast(w.joined(parts, len(shape)), torch.int64)
    return Value(w.emit("ScatterND", x, at, _spread(w, value, x, (*shape, *x.shape[len(places) :]))), x.like)
