"""`FewRowsProduct`: product of a few rows with a low-bit weight, in one compiled loop that reads the weight once."""

from __future__ import annotations

import ctypes
import math
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.loops.code.compiler import has_memory
from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.backends.plain.stored_weight import StoredWeight

MAX_ROWS = 16
"""Maximum number of rows for which the loop is used. For more rows, converting the weight first is faster."""
_CHUNK = 32
"""Bytes of a row of the weight that the loop converts at once. They have one scale."""
_MIN_PART_BYTES = 1 << 15
"""Minimum number of bytes of the weight that each thread reads."""
_PART_UNIT = 16
"""Number of columns of the result of which each part starts at a multiple. The loop computes up to four at once."""


class FewRowsProduct:
    """Product x @ weight.T + bias for a few rows of float32, and the constants of its loop.

    Args:
        loops: the module `fxq.backends.loops.code.few_rows_loops`.
        stored: weight (O, K), for which `refused` returns None.
        bias: float32 (O,), or None.
    """

    def __init__(self, loops: ModuleType, stored: StoredWeight, bias: Tensor | None) -> None:
        outputs, row_bytes = stored.values.shape
        (columns,), is_packed = stored.row, stored.packed is not None
        assert stored.scale is not None  # otherwise it is refused
        block = min(columns, stored.block or columns)
        scales = -(-columns // block)
        scale = stored.scale.expand(outputs) if stored.block is None else stored.scale
        scale = scale.reshape(outputs, scales).to(torch.float32).contiguous()
        lowest = 8.0 if is_packed and stored.signed else 0.0
        offset, zero = scale, lowest
        if stored.zero_point is not None:
            zero_point = stored.zero_point.expand(outputs) if stored.block is None else stored.zero_point
            offset, zero = (zero_point.reshape(outputs, scales) + lowest) * scale, 1.0
        chunks, halves = -(-row_bytes // _CHUNK), 2 if is_packed else 1
        span = chunks if scales == 1 else math.gcd(block, row_bytes if is_packed else 0) // _CHUNK
        starts = torch.arange(0, chunks, span, device="cpu").view(-1, 1) * _CHUNK
        starts = starts + torch.arange(halves, device="cpu") * row_bytes
        places = (4 * (starts // block).clamp_(max=scales - 1)).to(torch.int32)
        bias = torch.zeros(outputs, device="cpu") if bias is None else bias.to(torch.float32).contiguous()
        kinds = (loops.UNSIGNED4, loops.SIGNED4) if is_packed else (loops.UNSIGNED8, loops.SIGNED8)
        kind = kinds[stored.signed if is_packed else stored.values.dtype == torch.int8]
        self._constants = constants = (stored.values, scale, offset, bias, places)
        weight, scales_at, offset_at, bias_at, places_at = (tensor.data_ptr() for tensor in constants)
        self._before = weight, scales_at, offset_at, zero, bias_at, places_at
        self._after = columns, outputs, row_bytes, block, scales, span
        self._run, self._convert, self._kind, self._part = loops.few_rows, loops.floats_of, kind, loops.few_rows_part
        self._jobs: dict[int, tuple[Job, Tensor, Tensor]] = {}

    def fields(self, rows: int) -> list[int]:
        """Arguments of the loop for so many rows, but x and out, in order. The product has to outlive their use."""
        weight, scale, offset, zero, bias, places = self._before
        return [weight, scale, offset, int(zero), bias, places, self._kind, rows, *self._after]

    def floats(self, first: int, out: Tensor) -> Tensor:
        """Write rows of the weight, from `first` on, to `out`, contiguous float32 (rows, K), and return it."""
        weight, scale, offset, zero, *_ = self._before
        columns, _, row_bytes, block, scales, _ = self._after
        self._convert(
            weight, scale, offset, zero, out.data_ptr(), self._kind, first, len(out), columns, row_bytes, block, scales
        )
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, float32 (..., O), for x, float32 (..., K)."""
        x, (columns, outputs, *_) = x.contiguous(), self._after
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
        threads, rows = usable_threads(), x.numel() // columns
        if threads == 1 or not self._run_together(threads, x, y, rows):
            self._run(x.data_ptr(), *self._before, y.data_ptr(), self._kind, rows, *self._after)
        return y

    def _run_together(self, threads: int, x: Tensor, y: Tensor, rows: int) -> bool:
        """Compute y on several threads. Returns False without computing if y is too small or the threads are busy."""
        if threads not in self._jobs:
            self._jobs[threads] = self._divided(threads)
        job, _, counts = self._jobs[threads]
        bases = (ctypes.c_int64 * 3)(x.data_ptr(), y.data_ptr(), rows)
        return len(counts) > 0 and run_together(job, threads, ctypes.addressof(bases), 0)

    def _divided(self, threads: int) -> tuple[Job, Tensor, Tensor]:
        """Divide the columns of the result among threads. Returns the job and the tensors that it points to."""
        outputs, row_bytes = self._constants[0].shape
        parts = min(threads, outputs * row_bytes // _MIN_PART_BYTES)
        cuts = [outputs * k // parts // _PART_UNIT * _PART_UNIT for k in range(parts)] + [outputs]
        weight, scale, offset, zero, bias, places = self._before
        fields = [weight, scale, offset, int(zero), bias, places, self._kind, *self._after]
        table = torch.tensor([[*fields, *cut] for cut in pairwise(cuts)], dtype=torch.int64, device="cpu")
        counts = torch.tensor([parts] if parts > 1 else [], dtype=torch.int64, device="cpu")
        part_bytes = table.element_size() * (len(fields) + 2)
        return Job(code_address(self._part), table.data_ptr(), counts.data_ptr(), 1, 0, part_bytes), table, counts


def refused(stored: StoredWeight) -> str | None:
    """Why the loop does not support a weight (O, K); None if it does."""
    values, scale, zero_point = stored.values, stored.scale, stored.zero_point
    if values.dtype not in (torch.int8, torch.uint8) or scale is None:
        return "its weight is not stored in integers"
    if not has_memory(values, scale, zero_point) or not values.is_contiguous():
        return "its weight is not in contiguous CPU memory"
    if values.dim() != 2 or values.shape[1] < _CHUNK:
        return f"a row of its weight has less than {_CHUNK} bytes"
    if stored.axis not in (None, 0) if stored.block is None else stored.axis != 1:
        return "its scales are not by row of the weight, or by group of a row"
    (columns,), block = stored.row, stored.block
    if block is None or block >= columns:
        return None
    if block % _CHUNK or (stored.packed is not None and values.shape[1] % _CHUNK):
        return f"its groups, or half a row of 4-bit values, are no multiples of {_CHUNK} values"
    return None
