"""`SplitProduct`: product of many rows of floats with a low-bit weight on a CPU with AMX, as exact as in float32."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.plain.column_jobs import ColumnJobs
from fxq.backends.plain.few_rows import FewRowsProduct, zeros_of
from fxq.backends.plain.stored_weight import StoredWeight

_MAX_MAGNITUDE = 256
"""Magnitude up to which all whole numbers are bfloat16."""
_MAX_INPUT = 2.0**100
"""Magnitude of inputs from which sums of their products with the integers of a weight might overflow float32."""


class SplitProduct:
    """Product x @ weight.T + bias for many rows of float32, and the constants of its loops.

    Rows are split into bfloat16 numbers whose sum they are, and multiplied by the integers of the weight.

    Args:
        loops: the module `fxq.backends.loops.code.split_float_loops`.
        stored: weight (O, K), for which `split_refused` returns None.
        few: product of a few rows with this weight.
        of_large: product for inputs with a value of 2**100 or more, or one that is not finite.
    """

    def __init__(
        self, loops: ModuleType, stored: StoredWeight, few: FewRowsProduct, of_large: Callable[[Tensor], Tensor]
    ) -> None:
        weight, scale, _, _, bias, _, kind, _, columns, outputs, row_bytes, block, scales, _ = few.fields(0)
        zeros = zeros_of(stored).expand(outputs, scales).to(torch.float32).contiguous()
        self._keeps, self._loops, self._columns, self._outputs = (few, zeros), loops, columns, outputs
        half = row_bytes if stored.packing is not None and stored.packing.bits == 4 else columns
        self._of_large = of_large
        self._steps = loops.steps_of(columns, half)
        split, names = {"COLUMNS": columns, "HALF": half}, loops.SplitPartField
        self._split = ColumnJobs(
            loops.split_part, names, split, self._steps * loops.STEP_DEPTH, loops.STEP_DEPTH
        )  # fmt: skip
        fields = {
            "WEIGHT": weight, "SCALE": scale, "OFFSET": zeros.data_ptr(), "ZERO": 1, "BIAS": bias, "KIND": kind,
            "COLUMNS": columns, "OUTPUTS": outputs, "ROW_BYTES": row_bytes, "BLOCK": block, "SCALES": scales,
        }  # fmt: skip
        self._multiply = ColumnJobs(loops.multiply_split_part, loops.FloatPartField, fields, outputs, loops.COLUMNS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, float32 (..., O), for x, float32 (..., K)."""
        low, high = x.aminmax()
        if not (low > -_MAX_INPUT and high < _MAX_INPUT):
            return self._of_large(x)
        x, loops = x.contiguous(), self._loops
        y = torch.empty((*x.shape[:-1], self._outputs), dtype=torch.float32, device="cpu")
        rows = x.numel() // self._columns
        split = torch.empty(loops.split_bytes(min(rows, loops.MAX_ROWS), self._steps), dtype=torch.uint8, device="cpu")
        for first in range(0, rows, loops.MAX_ROWS):
            fields = {
                "X": x.data_ptr() + 4 * self._columns * first, "SPLIT": split.data_ptr(),
                "OUT": y.data_ptr() + 4 * self._outputs * first, "ROWS": min(rows - first, loops.MAX_ROWS),
            }  # fmt: skip
            self._split.run(loops.SplitCallField, fields)
            self._multiply.run(loops.SplitCallField, fields)
        return y


def split_refused(stored: StoredWeight) -> str | None:
    """Why the loop does not support a weight that `few_rows.chunks_refused` allows; None if it does."""
    zero, bits = zeros_of(stored), 8 if stored.packing is None else stored.packing.bits
    low = -128 if stored.packing is None and stored.values.dtype == torch.int8 else 0
    if not torch.equal(zero, zero.round()):
        return "its zero points are not whole numbers"
    largest = torch.maximum(low + 2**bits - 1 - zero, zero - low).max()
    return None if largest <= _MAX_MAGNITUDE else f"its values are more than {_MAX_MAGNITUDE} from their zero points"
