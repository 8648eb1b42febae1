"""Rows of the op table: pooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import as_tuple, aten, pick_values, row
from fxq.ops.sizes import is_all_of
from fxq.ops.table import Arguments, Instead, computes, moves, spell


def _pool(n: int, kind: str) -> Any:
    """Options of an n-dimensional pooling as n-tuples; the stride defaults to the kernel.

    With a window as large as its input (`F.avg_pool2d(x, x.size()[2:])`) it is an adaptive one to a single value.
    """

    def adapt(bound: Arguments) -> Arguments | Instead | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        bound["kernel_size"] = as_tuple(bound["kernel_size"], n)
        if is_all_of(bound["x"], bound["kernel_size"]) and _is_plain(bound, n):
            return Instead(f"adaptive_{kind}_pool{n}d", {"x": bound["x"], "output_size": (1,) * n})
        bound["stride"] = as_tuple(bound.get("stride") or bound["kernel_size"], n)
        for key in ("padding", "dilation"):
            if key in bound:
                bound[key] = as_tuple(bound[key], n)
        return bound

    return adapt


def _is_plain(bound: Arguments, n: int) -> bool:
    """Whether a pooling neither pads nor spreads its window, nor divides by another number than it has elements."""
    unpadded = as_tuple(bound.get("padding", 0), n) == (0,) * n
    return unpadded and as_tuple(bound.get("dilation", 1), n) == (1,) * n and bound.get("divisor_override") is None


_MAX_POOL = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG_POOL = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"


@row(
    spell(nn.MaxPool1d, _MAX_POOL, _pool(1, "max")),
    spell(F.max_pool1d, _MAX_POOL, _pool(1, "max")),
    spell(torch.max_pool1d, _MAX_POOL, _pool(1, "max")),
    spell(aten.max_pool1d.default, _MAX_POOL, _pool(1, "max")),
    quant=moves("x", selects=True),
)
def max_pool1d(
    x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Tensor:
    """x (N, C, L) -> (N, C, L')."""
    return F.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(
    spell(nn.MaxPool2d, _MAX_POOL, _pool(2, "max")),
    spell(F.max_pool2d, _MAX_POOL, _pool(2, "max")),
    spell(torch.max_pool2d, _MAX_POOL, _pool(2, "max")),
    spell(aten.max_pool2d.default, _MAX_POOL, _pool(2, "max")),
    spell(aten.max_pool2d_with_indices.default, _MAX_POOL, _pool(2, "max"), pick_values),
    quant=moves("x", selects=True),
)
def max_pool2d(
    x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0, 0), dilation: Any = (1, 1), ceil_mode: bool = False
) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W')."""
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(
    spell(nn.MaxPool3d, _MAX_POOL, _pool(3, "max")),
    spell(F.max_pool3d, _MAX_POOL, _pool(3, "max")),
    spell(torch.max_pool3d, _MAX_POOL, _pool(3, "max")),
    spell(aten.max_pool3d.default, _MAX_POOL, _pool(3, "max")),
    spell(aten.max_pool3d_with_indices.default, _MAX_POOL, _pool(3, "max"), pick_values),
    quant=moves("x", selects=True),
)
def max_pool3d(
    x: Tensor,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
    ceil_mode: bool = False,
) -> Tensor:
    """x (N, C, D, H, W) -> (N, C, D', H', W')."""
    return F.max_pool3d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(
    spell(nn.AvgPool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1, "avg")),
    spell(F.avg_pool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1, "avg")),
    spell(aten.avg_pool1d.default, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1, "avg")),
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
    spell(nn.AvgPool2d, _AVG_POOL, _pool(2, "avg")),
    spell(F.avg_pool2d, _AVG_POOL, _pool(2, "avg")),
    spell(aten.avg_pool2d.default, _AVG_POOL, _pool(2, "avg")),
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


@row(
    spell(nn.AvgPool3d, _AVG_POOL, _pool(3, "avg")),
    spell(F.avg_pool3d, _AVG_POOL, _pool(3, "avg")),
    spell(aten.avg_pool3d.default, _AVG_POOL, _pool(3, "avg")),
    quant=computes("x"),
)
def avg_pool3d(
    x: Tensor,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any = (0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """x (N, C, D, H, W) -> (N, C, D', H', W')."""
    return F.avg_pool3d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _adaptive(n: int) -> Any:
    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        return {**bound, "output_size": as_tuple(bound["output_size"], n)}

    return adapt


_SIZE = "x output_size"
_MAX_SIZE = "x output_size return_indices"


@row(
    *(spell(t, _SIZE, _adaptive(1)) for t in (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d)),
    spell(aten.adaptive_avg_pool1d.default, _SIZE, _adaptive(1)),
    quant=computes("x"),
)
def adaptive_avg_pool1d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, L) -> (N, C, *output_size)."""
    return F.adaptive_avg_pool1d(x, output_size)


@row(
    *(spell(t, _SIZE, _adaptive(2)) for t in (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)),
    *(spell(t, _SIZE, _adaptive(2)) for t in (aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)),
    quant=computes("x"),
)
def adaptive_avg_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_avg_pool2d(x, output_size)


@row(
    *(spell(t, _SIZE, _adaptive(3)) for t in (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d)),
    *(spell(t, _SIZE, _adaptive(3)) for t in (aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)),
    quant=computes("x"),
)
def adaptive_avg_pool3d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, D, H, W) -> (N, C, *output_size)."""
    return F.adaptive_avg_pool3d(x, output_size)


@row(
    *(spell(t, _MAX_SIZE, _adaptive(1)) for t in (nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d)),
    spell(aten.adaptive_max_pool1d.default, _SIZE, _adaptive(1), pick_values),
    quant=moves("x", selects=True),
)
def adaptive_max_pool1d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, L) -> (N, C, *output_size)."""
    return F.adaptive_max_pool1d(x, output_size)


@row(
    *(spell(t, _MAX_SIZE, _adaptive(2)) for t in (nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)),
    spell(aten.adaptive_max_pool2d.default, _SIZE, _adaptive(2), pick_values),
    quant=moves("x", selects=True),
)
def adaptive_max_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_max_pool2d(x, output_size)


@row(
    *(spell(t, _MAX_SIZE, _adaptive(3)) for t in (nn.AdaptiveMaxPool3d, F.adaptive_max_pool3d)),
    spell(aten.adaptive_max_pool3d.default, _SIZE, _adaptive(3), pick_values),
    quant=moves("x", selects=True),
)
def adaptive_max_pool3d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, D, H, W) -> (N, C, *output_size)."""
    return F.adaptive_max_pool3d(x, output_size)
