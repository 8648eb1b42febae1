"""Quantization of one tensor by hand, without a model: find scale and zero point, apply them, compute the error."""

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
    """Make an observer: call it on tensors, then read scale and zero point with `qparams()`.

    Args:
        kind: "minmax", "moving_average:0.01", "histogram", "percentile:99.99", "entropy", "mse:2" (stores all values),
            or the import path of your own class, with options after a colon.
        axis: None: one scale for the tensor. Else one per entry of this axis ("minmax", "moving_average", "mse").
        bits: width of the integers, 2 to 8.
        signed: True: stored as int8; False: as uint8.
        symmetric: True: the zero point is 0 (unsigned: the middle); False: affine, the zero point fits the range.

    Raises:
        RecipeError: unknown observer, or invalid options, bits or axis.

    Example:
        >>> obs = fxq.extend.make_observer("minmax")
        >>> x = obs(torch.tensor([-1.0, 0.0, 1.55]))  # returns its input
        >>> print(obs.qparams())
        scale=0.01 zero_point=100
        >>> obs = fxq.extend.make_observer("minmax", axis=0, signed=True, symmetric=True)
        >>> x = obs(torch.tensor([[0.5, -1.27], [2.54, 0.0]]))
        >>> obs.qparams().scale, obs.qparams().zero_point
        (tensor([0.0100, 0.0200]), tensor([0, 0], dtype=torch.int32))
    """
    if axis is not None and type(axis) is not int:
        raise RecipeError(f"make_observer: axis is {axis!r}; it must be an integer, such as 0, or None.")
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
    """Quantize a tensor: clamp(round(x / scale) + zero_point, qmin, qmax). Ties round to even.

    Args:
        x: floating point, any shape. Infinity becomes qmin or qmax.
        scale: float units per integer step, > 0: a number; per channel (with `axis`) float32 (C,); per block (with
            `axis` and `block`) the shape of `x`, with one entry per block along `axis`. Or `QParams`, as an observer
            returns them; then leave out all arguments that follow.
        zero_point: integer of 0.0, from qmin to qmax: a number, or int32 in the shape of `scale`.
        qmin: smallest integer, default 0. The result is int8 if it is negative, else uint8.
        qmax: largest integer, default 255.
        axis: the channel axis, or the axis that is cut into blocks; None: per tensor.
        block: number of values along `axis` that share a scale.

    Returns:
        Integers, int8 or uint8, same shape as `x`.

    Raises:
        InputError: an argument is invalid, or `x` has NaN.

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
    """Dequantize a tensor: (q - zero_point) * scale.

    Args:
        q: integers of any dtype and shape, also int32 biases.
        scale: as for `quantize_tensor`.
        zero_point: any integer, or int32 in the shape of `scale`.
        axis: as for `quantize_tensor`.
        block: as for `quantize_tensor`.

    Returns:
        float32, same shape as `q`.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> fxq.extend.dequantize_tensor(torch.tensor([5, 10, 13], dtype=torch.uint8), 0.5, 10)
        tensor([-2.5000,  0.0000,  1.5000])
    """
    name = "dequantize_tensor"
    if not isinstance(q, Tensor) or q.is_floating_point() or q.is_complex() or q.dtype == torch.bool:
        raise InputError(f"{name}: takes a tensor of integers, not {_description(q)}.")
    return dequantize(q, _grid(name, q, scale, zero_point, None, None, axis, block))


@dataclass(frozen=True)
class QuantizationNoise:
    """Error of quantizing a tensor: the difference to the tensor after quantize and dequantize.

    Attributes:
        sqnr: signal to quantization noise ratio in dB; one bit is about 6 dB.
        max_error: largest absolute difference, in the unit of the tensor.
        clipped: share of the values, 0 to 1, that are outside of the grid.
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
    """Compute the error of quantizing a tensor with this scale and zero point. Arguments as for `quantize_tensor`.

    Raises:
        InputError: an argument is invalid, or `x` has NaN or infinities.

    Example:
        >>> x = torch.linspace(-1, 1, 1001)
        >>> print(fxq.extend.quantization_error(x, 2 / 255, 128))
        SQNR 48.1 dB, largest error 0.00392, 0.00% clipped
        >>> print(fxq.extend.quantization_error(x, 1 / 255, 128))
        SQNR 9.0 dB, largest error 0.502, 49.85% clipped
    """
    x, grid = _checked("quantization_error", x, scale, zero_point, qmin, qmax, axis, block)
    if x.isinf().any():
        raise InputError("quantization_error: x has infinities, whose error is infinite.")
    agreement = Agreement()
    agreement.add(x, dequantize(quantize(x, grid), grid))
    scales, zero = (spread(t.to(x.device), x, grid.axis, grid.block) for t in (grid.scale, grid.zero_point))
    steps = torch.round(x / scales) + zero
    outside = int(((steps < grid.qmin) | (steps > grid.qmax)).sum())
    return QuantizationNoise(agreement.sqnr, agreement.max_error, outside / max(x.numel(), 1))


