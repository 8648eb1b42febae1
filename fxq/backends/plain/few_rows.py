"""`FewRowsProduct`: product of a few rows with a low-bit weight, in one compiled loop that reads the weight once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.loops.code.compiler import has_memory
from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.backends.plain.column_jobs import column_parts
from fxq.backends.plain.stored_weight import StoredWeight

MAX_ROWS = 16
"""Maximum number of rows for which the loop is used. For more rows, converting the weight first is faster."""
_CHUNK = 32
"""Bytes of a row of the weight that the loop converts at once. They have one scale."""
_MIN_PART_BYTES = 1 << 15
"""Minimum number of bytes of the weight that each thread reads."""
_SUMMED_ELEMENTS = 1 << 20
"""Number of weights that are converted at once for their sums."""
_PART_UNIT = 16
"""Number of columns of the result of which each part starts at a multiple. The loop computes up to four at once."""


class FewRowsProduct:
    """Product x @ weight.T + bias for a few rows of float32 or of integers, and the constants of its loop.

    Args:
        loops: the module `fxq.backends.loops.code.few_rows_loops`.
        stored: weight (O, K), for which `refused` returns None.
        bias: float32 (O,), or None.

    Attributes:
        max_integer_rows: number of rows of integers up to which no other product is faster.
    """

    def __init__(self, loops: ModuleType, stored: StoredWeight, bias: Tensor | None) -> None:
        outputs, stored_bytes = stored.values.shape
        (columns,), packing = stored.row, stored.packing
        is_packed, row_bytes = _is_read_packed(stored), _bytes_as_read(stored)
        assert stored.scale is not None  # otherwise it is refused
        block = min(columns, stored.block or columns)
        scales = -(-columns // block)
        scale = stored.scale.expand(outputs) if stored.block is None else stored.scale
        scale = scale.reshape(outputs, scales).to(torch.float32).contiguous()
        offset, zero = scale, _lowest(stored)
        if stored.zero_point is not None:
            offset, zero = zeros_of(stored).expand(outputs, scales) * scale, 1.0
        chunks, halves = -(-row_bytes // _CHUNK), 2 if is_packed else 1
        block_as_read = row_bytes // scales if _has_padded_blocks(stored) else block
        span = chunks if scales == 1 else math.gcd(block_as_read, row_bytes if is_packed else 0) // _CHUNK
        starts = torch.arange(0, chunks, span, device="cpu").view(-1, 1) * _CHUNK
        starts = starts + torch.arange(halves, device="cpu") * row_bytes
        places = (4 * (starts // block_as_read).clamp_(max=scales - 1)).to(torch.int32)
        bias = (
            torch.zeros(outputs, dtype=torch.float32, device="cpu")
            if bias is None
            else bias.to(torch.float32).contiguous()
        )
        if packing is None:
            kind = loops.SIGNED8 if stored.values.dtype == torch.int8 else loops.UNSIGNED8
        elif is_packed:
            kind = loops.SIGNED4 if packing.signed else loops.UNSIGNED4
        else:
            is_signed4 = packing.signed and packing.bits == 4
            kind = loops.UNPACKED_SIGNED4 if is_signed4 else loops.UNPACKED + packing.bits
        self._constants = constants = (stored.values, scale, offset, bias, places)
        weight, scales_at, offset_at, bias_at, places_at = (tensor.data_ptr() for tensor in constants)
        self._before = weight, scales_at, offset_at, zero, bias_at, places_at
        self._after = columns, outputs, stored_bytes, block, scales, span
        self._loops, self._run, self._convert, self._kind = loops, loops.few_rows, loops.floats_of, kind
        self.max_integer_rows: int = loops.MAX_INTEGER_ROWS
        self._ones: Tensor | None = None
        self._jobs: dict[tuple[int, bool], tuple[Job, Tensor, Tensor]] = {}

    def fields(self, rows: int) -> list[int]:
        """Arguments of the loop for so many rows, but x and out, in order. The product has to outlive their use."""
        weight, scale, offset, zero, bias, places = self._before
        return [weight, scale, offset, int(zero), bias, places, self._kind, rows, *self._after]

    def parts(self, threads: int) -> list[tuple[int, int]]:
        """First of the columns of the result that each thread computes, and their end."""
        outputs, row_bytes = self._constants[0].shape
        count = max(min(threads, outputs * row_bytes // _MIN_PART_BYTES), 1)
        return column_parts(outputs, count, _PART_UNIT)

    def ones(self) -> Tensor:
        """Sum of each row of the weight, float32 (O,)."""
        if self._ones is None:
            outputs, columns = self._after[1], self._after[0]
            buffer = torch.empty(
                min(outputs, -(-_SUMMED_ELEMENTS // columns)), columns, dtype=torch.float32, device="cpu"
            )
            pieces = [self.floats(i, buffer[: outputs - i]).double().sum(1) for i in range(0, outputs, len(buffer))]
            self._ones = torch.cat(pieces).to(torch.float32)
        return self._ones

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
        bases = x.data_ptr(), y.data_ptr(), rows
        if threads == 1 or not self._run_together(threads, bases, False):
            self._run(x.data_ptr(), *self._before, y.data_ptr(), self._kind, rows, *self._after)
        return y

    def of_integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Return the product, float32 (..., O), for rows of integers. Their products with the weight are added exactly.

        Args:
            x: uint8 (..., K).
            scale: contiguous float32, with one element or one for each row.
            zero_point: likewise, whole numbers.
        """
        x, (columns, outputs, *_) = x.contiguous(), self._after
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
        threads, steps = usable_threads(), (int(scale.numel() > 1), int(zero_point.numel() > 1))
        grid = scale.data_ptr(), zero_point.data_ptr(), *steps
        bases = x.data_ptr(), y.data_ptr(), x.numel() // columns, *grid
        if threads == 1 or not self._run_together(threads, bases, True):
            _, table, _ = self._job(1, True)
            self._loops.few_integers_part(table.data_ptr(), 1, (ctypes.c_int64 * len(bases))(*bases))
        return y

    def _run_together(self, threads: int, bases: Sequence[int], of_integers: bool) -> bool:
        """Compute on several threads. Returns False without computing if y is too small or the threads are busy."""
        job, _, counts = self._job(threads, of_integers)
        array = (ctypes.c_int64 * len(bases))(*bases)
        return len(counts) > 0 and run_together(job, threads, ctypes.addressof(array), 0)

    def _job(self, threads: int, of_integers: bool) -> tuple[Job, Tensor, Tensor]:
        key = threads, of_integers
        if key not in self._jobs:
            self._jobs[key] = self._divided(*key)
        return self._jobs[key]

    def _divided(self, threads: int, of_integers: bool) -> tuple[Job, Tensor, Tensor]:
        """Divide the columns of the result among threads. Returns the job and the tensors that it points to."""
        parts = self.parts(threads)
        weight, scale, offset, zero, bias, places = self._before
        fields = [weight, scale, offset, int(zero), bias, places, self._kind, *self._after]
        ones = self.ones().data_ptr() if of_integers else 0
        table = torch.tensor([[*fields, *part, ones] for part in parts], dtype=torch.int64, device="cpu")
        counts = torch.tensor([len(parts)] if len(parts) > 1 else [], dtype=torch.int64, device="cpu")
        function = self._loops.few_integers_part if of_integers else self._loops.few_rows_part
        job = Job(code_address(function), table.data_ptr(), counts.data_ptr(), 1, 0, 8 * self._loops.PART_FIELDS)
        return job, table, counts


