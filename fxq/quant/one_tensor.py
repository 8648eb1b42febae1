"""Quantization of one tensor by hand, without a model: find scale and zero point, apply them, see what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxq.common.metrics import Agreement
from fxq.errors import InputError, RecipeError
from fxq.quant.observer_base import Observer
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams, dequantize, quantize, spread
from fxq.quant.spec import TensorSpec


def make_observer(
    kind: str = "histogram",
    axis: int | None = None,
    *,
    bits: int = 8,
    signed: bool = False,
    symmetric: bool = False,
) -> Observer:
    """An observer by itself: call it on tensors, as many as you like, then ask it for scale and zero point.

    Args:
        kind: "minmax", "moving_average:0.01", "histogram", "percentile:99.99", "entropy", "mse:2" (keeps all that it
            sees), or the import path of one of your own.
        axis: None: one scale for the tensor. Else one for each entry of this axis ("minmax", "moving_average", "mse").
        bits: 2 to 8.
        signed: integers around zero (int8), or from zero on (uint8).
        symmetric: the zero point is 0 (unsigned: the middle); else it is chosen so that the grid fits the range
            (affine).

    Raises:
        RecipeError: there is no such observer, or no such grid.

    Example:
        >>> obs = fxq.extend.make_observer("minmax")
        >>> x = obs(torch.tensor([-1.0, 0.0, 1.55]))  # it returns what it is given
        >>> print(obs.qparams())
        scale=0.01 zero_point=100
        >>> obs = fxq.extend.make_observer("minmax", axis=0, signed=True, symmetric=True)
        >>> x = obs(torch.tensor([[0.5, -1.27], [2.54, 0.0]]))
        >>> obs.qparams().scale, obs.qparams().zero_point
        (tensor([0.0100, 0.0200]), tensor([0, 0], dtype=torch.int32))
    """
    if axis is not None and type(axis) is not int:
        raise RecipeError(f"make_observer: axis is {axis!r}; it must be an axis of the tensors, as 0, or None.")
    per = "tensor" if axis is None else "channel"
    return observer_for(TensorSpec(bits, signed, symmetric, per, kind), axis)  # type: ignore[arg-type]


def quantize_tensor(
    x: Tensor,
    scale: QParams | Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    qmin: int | None = None,
    qmax: int | None = None,
    axis: int | None = None,
    block: int | None = None,
) -> Tensor:
    """The integers that stand for a tensor: clamp(round(x / scale) + zero_point, qmin, qmax). Ties round to even.

    Args:
        x: floating point, any shape. Infinity becomes qmin or qmax.
        scale: of one step, more than 0: a number; with `axis` float32 (C,), one for each of its entries; with `block`
            of the shape of `x`, but for `axis`, which has one entry for each block. Or the `QParams` of an observer,
            which say all that follows, too.
        zero_point: the integer that stands for 0.0, from qmin to qmax: a number, or int32 of the shape of `scale`.
        qmin: the smallest integer, by default 0. Below 0 the result is int8, else uint8.
        qmax: the largest integer, by default 255.
        axis: the axis whose entries, or blocks, have scales of their own.
        block: how many values along `axis` share a scale.

    Raises:
        InputError: an argument is none of these, or `x` holds NaN.

    Example:
        >>> fxq.extend.quantize_tensor(torch.tensor([-0.5, 0.0, 0.26, 9.0]), 0.1, 10, qmax=15)
        tensor([ 5, 10, 13, 15], dtype=torch.uint8)
    """
    x, grid = _checked("quantize_tensor", x, scale, zero_point, qmin, qmax, axis, block)
    return quantize(x, grid)


def dequantize_tensor(
    q: Tensor,
    scale: QParams | Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    axis: int | None = None,
    block: int | None = None,
) -> Tensor:
    """The real values of integers, float32: (q - zero_point) * scale.

    Args:
        q: integers of any type, such as int32 biases.
        scale: as for `quantize_tensor`.
        zero_point: any integer; else as there.
        axis: as there.
        block: as there.

    Raises:
        InputError: an argument is none of these.

    Example:
        >>> fxq.extend.dequantize_tensor(torch.tensor([5, 10, 13], dtype=torch.uint8), 0.5, 10)
        tensor([-2.5000,  0.0000,  1.5000])
    """
    name = "dequantize_tensor"
    if not isinstance(q, Tensor) or q.is_floating_point() or q.is_complex() or q.dtype == torch.bool:
        raise InputError(f"{name}: takes a tensor of integers, not {_what(q)}.")
    return dequantize(q, _grid(name, q, scale, zero_point, None, None, axis, block))


@dataclass(frozen=True)
class QuantizationNoise:
    """What a scale costs: how far a tensor is from itself, quantized and dequantized.

    Attributes:
        sqnr: signal to quantization noise ratio in dB; a bit more or less is 6 dB.
        max_error: the largest absolute difference.
        clipped: the share of the values, 0 to 1, that lie outside of what the integers reach.
    """

    sqnr: float
    max_error: float
    clipped: float

    def __str__(self) -> str:
        return f"SQNR {self.sqnr:.1f} dB, largest error {self.max_error:.3g}, {self.clipped:.2%} clipped"


def quantization_error(
    x: Tensor,
    scale: QParams | Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    qmin: int | None = None,
    qmax: int | None = None,
    axis: int | None = None,
    block: int | None = None,
) -> QuantizationNoise:
    """What it costs to quantize a tensor with this scale and zero point. The arguments are those of `quantize_tensor`.

    Raises:
        InputError: as there; also where `x` holds infinities.

    Example:
        >>> x = torch.linspace(-1, 1, 1001)
        >>> print(fxq.extend.quantization_error(x, 2 / 255, 128))
        SQNR 48.1 dB, largest error 0.00392, 0.00% clipped
        >>> print(fxq.extend.quantization_error(x, 1 / 255, 128))
        SQNR 9.0 dB, largest error 0.502, 49.85% clipped
    """
    x, grid = _checked("quantization_error", x, scale, zero_point, qmin, qmax, axis, block)
    if x.isinf().any():
        raise InputError("quantization_error: x holds infinities, whose error is infinite.")
    found = Agreement()
    found.add(x, dequantize(quantize(x, grid), grid))
    size, zero = (spread(t.to(x.device), x, grid.axis, grid.block) for t in (grid.scale, grid.zero_point))
    steps = torch.round(x / size) + zero
    outside = int(((steps < grid.qmin) | (steps > grid.qmax)).sum())
    return QuantizationNoise(found.sqnr, found.max_error, outside / max(x.numel(), 1))


def _checked(
    name: str, x: Any, scale: Any, zero_point: Any, qmin: Any, qmax: Any, axis: Any, block: Any
) -> tuple[Tensor, QParams]:
    """The tensor in float32, and the grid that the arguments of the function `name` say."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(f"{name}: takes a floating point tensor, not {_what(x)}.")
    x = x.detach().to(torch.float32)
    if x.isnan().any():
        raise InputError(f"{name}: x holds NaN, which no integer stands for.")
    grid = _grid(name, x, scale, zero_point, qmin, qmax, axis, block)
    if not -128 <= grid.qmin < grid.qmax <= (127 if grid.qmin < 0 else 255):
        raise InputError(
            f"{name}: qmin is {grid.qmin} and qmax {grid.qmax}; they must lie in -128..127 (int8) or in 0..255 (uint8)."
        )
    if bool(((grid.zero_point < grid.qmin) | (grid.zero_point > grid.qmax)).any()):
        raise InputError(f"{name}: a zero point must be one of the integers, which are {grid.qmin} to {grid.qmax}.")
    return x, grid


