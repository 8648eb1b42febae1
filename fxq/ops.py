"""The op table: one row per op.

A row is a plain function. It is the op's canonical form: tensor arguments positional, options keyword-only, and its
body is what the op means. The decorator lists every other spelling of the op (module types, functions, method names,
aten overloads) and says how the op takes part in quantization. Passes, patterns and backends name ops, never spellings.

To add an op: add a row here and a line to `tests/test_ops.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxq.qparams  # noqa: F401  (registers fxq::quantize and fxq::dequantize)
from fxq.optable import Arguments, OpTable, computes, float_only, moves, spell

OPS = OpTable()
aten = torch.ops.aten
row = OPS.row

Ints = int | Sequence[int]


# ---- adapters: from a call as written to the op's arguments, or the reason why the call is another op


def _eval_norm(bound: Arguments) -> Arguments | str:
    bound.pop("momentum", None)
    if bound.pop("training", False) or bound.get("running_mean") is None:
        return "normalizes with the statistics of the batch"
    bound.pop("cudnn_enabled", None)
    return bound


def _numbers(bound: Arguments) -> Arguments | str:
    low, high = bound.pop("min", None), bound.pop("max", None)
    if not all(v is None or isinstance(v, (int, float)) for v in (low, high)):
        return "clamps between tensors"
    return {**bound, "min_val": -float("inf") if low is None else low, "max_val": float("inf") if high is None else high}


def _reduce(bound: Arguments) -> Arguments | str:
    if bound.pop("dtype", None) is not None:
        return "changes the dtype"
    return bound if bound.get("dim") is not None else "reduces over all axes"


def _pad_module(mode: str) -> Any:
    def adapt(bound: Arguments) -> Arguments:
        pad = bound.pop("padding")
        return {**bound, "pad": tuple(pad), "mode": mode, "value": bound.get("value", 0.0)}

    return adapt


def _upsample_nearest(bound: Arguments) -> Arguments:
    return {**bound, "mode": "nearest"}


def _no_output_size(bound: Arguments) -> Arguments | str:
    return "is called with output_size" if bound.pop("output_size", None) is not None else bound


def _method_view(bound: Arguments) -> Arguments | str:
    shape = bound.get("shape", ())
    return "changes the dtype" if len(shape) == 1 and isinstance(shape[0], torch.dtype) else bound


def _conv(n: int) -> Any:
    """Options of an n-dimensional convolution as n-tuples, so that every way to write them gives the same graph."""

    def adapt(bound: Arguments) -> Arguments:
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = bound.get(key, default)
            value = 0 if value == "valid" else value
            bound[key] = value if isinstance(value, str) else _tuple(value, n)
        return bound

    return adapt


def _pool(n: int) -> Any:
    """Options of an n-dimensional pooling as n-tuples; the stride defaults to the kernel."""

    def adapt(bound: Arguments) -> Arguments | str:
        if bound.pop("return_indices", False):
            return "returns indices"
        bound["kernel_size"] = _tuple(bound["kernel_size"], n)
        bound["stride"] = _tuple(bound.get("stride") or bound["kernel_size"], n)
        for key in ("padding", "dilation"):
            if key in bound:
                bound[key] = _tuple(bound[key], n)
        return bound

    return adapt


def _tuple(value: Any, n: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * n if len(values) == 1 else values


def _not_zero_padded_transpose(bound: Arguments) -> Arguments | str:
    return "pads other than with zeros" if bound.pop("padding_mode", "zeros") != "zeros" else bound


def _alpha_one(options: Mapping[str, Any]) -> str | None:
    return None if options["alpha"] == 1 else "add scales its second operand (alpha)"


def _nearest(options: Mapping[str, Any]) -> str | None:
    mode = options["mode"]
    return None if mode in ("nearest", "nearest-exact") else f"interpolates ({mode})"


# ---- ops with weights

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


@row(spell(nn.Conv1d, _CONV, _conv(1)), spell(F.conv1d, _CONV, _conv(1)),
     spell(aten.conv1d.default, _CONV, _conv(1)), spell(aten.conv1d.padding, _CONV, _conv(1)), quant=_CONV_QUANT)
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = (1,), padding: Any = (0,),
           dilation: Any = (1,), groups: int = 1, padding_mode: str = "zeros") -> Tensor:
    """x (N, C, L), weight (O, C/groups, K), bias (O,) -> (N, O, L')."""
    return _convolve(F.conv1d, x, weight, bias, {"stride": stride, "padding": padding, "dilation": dilation,
                                                 "groups": groups, "padding_mode": padding_mode})


@row(spell(nn.Conv2d, _CONV, _conv(2)), spell(F.conv2d, _CONV, _conv(2)),
     spell(aten.conv2d.default, _CONV, _conv(2)), spell(aten.conv2d.padding, _CONV, _conv(2)), quant=_CONV_QUANT)
def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = (1, 1), padding: Any = (0, 0),
           dilation: Any = (1, 1), groups: int = 1, padding_mode: str = "zeros") -> Tensor:
    """x (N, C, H, W), weight (O, C/groups, KH, KW), bias (O,) -> (N, O, H', W')."""
    return _convolve(F.conv2d, x, weight, bias, {"stride": stride, "padding": padding, "dilation": dilation,
                                                 "groups": groups, "padding_mode": padding_mode})


