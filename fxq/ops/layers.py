"""Rows of the op table: ops with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.table import as_tuple, aten, row
from fxq.optable import Arguments, computes, float_only, spell


def _eval_norm(bound: Arguments) -> Arguments | str:
    bound.pop("momentum", None)
    if bound.pop("training", False) or bound.get("running_mean") is None:
        return "normalizes with the statistics of the batch"
    bound.pop("cudnn_enabled", None)
    return bound


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


@row(
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


_CONVT = "x weight bias stride padding output_padding groups dilation"


def _conv_transpose(bound: Arguments) -> Arguments | str:
    if bound.pop("padding_mode", "zeros") != "zeros":
        return "pads other than with zeros"
    bound = _conv(2)(bound)
    bound["output_padding"] = as_tuple(bound.get("output_padding", 0), 2)
    return bound


@row(
    spell(nn.ConvTranspose2d, _CONVT + " padding_mode", _conv_transpose),
    spell(F.conv_transpose2d, _CONVT, _conv_transpose),
    spell(aten.conv_transpose2d.input, _CONVT, _conv_transpose),
    quant=computes("x", weight="weight", bias="bias", axis=1, heavy=True),
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


@row(nn.Linear, F.linear, aten.linear.default, quant=computes("x", weight="weight", bias="bias", axis=0, heavy=True))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (O, K), bias (O,) -> (..., O)."""
    return F.linear(x, weight, bias)


_NORM = "x running_mean running_var weight bias training momentum eps"
_NORM_ATEN = "x weight bias running_mean running_var training momentum eps cudnn_enabled"


@row(
    spell(nn.BatchNorm1d, _NORM, _eval_norm),
    spell(nn.BatchNorm2d, _NORM, _eval_norm),
    spell(nn.BatchNorm3d, _NORM, _eval_norm),
    spell(F.batch_norm, _NORM, _eval_norm),
    spell(torch.batch_norm, _NORM_ATEN, _eval_norm),
    spell(aten.batch_norm.default, _NORM_ATEN, _eval_norm),
    quant=float_only("x"),
)
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """x (N, C, ...), statistics, weight and bias (C,): (x - mean) / sqrt(var + eps) * weight + bias."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


@row(nn.PReLU, F.prelu, aten.prelu.default, "prelu", quant=float_only("x"))
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C, ...), weight (1,) or (C,): max(0, x) + weight * min(0, x)."""
    return F.prelu(x, weight)
