"""Planning of conversions and of element-wise ops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.planned_values import (
    NotPlannedError,
    PlannedHeads,
    PlannedValue,
    PlannedWeight,
    plans,
    refuse,
)
from fxq.backends.loops.programs.program_steps import Function, PointwiseStep
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.quant.qparams import QParams


@plans("quantize")
def quantize(
    plan: StepBuilder, x: Any, *, scale: Any, zero_point: Any, qmin: int, qmax: int, dtype: Any, axis: Any, block: Any
) -> Any:
    refuse(not isinstance(scale, float) or dtype != torch.uint8, "its grid is not constant uint8")
    refuse(axis is not None or block is not None, "its grid is not per-tensor")
    grid = QParams.per_tensor(scale, int(zero_point), qmin, qmax)
    return replace(x, joined=plan.quantize(x.joined, grid)) if isinstance(x, PlannedHeads) else plan.quantize(x, grid)


@plans("dequantize")
def dequantize(plan: StepBuilder, x: Any, *, scale: Any, zero_point: Any, **_: Any) -> Any:
    if isinstance(x, PlannedHeads):
        return replace(x, joined=dequantize(plan, x.joined, scale=scale, zero_point=zero_point))
    refuse(not isinstance(scale, float) or not isinstance(x, PlannedValue), "its grid is no constant")
    refuse(bool(x.area.is_float) or x.step is not None, "it reads no integers")
    return replace(plan.in_arena(x), grid=QParams.per_tensor(scale, int(zero_point)))


@plans("add")
def add(plan: StepBuilder, x: Any, other: Any, *, alpha: float) -> PlannedValue:
    refuse(alpha != 1, "its alpha is not 1")
    for add_in_step in (plan.add_integers, plan.add_floats):
        for value, residual in ((x, other), (other, x)):
            if add_in_step(value, residual):
                return value
    return binary(plan, x, other, False)


@plans("mul")
def mul(plan: StepBuilder, x: Any, other: Any) -> PlannedValue:
    value, factor = (other, x) if isinstance(x, PlannedWeight) else (x, other)
    if (
        isinstance(factor, PlannedWeight)
        and isinstance(value, PlannedValue)
        and isinstance(value.step, ProductStep)
        and value.step.can_fold_scale
    ):
        value.step.fold_scale(plan.per_channel(factor, value))
        return value
    return binary(plan, value, factor, True)


@plans("div")
def div(plan: StepBuilder, x: Any, other: Any, *, rounding_mode: Any = None) -> PlannedValue:
    refuse(not isinstance(other, (int, float)) or other == 0, "its divisor is not a constant other than 0")
    refuse(rounding_mode is not None, "it rounds the quotient")
    return mul(plan, x, PlannedWeight(torch.tensor(1 / other, dtype=torch.float32)))


@plans("sub")
def sub(plan: StepBuilder, x: Any, other: Any, *, alpha: float = 1) -> PlannedValue:
    refuse(alpha != 1, "its alpha is not 1")
    x, y = plan.read(x), plan.read(other)
    is_same_shape = x.area.shape == y.area.shape and (x.rank, x.axis) == (y.rank, y.axis)
    refuse(not is_same_shape, "its operands have other shapes")
    if y.grid is None:
        raise NotPlannedError("it subtracts floats")
    negative = QParams.per_tensor(-y.grid.s, y.grid.z)
    return plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid, y=y.area, y_grid=negative)


def binary(plan: StepBuilder, x: Any, y: Any, multiplies: bool) -> PlannedValue:
    """Plan the sum or the product of two values, or of a value and a constant."""
    if isinstance(x, PlannedWeight):
        x, y = y, x
    if isinstance(y, PlannedWeight):
        x = plan.read(x)
        constant = plan.constant(y, x)
        return plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid, y=constant, multiplies=multiplies)
    x, y = plan.read(x), plan.read(y)
    if math.prod(x.shape) < math.prod(y.shape):
        x, y = y, x
    refuse((x.rank, x.axis) != (y.rank, y.axis), "its operands have their channels on other axes")
    is_same_shape = x.area.shape == y.area.shape
    is_pixel = y.area.shape == (x.area.shape[0], 1, 1, x.area.shape[3])
    is_channel = y.area.shape == (*x.area.shape[:3], 1)
    refuse(not is_same_shape and not is_pixel and not is_channel, "its operands have other shapes")
    return plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid, y=y.area, y_grid=y.grid, multiplies=multiplies)


@plans("relu")
def relu(plan: StepBuilder, x: Any) -> PlannedValue:
    return plan.apply(x, Function("clamp", 0.0))


@plans("relu6")
def relu6(plan: StepBuilder, x: Any) -> PlannedValue:
    return plan.apply(x, Function("clamp", 0.0, 6.0))


@plans("hardtanh")
def hardtanh(plan: StepBuilder, x: Any, *, min_val: float, max_val: float) -> PlannedValue:
    return plan.apply(x, Function("clamp", float(min_val), float(max_val)))


@plans("leaky_relu")
def leaky_relu(plan: StepBuilder, x: Any, *, negative_slope: float) -> PlannedValue:
    return plan.apply(x, Function("prelu", slope=torch.tensor([float(negative_slope)], dtype=torch.float32)))


@plans("prelu")
def prelu(plan: StepBuilder, x: Any, weight: Any) -> PlannedValue:
    refuse(not isinstance(weight, PlannedWeight), "its slopes are no constant")
    refuse(
        weight.values.numel() > 1 and isinstance(x, PlannedValue) and x.axis != 1,
        "its slopes belong to another axis than the channels",
    )
    return plan.apply(x, Function("prelu", slope=weight.real.reshape(-1)))


@plans("gelu")
def gelu(plan: StepBuilder, x: Any, *, approximate: str) -> PlannedValue:
    refuse(approximate != "none", "its gelu is approximate")
    return plan.apply(x, Function("gelu"))


for _name in ("silu", "hardswish", "sigmoid", "tanh", "hardsigmoid"):
    plans(_name)(lambda plan, x, _name=_name: plan.apply(x, Function(_name)))
