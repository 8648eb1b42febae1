"""Rows of the op table: pooling and reduction."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.table import as_tuple, aten, row
from fxq.optable import Arguments, computes, moves, spell


def _reduce(bound: Arguments) -> Arguments | str:
    if bound.pop("dtype", None) is not None:
        return "changes the dtype"
    return bound if bound.get("dim") is not None else "reduces over all axes"


def _pool(n: int) -> Any:
    """Options of an n-dimensional pooling as n-tuples; the stride defaults to the kernel."""

    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        bound["kernel_size"] = as_tuple(bound["kernel_size"], n)
        bound["stride"] = as_tuple(bound.get("stride") or bound["kernel_size"], n)
        for key in ("padding", "dilation"):
            if key in bound:
                bound[key] = as_tuple(bound[key], n)
        return bound

    return adapt


_MAX_POOL = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG_POOL = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"


@row(
    spell(nn.MaxPool1d, _MAX_POOL, _pool(1)),
    spell(F.max_pool1d, _MAX_POOL, _pool(1)),
    spell(torch.max_pool1d, _MAX_POOL, _pool(1)),
    spell(aten.max_pool1d.default, _MAX_POOL, _pool(1)),
    quant=moves("x"),
)
def max_pool1d(
    x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Tensor:
    """x (N, C, L) -> (N, C, L')."""
    return F.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(
    spell(nn.MaxPool2d, _MAX_POOL, _pool(2)),
    spell(F.max_pool2d, _MAX_POOL, _pool(2)),
    spell(torch.max_pool2d, _MAX_POOL, _pool(2)),
    spell(aten.max_pool2d.default, _MAX_POOL, _pool(2)),
    quant=moves("x"),
)
def max_pool2d(
    x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0, 0), dilation: Any = (1, 1), ceil_mode: bool = False
) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W')."""
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(
    spell(nn.AvgPool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
    spell(F.avg_pool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
    spell(aten.avg_pool1d.default, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
    quant=computes("x"),
)
def avg_pool1d(
    x: Tensor,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """x (N, C, L) -> (N, C, L')."""
    return F.avg_pool1d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)


@row(
    spell(nn.AvgPool2d, _AVG_POOL, _pool(2)),
    spell(F.avg_pool2d, _AVG_POOL, _pool(2)),
    spell(aten.avg_pool2d.default, _AVG_POOL, _pool(2)),
    quant=computes("x"),
)
def avg_pool2d(
    x: Tensor,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W')."""
    return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _size2(bound: Arguments) -> Arguments:
    return {**bound, "output_size": as_tuple(bound["output_size"], 2)}


def _max_size2(bound: Arguments) -> Arguments | str:
    return "returns indices" if bound.pop("return_indices", False) else _size2(bound)


@row(
    spell(nn.AdaptiveAvgPool2d, "x output_size", _size2),
    spell(F.adaptive_avg_pool2d, "x output_size", _size2),
    spell(aten.adaptive_avg_pool2d.default, "x output_size", _size2),
    quant=computes("x"),
)
def adaptive_avg_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_avg_pool2d(x, output_size)


@row(
    spell(nn.AdaptiveMaxPool2d, "x output_size return_indices", _max_size2),
    spell(F.adaptive_max_pool2d, "x output_size return_indices", _max_size2),
    quant=moves("x"),
)
def adaptive_max_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_max_pool2d(x, output_size)


@row(
    spell(torch.mean, "x dim keepdim", _reduce),
    spell("mean", "x dim keepdim", _reduce),
    spell(aten.mean.dim, "x dim keepdim", _reduce),
    quant=computes("x"),
)
def mean(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Mean over the axes `dim`."""
    return torch.mean(x, dim, keepdim)
