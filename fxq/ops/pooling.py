"""Rows of the op table: the family of poolings, one for each number of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fxq.ops.registry import RANKS, as_tuple, named, pick_values, row
from fxq.ops.sizes import is_all_of
from fxq.ops.table import Arguments, Redirect, spell
from fxq.ops.traits import computes, moves


def _pool(n: int, kind: str) -> Any:
    """Adapter that converts options of an n-dimensional pooling to n-tuples; the stride defaults to the kernel size.

    A pooling with a window as large as its input, `F.avg_pool2d(x, x.size()[2:])`, becomes an adaptive pooling.
    """

    def adapt(bound: Arguments) -> Arguments | Redirect | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        bound["kernel_size"] = as_tuple(bound["kernel_size"], n)
        if is_all_of(bound["x"], bound["kernel_size"]) and _is_plain(bound, n):
            return Redirect(f"adaptive_{kind}_pool{n}d", {"x": bound["x"], "output_size": (1,) * n})
        bound["stride"] = as_tuple(bound.get("stride") or bound["kernel_size"], n)
        for key in ("padding", "dilation"):
            if key in bound:
                bound[key] = as_tuple(bound[key], n)
        return bound

    return adapt


def _is_plain(bound: Arguments, n: int) -> bool:
    """Whether a pooling has no padding, no dilation and no divisor other than the size of its window."""
    unpadded = as_tuple(bound.get("padding", 0), n) == (0,) * n
    return unpadded and as_tuple(bound.get("dilation", 1), n) == (1,) * n and bound.get("divisor_override") is None


_MAX_POOL = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG_POOL = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"
_MAX_POOLS = "nn.MaxPool{n}d F.max_pool{n}d torch.max_pool{n}d aten.max_pool{n}d.default"
_AVG_POOLS = "nn.AvgPool{n}d F.avg_pool{n}d aten.avg_pool{n}d.default"


def _max_pool(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"max_pool{n}d")
    both = named("aten.max_pool{n}d_with_indices.default", n) if n > 1 else []

    @row(
        *(spell(t, _MAX_POOL, _pool(n, "max")) for t in named(_MAX_POOLS, n)),
        *(spell(t, _MAX_POOL, _pool(n, "max"), pick_values) for t in both),
        traits=moves("x", selects=True, maximum=True),
        rank=n,
    )
    def max_pool(
        x: Tensor,
        *,
        kernel_size: Any,
        stride: Any,
        padding: Any = (0,) * n,
        dilation: Any = (1,) * n,
        ceil_mode: bool = False,
    ) -> Tensor:
        """x (N, C, *size) -> (N, C, *size')."""
        return function(x, kernel_size, stride, padding, dilation, ceil_mode)

    return max_pool


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, RANKS)


def _avg_pool(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"avg_pool{n}d")

    @row(*(spell(t, _AVG_POOL, _pool(n, "avg")) for t in named(_AVG_POOLS, n)), traits=computes("x"), rank=n)
    def avg_pool(
        x: Tensor,
        *,
        kernel_size: Any,
        stride: Any,
        padding: Any = (0,) * n,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        """x (N, C, *size) -> (N, C, *size')."""
        last = () if divisor_override is None else (divisor_override,)  # avg_pool1d does not take it
        return function(x, kernel_size, stride, padding, ceil_mode, count_include_pad, *last)

    return avg_pool


avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, RANKS)


def _adaptive(n: int) -> Any:
    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        return {**bound, "output_size": as_tuple(bound["output_size"], n)}

    return adapt


_SIZE = "x output_size"


def _adaptive_avg_pool(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"adaptive_avg_pool{n}d")
    names = "nn.AdaptiveAvgPool{n}d F.adaptive_avg_pool{n}d aten.adaptive_avg_pool{n}d.default"
    names += " aten._adaptive_avg_pool{n}d.default" if n > 1 else ""

    @row(*(spell(t, _SIZE, _adaptive(n)) for t in named(names, n)), traits=computes("x"), rank=n)
    def adaptive_avg_pool(x: Tensor, *, output_size: Any) -> Tensor:
        """x (N, C, *size) -> (N, C, *output_size)."""
        return function(x, output_size)

    return adaptive_avg_pool


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_avg_pool, RANKS)


def _adaptive_max_pool(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"adaptive_max_pool{n}d")
    names = "nn.AdaptiveMaxPool{n}d F.adaptive_max_pool{n}d"

    @row(
        *(spell(t, _SIZE + " return_indices", _adaptive(n)) for t in named(names, n)),
        *(spell(t, _SIZE, _adaptive(n), pick_values) for t in named("aten.adaptive_max_pool{n}d.default", n)),
        traits=moves("x", selects=True),
        rank=n,
    )
    def adaptive_max_pool(x: Tensor, *, output_size: Any) -> Tensor:
        """x (N, C, *size) -> (N, C, *output_size)."""
        return function(x, output_size)

    return adaptive_max_pool


adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(_adaptive_max_pool, RANKS)
