"""ONNX form of elementwise ops: activation functions, arithmetic and comparisons."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer, refuse, writes

_UNARY_OP_TYPES = {
    "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish", "mish": "Mish", "selu": "Selu", "erf": "Erf",
    "softsign": "Softsign", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "neg": "Neg",
    "abs": "Abs",
}  # fmt: skip
"""ONNX op type of ops that are one ONNX node without attributes."""


def _unary(op_type: str) -> Any:
    def write(w: Writer, x: Value) -> str:
        exact = op_type in ("Neg", "Abs")
        return w.emit(op_type, x if x.dtype.is_floating_point or exact else w.cast(x, torch.get_default_dtype()))

    return write


for _name, _kind in _UNARY_OP_TYPES.items():
    writes(_name)(_unary(_kind))


@writes("cast")
def cast(w: Writer, x: Value, *, dtype: torch.dtype) -> str:
    if dtype is torch.bool and x.dtype is not torch.bool:
        return w.emit("Not", w.emit("Equal", x, w.number(0, x)))
    exact = dtype in (torch.float32, torch.int32, torch.int64) or x.dtype is torch.bool
    refuse(not exact, f"engines disagree on values of {dtype}")
    return w.cast(x, dtype)


def clamp(w: Writer, x: Value, low: float, high: float) -> str:
    """Write a clamp, and record it: a quantize after it may make it redundant (see `conversion_nodes.py`)."""
    if low == 0.0 and high == math.inf and x.dtype.is_floating_point:
        result = w.emit("Relu", x)
    else:
        bounds = (None if math.isinf(bound) else w.number(bound, x) for bound in (low, high))
        result = w.emit("Clip", x, *bounds)
    w.clamps[result] = (x.name, low, high)
    return result


@writes("relu")
def relu(w: Writer, x: Value) -> str:
    return clamp(w, x, 0.0, math.inf)


@writes("relu6")
def relu6(w: Writer, x: Value) -> str:
    return clamp(w, x, 0.0, 6.0)


@writes("hardtanh")
def hardtanh(w: Writer, x: Value, *, min_val: float, max_val: float) -> str:
    has_integer_bounds = all(isinstance(bound, int) or math.isinf(bound) for bound in (min_val, max_val))
    if not x.dtype.is_floating_point and not has_integer_bounds:
        x = Value(w.cast(x, torch.float32), x.like.float())
    return clamp(w, x, min_val, max_val)


@writes("hardsigmoid")
def hardsigmoid(w: Writer, x: Value) -> str:
    return w.emit("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@writes("silu")
def silu(w: Writer, x: Value) -> str:
    return w.emit("Mul", x, w.emit("Sigmoid", x))


@writes("gelu")
def gelu(w: Writer, x: Value, *, approximate: str) -> str:
    return w.emit("Gelu", x, approximate=approximate)


@writes("softplus")
def softplus(w: Writer, x: Value, *, beta: float, threshold: float) -> str:
    steep = x.name if beta == 1 else w.emit("Mul", x, w.number(beta, x))
    result = w.emit("Softplus", steep)
    result = result if beta == 1 else w.emit("Div", result, w.number(beta, x))
    if threshold >= _SOFTPLUS_IDENTITY:
        return result
    return w.emit("Where", w.emit("Greater", steep, w.number(threshold, x)), x, result)


_SOFTPLUS_IDENTITY = 17
"""Input from which log(1 + exp(x)) equals x in float32."""


@writes("elu")
def elu(w: Writer, x: Value, *, alpha: float) -> str:
    return w.emit("Elu", x, alpha=float(alpha))


@writes("celu")
def celu(w: Writer, x: Value, *, alpha: float) -> str:
    return w.emit("Celu", x, alpha=float(alpha))


@writes("leaky_relu")
def leaky_relu(w: Writer, x: Value, *, negative_slope: float) -> str:
    return w.emit("LeakyRelu", x, alpha=float(negative_slope))


@writes("prelu")
def prelu(w: Writer, x: Value, weight: Value) -> str:
    size = math.prod(weight.shape)
    shape = (size, *[1] * (x.rank - 2)) if size > 1 else (1,)
    slope = w.constant_of(weight.name)
    return w.emit("PRelu", x, slope.reshape(shape) if slope is not None else w.reshaped(weight, shape))


@writes("log_sigmoid")
def log_sigmoid(w: Writer, x: Value) -> str:
    return w.emit("Neg", w.emit("Softplus", w.emit("Neg", x)))


@writes("tanhshrink")
def tanhshrink(w: Writer, x: Value) -> str:
    return w.emit("Sub", x, w.emit("Tanh", x))


@writes("hardshrink")
def hardshrink(w: Writer, x: Value, *, lambd: float) -> str:
    return w.emit("Shrink", x, lambd=float(lambd), bias=0.0)


@writes("softshrink")
def softshrink(w: Writer, x: Value, *, lambd: float) -> str:
    return w.emit("Shrink", x, lambd=float(lambd), bias=float(lambd))


@writes("threshold")
def threshold(w: Writer, x: Value, *, threshold: float, value: float) -> str:
    return w.emit("Where", w.emit("Greater", x, w.number(threshold, x)), x, w.number(value, x))


@writes("rsqrt")
def rsqrt(w: Writer, x: Value) -> str:
    return w.emit("Reciprocal", w.emit("Sqrt", x))


@writes("pow")
def power(w: Writer, x: Value, *, exponent: Any) -> str:
    a, b, _ = both(w, x, exponent)
    return w.emit("Pow", a, b)


def both(w: Writer, x: Any, other: Any) -> tuple[Any, Any, torch.dtype]:
    """Cast two operands to their common dtype, with numbers as constants; return both and the dtype."""
    likes: list[Any] = [v.like if isinstance(v, Value) else 1 if varies(v) else v for v in (x, other)]
    dtype = torch.result_type(*likes)
    operands: list[Any] = []
    for value in (x, other):
        if isinstance(value, Value):
            operands.append(value if value.dtype == dtype else w.cast(value, dtype))
        else:
            operands.append(w.number_or_size(value, dtype))
    return operands[0], operands[1], dtype


def _scaled(w: Writer, other: Any, alpha: float) -> Any:
    if alpha == 1:
        return other
    if not isinstance(other, Value):
        return other * alpha
    return Value(w.emit("Mul", other, w.number(alpha, other)), other.like)


@writes("add")
def add(w: Writer, x: Any, other: Any, *, alpha: float) -> str:
    a, b, dtype = both(w, x, _scaled(w, other, alpha))
    return w.emit("Or" if dtype is torch.bool else "Add", a, b)


@writes("sub")
def sub(w: Writer, x: Any, other: Any, *, alpha: float) -> str:
    a, b, _ = both(w, x, _scaled(w, other, alpha))
    return w.emit("Sub", a, b)


@writes("div")
def div(w: Writer, x: Any, other: Any, *, rounding_mode: str | None) -> str:
    a, b, dtype = both(w, x, other)
    if w.portable and rounding_mode == "floor":
        if dtype.is_floating_point:
            return w.emit("Floor", w.emit("Div", a, b))
        return w.emit("Div", w.emit("Sub", a, w.emit("Mod", a, b)), b)
    refuse(rounding_mode is not None, "its quotient is rounded")
    if not dtype.is_floating_point:
        a, b = (w.cast(value, torch.get_default_dtype()) for value in (a, b))
    return w.emit("Div", a, b)


def _binary(op_type: str, of_truths: str) -> Any:
    def write(w: Writer, x: Any, other: Any) -> str:
        a, b, dtype = both(w, x, other)
        return w.emit(of_truths if dtype is torch.bool else op_type, a, b)

    return write


for _name, _kinds in {"mul": ("Mul", "And"), "maximum": ("Max", "Or"), "minimum": ("Min", "And")}.items():
    writes(_name)(_binary(*_kinds))


@writes("where")
def where(w: Writer, condition: Value, x: Any, other: Any) -> str:
    a, b, _ = both(w, x, other)
    return w.emit("Where", condition, a, b)


@writes("masked_fill")
def masked_fill(w: Writer, x: Value, mask: Value, value: Any) -> str:
    filled = w.cast(value, x.dtype) if isinstance(value, Value) else w.number(value, x)
    return w.emit("Where", mask, filled, x)