_CONVT = "x weight bias stride padding output_padding groups dilation"


def _conv_transpose(bound: Arguments) -> Arguments | str:
    if bound.pop("padding_mode", "zeros") != "zeros":
        return "pads other than with zeros"
    bound = _conv(2)(bound)
    bound["output_padding"] = _tuple(bound.get("output_padding", 0), 2)
    return bound


@row(spell(nn.ConvTranspose2d, _CONVT + " padding_mode", _conv_transpose),
     spell(F.conv_transpose2d, _CONVT, _conv_transpose), spell(aten.conv_transpose2d.input, _CONVT, _conv_transpose),
     quant=computes("x", weight="weight", bias="bias", axis=1, heavy=True))
def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = (1, 1),
                     padding: Any = (0, 0), output_padding: Any = (0, 0), dilation: Any = (1, 1),
                     groups: int = 1) -> Tensor:
    """x (N, C, H, W), weight (C, O/groups, KH, KW), bias (O,) -> (N, O, H', W')."""
    return F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)


@row(nn.Linear, F.linear, aten.linear.default, quant=computes("x", weight="weight", bias="bias", axis=0, heavy=True))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (O, K), bias (O,) -> (..., O)."""
    return F.linear(x, weight, bias)


_NORM = "x running_mean running_var weight bias training momentum eps"
_NORM_ATEN = "x weight bias running_mean running_var training momentum eps cudnn_enabled"


@row(spell(nn.BatchNorm1d, _NORM, _eval_norm), spell(nn.BatchNorm2d, _NORM, _eval_norm),
     spell(nn.BatchNorm3d, _NORM, _eval_norm), spell(F.batch_norm, _NORM, _eval_norm),
     spell(torch.batch_norm, _NORM_ATEN, _eval_norm), spell(aten.batch_norm.default, _NORM_ATEN, _eval_norm),
     quant=float_only("x"))
def batch_norm(x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None,
               bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """x (N, C, ...), statistics, weight and bias (C,): (x - mean) / sqrt(var + eps) * weight + bias."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


@row(nn.PReLU, F.prelu, aten.prelu.default, "prelu", quant=float_only("x"))
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C, ...), weight (1,) or (C,): max(0, x) + weight * min(0, x)."""
    return F.prelu(x, weight)


# ---- arithmetic of two tensors


@row(torch.add, operator.add, operator.iadd, "add", "add_", aten.add.Tensor, aten.add_.Tensor,
     quant=computes("x", "other", unless=_alpha_one), commutes=True)
def add(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """x + alpha * other, broadcast."""
    return torch.add(x, other, alpha=alpha) if alpha != 1 else x + other


@row(torch.mul, operator.mul, operator.imul, "mul", "mul_", aten.mul.Tensor, aten.mul_.Tensor,
     quant=computes("x", "other"), commutes=True)
def mul(x: Tensor, other: Tensor) -> Tensor:
    """x * other, broadcast."""
    return x * other


@row(spell(torch.cat, "xs dim"), spell(torch.concat, "xs dim"), spell(torch.concatenate, "xs dim"),
     spell(aten.cat.default, "xs dim"), quant=moves("xs", layout=True))
def cat(xs: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Concatenate along `dim`."""
    return torch.cat(list(xs), dim)


