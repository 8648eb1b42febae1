"""`BFloat16Linear`: weight-only linear layer that multiplies few rows in bfloat16, with kernels of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.plain.few_rows import MAX_ROWS
from fxq.backends.plain.stored_weight import StoredWeight, float_input
from fxq.backends.plain.weight_only import WeightOnlyLinear

_GROUPS = (256, 128, 64, 32)
"""Numbers of 4-bit values with one scale that PyTorch's kernel supports."""
_OUTPUT_UNIT, _COLUMN_UNIT, _ALIGNMENT = 16, 16, 64
"""Divisors of the outputs (4 bits), columns (8 bits, whose rows are read at aligned addresses) and addresses."""
_PACKED_ROWS = 1 << 10
"""Rows of a weight that are packed at once, a multiple of the rows that PyTorch packs together."""
_MAX_ELEMENTS = 1 << 31
"""Elements of a weight that the indices of PyTorch's kernels can count."""
_MIDDLE = 8
"""4-bit integer that PyTorch's kernel takes as 0."""


class BFloat16Linear(WeightOnlyLinear):
    """Linear layer that multiplies up to `MAX_ROWS` rows in bfloat16, see `BFloat16Product`, and more in float32.

    It is made for recipes that allow bfloat16 (`QuantConfig.compute`), where Numba is missing. A machine without
    PyTorch's kernels, on which its file is loaded, computes all rows in float32.
    """

    name: ClassVar[str] = "weight_only.bfloat16_linear"

    def bind(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function for inputs like these. See `Bindable.bind`."""
        product = self._in_bfloat16(x)
        if product is None:
            return super().bind(x)
        return product if x.dtype == torch.float32 else lambda x: product(float_input(x))

    def forward(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O)."""
        product = self._in_bfloat16(x)
        return super().forward(x) if product is None else product(float_input(x))

    def rounded_result(self, *inputs: Tensor) -> Tensor | None:
        (x,) = inputs
        product = self._in_bfloat16(x)
        return None if product is None else product.rounded(float_input(x))

    def _in_bfloat16(self, x: Tensor) -> BFloat16Product | None:
        """Product in bfloat16 for inputs like these; None if they have many rows, or this machine has no kernel."""
        stored = self.stored_weight()
        fits = x.is_cpu and x.shape[-1:] == stored.row and 0 < x.numel() <= MAX_ROWS * stored.row[0]
        if not fits:
            return None

        def make() -> BFloat16Product | None:
            return BFloat16Product(stored, self.bias) if bfloat16_refused(stored) is None else None

        product: BFloat16Product | None = self._cached("bfloat16", make)
        return product


class BFloat16Product:
    """Product x @ weight.T + bias for a few rows, of which inputs, scales per block, and sums are rounded to bfloat16.

    A sum is rounded before it is multiplied with the scale of its column in float32, and before the bias is added.

    Args:
        stored: weight (O, K), for which `bfloat16_refused` returns None.
        bias: float32 (O,), or None.
    """

    def __init__(self, stored: StoredWeight, bias: Tensor | None) -> None:
        self._stored, self._bias = stored, bias
        scale = stored.scale if stored.block is None else None
        self._scale = None if scale is None else scale.to(torch.float32)
        self._group = _group(stored)
        if stored.packing is None:
            self._weight, self._ones = _aligned(stored.values), torch.ones(len(stored.values), dtype=torch.bfloat16)
        else:
            self._weight, self._grid = _packed(stored), _scales_and_zeros(stored, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, float32 (..., O), for x, float32 (..., K)."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16, memory_format=torch.contiguous_format)
        if self._stored.packing is None:
            y = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._ones)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._weight, self._group, self._grid)
        return self._scaled(y.to(torch.float32)).view(*x.shape[:-1], -1)

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the product is up to float32 rounding, computed without the packed form of the weight."""
        rows = _rounded(x.reshape(-1, x.shape[-1]))
        y = _rounded(F.linear(rows, _rounded_weight(self._stored)))
        return self._scaled(y).view(*x.shape[:-1], -1)

    def _scaled(self, y: Tensor) -> Tensor:
        if self._scale is None:
            return y if self._bias is None else y.add_(self._bias)
        return y.mul_(self._scale) if self._bias is None else torch.addcmul(self._bias, y, self._scale)


def _rounded(values: Tensor) -> Tensor:
    """Values rounded to bfloat16, as float32."""
    return values.to(torch.bfloat16).to(torch.float32)


def _rounded_weight(stored: StoredWeight) -> Tensor:
    """Weight whose grid is rounded as for PyTorch's kernel, float32 (O, K); without scales that are applied to sums."""
    assert stored.scale is not None  # otherwise `bfloat16_refused` refuses it
    if stored.block is None:
        return replace(stored, scale=torch.ones_like(stored.scale)).floats(stored.empty())
    middle, packed_middle = (0, 0) if stored.packing is None or stored.packing.signed else (_MIDDLE, 0x88)
    steps = replace(stored, scale=_rounded(stored.scale), zero_point=torch.full_like(stored.scale, middle))
    middles = replace(stored, values=torch.full_like(stored.values, packed_middle))
    return steps.floats(stored.empty()).add_(_rounded(middles.floats(stored.empty())))