def _checked(
    name: str, x: Any, scale: Any, zero_point: Any, qmin: Any, qmax: Any, axis: Any, block: Any
) -> tuple[Tensor, QParams]:
    """Return the tensor in float32, and the grid of the arguments of the function `name`, both checked."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(f"{name}: takes a floating point tensor, not {_description(x)}.")
    x = x.detach().to(torch.float32)
    if x.isnan().any():
        raise InputError(f"{name}: x has NaN, which cannot be quantized.")
    grid = _grid(name, x, scale, zero_point, qmin, qmax, axis, block)
    if not -128 <= grid.qmin < grid.qmax <= (127 if grid.qmin < 0 else 255):
        raise InputError(
            f"{name}: qmin is {grid.qmin} and qmax {grid.qmax}; they must be in -128..127 (int8) or in 0..255 (uint8)."
        )
    if bool(((grid.zero_point < grid.qmin) | (grid.zero_point > grid.qmax)).any()):
        raise InputError(f"{name}: zero_point must be from qmin to qmax, which are {grid.qmin} and {grid.qmax}.")
    return x, grid


def _grid(
    name: str, x: Tensor, scale: Any, zero_point: Any, qmin: Any, qmax: Any, axis: int | None, block: int | None
) -> QParams:
    """Return the grid of the arguments, for values of the shape of `x`."""
    if isinstance(scale, QParams):
        if any(value is not None for value in (zero_point, qmin, qmax, axis, block)):
            raise InputError(f"{name}: QParams include zero_point, qmin, qmax, axis and block; leave those out.")
        zero_point, qmin, qmax, axis, block = scale.zero_point, scale.qmin, scale.qmax, scale.axis, scale.block
        scale = scale.scale
    qmin, qmax = 0 if qmin is None else qmin, 255 if qmax is None else qmax
    if type(qmin) is not int or type(qmax) is not int:
        raise InputError(f"{name}: qmin and qmax are integers, not {qmin!r} and {qmax!r}.")
    shape = _shape(name, x, axis, block)
    if not isinstance(scale, (Tensor, int, float)) or isinstance(scale, bool):
        raise InputError(f"{name}: scale is a number, a tensor of numbers, or QParams, not {_description(scale)}.")
    scales = torch.as_tensor(scale, dtype=torch.float32)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise InputError(f"{name}: scale must be finite and more than 0; it is {_smallest(scales)}.")
    is_integer = isinstance(zero_point, int) or (
        isinstance(zero_point, Tensor) and not zero_point.dtype.is_floating_point
    )
    if not is_integer:
        raise InputError(f"{name}: zero_point must be an integer, not {_description(zero_point)}.")
    zeros = torch.as_tensor(zero_point, dtype=torch.int32, device=scales.device)
    zeros = zeros if isinstance(zero_point, Tensor) else zeros.expand(shape)
    for argument, values in (("scale", scales), ("zero_point", zeros)):
        if values.shape != shape and (axis is not None or values.numel() != 1):
            raise InputError(
                f"{name}: {argument} has shape {tuple(values.shape)}, and must have {shape} for a tensor of shape "
                f"{tuple(x.shape)} with axis={axis} and block={block}: one number per entry, or block, of the axis; "
                "without axis, one number."
            )
    dtype = torch.int8 if qmin < 0 else torch.uint8
    return QParams(scales.reshape(shape), zeros.reshape(shape), qmin, qmax, dtype, axis, block)


def _shape(name: str, x: Tensor, axis: int | None, block: int | None) -> tuple[int, ...]:
    """Shape of the scales for values of the shape of `x`."""
    if axis is None:
        if block is not None:
            raise InputError(f"{name}: block needs axis, the axis that is cut into blocks.")
        return ()
    if type(axis) is not int or not -x.dim() <= axis < x.dim():
        raise InputError(f"{name}: there is no axis {axis!r} in a tensor of shape {tuple(x.shape)}.")
    if block is None:
        return (x.shape[axis],)
    if type(block) is not int or block < 1:
        raise InputError(f"{name}: block is {block!r}; it must be the number of values that share a scale, 1 or more.")
    shape = list(x.shape)
    shape[axis] = math.ceil(shape[axis] / block)
    return tuple(shape)


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _smallest(values: Tensor) -> str:
    return f"{float(values.min()):g}" if values.numel() else "an empty tensor"
