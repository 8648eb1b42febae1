"""Rows of the op table: convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import as_tuple, aten, row
from fxq.ops.table import Arguments, Instead, computes, spell


def _conv(n: int) -> Any:
    """Options of an n-dimensional convolution as n-tuples, so that every way to write them gives the same graph."""

    def adapt(bound: Arguments) -> Arguments:
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = bound.get(key, default)
            value = 0 if value == "valid" else value
            bound[key] = value if isinstance(value, str) else as_tuple(value, n)
        return bound

    return adapt


_CONV = "x weight bias stride padding dilation groups padding_mode"
_ATEN_CONV = "x weight bias stride padding dilation transposed output_padding groups"


def _convolve(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    mode = options.pop("padding_mode")
    if mode == "zeros":
        return function(x, weight, bias, **options)
    padded = F.pad(x, conv_padding(weight.shape, options["padding"], options["dilation"]), mode=mode)
    return function(padded, weight, bias, **{**options, "padding": 0})


def conv_padding(weight_shape: Sequence[int], padding: Any, dilation: Sequence[int]) -> tuple[int, ...]:
    """The padding of a convolution in `F.pad`'s order (last axis first, left then right); 'same' pads right first."""
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(weight_shape[2:], dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in padding]
    return tuple(p for pair in reversed(sides) for p in pair)


_CONV_QUANT = computes("x", weight="weight", bias="bias", axis=0, heavy=True)


def _any_convolution(bound: Arguments) -> Instead:
    """aten.convolution is all of them: the number of strides and a flag say which."""
    n, transposed = len(bound["stride"]), bound.pop("transposed")
    if transposed:
        return Instead(f"conv_transpose{n}d", _conv_transpose(n)(bound))
    bound.pop("output_padding", None)
    return Instead(f"conv{n}d", _conv(n)(bound))


@row(
    spell(aten.convolution.default, _ATEN_CONV, _any_convolution),
    spell(nn.Conv1d, _CONV, _conv(1)),
    spell(F.conv1d, _CONV, _conv(1)),
    spell(aten.conv1d.default, _CONV, _conv(1)),
    spell(aten.conv1d.padding, _CONV, _conv(1)),
    quant=_CONV_QUANT,
)
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """x (N, C, L), weight (O, C/groups, K), bias (O,) -> (N, O, L')."""
    return _convolve(
        F.conv1d,
        x,
        weight,
        bias,
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": padding_mode},
    )


@row(
    spell(nn.Conv2d, _CONV, _conv(2)),
    spell(F.conv2d, _CONV, _conv(2)),
    spell(aten.conv2d.default, _CONV, _conv(2)),
    spell(aten.conv2d.padding, _CONV, _conv(2)),
    quant=_CONV_QUANT,
)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """x (N, C, H, W), weight (O, C/groups, KH, KW), bias (O,) -> (N, O, H', W')."""
    return _convolve(
        F.conv2d,
        x,
        weight,
        bias,
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": padding_mode},
    )


@row(
    spell(nn.Conv3d, _CONV, _conv(3)),
    spell(F.conv3d, _CONV, _conv(3)),
    spell(aten.conv3d.default, _CONV, _conv(3)),
    spell(aten.conv3d.padding, _CONV, _conv(3)),
    quant=_CONV_QUANT,
)
def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """x (N, C, D, H, W), weight (O, C/groups, KD, KH, KW), bias (O,) -> (N, O, D', H', W')."""
    return _convolve(
        F.conv3d,
        x,
        weight,
        bias,
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": padding_mode},
    )


_CONVT = "x weight bias stride padding output_padding groups dilation"
_CONVT_QUANT = computes("x", weight="weight", bias="bias", axis=1, heavy=True)


def _conv_transpose(n: int) -> Any:
    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("padding_mode", "zeros") != "zeros":
            return "pads other than with zeros"
        bound = _conv(n)(bound)
        bound["output_padding"] = as_tuple(bound.get("output_padding", 0), n)
        return bound

    return adapt


@row(
    spell(nn.ConvTranspose1d, _CONVT + " padding_mode", _conv_transpose(1)),
    spell(F.conv_transpose1d, _CONVT, _conv_transpose(1)),
    spell(aten.conv_transpose1d.default, _CONVT, _conv_transpose(1)),
    quant=_CONVT_QUANT,
)
def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1,),
    padding: Any = (0,),
    output_padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
) -> Tensor:
    """x (N, C, L), weight (C, O/groups, K), bias (O,) -> (N, O, L')."""
    return F.conv_transpose1d(x, weight, bias, stride, padding, output_padding, groups, dilation)


@row(
    spell(nn.ConvTranspose2d, _CONVT + " padding_mode", _conv_transpose(2)),
    spell(F.conv_transpose2d, _CONVT, _conv_transpose(2)),
    spell(aten.conv_transpose2d.input, _CONVT, _conv_transpose(2)),
    quant=_CONVT_QUANT,
)
def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    output_padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Tensor:
    """x (N, C, H, W), weight (C, O/groups, KH, KW), bias (O,) -> (N, O, H', W')."""
    return F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)


@row(
    spell(nn.ConvTranspose3d, _CONVT + " padding_mode", _conv_transpose(3)),
    spell(F.conv_transpose3d, _CONVT, _conv_transpose(3)),
    spell(aten.conv_transpose3d.input, _CONVT, _conv_transpose(3)),
    quant=_CONVT_QUANT,
)
def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    output_padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """x (N, C, D, H, W), weight (C, O/groups, KD, KH, KW), bias (O,) -> (N, O, D', H', W')."""
    return F.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation)