# ---- activation functions

_INPLACE = "x inplace"


@row(nn.ReLU, spell(F.relu, _INPLACE), torch.relu, torch.relu_, "relu", "relu_", aten.relu.default,
     aten.relu_.default, quant=moves("x", narrows=True))
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


@row(nn.ReLU6, spell(F.relu6, _INPLACE), aten.relu6.default, quant=moves("x", narrows=True))
def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return F.relu6(x)


_CLAMP = "x min max"


@row(nn.Hardtanh, spell(F.hardtanh, "x min_val max_val inplace"), spell(F.hardtanh_, "x min_val max_val"),
     aten.hardtanh.default, aten.hardtanh_.default, spell(torch.clamp, _CLAMP, _numbers), spell(torch.clip, _CLAMP, _numbers),
     spell("clamp", _CLAMP, _numbers), spell("clamp_", _CLAMP, _numbers), spell("clip", _CLAMP, _numbers),
     spell(aten.clamp.default, _CLAMP, _numbers), quant=moves("x", narrows=True))
def hardtanh(x: Tensor, *, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """min(max(x, min_val), max_val); either bound may be infinite."""
    return torch.clamp(x, min_val, max_val)


@row(nn.Hardswish, spell(F.hardswish, _INPLACE), aten.hardswish.default, aten.hardswish_.default, quant=float_only("x"))
def hardswish(x: Tensor) -> Tensor:
    """x * relu6(x + 3) / 6."""
    return F.hardswish(x)


@row(nn.Hardsigmoid, spell(F.hardsigmoid, _INPLACE), aten.hardsigmoid.default,
     quant=float_only("x", output_range=(0.0, 1.0)))
def hardsigmoid(x: Tensor) -> Tensor:
    """relu6(x + 3) / 6."""
    return F.hardsigmoid(x)


@row(nn.SiLU, spell(F.silu, _INPLACE), aten.silu.default, aten.silu_.default, quant=float_only("x"))
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


@row(nn.GELU, F.gelu, aten.gelu.default, quant=float_only("x"))
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x), or its tanh approximation."""
    return F.gelu(x, approximate=approximate)


@row(nn.LeakyReLU, spell(F.leaky_relu, "x negative_slope inplace"), spell(F.leaky_relu_, "x negative_slope"),
     aten.leaky_relu.default, aten.leaky_relu_.default, quant=float_only("x"))
def leaky_relu(x: Tensor, *, negative_slope: float = 0.01) -> Tensor:
    """max(0, x) + negative_slope * min(0, x)."""
    return F.leaky_relu(x, negative_slope)


@row(nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_", aten.sigmoid.default,
     quant=float_only("x", output_range=(0.0, 1.0)))
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


@row(nn.Tanh, F.tanh, torch.tanh, "tanh", "tanh_", aten.tanh.default, quant=float_only("x", output_range=(-1.0, 1.0)))
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


# ---- pooling and reduction

_MAX_POOL = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG_POOL = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"


@row(spell(nn.MaxPool1d, _MAX_POOL, _pool(1)), spell(F.max_pool1d, _MAX_POOL, _pool(1)),
     spell(torch.max_pool1d, _MAX_POOL, _pool(1)), spell(aten.max_pool1d.default, _MAX_POOL, _pool(1)), quant=moves("x"))
def max_pool1d(x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0,), dilation: Any = (1,),
               ceil_mode: bool = False) -> Tensor:
    """x (N, C, L) -> (N, C, L')."""
    return F.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(spell(nn.MaxPool2d, _MAX_POOL, _pool(2)), spell(F.max_pool2d, _MAX_POOL, _pool(2)),
     spell(torch.max_pool2d, _MAX_POOL, _pool(2)), spell(aten.max_pool2d.default, _MAX_POOL, _pool(2)), quant=moves("x"))
def max_pool2d(x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0, 0), dilation: Any = (1, 1),
               ceil_mode: bool = False) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W')."""
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


