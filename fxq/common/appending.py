"""Concatenation to a tensor that grows from call to call, such as a key-value cache, without copying it each time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._functorch import peek_interpreter_stack

MIN_RESERVED = 64
"""Minimum number of entries that new memory has room for, beside those that it holds."""
_ATTRIBUTE = "fxq_reserved"


@dataclass
class _Reserved:
    """Description of memory that results of `appended` share. It is an attribute of their storage.

    Attributes:
        sizes: sizes of a result, without the growing axis.
        strides: strides of every result.
        dtype: dtype of every result.
        dim: the growing axis.
        capacity: number of entries along that axis that the memory has room for.
        used: number of entries that were written. A result that ends there is continued in place.
        version: PyTorch's count of writes into the memory after the last entry was written.
        lock: is held while entries are claimed.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    capacity: int
    used: int
    version: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_latest(self, past: Tensor) -> bool:
        """Whether a tensor is the latest result in this memory, or the end of it: nothing was written after it."""
        fits = past.dtype is self.dtype and past.stride() == self.strides and _without(past, self.dim) == self.sizes
        fits = fits and _version(past) == self.version
        first, rest = divmod(int(past.storage_offset()), self.strides[self.dim])
        return fits and not rest and first + past.shape[self.dim] == self.used

    def claims(self, past: Tensor, count: int) -> bool | None:
        """Claim room for `count` entries after `past`. Returns whether there is; None if `past` is not the latest."""
        with self.lock:
            if not self.is_latest(past):
                return None
            has_room = self.used + count <= self.capacity
            self.used += count if has_room else 0
        return has_room


def appended(past: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return `torch.cat([past, new], dim)`, without a copy of `past` if that is the result of an earlier call.

    A result that is passed in again gets memory with room for more entries. Later entries are written into that memory,
    after those of `past`, if `past` is the latest result in it. Otherwise, as for a second continuation of one `past`,
    both are copied. Results of successive calls therefore share memory: all of them stay correct as long as the caller
    writes to none of them. They are contiguous only if no axis before `dim` has more than one entry.

    Args:
        past: tensor of any shape and dtype.
        new: tensor of the same shape, but for the axis `dim`.
        dim: axis to concatenate along.
    """
    if torch.compiler.is_compiling() or _get_tracing_state() is not None or peek_interpreter_stack() is not None:
        return torch.cat([past, new], dim)
    axis = dim % max(past.dim(), 1)
    if not _may_share(past, new) or _without(past, axis) != _without(new, axis) or 0 in (past.numel(), new.numel()):
        return _marked(torch.cat([past, new], dim), axis)
    reserved: _Reserved | None = getattr(past.untyped_storage(), _ATTRIBUTE, None)
    length, count = past.shape[axis], new.shape[axis]
    has_room = None if reserved is None or reserved.dim != axis else reserved.claims(past, count)
    if has_room is None:
        return _marked(torch.cat([past, new], axis), axis)
    sizes = (*past.shape[:axis], length + count, *past.shape[axis + 1 :])
    if has_room:
        result = past.as_strided(sizes, past.stride(), past.storage_offset())
    else:
        room = max((length + count) // 2, MIN_RESERVED)
        memory = past.new_empty((*past.shape[:axis], length + count + room, *past.shape[axis + 1 :]))
        result = memory.narrow(axis, 0, length + count)
        result.narrow(axis, 0, length).copy_(past)
    result.narrow(axis, length, count).copy_(new)
    if not has_room:
        return _marked(result, axis, memory)
    assert reserved is not None
    reserved.version = _version(result)
    return result


def _may_share(past: Tensor, new: Tensor) -> bool:
    """Whether the result may be in the memory of `past`: for plain tensors of one kind.

    With gradients enabled, backward would take the write for a change of a tensor that it has saved. Processes that
    share memory would write their entries to one place.
    """
    return (
        not torch.is_grad_enabled()
        and _is_plain(past)
        and _is_plain(new)
        and (past.dtype, past.device, past.dim()) == (new.dtype, new.device, new.dim())
        and past.is_inference() == torch.is_inference_mode_enabled()
        and not (past.device.type == "cpu" and past.is_shared())
    )


def _version(tensor: Tensor) -> int:
    """Number of writes into a tensor and its views. Inference tensors do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() > 0


def _without(tensor: Tensor, axis: int) -> tuple[int, ...]:
    """Sizes of a tensor without an axis."""
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])


def _marked(result: Tensor, axis: int, memory: Tensor | None = None) -> Tensor:
    """Return a result of `appended` that is the first in its memory, after marking that memory.

    Args:
        result: the result.
        axis: the growing axis.
        memory: tensor that the result is the first part of, along this axis; None: the result itself.
    """
    if _is_plain(result) and result.numel():
        sizes, used = _without(result, axis), result.shape[axis]
        capacity = used if memory is None else memory.shape[axis]
        reserved = _Reserved(sizes, result.stride(), result.dtype, axis, capacity, used, _version(result))
        setattr(result.untyped_storage(), _ATTRIBUTE, reserved)
    return result
