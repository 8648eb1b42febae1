"""`PanelProduct`: product of many rows of floats with a low-bit weight, which is unpacked in pieces that stay in L1."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.plain.column_jobs import ColumnJobs
from fxq.backends.plain.few_rows import FewRowsProduct


class PanelProduct:
    """Product x @ weight.T + bias for many rows of float32, and the constants of its loop.

    The loop unpacks a piece of the weight to float32 in the order in which it is read, and multiplies all rows by it.

    Args:
        loops: the module `fxq.backends.loops.code.panel_loops`.
        few: product of a few rows with this weight.
    """

    def __init__(self, loops: ModuleType, few: FewRowsProduct) -> None:
        weight, scale, offset, zero, bias, _, kind, _, columns, outputs, row_bytes, block, scales, _ = few.fields(0)
        fields = {
            "WEIGHT": weight, "SCALE": scale, "OFFSET": offset, "ZERO": zero, "BIAS": bias, "KIND": kind,
            "COLUMNS": columns, "OUTPUTS": outputs, "ROW_BYTES": row_bytes, "BLOCK": block, "SCALES": scales,
        }  # fmt: skip
        self._keeps, self._loops, self._columns, self._outputs = few, loops, columns, outputs
        self._jobs = ColumnJobs(loops.multiply_floats_part, loops.FloatPartField, fields, outputs, loops.COLUMNS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, float32 (..., O), for x, float32 (..., K), of at least `MIN_ROWS` rows of the loop."""
        x = x.contiguous()
        y = torch.empty((*x.shape[:-1], self._outputs), dtype=torch.float32, device="cpu")
        fields = {"X": x.data_ptr(), "OUT": y.data_ptr(), "ROWS": x.numel() // self._columns}
        self._jobs.run(self._loops.FloatCallField, fields)
        return y
