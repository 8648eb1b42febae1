"""`FewRowsProduct`: product of a few rows with a low-bit weight, in one compiled loop that reads the weight once."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.loops.code.compiler import has_memory
from fxq.backends.plain.stored_weight import StoredWeight

MAX_ROWS = 16
"""Rows up to which the loop is used. For more rows, converting the weight first is faster."""
_CHUNK = 32
"""Bytes of a row of the weight that the loop converts at once. They have one scale."""


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
        self._run, self._kind = loops.few_rows, kind

    def __call__(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O)."""
        x, (columns, outputs, *_) = x.contiguous(), self._after
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
        self._run(x.data_ptr(), *self._before, y.data_ptr(), self._kind, x.numel() // columns, *self._after)
        return y


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
