"""Program of a region: its steps for inputs of one kind, and the memory that each caller runs it in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

import fxq.backends.loops.programs.attention_ops
import fxq.backends.loops.programs.image_ops
import fxq.backends.loops.programs.layer_ops
import fxq.backends.loops.programs.pointwise_ops
import fxq.backends.loops.programs.view_ops  # noqa: F401  (register the planners)
from fxq.backends.loops.code.thread_pool import usable_threads
from fxq.backends.loops.programs.areas import ARENA, EXTERNAL, SCRATCH, lay_out
from fxq.backends.loops.programs.plan import ProgramPlan, planned
from fxq.backends.loops.programs.planned_values import PlannedHeads, PlannedValue
from fxq.backends.loops.programs.program_steps import ProgramStep, RowWriter
from fxq.backends.loops.programs.step_rows import StepRows


class RegionProgram:
    """Program that runs a region for inputs of one kind.

    It runs on as many threads as PyTorch had when it was made, or on the caller's alone while they serve another one.

    Args:
        loops: Compiled functions, `fxq.backends.loops.code.program_loops`.
        gm: Region in qdq form.
        inputs: Example inputs, float32 or uint8.
        last: Which inputs are images in channels-last format. If any is, the images that it returns are, too.

    Raises:
        NotPlannedError: No step computes a node.
    """

    def __init__(self, loops: ModuleType, gm: fx.GraphModule, inputs: Sequence[Tensor], last: Sequence[bool]) -> None:
        formatted = [x.contiguous(memory_format=_FORMATS[image]) for x, image in zip(inputs, last, strict=True)]
        with torch.device("cpu"):
            self._make(loops, planned(gm, formatted))
        self._count, self._last = len(formatted), any(last)
        self._thread = threading.local()

    def _make(self, loops: ModuleType, plan: ProgramPlan) -> None:
        """Lay out memory, and write the rows of the steps."""
        self.plan = plan
        for i, step in reversed(list(enumerate(plan.steps))):
            step.out.root.first_step = i
            for area in (step.out.root, *(read.root for read in step.reads)):
                area.last_step = max(area.last_step, i)
        self._arena = lay_out(step.out for step in plan.steps if step.out.base == ARENA)
        writer = RowWriter(loops)
        step_rows = [(step, row) for step in plan.steps for row in step.rows(writer)]
        self._steps = [step for step, _ in step_rows]
        self._rows = StepRows(loops, [row for _, row in step_rows], usable_threads())
        self._constants = [*writer.constants, *plan.constants]
        self._scratch = max((step.scratch(loops) for step in plan.steps), default=0)

    def _for_caller(self) -> Callable[..., Any]:
        """Return the program as a function of the inputs, with memory for one caller."""
        threads, scratch = self._rows.threads, _whole_lines(self._scratch)
        with torch.inference_mode(False):
            memory = torch.zeros(self._arena.nbytes + threads * scratch + 128, dtype=torch.uint8, device="cpu")
            offset = -memory.data_ptr() % 64
            for start, count, value in self._arena.filled:
                memory[offset + start : offset + start + count] = value
            count = EXTERNAL + self._count + len(self.plan.outputs)
            bases = torch.zeros(threads, count, dtype=torch.int64, device="cpu")
            bases[:, ARENA] = memory.data_ptr() + offset
            first_scratch = memory.data_ptr() + offset + _whole_lines(self._arena.nbytes)
            bases[:, SCRATCH] = first_scratch + scratch * torch.arange(threads, device="cpu")
        run = self._rows.runner(bases)
        reads = [(EXTERNAL + i, self.plan.format(i), self.plan.is_transposed(i)) for i in range(self._count)]
        outputs = [
            (EXTERNAL + self._count + k, *_strided(value), torch.empty((), dtype=dtype, device="cpu").new_empty_strided)
            for k, value in enumerate(self.plan.outputs)
            for dtype in [torch.float32 if value.area.is_float else torch.uint8]
        ]
        addresses, returns_tuple = bases[0].numpy() if threads == 1 else bases.t().numpy(), self.plan.returns_tuple
        images = [y for y in self.plan.outputs if isinstance(y, PlannedValue) and y.rank > 2 and y.axis == 1]
        makes_contiguous = bool(images) and not self._last

        def call(inputs: Sequence[Tensor], held: list[Tensor] | None = None) -> Any:
            alive, values = [], []
            for x, (i, form, transposed) in zip(inputs, reads, strict=True):
                x = x.detach() if x.requires_grad else x
                x = (x.mT if transposed else x).contiguous(memory_format=form).resolve_neg()
                alive.append(x)
                addresses[i] = x.data_ptr()
            for i, shape, strides, empty in outputs:
                values.append(empty(shape, strides))
                addresses[i] = values[-1].data_ptr()
            run()
            if held is not None:
                held += [*alive, *values]
            values = [y.contiguous() for y in values] if makes_contiguous else values
            return tuple(values) if returns_tuple else values[0]

        call.keeps = memory, self._rows, self._constants  # type: ignore[attr-defined]  # the addresses are theirs
        call.bases = bases  # type: ignore[attr-defined]
        return call

    def __call__(self, *inputs: Tensor) -> Any:
        try:
            call = self._thread.call
        except AttributeError:
            call = self._thread.call = self._for_caller()
        return call(inputs)

    def timed(self, inputs: Sequence[Tensor], rounds: Iterable[object]) -> list[tuple[ProgramStep, float]]:
        """Time each step in microseconds: the shortest of several rounds."""
        self(*inputs)
        held: list[Tensor] = []  # keeps inputs and outputs alive
        self._thread.call(inputs, held)
        bases, repeats = self._thread.call.bases, 1 if self._rows.threads == 1 else _REPEATS
        runs = [*self._rows.single_runners(bases, repeats), self._rows.runner(bases, 0)]
        shortest = [math.inf] * len(runs)  # the last one is an empty call
        for _ in rounds:
            for i, run in enumerate(runs):
                start = time.perf_counter()
                run()
                shortest[i] = min(shortest[i], time.perf_counter() - start)
        empty = shortest.pop()
        return [(step, 1e6 * max(t - empty, 0.0) / repeats) for step, t in zip(self._steps, shortest, strict=True)]


def _whole_lines(nbytes: int) -> int:
    """Bytes, rounded up to whole cache lines."""
    return -(-nbytes // 64) * 64


_REPEATS = 8
"""Calls of a step that are timed as one where threads run it, so that their beginning hardly counts."""
_FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


def _strided(value: PlannedValue | PlannedHeads) -> tuple[Sequence[int], Sequence[int]]:
    """Shape and strides of an output without gaps between pixels."""
    if isinstance(value, PlannedHeads):
        _, length, channels = value.joined.shape
        head_stride, length_stride = channels // value.heads, channels
        return value.shape, (
            length * channels,
            *((head_stride, length_stride) if value.transposed else (length_stride, head_stride)),
            1,
        )
    _, h, w, c = value.area.shape
    by_axis = {4: (h * w * c, w * c, c, 1), 3: (w * c, c, 1), 2: (c, 1)}[value.rank]
    is_first = value.rank > 2 and value.axis == 1
    return value.shape, (by_axis[0], by_axis[-1], *by_axis[1:-1]) if is_first else by_axis
