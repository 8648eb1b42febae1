"""Rows of the op table: the family of convolutions, one for each number of spatial axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fxq.ops.registry import RANKS, as_tuple, aten, named, row
from fxq.ops.table import Arguments, Redirect, Shape, spell
from fxq.ops.traits import computes


def _tuples(n: int) -> Any:
    """Adapter that converts options of an n-dimensional convolution to n-tuples, for one spelling of equal calls."""

    def adapt(bound: Arguments) -> Arguments:
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = bound.get(key, default)
            value = 0 if value == "valid" else value
            bound[key] = value if isinstance(value, str) else as_tuple(value, n)
        return bound

    return adapt


def conv_padding(weight_shape: Sequence[int], padding: Any, dilation: Sequence[int]) -> tuple[int, ...]:
    """Padding of a convolution in the order of `F.pad`: last axis first, left then right.

    'same' puts an odd element of padding on the right.
    """
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(weight_shape[2:], dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in padding]
    return tuple(p for pair in reversed(sides) for p in pair)


def _any_convolution(bound: Arguments) -> Redirect:
    """Redirect aten.convolution to the op that its number of strides and its `transposed` flag select."""
    n, transposed = len(bound["stride"]), bound.pop("transposed")
    if transposed:
        return Redirect(f"conv_transpose{n}d", _transposed_tuples(n)(bound))
    bound.pop("output_padding", None)
    return Redirect(f"conv{n}d", _tuples(n)(bound))


_CONV = "x weight bias stride padding dilation groups padding_mode"
_CONVS = "nn.Conv{n}d F.conv{n}d aten.conv{n}d.default aten.conv{n}d.padding"
_ATEN_CONV = "x weight bias stride padding dilation transposed output_padding groups"
_ANY = spell(aten.convolution.default, _ATEN_CONV, _any_convolution)


def _macs(out: Shape, x: Shape, weight: Shape, *_: Any) -> int:
    """Multiply-accumulates: values of the output x weights of one output channel."""
    return math.prod(out) * math.prod(weight[1:])


def _conv(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"conv{n}d")

    @row(
        *(spell(t, _CONV, _tuples(n)) for t in named(_CONVS, n)),
        *([_ANY] if n == 1 else []),  # a spelling belongs to one op; this one redirects to the others
        traits=computes("x", weight="weight", bias="bias", axis=0, channels=-n - 1, heavy=True),
        macs=_macs,
        rank=n,
    )
    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Any = (1,) * n,
        padding: Any = (0,) * n,
        dilation: Any = (1,) * n,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> Tensor:
        """x (N, C, *size), weight (O, C/groups, *kernel), bias (O,) -> (N, O, *size')."""
        if padding_mode != "zeros":
            x = F.pad(x, conv_padding(weight.shape, padding, dilation), mode=padding_mode)
            padding = 0
        return function(x, weight, bias, stride, padding, dilation, groups)

    return conv


conv1d, conv2d, conv3d = map(_conv, RANKS)


def _transposed_tuples(n: int) -> Any:
    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("padding_mode", "zeros") != "zeros":
            return "does not pad with zeros"
        bound = _tuples(n)(bound)
        bound["output_padding"] = as_tuple(bound.get("output_padding", 0), n)
        return bound

    return adapt


_CONVT = "x weight bias stride padding output_padding groups dilation"
_CONVTS = "F.conv_transpose{n}d aten.conv_transpose{n}d."


def _transposed_macs(out: Shape, x: Shape, weight: Shape, *_: Any) -> int:
    """Multiply-accumulates: values of the input x weights of one input channel."""
    return math.prod(x) * math.prod(weight[1:])


def _conv_transpose(n: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"conv_transpose{n}d")

    @row(
        *(spell(t, _CONVT + " padding_mode", _transposed_tuples(n)) for t in named("nn.ConvTranspose{n}d", n)),
        *(spell(t, _CONVT, _transposed_tuples(n)) for t in named(_CONVTS + ("default" if n == 1 else "input"), n)),
        traits=computes("x", weight="weight", bias="bias", axis=1, channels=-n - 1, heavy=True),
        macs=_transposed_macs,
        rank=n,
    )
    def conv_transpose(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Any = (1,) * n,
        padding: Any = (0,) * n,
        output_padding: Any = (0,) * n,
        dilation: Any = (1,) * n,
        groups: int = 1,
    ) -> Tensor:
        """x (N, C, *size), weight (C, O/groups, *kernel), bias (O,) -> (N, O, *size')."""
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)

    return conv_transpose


conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_conv_transpose, RANKS)
