"""How a compiled model is called: which memory it reads and writes, in each thread."""

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

SMALL = 1 << 16
"""Bytes of a tensor that is copied sooner than an engine is told where another one lies."""


class Request(ABC):
    """A compiled model, for one thread: it reads the memory of its inputs, and writes into that of its outputs.

    Both are tensors without gaps, of the shapes that it was compiled for, and alive until it has run.
    """

    @abstractmethod
    def set_input(self, i: int, x: Tensor) -> None:
        """Read an input from there from now on."""

    @abstractmethod
    def set_output(self, i: int, y: Tensor) -> None:
        """Write an output there from now on."""

    @abstractmethod
    def run(self) -> None:
        """Compute the outputs."""


class EngineCall:
    """Runs a compiled model. Small tensors have a place of their own in each thread; others are used where they lie.

    Args:
        written: the model.
        requests: makes a request.
        inputs: those that it was compiled for.
        turned: which of them come as images channels-last, and are read as (N, H, W, C).

    Raises:
        InputError: (where it is called) an index is out of range, or the engine fails.
    """

    def __init__(
        self, written: OnnxGraph, requests: Callable[[], Request], inputs: Sequence[Any], turned: Sequence[bool]
    ) -> None:
        self.written, self.requests = written, requests
        self.reads = [(i, _like(inputs[i], turned[i]), turned[i]) for i in written.input_indices]
        self._thread = threading.local()
        self._thread.call = self._for_thread()

    def __call__(self, *given: Any) -> Any:
        try:
            call = self._thread.call
        except AttributeError:
            call = self._thread.call = self._for_thread()
        return call(given)

    def _for_thread(self) -> Callable[[Sequence[Any]], Any]:
        """A function of the inputs, for one thread. What it needs it has at hand: small models run in 20 us."""
        request, indices, several = self.requests(), self.written.indices, self.written.returns_sequence
        set_input, set_output, run = request.set_input, request.set_output, request.run
        reads = [
            (i, at, turn, _place(like, turn, partial(set_input, i))) for i, (at, like, turn) in enumerate(self.reads)
        ]
        makes = [
            (i, like, turn, _place(like, turn, partial(set_output, i)))
            for i, (like, turn) in enumerate(zip(self.written.outputs, self.written.channels_last, strict=True))
        ]

        def call(given: Sequence[Any]) -> Any:
            for taken, size in indices:
                if not in_range(given[taken], size):
                    raise InputError(f"an index is out of range: they go from 0 to {size - 1}.")
            alive = []
            for i, taken, turn, place in reads:
                x = given[taken]
                x = x.detach() if x.requires_grad else x
                if place is not None:
                    place.copy_(x)
                else:
                    x = x.permute(TO_LAST) if turn else x
                    alive.append(x.contiguous().resolve_neg())
                    set_input(i, alive[-1])
            values: list[Tensor] = []
            for i, like, turn, place in makes:
                value = _empty(like) if place is None else place
                if place is None:
                    set_output(i, value)
                    value = value.permute(TO_FIRST) if turn else value
                values.append(value)
            try:
                run()
            except Exception as error:  # whatever an engine raises
                kind = type(error).__name__
                raise InputError(f"the engine fails on the values of its inputs: {kind}: {words_of(error)}") from error
            for i, _, _, place in makes:
                if place is not None:
                    values[i] = place.clone()
            return tuple(values) if several else values[0]

        return call


def _like(x: Tensor, turned: bool) -> Tensor:
    """A tensor of the same shape and type, without values, as the engine reads it."""
    return torch.empty_like(x.permute(TO_LAST) if turned else x, device="meta")


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _place(like: Tensor, turned: bool, bind: Callable[[Tensor], None]) -> Tensor | None:
    """Memory for a small tensor, which the engine knows, as (N, C, H, W) if it is an image; None for a large one."""
    if like.numel() * like.element_size() > SMALL:
        return None
    with torch.inference_mode(False):  # it is written to in any mode
        place = _empty(like)
        seen = place.permute(TO_FIRST) if turned else place
    bind(place)
    return seen
