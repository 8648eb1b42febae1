"""Readers of elementwise ONNX ops: activation functions, arithmetic, comparisons and logic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.onnx.reading.graph_builder import Traced
from fxq.onnx.reading.onnx_file import FOUR_BIT, dtype_of_number
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.writer import refuse

_UNARY: dict[str, Callable[..., Any]] = {
    "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "HardSwish": F.hardswish, "Mish": F.mish, "Relu": torch.relu,
    "Erf": torch.erf, "Softsign": F.softsign, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt,
    "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos,
    "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh,
    "Atanh": torch.atanh, "Neg": torch.neg, "Abs": torch.abs, "Sign": torch.sign, "Ceil": torch.ceil,
    "Floor": torch.floor, "Round": torch.round, "Reciprocal": torch.reciprocal, "IsNaN": torch.isnan,
    "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not, "Det": torch.det,
}  # fmt: skip
"""PyTorch's function for op types with one input and no attributes."""


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(r: Reader, x: Any) -> Any:
        return r.call(function, x)

    return read


for _name, _function in _UNARY.items():
    reads(_name)(_unary(_function))


@reads("Identity")
def identity(r: Reader, x: Any) -> Any:
    return x


@reads("Dropout")
def dropout(r: Reader, x: Any, ratio: Any = None, training_mode: Any = None, **attributes: Any) -> Any:
    drops = (0.5 if ratio is None else r.number(ratio)) > 0
    refuse(training_mode is not None and r.number(training_mode) and drops, "it drops values at random")
    return x, r.call(torch.ones_like, x, dtype=torch.bool)