def _lowest(stored: StoredWeight) -> float:
    """Number that is added to the values of a weight as the loops read them: no packed value is negative then."""
    return 2.0 ** (stored.packing.bits - 1) if stored.packing is not None and stored.packing.signed else 0.0


def zeros_of(stored: StoredWeight) -> Tensor:
    """Zero points of the integers as the loops read them: packed integers are read as unsigned ones.

    Returns:
        (O or 1, number of scales of a row).
    """
    if stored.zero_point is None:
        return torch.full((1, 1), _lowest(stored), device="cpu")
    return (stored.zero_point.reshape(-1, 1) if stored.block is None else stored.zero_point) + _lowest(stored)


def _is_read_packed(stored: StoredWeight) -> bool:
    """Whether the loop reads values as they are packed, in 4 bits: each chunk of half a row has one scale.

    All others of fewer than 8 bits are unpacked first.
    """
    packing, block = stored.packing, stored.block
    if packing is None or packing.bits != 4:
        return False
    half = packing.row_bytes
    if block is None or block >= packing.count:
        return half >= _CHUNK
    return block % _CHUNK == 0 and half % _CHUNK == 0


def _has_padded_blocks(stored: StoredWeight) -> bool:
    """Whether rows are unpacked with zeros after each block, so that it is of whole chunks."""
    block, (columns,) = stored.block, stored.row
    return stored.packing is not None and block is not None and block < columns and block % _CHUNK > 0


def _bytes_as_read(stored: StoredWeight) -> int:
    """Bytes of a row of a weight as chunks read it."""
    (columns,), block = stored.row, stored.block
    if _has_padded_blocks(stored):
        assert block is not None
        return -(-columns // block) * -(-block // _CHUNK) * _CHUNK
    return stored.values.shape[1] if stored.packing is None or _is_read_packed(stored) else columns


def refused(stored: StoredWeight) -> str | None:
    """Why the loop does not support a weight (O, K); None if it does."""
    values, scale, zero_point = stored.values, stored.scale, stored.zero_point
    if values.dtype not in (torch.int8, torch.uint8) or scale is None:
        return "its weight is not stored in integers"
    if not has_memory(values, scale, zero_point) or not values.is_contiguous():
        return "its weight is not in contiguous CPU memory"
    if values.dim() != 2 or _bytes_as_read(stored) < _CHUNK:
        return f"a row of its weight has fewer than {_CHUNK} values"
    if stored.axis not in (None, 0) if stored.block is None else stored.axis != 1:
        return "its scales are not by row of the weight, or by group of a row"
    (columns,), block = stored.row, stored.block
    if stored.packing is None and block is not None and block < columns and block % _CHUNK:
        return f"its block size of 8-bit values is not a multiple of {_CHUNK}"
    return None


def chunks_refused(stored: StoredWeight) -> str | None:
    """Why loops that multiply many rows do not support a weight that `refused` allows; None if they do."""
    is_of_4_bits = stored.packing is not None and stored.packing.bits == 4
    if _has_padded_blocks(stored) or (is_of_4_bits and not _is_read_packed(stored)):
        return f"its block size, or half a row of 4-bit values, is not a multiple of {_CHUNK}"
    return None
