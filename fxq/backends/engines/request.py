"""Calls of a compiled model: the memory that it reads and writes, in each thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxq.errors import InputError, words_of
from fxq.onnx.graph import TO_FIRST, TO_LAST, OnnxGraph
from fxq.onnx.writer import in_range

MAX_COPIED_BYTES = 1 << 16
"""Bytes up to which copying a tensor is faster than binding an engine to its memory."""


class Request(ABC):
    """Compiled model bound to the memory of its inputs and outputs, for one thread.

    The tensors are contiguous, have the shapes that the model was compiled for, and are alive until it has run.
    """

    @abstractmethod
    def set_input(self, i: int, x: Tensor) -> None:
        """Read input `i` from the memory of this tensor from now on."""

    @abstractmethod
    def set_output(self, i: int, y: Tensor) -> None:
        """Write output `i` to the memory of this tensor from now on."""

    @abstractmethod
    def run(self) -> None:
        """Compute the outputs."""


class EngineCall:
    """Function that runs a compiled model. Small tensors are copied to memory of each thread; others are used in place.

    Args:
        written: The model.
        requests: Function that creates a request.
        inputs: Example inputs that the model was compiled for.
        turned: Which inputs are images in channels-last format, which the model reads as (N, H, W, C).

    Raises:
        InputError: (in a call) An index is out of range, or the engine fails.
    """

    def __init__(
        self, written: OnnxGraph, requests: Callable[[], Request], inputs: Sequence[Any], turned: Sequence[bool]
    ) -> None:
        self.written, self.requests = written, requests
        self.reads = [(i, _like(inputs[i], turned[i]), turned[i]) for i in written.input_indices]
        self._thread = threading.local()
        self._thread.call = self._for_thread()

    def __call__(self, *inputs: Any) -> Any:
        try:
            call = self._thread.call
        except AttributeError:
            call = self._thread.call = self._for_thread()
        return call(*inputs)

    def _for_thread(self) -> Callable[..., Any]:
        """Return a function of the inputs for one thread.

        It looks up attributes once and calls few functions, since small models run in microseconds.
        """
        request, indices, returns_tuple = self.requests(), self.written.indices, self.written.returns_sequence
        run, outputs = request.run, zip(self.written.outputs, self.written.channels_last, strict=True)
        copied_inputs: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        bound_inputs: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        for i, (number, like, turned) in enumerate(self.reads):
            bind = partial(request.set_input, i)
            place = _copy_target(like, turned, bind)
            if place is None:
                bound_inputs.append((number, _reader(turned, bind)))
            else:
                copied_inputs.append((number, place.copy_))
        writers = [_writer(like, turned, partial(request.set_output, i)) for i, (like, turned) in enumerate(outputs)]
        bound_outputs = [(i, create) for i, (create, copies) in enumerate(writers) if not copies]
        copied_outputs = [(i, clone) for i, (clone, copies) in enumerate(writers) if copies]
        empty: list[Any] = [None] * len(writers)

        def call(*inputs: Any) -> Any:
            for number, size in indices:
                if not in_range(inputs[number], size):
                    raise InputError(f"an index is out of range: indices are from 0 to {size - 1}.")
            for number, copy in copied_inputs:
                x = inputs[number]
                copy(x.detach() if x.requires_grad else x)
            alive = [read(inputs[number]) for number, read in bound_inputs]
            values = empty.copy()
            for i, create in bound_outputs:
                values[i] = create()
            try:
                run()
            except Exception as error:  # whatever an engine raises
                kind = type(error).__name__
                raise InputError(f"the engine fails on the values of its inputs: {kind}: {words_of(error)}") from error
            del alive
            for i, clone in copied_outputs:
                values[i] = clone()
            return tuple(values) if returns_tuple else values[0]

        return call


def _reader(turned: bool, bind: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    """Function that binds the engine to an input, and returns the tensor that has to be alive until it has run."""

    def use(x: Tensor) -> Tensor:
        x = x.detach() if x.requires_grad else x
        x = (x.permute(TO_LAST) if turned else x).contiguous().resolve_neg()
        bind(x)
        return x

    return use


def _writer(like: Tensor, turned: bool, bind: Callable[[Tensor], None]) -> tuple[Callable[[], Tensor], bool]:
    """Function that returns an output: memory that the engine will write; or, if it is small, a copy of its value.

    Returns:
        The function, and whether it returns a copy and so has to be called after the engine has run.
    """
    place = _copy_target(like, turned, bind)

    def create() -> Tensor:
        value = _empty(like)
        bind(value)
        return value.permute(TO_FIRST) if turned else value

    return (create, False) if place is None else (place.clone, True)


def _like(x: Tensor, turned: bool) -> Tensor:
    """Meta tensor of the shape and dtype that the engine reads."""
    return torch.empty_like(x.permute(TO_LAST) if turned else x, device="meta")


def _empty(like: Tensor) -> Tensor:
    """Memory for a tensor like this one."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _copy_target(like: Tensor, turned: bool, bind: Callable[[Tensor], None]) -> Tensor | None:
    """Memory that a small tensor is copied to or from, bound to the engine; None for large tensors.

    Images are returned as (N, C, H, W).
    """
    if like.numel() * like.element_size() > MAX_COPIED_BYTES:
        return None
    with torch.inference_mode(False):  # writable in any mode
        place = _empty(like)
        view = place.permute(TO_FIRST) if turned else place
    bind(place)
    return view
