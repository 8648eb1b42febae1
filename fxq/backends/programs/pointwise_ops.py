"""Which steps compute conversions, and ops of each element alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxq.backends.programs.areas import Grid
from fxq.backends.programs.layer_steps import Product
from fxq.backends.programs.plan import Plan, Value, Weight, plans, refuse
from fxq.backends.programs.steps import Function, Pointwise


@plans("quantize")
def quantize(
    plan: Plan, x: Any, *, scale: Any, zero_point: Any, qmin: int, qmax: int, dtype: Any, axis: Any, block: Any
) -> Value:
    refuse(not isinstance(scale, float) or dtype != torch.uint8, "it rounds to other grids than one of uint8")
    refuse(axis is not None or block is not None, "it rounds to several grids")
    return plan.quantize(x, Grid(scale, int(zero_point), qmin, qmax))


@plans("dequantize")
def dequantize(plan: Plan, x: Value, *, scale: Any, zero_point: Any, **_: Any) -> Value:
    refuse(not isinstance(scale, float) or not isinstance(x, Value), "its grid is no constant")
    refuse(bool(x.area.is_float) or x.step is not None, "it reads no integers")
    x = plan.inside(x)
    x.area.zero = int(zero_point)
    return Value(x.area, x.rank, x.axis, Grid(scale, int(zero_point)))


@plans("add")
def add(plan: Plan, x: Any, other: Any, *, alpha: float) -> Value:
    refuse(alpha != 1, "it multiplies what it adds")
    for value, residual in ((x, other), (other, x)):
        if plan.adds(value, residual):
            value.step.residual, value.step.residual_grid = residual.area, residual.grid
            return value
    return binary(plan, x, other, False)


@plans("mul")
def mul(plan: Plan, x: Any, other: Any) -> Value:
    x, other = (other, x) if isinstance(x, Weight) else (x, other)
    if isinstance(other, Weight) and isinstance(x, Value) and isinstance(x.step, Product) and x.step.folds:
        x.step.scaled(plan.per_channel(other, x))
        return x
    return binary(plan, x, other, True)


def binary(plan: Plan, x: Any, y: Any, multiplies: bool) -> Value:
    if isinstance(x, Weight):
        x, y = y, x
    if isinstance(y, Weight):
        x = plan.read(x)
        made = plan.constant(y, x)
        return plan.add(Pointwise, x, x=x.area, x_grid=x.grid, y=made, multiplies=multiplies)
    x, y = plan.read(x), plan.read(y)
    if math.prod(x.shape) < math.prod(y.shape):
        x, y = y, x
    refuse((x.rank, x.axis) != (y.rank, y.axis), "they have their channels elsewhere")
    same = x.area.shape == y.area.shape
    one = y.area.shape == (x.area.shape[0], 1, 1, x.area.shape[3])
    refuse(not same and not one, "their shapes differ")
    return plan.add(Pointwise, x, x=x.area, x_grid=x.grid, y=y.area, y_grid=y.grid, multiplies=multiplies)


@plans("relu")
def relu(plan: Plan, x: Any) -> Value:
    return plan.apply(x, Function("clamp", 0.0))


@plans("relu6")
def relu6(plan: Plan, x: Any) -> Value:
    return plan.apply(x, Function("clamp", 0.0, 6.0))


@plans("hardtanh")
def hardtanh(plan: Plan, x: Any, *, min_val: float, max_val: float) -> Value:
    return plan.apply(x, Function("clamp", float(min_val), float(max_val)))


@plans("leaky_relu")
def leaky_relu(plan: Plan, x: Any, *, negative_slope: float) -> Value:
    return plan.apply(x, Function("prelu", slope=torch.tensor([float(negative_slope)])))


@plans("prelu")
def prelu(plan: Plan, x: Any, weight: Any) -> Value:
    refuse(not isinstance(weight, Weight), "its slopes are no constant")
    refuse(weight.values.numel() > 1 and isinstance(x, Value) and x.axis != 1, "its slopes are those of another axis")
    return plan.apply(x, Function("prelu", slope=weight.real.reshape(-1)))


@plans("gelu")
def gelu(plan: Plan, x: Any, *, approximate: str) -> Value:
    refuse(approximate != "none", "it is an approximation")
    return plan.apply(x, Function("gelu"))


for _name in ("silu", "hardswish", "sigmoid", "tanh", "hardsigmoid"):
    plans(_name)(lambda plan, x, _name=_name: plan.apply(x, Function(_name)))
