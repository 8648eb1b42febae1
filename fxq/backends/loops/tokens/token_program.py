"""`TokenProgram` runs steps on a few tokens in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.common.appending import extended
from fxq.quant.packing import Packing
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.row_memory import RowMemory
from fxq.runtime.growing import OtherInputsError

GROWING_AXIS = 2
"""Axis of a state (samples, heads, length, depth) along which a program appends to it."""


class StateForm(NamedTuple):
    """Sizes of a state, (samples, heads, length, depth), and of what a program appends to it.

    Attributes:
        samples: size of the first axis.
        heads: size of the second axis.
        depth: size of the last axis.
        new: number of new entries.
        in_integers: whether the state is `QuantizedRows` of uint8; else it is float32.
        packing: how a row of integers is packed into bytes; None: each takes a byte.
        blocks: number of scales of a row of integers.
    """

    samples: int
    heads: int
    depth: int
    new: int
    in_integers: bool = False
    packing: Packing | None = None
    blocks: int = 1

    @property
    def bits(self) -> int:
        """Width of a stored integer."""
        return 8 if self.packing is None else self.packing.bits

    @property
    def tensor_count(self) -> int:
        """Number of tensors that hold the state."""
        return 3 if self.in_integers else 1

    def length_of(self, state: Any) -> int:
        """Length of a state before the new entries.

        Raises:
            OtherInputsError: it has another form, or needs a gradient.
        """
        if type(state) is QuantizedRows and (state.packing, state.blocks, state.is_rotated) != (
            self.packing, self.blocks, False,
        ):  # fmt: skip
            raise OtherInputsError
        if self.in_integers and type(state) is QuantizedRows and state.memory is not None:
            if state.memory.sizes != (self.samples, self.heads, self.depth):
                raise OtherInputsError
            return state.shape[GROWING_AXIS]
        parts = state.parts if type(state) is QuantizedRows else (state,)
        stored = self.depth if self.packing is None else self.packing.row_bytes
        dtypes = (torch.uint8, torch.float32, torch.uint8) if self.in_integers else (torch.float32,)
        if len(parts) != len(dtypes):
            raise OtherInputsError
        length = 0
        for part, dtype, depth in zip(parts, dtypes, (stored, self.blocks, self.blocks), strict=False):
            if type(part) is not Tensor or part.dtype is not dtype or part.requires_grad or part.dim() != 4:
                raise OtherInputsError
            if not part.is_cpu:
                raise OtherInputsError
            n, h, length, d = part.shape
            if (n, h, d) != (self.samples, self.heads, depth) or length != parts[0].shape[GROWING_AXIS]:
                raise OtherInputsError
        return length

    def continued(self, state: Any) -> tuple[Tensor, list[int]]:
        """State with room for the new entries, and the integers that describe it, see `token_loops.VARYING`.

        The values of a row are side by side in memory, and so are the scales and zero points of a head or row.
        """
        if not self.in_integers:
            floats = extended(state if state.stride(3) == 1 else state.contiguous(), self.new, GROWING_AXIS)
            return floats, [floats.data_ptr(), floats.shape[GROWING_AXIS], *floats.stride()[:3]]
        memory, length = state.memory, state.shape[GROWING_AXIS] + self.new
        if memory is not None and memory.claims(length - self.new, self.new):
            return memory.state(length), memory.numbers(length)
        of_grid = 2 if self.blocks == 1 else 3
        axes = zip(state.parts, (3, of_grid, of_grid), strict=True)
        past = [part if part.stride(axis) == 1 else part.contiguous() for part, axis in axes]
        parts = [extended(part, self.new, GROWING_AXIS) for part in past]
        memory = RowMemory.of(parts, self.packing)
        if memory is not None:
            return memory.state(length), memory.numbers(length)
        numbers = [number for part in parts for number in (part.data_ptr(), length, *part.stride()[:3])]
        integers, scale, zero_point = parts
        return QuantizedRows(integers, scale, zero_point, self.packing), numbers


class MaskForm(NamedTuple):
    """Sizes that a mask, bool, is broadcast to: (samples, heads, queries, length of a state).

    Attributes:
        samples: size of the first axis.
        heads: size of the second axis.
        queries: size of the third axis.
        state: index of the state.
    """

    samples: int
    heads: int
    queries: int
    state: int


@dataclass
class GrowingInputs:
    """Inputs of a program that grow from call to call.

    Attributes:
        states: states that the program appends to.
        masks: masks of attentions to these states.
        equal: groups of states that must have the same length.
    """

    states: list[StateForm] = field(default_factory=list)
    masks: list[MaskForm] = field(default_factory=list)
    equal: list[set[int]] = field(default_factory=list)

    def must_be_equal(self, *states: int) -> None:
        """Require that states have the same length."""
        joined = set(states).union(*(group for group in self.equal if not group.isdisjoint(states)))
        self.equal = [group for group in self.equal if group.isdisjoint(states)]
        if len(joined) > 1:
            self.equal.append(joined)

    def lengths(self, pasts: Sequence[Any]) -> list[int]:
        """Lengths of states with their new entries.

        Raises:
            OtherInputsError: a state has other sizes or another dtype, or needs a gradient.
        """
        lengths = [form.length_of(past) + form.new for past, form in zip(pasts, self.states, strict=True)]
        if any(len({lengths[state] for state in group}) > 1 for group in self.equal):
            raise OtherInputsError
        return lengths

    def masks_as_integers(self, masks: Sequence[Tensor], lengths: Sequence[int]) -> list[int]:
        """Integers that describe masks, see `token_loops.VARYING`, for states of these lengths.

        Raises:
            OtherInputsError: a mask has another dtype, or cannot be broadcast to its form.
        """
        numbers = list[int]()
        for mask, (samples, heads, queries, state) in zip(masks, self.masks, strict=True):
            if type(mask) is not Tensor or mask.dtype is not torch.bool:
                raise OtherInputsError
            try:
                strides = mask.expand(samples, heads, queries, lengths[state]).stride()
            except RuntimeError:  # sizes that cannot be broadcast, of which PyTorch's op tells the user
                raise OtherInputsError from None
            numbers += mask.data_ptr(), *strides
        return numbers

    def tensors_before(self, state: int) -> int:
        """Number of tensors that hold the states before this one."""
        return sum(form.tensor_count for form in self.states[:state])


class TokenProgram:
    """Steps that compute some values of a graph in one call.

    It runs on as many threads as PyTorch had when it was made, or on the caller's alone while they serve another one.

    Args:
        loops: the module `fxq.backends.loops.code.token_loops`.
        steps: int64 (steps, fields).
        inputs: shapes of the inputs.
        growing: states and masks, which are further inputs.
        outputs: shapes of the outputs.
        size: bytes of memory for values.
        parts: for a step that is divided among threads, by index: its parts for a number of threads, as pairs of the
            first column or head and their end.
        kept: further objects whose memory the steps refer to by address.
    """

    def __init__(
        self,
        loops: ModuleType,
        steps: Tensor,
        inputs: Sequence[Any],
        growing: GrowingInputs,
        outputs: Sequence[Any],
        size: int,
        parts: Mapping[int, Callable[[int], Sequence[tuple[int, int]]]],
        kept: Any,
    ) -> None:
        self._inputs, self._size, self._kept = [torch.Size(shape) for shape in inputs], size, kept
        self._outputs, self._growing = [torch.Size(shape) for shape in outputs], growing
        numbers = loops.VARYING * (growing.tensors_before(len(growing.states)) + len(growing.masks))
        self._bases = ctypes.c_int64 * (2 + len(inputs) + len(outputs) + numbers)
        self._loops, self._steps, self._parts = loops, steps, parts
        self._job, self._threads, self._tables = self._divided(usable_threads())

    @property
    def attends(self) -> bool:
        """Whether a step computes an attention."""
        codes = self._steps[:, self._loops.TokenField.CODE].tolist()
        return self._loops.ATTEND in codes or self._loops.ATTEND_TO_INTEGERS in codes

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the outputs as a list, and after them the states with their new entries; one result as it is.

        Args:
            inputs: the inputs, then the states, then the masks. A state in integers is `QuantizedRows`.

        Raises:
            OtherInputsError: an input has another shape or dtype, or needs a gradient.
        """
        growing, count = self._growing, len(self._inputs)
        pasts, masks = inputs[count : count + len(growing.states)], inputs[count + len(growing.states) :]
        held = []
        for x, shape in zip(inputs[:count], self._inputs, strict=True):
            if x.shape != shape or x.dtype is not torch.float32 or x.requires_grad or type(x) is QuantizedRows:
                raise OtherInputsError
            held.append(x if x.is_contiguous() else x.contiguous())
        states, numbers = list[Tensor](), list[int]()
        if pasts:
            numbers = growing.masks_as_integers(masks, growing.lengths(pasts))
            for past, form in zip(pasts, growing.states, strict=True):
                state, of_state = form.continued(past)
                states.append(state)
                numbers += of_state
        memory = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        outputs = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self._outputs]
        addresses = [x.data_ptr() for x in held] + [y.data_ptr() for y in outputs]
        bases, threads = self._bases(0, memory.data_ptr(), *addresses, *numbers), self._threads
        if threads == 1 or not run_together(self._job, threads, ctypes.addressof(bases), 0):
            self._loops.run(self._steps.data_ptr(), len(self._steps), bases)
        results = outputs + states
        return results if len(results) > 1 else results[0]

    def _divided(self, threads: int) -> tuple[Job, int, Any]:
        """Divide steps among threads. Returns the job, its number of threads, and the memory it points to."""
        parts = {k: parts_for(threads) for k, parts_for in self._parts.items()}
        counts = torch.tensor([len(parts.get(k, [0])) for k in range(len(self._steps))], device="cpu")
        table = self._steps[:, None].repeat(1, int(counts.max()), 1)
        first = self._loops.TokenField.COLUMNS
        for k, columns in parts.items():
            table[k, : len(columns), first : first + 2] = torch.tensor(columns, device="cpu")
        of_row, count = 8 * self._loops.MAX_FIELDS, table.shape[1]
        function = code_address(self._loops.run)
        job = Job(function, table.data_ptr(), counts.data_ptr(), len(counts), count * of_row, of_row)
        return job, count, (table, counts)