def _grid(
    name: str, x: Tensor, scale: Any, zero_point: Any, qmin: Any, qmax: Any, axis: int | None, block: int | None
) -> QParams:
    """The grid that the arguments say, for values of the shape of `x`."""
    if isinstance(scale, QParams):
        if any(value is not None for value in (zero_point, qmin, qmax, axis, block)):
            raise InputError(f"{name}: QParams say the zero point and all else; give nothing besides.")
        zero_point, qmin, qmax, axis, block = scale.zero_point, scale.qmin, scale.qmax, scale.axis, scale.block
        scale = scale.scale
    qmin, qmax = 0 if qmin is None else qmin, 255 if qmax is None else qmax
    if type(qmin) is not int or type(qmax) is not int:
        raise InputError(f"{name}: qmin and qmax are integers, not {qmin!r} and {qmax!r}.")
    shape = _shape(name, x, axis, block)
    if not isinstance(scale, (Tensor, int, float)) or isinstance(scale, bool):
        raise InputError(f"{name}: a scale is a number, a tensor of them, or QParams, not {_what(scale)}.")
    steps = torch.as_tensor(scale, dtype=torch.float32)
    if not bool((steps.isfinite() & (steps > 0)).all()):
        raise InputError(f"{name}: a scale is the size of a step, finite and more than 0; here is {_numbers(steps)}.")
    whole = isinstance(zero_point, int) or (isinstance(zero_point, Tensor) and not zero_point.dtype.is_floating_point)
    if not whole:
        raise InputError(f"{name}: zero_point is the integer that stands for 0.0, not {_what(zero_point)}.")
    zeros = torch.as_tensor(zero_point, dtype=torch.int32, device=steps.device)
    zeros = zeros if isinstance(zero_point, Tensor) else zeros.expand(shape)
    for what, values in (("scale", steps), ("zero_point", zeros)):
        if values.shape != shape and (axis is not None or values.numel() != 1):
            raise InputError(
                f"{name}: {what} has shape {tuple(values.shape)}, and must have {shape} for a tensor of shape "
                f"{tuple(x.shape)} with axis={axis} and block={block}: one for each entry, or block, of the axis; "
                "without axis, one."
            )
    dtype = torch.int8 if qmin < 0 else torch.uint8
    return QParams(steps.reshape(shape), zeros.reshape(shape), qmin, qmax, dtype, axis, block)


def _shape(name: str, x: Tensor, axis: int | None, block: int | None) -> tuple[int, ...]:
    """The shape of the scales of values like `x`."""
    if axis is None:
        if block is not None:
            raise InputError(f"{name}: blocks lie along an axis: give axis, too.")
        return ()
    if type(axis) is not int or not -x.dim() <= axis < x.dim():
        raise InputError(f"{name}: there is no axis {axis!r} in a tensor of shape {tuple(x.shape)}.")
    if block is None:
        return (x.shape[axis],)
    if type(block) is not int or block < 1:
        raise InputError(f"{name}: block is {block!r}; it is how many values share a scale, 1 or more.")
    shape = list(x.shape)
    shape[axis] = math.ceil(shape[axis] / block)
    return tuple(shape)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _numbers(values: Tensor) -> str:
    return f"{float(values.min()):g}" if values.numel() else "an empty tensor"
