"""Quantization parameters and their arithmetic, and the operators `fxq::quantize` and `fxq::dequantize`.

    x_q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)        x ~ (x_q - zero_point) * scale

Source: Jacob et al. 2018, section 2.1, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxq.common.isolation import autocast_on
from fxq.errors import InputError
from fxq.quant.spec import TensorSpec

_LIB = torch.library.Library("fxq", "DEF")
_LIB.define("quantize(Tensor x, float scale, int zero_point, int qmin, int qmax, ScalarType dtype) -> Tensor")
_LIB.define("dequantize(Tensor q, float scale, int zero_point) -> Tensor")
_GRIDS = "Tensor scale, Tensor zero_point, int? axis, int? block"
_LIB.define(f"quantize.tensor(Tensor x, {_GRIDS}, int qmin, int qmax, ScalarType dtype) -> Tensor")
_LIB.define(f"dequantize.tensor(Tensor q, {_GRIDS}) -> Tensor")


def as_float32(x: Tensor) -> Tensor:
    """Return `x`, an input of a quantized layer, as float32; only `torch.autocast` may have made it another type.

    Raises:
        InputError: `x` has another dtype outside of `torch.autocast`, so that the scale may not fit its values.
    """
    if x.dtype == torch.float32:
        return x
    if x.dtype in (torch.float16, torch.bfloat16) and autocast_on():
        return x.to(torch.float32)
    dtype = str(x.dtype).removeprefix("torch.")
    raise InputError(
        f"an input of a quantized layer is {dtype}, of shape {tuple(x.shape)}; the layer takes float32. "
        "Give the quantized model the inputs of the float model: x.float(), and images of bytes with the scaling of "
        "the float model, such as x.float() / 255."
    )


def _quantize(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    return _to_grid(as_float32(x), scale, zero_point, qmin, qmax, dtype)


def _to_grid(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | int, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    x = x.to(torch.float32)
    if not isinstance(scale, Tensor):
        scale = x.new_full((), scale)  # exact division on every device; some multiply by the inverse of a number
    return (x / scale).round_().add_(zero_point).clamp_(qmin, qmax).to(dtype)


def spread(values: Tensor, x: Tensor, axis: int | None, block: int | None) -> Tensor:
    """Return scales or zero points in a shape that broadcasts with `x`.

    Args:
        values: () per tensor; (..., 1) per row, returned unchanged; (C,) per channel; per block, as many axes as `x`:
            one entry per block along `axis`, and along each other axis one per entry of `x`, or one for all.
        x: the tensor, any shape.
        axis: the channel axis, or the axis that is cut into blocks; None: per tensor or per row.
        block: number of entries along `axis` that share a scale; the last block may be shorter.
    """
    if axis is None or values.dim() == 0:
        return values
    if block is not None:
        return values.repeat_interleave(min(block, x.shape[axis]), axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.reshape(shape)


def _quantize_tensor(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    block: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    x = as_float32(x)
    return _to_grid(x, spread(scale, x, axis, block), spread(zero_point, x, axis, block), qmin, qmax, dtype)


def _dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    return q.to(torch.float32, copy=True).sub_(zero_point).mul_(scale)


def _dequantize_tensor(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, block: int | None) -> Tensor:
    return (q.to(torch.float32) - spread(zero_point, q, axis, block)).mul_(spread(scale, q, axis, block))


_DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "quantize": _quantize,
    "quantize.tensor": _quantize_tensor,
    "dequantize": _dequantize,
    "dequantize.tensor": _dequantize_tensor,
}


def _pieces(x: Tensor, axis: int, block: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of all full blocks of `x` and of the shorter last block, each with scales or zero points that broadcast."""
    count, rest = divmod(x.shape[axis], block)
    for first, blocks, size in ((0, count, block), (count, 1, rest)):
        if blocks and size:
            part = x.narrow(axis, first * block, blocks * size).unflatten(axis, (blocks, size))
            yield part, *(v.narrow(axis, first, blocks).unsqueeze(axis + 1) if v.dim() else v for v in values)


