"""Concatenation to a tensor that grows from call to call, such as a key-value cache, without copying it each time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._functorch import peek_interpreter_stack

from fxq.errors import StateError

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
        address: address of the memory. Memory that is moved, such as to share it with other processes, is not written.
        is_shared: whether several results are in the memory.
        lock: is held while entries are claimed.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    capacity: int
    used: int
    version: int
    address: int
    is_shared: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end_of(self, past: Tensor, sizes: tuple[int, ...]) -> int:
        """Number of entries up to the end of a tensor, which has these sizes without the axis; -1: of another form."""
        fits = past.dtype is self.dtype and past.stride() == self.strides and sizes == self.sizes
        first, rest = divmod(int(past.storage_offset()), self.strides[self.dim])
        return first + past.shape[self.dim] if fits and not rest else -1

    def claims(self, end: int, count: int, version: int) -> bool:
        """Reserve `count` entries after the entry `end`, for a caller that holds the lock.

        Args:
            end: number of entries up to the last one of a state.
            count: number of new entries.
            version: PyTorch's count of writes into the memory.

        Returns:
            Whether they are reserved; otherwise there is no room, or they have been written.

        Raises:
            StateError: a caller has written into the memory, and several results are in it.
        """
        if version != self.version:
            if self.is_shared:
                raise StateError(
                    "a state was written to after the model returned it. It shares memory with states of earlier and "
                    "later calls, which the write has changed, too: write to a copy, state = state.clone()."
                )
            return False
        if end != self.used or end + count > self.capacity:
            return False
        self.used, self.is_shared = end + count, True
        return True

    def claimed(self, past: Tensor, count: int, sizes: tuple[int, ...]) -> Tensor | None:
        """Reserve `count` entries after `past`, for a caller that holds the lock.

        Returns:
            `past` and these entries, which are not written yet; None if `past` is not the latest, or has no room.

        Raises:
            StateError: a caller has written into the memory, and several results are in it.
        """
        if not self.claims(self.end_of(past, sizes), count, past._version):
            return None
        whole = (*sizes[: self.dim], past.shape[self.dim] + count, *sizes[self.dim :])
        return past.as_strided(whole, self.strides, past.storage_offset())


def appended(past: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return `torch.cat([past, new], dim)`, without a copy of `past` if that is the result of an earlier call.

    A result that is passed in again gets memory with room for more entries. Later entries are written into that memory,
    after those of `past`, if `past` is the latest result in it. Otherwise, as for a second continuation of one `past`,
    both are copied. Results of successive calls therefore share memory, so that the caller must not write to them: the
    next call with one of them raises an error. They are contiguous only if no axis before `dim` has several entries.

    Args:
        past: tensor of any shape and dtype.
        new: tensor of the same shape, but for the axis `dim`.
        dim: axis to concatenate along.

    Raises:
        StateError: `past` shares memory with other results, and was written to, or one of them.
    """
    if torch.compiler.is_compiling() or _get_tracing_state() is not None or peek_interpreter_stack() is not None:
        return torch.cat([past, new], dim)
    axis = dim % max(past.dim(), 1)
    may_share = _may_share(past, new) and _without(past, axis) == _without(new, axis)
    if not may_share or not (past.numel() and new.numel()):
        return _concatenated(past, new, axis)
    result = _in_reserved(past, new.shape[axis], axis, new)
    return _concatenated(past, new, axis) if result is None else result


def extended(past: Tensor, count: int, dim: int) -> Tensor:
    """Return what `appended` returns, but with arbitrary values in the `count` new entries.

    The caller must write the new entries before anything reads them, in a way that PyTorch does not count in
    `_version`, such as by address.

    Args:
        past: plain tensor, not a view that is expanded along a later axis.
        count: number of new entries, at least one.
        dim: axis of the entries, not negative.

    Raises:
        StateError: `past` shares memory with other results, and was written to, or one of them.
    """
    result = None if torch.is_grad_enabled() else _in_reserved(past, count, dim)
    if result is not None:
        return result
    length = past.shape[dim]
    with torch.inference_mode(False), torch.no_grad():
        result = past.new_empty((*past.shape[:dim], length + count, *past.shape[dim + 1 :]))
        result.narrow(dim, 0, length).copy_(past)
    return _marked(result, dim)


