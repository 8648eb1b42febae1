"""`ColumnJobs`: compiled loop for a product, whose columns are divided among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads

_MIN_PART_COLUMNS = 64
"""Minimum number of columns of the result that each thread computes."""


class ColumnJobs:
    """Compiled loop that computes columns of a product, on as many threads as there are.

    Args:
        function: the loop, `void (part, 1, call)`: both are arrays of int64.
        names: fields of a part; FIRST and END are its first column and their end.
        fields: values of all other fields.
        outputs: number of columns.
        unit: number of columns of which each part starts at a multiple.
    """

    def __init__(
        self, function: Callable[..., None], names: type[IntEnum], fields: Mapping[str, int], outputs: int, unit: int
    ) -> None:
        self._function, self._names, self._fields = function, list(names.__members__), dict(fields)
        self._outputs, self._unit = outputs, unit
        self._jobs: dict[int, tuple[Job, Tensor, Tensor]] = {}

    def run(self, names: type[IntEnum], fields: Mapping[str, int]) -> None:
        """Compute all columns. `names` are the fields of a call, `fields` their values."""
        array, threads = (ctypes.c_int64 * len(names))(*(fields[name] for name in names.__members__)), usable_threads()
        job, _, counts = self._job(threads)
        if len(counts) == 0 or not run_together(job, threads, ctypes.addressof(array), 0):
            _, table, _ = self._job(1)
            self._function(table.data_ptr(), 1, array)

    def _job(self, threads: int) -> tuple[Job, Tensor, Tensor]:
        """Job that divides the columns among threads, and the tensors that it points to. One part has no counts."""
        if threads not in self._jobs:
            count = max(min(threads, self._outputs // _MIN_PART_COLUMNS), 1)
            parts = column_parts(self._outputs, count, self._unit)
            rows = [self._fields | {"FIRST": first, "END": end} for first, end in parts]
            table = torch.tensor([[row[name] for name in self._names] for row in rows], dtype=torch.int64, device="cpu")
            counts = torch.tensor([len(parts)] if len(parts) > 1 else [], dtype=torch.int64, device="cpu")
            job = Job(
                code_address(self._function),
                table.data_ptr(),
                counts.data_ptr(),
                1,
                0,
                table.element_size() * len(self._names),
            )
            self._jobs[threads] = job, table, counts
        return self._jobs[threads]


def column_parts(columns: int, count: int, unit: int) -> list[tuple[int, int]]:
    """First column and end of `count` parts of about equal size. Each part starts at a multiple of `unit`."""
    return list(pairwise([columns * k // count // unit * unit for k in range(count)] + [columns]))