@row(spell(nn.AvgPool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
     spell(F.avg_pool1d, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
     spell(aten.avg_pool1d.default, "x kernel_size stride padding ceil_mode count_include_pad", _pool(1)),
     quant=computes("x"))
def avg_pool1d(x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0,), ceil_mode: bool = False,
               count_include_pad: bool = True) -> Tensor:
    """x (N, C, L) -> (N, C, L')."""
    return F.avg_pool1d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)


@row(spell(nn.AvgPool2d, _AVG_POOL, _pool(2)), spell(F.avg_pool2d, _AVG_POOL, _pool(2)),
     spell(aten.avg_pool2d.default, _AVG_POOL, _pool(2)), quant=computes("x"))
def avg_pool2d(x: Tensor, *, kernel_size: Any, stride: Any, padding: Any = (0, 0), ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W')."""
    return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _size2(bound: Arguments) -> Arguments:
    return {**bound, "output_size": _tuple(bound["output_size"], 2)}


def _max_size2(bound: Arguments) -> Arguments | str:
    return "returns indices" if bound.pop("return_indices", False) else _size2(bound)


@row(spell(nn.AdaptiveAvgPool2d, "x output_size", _size2), spell(F.adaptive_avg_pool2d, "x output_size", _size2),
     spell(aten.adaptive_avg_pool2d.default, "x output_size", _size2), quant=computes("x"))
def adaptive_avg_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_avg_pool2d(x, output_size)


@row(spell(nn.AdaptiveMaxPool2d, "x output_size return_indices", _max_size2),
     spell(F.adaptive_max_pool2d, "x output_size return_indices", _max_size2), quant=moves("x"))
def adaptive_max_pool2d(x: Tensor, *, output_size: Any) -> Tensor:
    """x (N, C, H, W) -> (N, C, *output_size)."""
    return F.adaptive_max_pool2d(x, output_size)


@row(spell(torch.mean, "x dim keepdim", _reduce), spell("mean", "x dim keepdim", _reduce),
     spell(aten.mean.dim, "x dim keepdim", _reduce), quant=computes("x"))
def mean(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Mean over the axes `dim`."""
    return torch.mean(x, dim, keepdim)


# ---- data movement


@row(nn.Flatten, torch.flatten, "flatten", quant=moves("x", layout=True, view=True))
def flatten(x: Tensor, *, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes start_dim..end_dim into one."""
    return torch.flatten(x, start_dim, end_dim)


def _sizes(bound: Arguments) -> Arguments | str:
    shape = bound.get("shape", ())
    if isinstance(shape, torch.dtype) or (isinstance(shape, tuple) and any(isinstance(s, torch.dtype) for s in shape)):
        return "changes the dtype"
    return {**bound, "shape": tuple(shape)} if isinstance(shape, (tuple, list)) else bound


@row(spell(torch.reshape, "x shape", _sizes), spell("reshape", "x *shape", _sizes), spell("view", "x *shape", _sizes),
     spell(aten.reshape.default, "x shape", _sizes), spell(aten.view.default, "x shape", _sizes),
     quant=moves("x", layout=True, view=True))
def reshape(x: Tensor, *, shape: Any) -> Tensor:
    """The same elements in another shape; `view` is one of its spellings."""
    return torch.reshape(x, shape)


@row(spell(torch.permute, "x dims"), spell("permute", "x *dims"), spell(aten.permute.default, "x dims"),
     quant=moves("x", layout=True, view=True))
def permute(x: Tensor, *, dims: Any) -> Tensor:
    """Reorder the axes."""
    return torch.permute(x, tuple(dims))


@row(spell(torch.transpose, "x dim0 dim1"), spell("transpose", "x dim0 dim1"), spell(torch.swapaxes, "x dim0 dim1"),
     spell(aten.transpose.int, "x dim0 dim1"), quant=moves("x", layout=True, view=True))
def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    """Swap two axes."""
    return torch.transpose(x, dim0, dim1)


@row("contiguous", quant=moves("x", layout=True, view=True))
def contiguous(x: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    """The same values, laid out in memory as asked."""
    return x.contiguous(memory_format=memory_format)


@row(nn.PixelShuffle, spell(F.pixel_shuffle, "x upscale_factor"), aten.pixel_shuffle.default, quant=moves("x", layout=True))
def pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    """x (N, C*r*r, H, W) -> (N, C, H*r, W*r).  Source: Shi et al. 2016, section 3.2."""
    return F.pixel_shuffle(x, upscale_factor)


@row(spell(F.pad, "x pad mode value"), spell(nn.ZeroPad2d, "x padding", _pad_module("constant")),
     spell(nn.ConstantPad2d, "x padding value", _pad_module("constant")),
     spell(nn.ReflectionPad2d, "x padding", _pad_module("reflect")),
     spell(nn.ReplicationPad2d, "x padding", _pad_module("replicate")),
     spell(nn.CircularPad2d, "x padding", _pad_module("circular")),
     spell(aten.constant_pad_nd.default, "x pad value"), quant=moves("x"))
def pad(x: Tensor, *, pad: Any, mode: str = "constant", value: float | None = 0.0) -> Tensor:
    """Pad the last axes: `pad` is (left, right) of the last axis, then of the one before."""
    return F.pad(x, pad, mode, value if mode == "constant" else None)


_INTERPOLATE = "x size scale_factor mode align_corners recompute_scale_factor antialias"


@row(spell(F.interpolate, _INTERPOLATE), spell(nn.Upsample, _INTERPOLATE),
     spell(nn.UpsamplingNearest2d, "x size scale_factor", _upsample_nearest),
     quant=moves("x", layout=True, unless=_nearest))
def interpolate(x: Tensor, *, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
                antialias: bool = False) -> Tensor:
    """Resize the spatial axes; only the nearest modes are pure data movement."""
    return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


def _dropout(bound: Arguments) -> Arguments:
    bound.pop("p", None)
    return bound


_DROPOUT = "x p training inplace"


@row(*(spell(t, _DROPOUT, _dropout) for t in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)),
     *(spell(t, _DROPOUT, _dropout) for t in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)),
     quant=moves("x", layout=True, view=True))
def dropout(x: Tensor, *, training: bool = True) -> Tensor:
    """The identity when `training` is false; canonicalize removes it then."""
    return F.dropout(x, training=training)


@row(nn.Identity, quant=moves("x", layout=True, view=True))
def identity(x: Tensor) -> Tensor:
    """x itself; canonicalize removes it."""
    return x


# ---- conversions


@row(torch.ops.fxq.quantize.default, quant=float_only("x"))
def quantize(x: Tensor, *, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    """x float32 -> `dtype`, per tensor (see `fxq/qparams.py`)."""
    return torch.ops.fxq.quantize.default(x, scale, zero_point, qmin, qmax, dtype)


@row(torch.ops.fxq.dequantize.default, quant=float_only("x"))
def dequantize(x: Tensor, *, scale: float, zero_point: int) -> Tensor:
    """x integer -> float32, per tensor."""
    return torch.ops.fxq.dequantize.default(x, scale, zero_point)


@row(torch.ops.fxq.dequantize.channel, quant=float_only("x"))
def dequantize_channel(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int) -> Tensor:
    """x integer -> float32, one scale per entry of `axis`."""
    return torch.ops.fxq.dequantize.channel(x, scale, zero_point, axis)


@row(quant=float_only("x"))
def requantize(x: Tensor, *, from_scale: float, from_zero_point: int, scale: float, zero_point: int, qmin: int, qmax: int,
               dtype: torch.dtype) -> Tensor:
    """x integer on one grid -> integer on another: quantize(dequantize(x))."""
    return torch.ops.fxq.quantize.default(
        torch.ops.fxq.dequantize.default(x, from_scale, from_zero_point), scale, zero_point, qmin, qmax, dtype
    )