class Room(NamedTuple):
    """Memory that results of `extended` share, with room for more entries.

    Attributes:
        memory: tensor of all entries that it has room for.
        reserved: its description.
    """

    memory: Tensor
    reserved: _Reserved

    @classmethod
    def of(cls, state: Tensor) -> Room | None:
        """Memory of a result of `extended`; None if it has none."""
        storage = state.untyped_storage()
        reserved: _Reserved | None = getattr(storage, _ATTRIBUTE, None)
        if reserved is None or reserved.address != storage.data_ptr():
            return None
        shape = (*reserved.sizes[: reserved.dim], reserved.capacity, *reserved.sizes[reserved.dim :])
        return cls(state.as_strided(shape, reserved.strides, 0), reserved)

    def claims(self, end: int, count: int) -> bool:
        """Reserve `count` entries after the entry `end`, which the caller must write as those of `extended`.

        Returns:
            Whether they are reserved; otherwise there is no room, or they have been written.

        Raises:
            StateError: a caller has written into the memory, and several results are in it.
        """
        reserved, memory = self.reserved, self.memory
        with reserved.lock:
            return memory.data_ptr() == reserved.address and reserved.claims(end, count, memory._version)


def _in_reserved(past: Tensor, count: int, axis: int, new: Tensor | None = None) -> Tensor | None:
    """Return `past` and `count` more entries in memory that is or becomes reserved for them; None for other tensors.

    Args:
        past: tensor with at least one value.
        count: number of new entries.
        axis: axis of the entries.
        new: their values; None: they are not written.
    """
    storage, sizes, length = past.untyped_storage(), _without(past, axis), past.shape[axis]
    reserved: _Reserved | None = getattr(storage, _ATTRIBUTE, None)
    if reserved is None or reserved.dim != axis or reserved.address != storage.data_ptr():
        return None
    with reserved.lock:
        result = reserved.claimed(past, count, sizes)
        if result is not None and new is not None:
            result.narrow(axis, length, count).copy_(new)
            reserved.version = result._version
    if result is not None:
        return result
    if reserved.end_of(past, sizes) != reserved.used:
        return None
    room = max((length + count) // 2, MIN_RESERVED)
    with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count writes
        memory = past.new_empty((*past.shape[:axis], length + count + room, *past.shape[axis + 1 :]))
    result = memory.narrow(axis, 0, length + count)
    result.narrow(axis, 0, length).copy_(past)
    if new is not None:
        result.narrow(axis, length, count).copy_(new)
    return _marked(result, axis, memory)


def _concatenated(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """Return a concatenation that is the first result in its memory. Without gradients, it is no inference tensor."""
    if torch.is_grad_enabled():
        return _marked(torch.cat([past, new], axis), axis)
    with torch.inference_mode(False), torch.no_grad():
        return _marked(torch.cat([past, new], axis), axis)


def _may_share(past: Tensor, new: Tensor) -> bool:
    """Whether the result may be in the memory of `past`: for plain tensors of one kind.

    With gradients enabled, backward would take the write for a change of a tensor that it has saved.
    """
    return (
        not torch.is_grad_enabled()
        and _is_plain(past)
        and _is_plain(new)
        and past.dtype is new.dtype
        and past.device == new.device
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() > 0


def _without(tensor: Tensor, axis: int) -> tuple[int, ...]:
    """Sizes of a tensor without an axis."""
    sizes = tuple(tensor.shape)
    return sizes[:axis] + sizes[axis + 1 :]


def _marked(result: Tensor, axis: int, memory: Tensor | None = None) -> Tensor:
    """Return a result of `appended` that is the first in its memory, after marking that memory.

    Args:
        result: the result.
        axis: the growing axis.
        memory: tensor that the result is the first part of, along this axis; None: the result itself.
    """
    if _is_plain(result) and result.numel() and not result.is_inference():
        sizes, used = _without(result, axis), result.shape[axis]
        capacity = used if memory is None else memory.shape[axis]
        storage = result.untyped_storage()
        reserved = _Reserved(
            sizes, result.stride(), result.dtype, axis, capacity, used, result._version, storage.data_ptr()
        )
        setattr(storage, _ATTRIBUTE, reserved)
    return result
