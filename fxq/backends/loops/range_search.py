"""`least_block_range`: search for the ranges of least error of blocks of weights, compiled where Numba is installed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.loops.code.compiler import has_memory, loops
from fxq.quant.least_error import MAX_QUICK_VALUES, Zooms, least_range
from fxq.quant.spec import TensorSpec

_MODULE = "rounding_loops"
"""Module of the compiled loops."""
_ROWS_AT_ONCE = 2048
"""Number of blocks that one call of the loop searches: their values stay in the second-level cache."""
_MIN_VALUES = 1 << 16
"""Number of values from which the loop is used: for fewer ones, loading Numba takes longer."""


def least_block_range(
    values: Tensor, low: Tensor, high: Tensor, spec: TensorSpec, power: float, zooms: Zooms, emphasis: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what `least_range` returns; many blocks of some tens of values are searched by a compiled loop.

    The loop computes grids in float32, so that of two ranges with nearly equal errors it may choose the other one.

    Args:
        values: float32, the shape of `low` and one axis more, along which values share a scale.
        low: smallest value of each block, float32. The loop takes it from the values.
        high: largest value of each block, same shape, likewise.
        spec: spec of the grid.
        power: exponent of the error. The loop knows 2 only.
        zooms: passes of the search, see `fxq.quant.least_error.least_range`.
        emphasis: how much more the errors of large values count, likewise.

    Returns:
        (low, high), float32, same shape as `low`.
    """
    rows = values.reshape(low.numel(), -1)
    is_compiled = power == 2.0 and rows.shape[1] <= MAX_QUICK_VALUES and rows.numel() >= _MIN_VALUES
    module = loops(_MODULE) if is_compiled and has_memory(rows) else None
    if module is None:
        return least_range(values, low, high, spec, power, zooms=zooms, emphasis=emphasis)
    weights, ends = rows.new_ones(rows.shape[1]), rows.new_empty(2, len(rows))

    def search(at: int) -> None:
        part = slice(at, at + _ROWS_AT_ONCE)
        columns = rows[part].T.contiguous()
        search_columns(module, columns, weights, spec, zooms, emphasis, ends[0, part], ends[1, part])

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # the loop does not hold Python's lock
        list(threads.map(search, range(0, len(rows), _ROWS_AT_ONCE)))
    return ends[0].reshape(low.shape), ends[1].reshape(low.shape)


def search_columns(
    module: ModuleType,
    values: Tensor,
    weights: Tensor,
    spec: TensorSpec,
    zooms: Sequence[tuple[float, float, int]],
    emphasis: float,
    low: Tensor,
    high: Tensor,
) -> None:
    """Write the ranges of least weighted squared error of some blocks, which are stored by column.

    Args:
        module: the module `fxq.backends.loops.code.rounding_loops`.
        values: float32 (n, R), contiguous, with the n values of each of R blocks.
        weights: weights of the columns in the error, float32 (n,), contiguous.
        spec: spec of the grid.
        zooms: passes of the search, see `fxq.quant.least_error.least_range`.
        emphasis: how much more the errors of large values count, likewise.
        low: lower end of each block, float32 (R,), contiguous; written.
        high: upper end of each block, likewise.
    """
    table = torch.tensor(zooms, dtype=torch.float32, device="cpu").reshape(-1, 3)
    module.least_ranges(
        values.data_ptr(), weights.data_ptr(), table.data_ptr(), len(table), low.data_ptr(), high.data_ptr(),
        *values.shape, spec.qmin, spec.qmax, int(spec.symmetric), emphasis,
    )  # fmt: skip
