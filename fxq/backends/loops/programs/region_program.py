"""A program: the steps of a region, for inputs of one kind, and the memory that each thread runs it in."""

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
import fxq.backends.loops.programs.view_ops  # noqa: F401  (register what computes each op)
from fxq.backends.loops.programs.areas import ARENA, GIVEN, SCRATCH, laid_out
from fxq.backends.loops.programs.plan import ProgramPlan, planned
from fxq.backends.loops.programs.planned_values import PlannedHeads, PlannedValue
from fxq.backends.loops.programs.program_steps import ProgramStep, StepRows


class RegionProgram:
    """Runs a region for inputs of one kind.

    Args:
        loops: compiled functions, `fxq.backends.loops.code.program_loops`.
        gm: the region in qdq form.
        inputs: those that it was made for, float32 or uint8.
        last: which of them are images that lie channels-last. Then so do those that it returns.

    Raises:
        NotPlannedError: a node of it has no step.
    """

    def __init__(self, loops: ModuleType, gm: fx.GraphModule, inputs: Sequence[Tensor], last: Sequence[bool]) -> None:
        given = [x.contiguous(memory_format=_FORMATS[image]) for x, image in zip(inputs, last, strict=True)]
        with torch.device("cpu"):
            self._make(loops, planned(gm, given))
        self._count, self._last = len(given), any(last)
        self._thread = threading.local()

    def _make(self, loops: ModuleType, plan: ProgramPlan) -> None:
        """Lay out memory, and write the steps down."""
        self.plan = plan
        for i, step in reversed(list(enumerate(plan.steps))):
            step.out.root.first = i
            for area in (step.out.root, *(read.root for read in step.reads)):
                area.last = max(area.last, i)
        self._arena = laid_out(step.out for step in plan.steps if step.out.base == ARENA)
        rows = StepRows(loops)
        made = [(step, row) for step in plan.steps for row in step.rows(rows)]
        self._steps = [step for step, _ in made]
        self._rows = torch.zeros(len(made), loops.WIDTH, dtype=torch.int64)
        for i, (_, row) in enumerate(made):
            self._rows[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        self._constants, self._loops = [*rows.constants, *plan.constants], loops
        self._scratch = max((step.scratch(loops) for step in plan.steps), default=0)

    def _for_thread(self) -> Callable[..., Any]:
        """A function of the inputs, for one thread. What it needs it has at hand."""
        with torch.inference_mode(False):
            memory = torch.zeros(self._arena.nbytes + self._scratch + 128, dtype=torch.uint8, device="cpu")
            offset = -memory.data_ptr() % 64
            for start, count, value in self._arena.filled:
                memory[offset + start : offset + start + count] = value
            count = GIVEN + self._count + len(self.plan.outputs)
            bases = torch.zeros(count, dtype=torch.int64, device="cpu")
            bases[ARENA] = memory.data_ptr() + offset
            bases[SCRATCH] = bases[ARENA] + -(-self._arena.nbytes // 64) * 64
        run, steps, many, where = self._loops.run, self._rows.data_ptr(), len(self._rows), bases.data_ptr()
        reads = [(GIVEN + i, self.plan.format(i)) for i in range(self._count)]
        makes = [
            (GIVEN + self._count + k, *_strided(value), torch.empty((), dtype=dtype, device="cpu").new_empty_strided)
            for k, value in enumerate(self.plan.outputs)
            for dtype in [torch.float32 if value.area.is_float else torch.uint8]
        ]
        addresses, several = bases.numpy(), self.plan.several
        images = [y for y in self.plan.outputs if isinstance(y, PlannedValue) and y.rank == 4 and y.axis == 1]
        turns = bool(images) and not self._last

        def call(inputs: Sequence[Tensor], held: list[Tensor] | None = None) -> Any:
            alive, values = [], []
            for x, (i, form) in zip(inputs, reads, strict=True):
                x = (x.detach() if x.requires_grad else x).contiguous(memory_format=form).resolve_neg()
                alive.append(x)
                addresses[i] = x.data_ptr()
            for i, shape, strides, empty in makes:
                values.append(empty(shape, strides))
                addresses[i] = values[-1].data_ptr()
            run(steps, many, where)
            if held is not None:
                held += [*alive, *values]
            values = [y.contiguous() for y in values] if turns else values
            return tuple(values) if several else values[0]

        call.keeps = memory, self._rows, self._constants  # type: ignore[attr-defined]  # the addresses are theirs
        call.bases = bases  # type: ignore[attr-defined]
        return call

    def __call__(self, *inputs: Tensor) -> Any:
        try:
            call = self._thread.call
        except AttributeError:
            call = self._thread.call = self._for_thread()
        return call(inputs)

    def timed(self, inputs: Sequence[Tensor], rounds: Iterable[object]) -> list[tuple[ProgramStep, float]]:
        """Its steps, and the microseconds that each takes: the least of some rounds."""
        self(*inputs)
        held: list[Tensor] = []  # else what is written and read would be gone
        self._thread.call(inputs, held)
        bases, first, width = self._thread.call.bases.data_ptr(), self._rows.data_ptr(), 8 * self._loops.WIDTH
        count = len(self._rows)
        least = [math.inf] * (count + 1)  # the last one of nothing
        for _ in rounds:
            for i in range(count + 1):
                start = time.perf_counter()
                self._loops.run(first + (i % count) * width, int(i < count), bases)
                least[i] = min(least[i], time.perf_counter() - start)
        return [(step, 1e6 * max(t - least[-1], 0.0)) for step, t in zip(self._steps, least, strict=False)]


_FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


def _strided(value: PlannedValue | PlannedHeads) -> tuple[Sequence[int], Sequence[int]]:
    """The shape and strides of an output, whose pixels lie one behind the other."""
    if isinstance(value, PlannedHeads):
        _, length, channels = value.joined.shape
        head, place = channels // value.heads, channels
        return value.shape, (length * channels, *((head, place) if value.transposed else (place, head)), 1)
    _, h, w, c = value.area.shape
    by_axis = {4: (h * w * c, w * c, c, 1), 3: (w * c, c, 1), 2: (c, 1)}[value.rank]
    return value.shape, (by_axis[0], 1, *by_axis[1:3]) if value.rank == 4 and value.axis == 1 else by_axis