_AT_ONCE = 1 << 18
"""Values of a large weight that are quantized at once: a float copy of the whole would take long to allocate."""


def _quantize_blocks(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    block: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """Quantize on a grid per block, without scales and zero points in the size of `x`."""
    if axis is None or block is None:
        return _quantize_tensor(x, scale, zero_point, axis, block, qmin, qmax, dtype)
    rows = max(_AT_ONCE * len(x) // max(x.numel(), 1), 1)
    if len(x) > 8 * rows and axis % x.dim() and len(scale) == len(x) and zero_point.shape in (scale.shape, ()):
        q = torch.empty(x.shape, dtype=dtype, device=x.device)
        for i in range(0, len(x), rows):
            z = zero_point[i : i + rows] if zero_point.dim() else zero_point
            q[i : i + rows] = _quantize_blocks(x[i : i + rows], scale[i : i + rows], z, axis, block, qmin, qmax, dtype)
        return q
    x, is_between = as_float32(x).clone(), zero_point.is_floating_point()
    for part, s, z in _pieces(x, axis % x.dim(), block, scale, zero_point):
        part.div_(s)
        part.add_(z).round_() if is_between else part.round_().add_(z)
    return x.clamp_(qmin, qmax).to(dtype)


def _dequantize_blocks(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, block: int | None) -> Tensor:
    """Dequantize; if the grid is per block, without scales and zero points in the size of `q`.

    Zero points that are all 0 are not subtracted: a pass over a large weight takes as long as reading it.
    """
    zeros_only = zero_point.is_cpu and zero_point.dim() <= q.dim() and not zero_point.any()
    if axis is None or block is None:
        if not zeros_only or scale.dim() > q.dim():
            return _dequantize_tensor(q, scale, zero_point, axis, block)
        return q.to(torch.float32, copy=True).mul_(spread(scale, q, axis, block))
    x = q.to(torch.float32, copy=True)
    for part, s, z in _pieces(x, axis % x.dim(), block, scale, zero_point):
        (part if zeros_only else part.sub_(z)).mul_(s)
    return x


_KERNELS = {**_DEFINITIONS, "quantize.tensor": _quantize_blocks, "dequantize.tensor": _dequantize_blocks}
for _name, _function in _KERNELS.items():
    _LIB.impl(_name, _function, "CompositeExplicitAutograd")


def define_op(schema: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define an operator of the namespace fxq.

    Args:
        schema: its name and signature, as `torch.library` takes them.
        function: its definition in PyTorch ops.
        fake: returns a tensor of its shape and dtype.
    """
    name = schema.partition("(")[0]
    _LIB.define(schema)
    _LIB.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxq::{name}")(fake)
    _DEFINITIONS[name] = function


class AsPlainOps(TorchFunctionMode):
    """Context in which a trace records the PyTorch ops that these operators consist of, instead of the operators."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or the definition of one of these operators."""
        if isinstance(function, torch._ops.OpOverload) and function.namespace == "fxq":
            function = _DEFINITIONS[str(function).removeprefix("fxq.").removesuffix(".default")]
        return function(*args, **(kwargs or {}))


@torch.library.register_fake("fxq::quantize")
@torch.library.register_fake("fxq::quantize.tensor")
def _(x: Tensor, *grid: Any) -> Tensor:
    return torch.empty_like(x, dtype=grid[-1])


@torch.library.register_fake("fxq::dequantize")
def _(q: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@torch.library.register_fake("fxq::dequantize.tensor")
def _(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, block: int | None) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def as_zero_point(value: Any, device: torch.device) -> Tensor:
    """Zero points as a tensor: int32, or float32 if they lie between integers."""
    between = isinstance(value, Tensor) and value.is_floating_point()
    return torch.as_tensor(value, dtype=torch.float32 if between else torch.int32, device=device)


@dataclass(frozen=True, eq=False)
class QParams:
    """Grid of one tensor: scale, zero point and integer limits.

    Attributes:
        scale: float32, > 0, float units per integer step: 0-d (per tensor), (C,) (per channel), or per block as many
            axes as the tensor, with one entry per block along `axis` and along each other axis either all or one.
            Scales of blocks that come from a file may be negative.
        zero_point: int32, same shape as `scale`: the integer of float zero. float32 for weights of files whose blocks
            have an offset that is no multiple of the scale, so that zero lies between two integers.
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        dtype: storage type, `torch.uint8` or `torch.int8`; `torch.float16` for weights that are stored so.
        axis: the channel axis, or the axis that is cut into blocks; None per tensor.
        block: number of values along `axis` that share a scale; None per tensor and per channel.
    """

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None
    block: int | None = None

    @classmethod
    def per_tensor(
        cls, scale: float, zero_point: int, qmin: int = 0, qmax: int = 255, dtype: torch.dtype = torch.uint8
    ) -> QParams:
        """Make parameters from plain numbers, on the CPU. `scale` is rounded to float32, as kernels use it."""
        scales = torch.tensor(scale, dtype=torch.float32, device="cpu")
        return cls(scales, torch.tensor(zero_point, dtype=torch.int32, device="cpu"), qmin, qmax, dtype)

    @classmethod
    def of_float16(cls) -> QParams:
        """Make the parameters of a weight that is stored as float16, with scale 1."""
        largest = int(torch.finfo(torch.float16).max)
        return cls.per_tensor(1.0, 0, -largest, largest, torch.float16)

    @property
    def s(self) -> float:
        """Scale as a float. Per tensor only."""
        return float(self.scale)

    @property
    def z(self) -> int:
        """Zero point as an int. Per tensor only."""
        return int(self.zero_point)

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 16 if self.dtype == torch.float16 else (self.qmax - self.qmin).bit_length()

    @property
    def low(self) -> Tensor:
        """Smallest float on the grid, same shape as `scale`."""
        return (self.qmin - self.zero_point) * self.scale

    @property
    def high(self) -> Tensor:
        """Largest float on the grid, same shape as `scale`."""
        return (self.qmax - self.zero_point) * self.scale

    def rounded(self, x: Tensor) -> Tensor:
        """Round `x` (float32, any shape) to the nearest floats on the grid: float32, same shape."""
        return dequantize(quantize(x, self), self)

    def quantize(self, x: Tensor) -> Tensor:
        """Quantize `x` (float32, any shape) to `dtype`, same shape. Ties round to even."""
        return quantize(x, self)

    def same_as(self, other: QParams | None) -> bool:
        """Whether both quantize every float to the same integer."""
        return other is not None and (
            self is other
            or (
                (self.qmin, self.qmax, self.dtype, self.axis, self.block)
                == (other.qmin, other.qmax, other.dtype, other.axis, other.block)
                and torch.equal(self.scale, other.scale)
                and torch.equal(self.zero_point, other.zero_point)
            )
        )

    def __str__(self) -> str:
        if self.axis is None:
            return f"scale={self.s:.4g} zero_point={self.z}"
        per = "channel" if self.block is None else f"block of {self.block}"
        return f"scale=[{float(self.scale.min()):.3g}..{float(self.scale.max()):.3g}] per {per} (axis {self.axis})"


def choose_qparams(
    low: Tensor, high: Tensor, spec: TensorSpec, axis: int | None = None, block: int | None = None
) -> QParams:
    """Choose the scale and zero point that cover the range from `low` to `high`. Float zero is on the grid, exactly.

    Args:
        low: smallest value, float32: 0-d (per tensor), (C,) (per channel), or per block the shape of `QParams.scale`.
        high: largest value, same shape.
        spec: bits, sign and symmetry of the grid.
        axis: the channel axis, or the axis that is cut into blocks; None per tensor.
        block: number of entries along `axis` that share a scale.

    Returns:
        The parameters. A channel whose range is 0 to 0 gets the largest scale of the other channels, so that its bias
        is as fine as theirs; if all are, the scale is that of the range 0 to 1. Scales below the smallest normal
        float32 are raised to it.

    Raises:
        InputError: `low` or `high` is NaN or infinite, or low > high.

    Example:
        >>> choose_qparams(torch.tensor(-1.0), torch.tensor(1.55), TensorSpec()).z
        100

    Source: Jacob et al. 2018, section 3 (nudged zero point).
    """
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise InputError("choose_qparams: the range has NaN or Inf; look for them in the weights or the data.")
    if bool((low > high).any()):
        raise InputError("choose_qparams: low > high; the observer has seen no data.")
    scale, zero_point = scale_and_zero_point(low, high, spec.qmin, spec.qmax, spec.symmetric)
    return QParams(scale, zero_point, spec.qmin, spec.qmax, spec.dtype, axis, block)


def scale_and_zero_point(low: Tensor, high: Tensor, qmin: int, qmax: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Compute scales and zero points as `choose_qparams` does, without checks, which would wait for the device.

    Args:
        low: smallest values, one per scale of a tensor, floating point, any shape.
        high: largest values, same shape.
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        symmetric: whether the zero point is the middle of the grid.

    Returns:
        Scales, float32, and zero points, int32, same shape as `low`.
    """
    low, high = low.detach().to(torch.float64).clamp(max=0.0), high.detach().to(torch.float64).clamp(min=0.0)
    if symmetric:
        zero = (qmin + qmax + 1) // 2
        scale, unit_scale = torch.maximum(-low / (zero - qmin), high / (qmax - zero)), 1 / (qmax - zero)
    else:
        scale, unit_scale = (high - low) / (qmax - qmin), 1 / (qmax - qmin)
    if scale.numel():
        largest = scale.amax()
        scale = torch.where(scale == 0, torch.where(largest == 0, unit_scale, largest), scale)
    scale = scale.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    if symmetric:
        return scale, torch.full_like(scale, zero, dtype=torch.int32)
    return scale, (qmin - torch.round(low / scale.double())).clamp(qmin, qmax).to(torch.int32)


def scale_dtype(scale: Tensor, exact: bool = False) -> torch.dtype:
    """Type in which scales of blocks are stored: float16, or float32 if one is out of its normal range.

    Rounding to it changes a scale by 0.05 % at most.

    Args:
        scale: the scales, float32, > 0.
        exact: whether no scale may change, as for weights with integers of a file.

    Example:
        >>> scale_dtype(torch.tensor([0.01, 2.0])), scale_dtype(torch.tensor([0.01, 2e-5]))
        (torch.float16, torch.float32)
    """
    half = torch.finfo(torch.float16)
    fits = bool(((scale >= half.tiny) & (scale <= half.max)).all())
    fits = fits and not (exact and not torch.equal(scale.half().float(), scale))
    return torch.float16 if fits else torch.float32


def quantize(x: Tensor, qp: QParams) -> Tensor:
    """Quantize `x` (float32, any shape) to the grid of `qp`: same shape, `qp.dtype`. Ties round to even.

    Example:
        >>> quantize(torch.tensor([0.0, 0.5, 9.0]), QParams.per_tensor(0.5, 3, 0, 15)).tolist()
        [3, 4, 15]
    """
    if qp.axis is None:
        return torch.ops.fxq.quantize.default(x, qp.s, qp.z, qp.qmin, qp.qmax, qp.dtype)
    scale, zero_point = qp.scale.to(x.device), qp.zero_point.to(x.device)
    return torch.ops.fxq.quantize.tensor(x, scale, zero_point, qp.axis, qp.block, qp.qmin, qp.qmax, qp.dtype)


def dequantize(q: Tensor, qp: QParams) -> Tensor:
    """Dequantize `q` (integers on the grid of `qp`): float32, same shape."""
    if qp.axis is None:
        return torch.ops.fxq.dequantize.default(q, qp.s, qp.z)
    scale, zero_point = qp.scale.to(q.device), qp.zero_point.to(q.device)
    return torch.ops.fxq.dequantize.tensor(q, scale, zero_point, qp.axis, qp.block)
