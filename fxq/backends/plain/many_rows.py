"""`ManyRowsProduct`: product of many rows of integers with a low-bit weight that has a scale per block."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.plain.column_jobs import ColumnJobs
from fxq.backends.plain.few_rows import FewRowsProduct, chunks_refused, refused
from fxq.backends.plain.stored_weight import StoredWeight

_WORD = 4
"""Integers that are multiplied at once."""


class ManyRowsProduct:
    """Product x @ weight.T + bias for many rows of integers, and the constants of its loop.

    The loop unpacks some rows of the weight to int8, and multiplies all rows of the input by them.

    Args:
        loops: the module `fxq.backends.loops.code.many_rows_loops`.
        stored: weight (O, K), for which `many_rows_refused` returns None.
        few: product of a few rows with this weight.
        arranges: whether a weight of 8 bits is also kept in the order of the loop, which takes memory and saves time.
    """

    def __init__(self, loops: ModuleType, stored: StoredWeight, few: FewRowsProduct, arranges: bool = False) -> None:
        weight, scale, _, _, bias, _, kind, _, columns, outputs, row_bytes, block, scales, _ = few.fields(0)
        zeros = torch.empty(0) if stored.packing is None else _packed_zeros(stored).to(torch.uint8).contiguous()
        arranged = _arranged(stored.values, loops.COLUMNS) if arranges and stored.packing is None else None
        if arranged is not None:
            weight, kind = arranged.data_ptr(), loops.ARRANGED
        self._keeps = few, zeros, few.ones(), arranged
        fields = {
            "WEIGHT": weight, "SCALE": scale, "ZEROS": zeros.data_ptr(), "BIAS": bias, "ONES": few.ones().data_ptr(),
            "KIND": kind, "COLUMNS": columns, "OUTPUTS": outputs, "ROW_BYTES": row_bytes, "BLOCK": block,
            "SCALES": scales,
        }  # fmt: skip
        self._loops, self._columns, self._outputs = loops, columns, outputs
        self._jobs = ColumnJobs(loops.many_integers_part, loops.PartField, fields, outputs, loops.COLUMNS)

    def of_integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Return the product, float32 (..., O). See `FewRowsProduct.of_integers`.

        Args:
            x: uint8 (..., K), at least `ROWS` of the loop: it writes whole tiles of rows.
            scale: contiguous float32, with one element or one for each row.
            zero_point: likewise, whole numbers.
        """
        x = x.contiguous()
        y = torch.empty((*x.shape[:-1], self._outputs), dtype=torch.float32, device="cpu")
        fields = {
            "X": x.data_ptr(), "OUT": y.data_ptr(), "ROWS": x.numel() // self._columns,
            "SCALE": scale.data_ptr(), "ZERO": zero_point.data_ptr(),
            "SCALE_STEP": int(scale.numel() > 1), "ZERO_STEP": int(zero_point.numel() > 1),
        }  # fmt: skip
        self._jobs.run(self._loops.CallField, fields)
        return y


def _arranged(weight: Tensor, columns: int) -> Tensor:
    """Order int8 (O, K) as the loop reads it: (tiles, words, columns, _WORD), with zeros after the last row."""
    padded = F.pad(weight, (0, 0, 0, -len(weight) % columns))
    return padded.view(-1, columns, weight.shape[1] // _WORD, _WORD).transpose(1, 2).contiguous()


def many_rows_refused(stored: StoredWeight) -> str | None:
    """Why the loop does not support a weight (O, K); None if it does."""
    why = refused(stored) or chunks_refused(stored)
    if why is not None:
        return why
    is_in_halves = stored.packing is not None and stored.packing.bits == 4
    if (stored.values.shape[1] if is_in_halves else stored.row[0]) % _WORD:
        return f"a row of its weight, or half a row of 4-bit values, is not a multiple of {_WORD} values"
    if stored.packing is None:
        is_symmetric = stored.values.dtype == torch.int8 and stored.zero_point is None
        return None if is_symmetric else "its values of one byte are unsigned or have zero points"
    if is_in_halves and stored.row[0] % 2:
        return "a row of its weight has an odd number of values"
    zero, bits = _packed_zeros(stored), stored.packing.bits
    return None if bool(((zero >= 0) & (zero < 2**bits)).all()) else f"its zero points are no values of {bits} bits"


def _packed_zeros(stored: StoredWeight) -> Tensor:
    """Zero points of packed values, which are counted from the lowest value: int64, (O,) or (O, blocks)."""
    assert stored.scale is not None and stored.packing is not None  # as of all that `refused` allows
    zero = torch.zeros_like(stored.scale) if stored.zero_point is None else stored.zero_point
    zero = zero.to(torch.int64) + (2 ** (stored.packing.bits - 1) if stored.packing.signed else 0)
    return zero.expand(len(stored.values)) if stored.block is None else zero
