"""ONNX form of assignments to parts of tensors, concatenated from the assigned part and the slices around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fxq.graph.updates import updated
from fxq.onnx.function_nodes import writes_calls
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes

_AXIS_END = 2**31 - 1
"""Stop of a slice to the end of an axis."""


@writes("assign")
def assign(w: Writer, x: Value, value: Any, *, index: Any) -> str:
    parts = [part for part in index if part is not None]
    refuse(not all(type(part) in (int, slice) for part in parts), "its index is computed, not constant")
    slices = [part if isinstance(part, slice) else slice(part, part + 1 or None) for part in parts]
    result = x.like[index].shape
    inner = x.like[tuple(slices)].shape
    new = _expanded(w, value, x, result)
    if len(inner) != len(result) or None in index:
        new = w.reshaped(Value(new, w.empty(result, x.dtype)), inner)
    return _replaced(w, x, new, [_span(part, x.shape[axis]) for axis, part in enumerate(slices)], 0, x.rank)


class _Positions(NamedTuple):
    """Positions along an axis, and the size of the axis."""

    positions: list[int]
    size: int


def _span(part: slice, size: Any) -> Any:
    """Start and stop of a slice of an axis, or its positions if its step is not 1."""
    varied = any(map(varies, (size, part.start, part.stop)))
    if part.step not in (None, 1):
        refuse(varied, "it assigns with a step to an axis whose size varies")
        return _Positions(list(range(int(size)))[part], int(size))
    if varied:
        return part.start or 0, _AXIS_END if part.stop is None else part.stop
    start, stop, _ = part.indices(int(size))
    return start, _AXIS_END if stop >= size else max(start, stop)


def _replaced(w: Writer, x: Operand, new: str, spans: list[Any], axis: int, rank: int) -> str:
    """Write `x` with the spans of its axes, from `axis` on, replaced by `new`."""
    while axis < len(spans) and spans[axis] == (0, _AXIS_END):
        axis += 1
    if axis == len(spans):
        return new
    if isinstance(spans[axis], _Positions):
        positions, size = spans[axis].positions, spans[axis].size
        middle = _replaced(w, w.emit("Gather", x, torch.tensor(positions), axis=axis), new, spans, axis + 1, rank)
        source, mask = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
        source[positions], mask[positions] = torch.arange(len(positions)), True
        mask = mask.view(size, *[1] * (rank - axis - 1))
        return w.emit("Where", mask, w.emit("Gather", middle, source, axis=axis), x)
    start, stop = spans[axis]
    middle = _replaced(w, w.cut(x, axis, start, stop), new, spans, axis + 1, rank)
    before = [] if isinstance(start, int) and start == 0 else [w.cut(x, axis, 0, start)]
    after = [] if isinstance(stop, int) and stop == _AXIS_END else [w.cut(x, axis, stop, _AXIS_END)]
    return w.joined([*before, middle, *after], axis)


def _expanded(w: Writer, value: Any, x: Value, shape: Any) -> str:
    """Write the assigned value, cast to the dtype of `x` and expanded to a shape."""
    if not isinstance(value, Value):
        refuse(not isinstance(value, (int, float)), "the assigned value is neither a tensor nor a number")
        return w.emit("Expand", w.number(value, x), w.ints(shape))
    while value.rank > len(shape):  # leading axes of size 1
        value = Value(w.reshaped(value, value.shape[1:]), value.like[0])
    operand: Operand = value if value.dtype == x.dtype else w.cast(value, x.dtype)
    return w.emit("Expand", operand, w.ints(shape))


@writes_calls(updated)
def _scatter_nd(w: Writer, x: Value, index: Any, value: Any) -> Value:
    indices = index if isinstance(index, tuple) else (index,)
    are_integers = all(isinstance(i, Value) and i.dtype in (torch.int32, torch.int64) for i in indices)
    refuse(not are_integers, "its index holds more than integer tensors for the first axes")
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    parts = [w.reshaped(Value(w.emit("Expand", i, w.ints(shape)), i.like), (*shape, 1)) for i in indices]
    positions = w.cast(w.joined(parts, len(shape)), torch.int64)
    return Value(w.emit("ScatterND", x, positions, _expanded(w, value, x, (*shape, *x.shape[len(indices) :]))), x.like)