@reads("IsInf")
def is_inf(r: Reader, x: Any, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    if detect_negative and detect_positive:
        return r.call(torch.isinf, x)
    sign = math.inf if detect_positive else -math.inf
    return (
        r.call(torch.eq, x, sign)
        if detect_negative or detect_positive
        else r.call(torch.zeros_like, x, dtype=torch.bool)
    )


@reads("HardSigmoid")
def hard_sigmoid(r: Reader, x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return r.call(F.hardsigmoid, x)
    return r.call(torch.clamp, r.call(torch.add, r.call(torch.mul, x, alpha), beta), 0.0, 1.0)


@reads("Elu")
def elu(r: Reader, x: Any, *, alpha: float = 1.0) -> Any:
    return r.call(F.elu, x, alpha)


@reads("Selu")
def selu(
    r: Reader, x: Any, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Any:
    if abs(alpha - 1.6732632) < 1e-6 and abs(gamma - 1.050701) < 1e-6:
        return r.call(F.selu, x)
    return r.call(torch.mul, r.call(F.elu, x, alpha), gamma)


@reads("Celu")
def celu(r: Reader, x: Any, *, alpha: float = 1.0) -> Any:
    return r.call(F.celu, x, alpha)


@reads("LeakyRelu")
def leaky_relu(r: Reader, x: Any, *, alpha: float = 0.01) -> Any:
    return r.call(F.leaky_relu, x, alpha)


@reads("ThresholdedRelu")
def thresholded_relu(r: Reader, x: Any, *, alpha: float = 1.0) -> Any:
    return r.call(F.threshold, x, alpha, 0.0)


@reads("Softplus")
def softplus(r: Reader, x: Any) -> Any:
    return r.call(F.softplus, x)


@reads("Shrink")
def shrink(r: Reader, x: Any, *, bias: float = 0.0, lambd: float = 0.5) -> Any:
    if bias in (0.0, lambd) and r.like(x).is_floating_point():
        return r.call(F.softshrink if bias else F.hardshrink, x, lambd)
    above = r.call(torch.where, r.call(torch.gt, x, lambd), r.call(torch.sub, x, bias), r.call(torch.zeros_like, x))
    return r.call(torch.where, r.call(torch.lt, x, -lambd), r.call(torch.add, x, bias), above)


@reads("Gelu")
def gelu(r: Reader, x: Any, *, approximate: str = "none") -> Any:
    return r.call(F.gelu, x, approximate=approximate)


@reads("BiasGelu")
def bias_gelu(r: Reader, x: Any, bias: Any) -> Any:
    return r.call(F.gelu, r.call(torch.add, x, bias))


@reads("FastGelu")
def fast_gelu(r: Reader, x: Any, bias: Any = None) -> Any:
    return r.call(F.gelu, x if bias is None else r.call(torch.add, x, bias), approximate="tanh")


@reads("QuickGelu")
def quick_gelu(r: Reader, x: Any, *, alpha: float = 1.702) -> Any:
    return r.call(torch.mul, x, r.call(torch.sigmoid, r.call(torch.mul, x, alpha)))


@reads("Swish")
def swish(r: Reader, x: Any, *, alpha: float = 1.0) -> Any:
    if alpha == 1:
        return r.call(F.silu, x)
    return r.call(torch.mul, x, r.call(torch.sigmoid, r.call(torch.mul, x, alpha)))


@reads("PRelu")
def prelu(r: Reader, x: Any, slope: Any) -> Any:
    like, rank = r.like(slope), r.like(x).dim()
    channels = (
        like.dim() == 0
        or like.numel() == 1
        or (rank > 1 and like.dim() == rank - 1 and like.shape[0] == like.numel() == r.like(x).shape[1])
    )
    if isinstance(slope, Tensor) and channels and rank > 1:
        key = id(slope), "slope"
        return r.call(F.prelu, x, r.derived(key, slope, lambda: slope.reshape(-1)))
    return r.call(torch.where, r.call(torch.ge, x, 0), x, r.call(torch.mul, x, slope))


@reads("Clip")
def clip(r: Reader, x: Any, low: Any = None, high: Any = None, **attributes: float) -> Any:
    low, high = attributes.get("min", low), attributes.get("max", high)
    bounds = [value if value is None or isinstance(value, Traced) else r.number(value) for value in (low, high)]
    if bounds == [None, None]:
        return x
    if bounds == [0, 6] and r.like(x).is_floating_point():
        return r.call(F.relu6, x)
    lowest, highest = bounds
    if any(isinstance(bound, Traced) for bound in bounds):
        floor = x if lowest is None else r.call(torch.maximum, x, _as_tensor(r, lowest, x))
        return floor if highest is None else r.call(torch.minimum, floor, _as_tensor(r, highest, x))
    return r.call(torch.clamp, x, *bounds)


def _as_tensor(r: Reader, value: Any, x: Any) -> Any:
    return value if isinstance(value, Traced) else torch.tensor(value, dtype=r.like(x).dtype)


def plain(r: Reader, value: Any, other: Any) -> Any:
    """Return a constant with one entry as a number, if the result of an op with `other` has the shape of `other`."""
    if not isinstance(value, Tensor) or isinstance(other, Tensor) or value.numel() != 1:
        return value
    like = r.like(other)
    same_kind = value.dtype == like.dtype and value.dtype is not torch.bool
    return value.item() if same_kind and value.dim() <= like.dim() else value


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(r: Reader, x: Any, other: Any, **attributes: Any) -> Any:
        return r.call(function, plain(r, x, other), plain(r, other, x))

    return read


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Greater": operator.gt, "Less": operator.lt,
    "GreaterOrEqual": operator.ge, "LessOrEqual": operator.le, "Equal": operator.eq,
}  # fmt: skip
"""Python's operator for op types with two inputs."""
for _name, _function in _BINARY.items():
    reads(_name)(_binary(_function))

for _name, _function in {
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}.items():  # fmt: skip
    reads(_name)(lambda r, x, other, _function=_function, **attributes: r.call(_function, x, other))


plain_product = _binary(operator.mul)
"""Reader of Mul for any operands."""


@reads("Div")
def div(r: Reader, x: Any, other: Any, **attributes: Any) -> Any:
    if r.like(x).is_floating_point():
        return r.call(operator.truediv, plain(r, x, other), plain(r, other, x))
    return r.call(torch.div, x, plain(r, other, x), rounding_mode="trunc")


@reads("Mod")
def mod(r: Reader, x: Any, other: Any, *, fmod: int = 0) -> Any:
    return r.call(torch.fmod if fmod else torch.remainder, x, plain(r, other, x))


@reads("Pow")
def power(r: Reader, x: Any, exponent: Any) -> Any:
    constant = isinstance(exponent, Tensor) and exponent.numel() == 1 and exponent.dim() <= r.like(x).dim()
    result = r.call(torch.pow, x, exponent.item() if constant else exponent)
    dtype = r.like(x).dtype
    return result if r.like(result).dtype == dtype else cast_to(r, result, dtype)


@reads("BitShift")
def bit_shift(r: Reader, x: Any, amount: Any, *, direction: str) -> Any:
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return r.call(shift, x, amount)


def _folded(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(r: Reader, *xs: Any) -> Any:
        return reduce(lambda x, other: r.call(function, x, other), xs)

    return read


reads("Max")(_folded(torch.maximum))
reads("Min")(_folded(torch.minimum))
reads("Sum")(_folded(torch.add))


@reads("Mean")
def mean(r: Reader, *xs: Any) -> Any:
    return r.call(torch.div, reduce(lambda x, other: r.call(torch.add, x, other), xs), len(xs))


@reads("Where")
def where(r: Reader, condition: Any, x: Any, other: Any) -> Any:
    return r.call(torch.where, condition, x, other)


def cast_to(r: Reader, x: Any, dtype: torch.dtype) -> Any:
    """Cast an operand to a dtype."""
    if r.like(x).dtype == dtype:
        return x
    return r.call("to", x, dtype)


@reads("Cast")
def cast(r: Reader, x: Any, *, to: int, **attributes: Any) -> Any:
    refuse(to in FOUR_BIT, "it casts to 4-bit integers")
    result = cast_to(r, x, dtype_of_number(to))
    if id(x) in r.notes and r.like(result).dtype is torch.float32:
        r.noted(r.notes[id(x)], result)
    return result


@reads("CastLike")
def cast_like(r: Reader, x: Any, like: Any, **attributes: Any) -> Any:
    refuse(id(like) in r.four_bit, "it casts to 4-bit integers")
    return cast_to(r, x, r.like(like).dtype)


@reads("RandomNormalLike")
def random_normal_like(
    r: Reader, x: Any, *, mean: float = 0.0, scale: float = 1.0, dtype: int | None = None, seed: float = 0.0
) -> Any:
    kind = r.like(x).dtype if dtype is None else dtype_of_number(dtype)
    noise = r.call(torch.randn_like, x, dtype=kind)
    return r.call(operator.add, r.call(operator.mul, noise, scale), mean) if (mean, scale) != (0.0, 1.0) else noise