def bfloat16_refused(stored: StoredWeight) -> str | None:
    """Why PyTorch's kernels in bfloat16 do not support a weight, or are not fast on this CPU; None if they do."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512") or sys.platform == "win32":
        return "PyTorch's kernels in bfloat16 are not vectorized on this machine"
    if stored.scale is None or len(stored.row) != 1 or not stored.values.is_contiguous():
        return "its weight is not stored in contiguous integers"
    if stored.axis not in (None, 0) if stored.block is None else stored.axis != 1:
        return "its scales are not by row of the weight, or by block of a row"
    if stored.numel >= _MAX_ELEMENTS:
        return f"its weight has {_MAX_ELEMENTS} elements or more"
    return _eight_bits_refused(stored) if stored.packing is None else _four_bits_refused(stored)


def _eight_bits_refused(stored: StoredWeight) -> str | None:
    if stored.block is not None or stored.zero_point is not None or stored.values.dtype != torch.int8:
        return 'with 8 bits, only symmetric weights with per="channel" or "tensor" are supported'
    if stored.row[0] % _COLUMN_UNIT:
        return f"the {stored.row[0]} values of a row of its weight are no multiple of {_COLUMN_UNIT}"
    return None


def _four_bits_refused(stored: StoredWeight) -> str | None:
    outputs, columns = len(stored.values), stored.row[0]
    if stored.packing is None or stored.packing.bits != 4:
        return "its weight has neither 4 nor 8 bits"
    if outputs % _OUTPUT_UNIT:
        return f"its {outputs} outputs are no multiple of {_OUTPUT_UNIT}"
    if not _group(stored):
        sizes = ", ".join(map(str, reversed(_GROUPS)))
        block = columns if stored.block is None else min(stored.block, columns)
        return f"its rows of {columns} values in blocks of {block} cannot be divided into groups of {sizes}"
    return None


def _group(stored: StoredWeight) -> int:
    """Largest supported number of values with one scale that divides both rows and blocks of a weight; 0: none."""
    columns = stored.row[0]
    block = columns if stored.block is None or stored.block >= columns else stored.block
    return next((size for size in _GROUPS if block % size == 0 and columns % block == 0), 0)


def _aligned(values: Tensor) -> Tensor:
    return values if values.data_ptr() % _ALIGNMENT == 0 else values.clone()


def _packed(stored: StoredWeight) -> Tensor:
    """4-bit integers in the order of PyTorch's kernel, which depends on the CPU: uint8 (O, K // 2)."""
    assert stored.packing is not None  # otherwise `bfloat16_refused` refuses it
    middle = _MIDDLE if stored.packing.signed else 0
    pieces = stored.values.split(_PACKED_ROWS)
    integers = (stored.packing.unpack(piece).to(torch.int32).add_(middle) for piece in pieces)
    return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(piece, 1) for piece in integers])


def _scales_and_zeros(stored: StoredWeight, group: int) -> Tensor:
    """Scale of each group, and real value of its middle integer: bfloat16 (K // group, O, 2).

    If a column of the result has one scale, which is applied to sums, the scale is 1 here, and the zero is exact.
    """
    assert stored.packing is not None  # otherwise `bfloat16_refused` refuses it
    outputs, groups = len(stored.values), stored.row[0] // group
    middle = torch.tensor(0.0 if stored.packing.signed else float(_MIDDLE))
    zero_point = middle.new_zeros(()) if stored.zero_point is None else stored.zero_point.to(torch.float32)
    if stored.block is None:
        scale, zero_point = torch.ones(outputs, groups, dtype=torch.float32), zero_point.expand(outputs).view(-1, 1)
    else:
        assert stored.scale is not None  # otherwise `bfloat16_refused` refuses it
        scale = stored.scale.to(torch.float32)
    scale, zero = torch.broadcast_tensors(scale, (middle - zero_point) * scale)
    both = torch.stack([scale, zero], -1)
    return both.repeat_interleave(groups // both.shape[1], 1).transpose(0, 1).to(torch.bfloat16).contiguous()
