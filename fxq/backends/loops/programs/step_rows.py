"""Rows of the steps of a program, and functions that run them on one thread or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together
from fxq.backends.loops.programs.split_rows import split_row


class StepRows:
    """Rows of steps, divided among threads.

    Args:
        loops: Compiled functions, `fxq.backends.loops.code.program_loops`.
        rows: Rows of the steps in order.
        threads: Number of threads that may run parts of a step at once.

    Attributes:
        threads: Number of threads that there is work for. At most the argument; 1 if all steps are small.
        rows: The argument.
        parts: Rows of the parts of each step.
    """

    def __init__(self, loops: ModuleType, rows: Sequence[Sequence[int]], threads: int) -> None:
        self._loops, self.rows = loops, rows
        self.parts = [split_row(loops, row, threads) if threads > 1 else [row] for row in rows]
        self.threads = max(map(len, self.parts), default=1)

    def runner(self, bases: Tensor, count: int | None = None) -> Callable[[], None]:
        """Return a function that runs the first `count` steps, or all of them, whichever threads are free.

        Args:
            bases: int64 (threads, number of bases): the base addresses of each part.
            count: Number of steps.
        """
        return self._runner(bases, range(len(self.rows) if count is None else count))

    def single_runners(self, bases: Tensor, repeats: int) -> list[Callable[[], None]]:
        """Return functions that run one step each, several times."""
        return [self._runner(bases, [k] * repeats) for k in range(len(self.rows))]

    def _runner(self, bases: Tensor, steps: Sequence[int]) -> Callable[[], None]:
        rows, base_address = _table(self._loops, [self.rows[k] for k in steps]), bases.data_ptr()
        run_alone = partial(self._loops.run, rows.data_ptr(), len(rows), base_address)
        counts, threads = [len(self.parts[k]) for k in steps], self.threads
        if max(counts, default=1) == 1:
            return _keeping(run_alone, rows)
        places = [row for k in steps for row in [*self.parts[k], *[[]] * (threads - len(self.parts[k]))]]
        parts, part_counts = _table(self._loops, places), torch.tensor(counts, dtype=torch.int64, device="cpu")
        row_bytes, bases_bytes = parts.stride(0) * parts.element_size(), bases.stride(0) * bases.element_size()
        job = Job(
            code_address(self._loops.run), parts.data_ptr(), part_counts.data_ptr(), len(steps), threads * row_bytes,
            row_bytes,
        )  # fmt: skip

        def run() -> None:
            if not run_together(job, threads, base_address, bases_bytes):
                run_alone()

        return _keeping(run, rows, parts, part_counts)


def _keeping(run: Callable[[], None], *memory: Tensor) -> Callable[[], None]:
    """Make a function keep the memory that it reads by address."""
    run.memory = memory  # type: ignore[attr-defined]
    return run


def _table(loops: ModuleType, rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows with zeros for unused fields, int64 (count, MAX_STEP_FIELDS)."""
    width = int(loops.MAX_STEP_FIELDS)
    filled = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device="cpu").view(-1, width)
