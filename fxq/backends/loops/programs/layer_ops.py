"""Which steps compute layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fxq.backends.kernel import pair
from fxq.backends.loops.programs.layer_steps import LinearStep, ProductStep
from fxq.backends.loops.programs.planned_values import PlannedValue, PlannedWeight, constant_of, plans, refuse
from fxq.backends.loops.programs.pointwise_ops import binary
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.ops.convolution import conv_padding


@plans("linear")
def linear(plan: StepBuilder, x: Any, weight: Any, bias: Any = None) -> PlannedValue:
    x, weight = plan.layer(x, weight)
    refuse(x.axis != x.rank - 1, "its input has the channels elsewhere")
    if x.area.is_float:
        return _float_layer(plan, x, weight, bias)
    refuse(x.axis != x.rank - 1, "its input has the channels elsewhere")
    refuse(weight.axis != 0, "its weight has scales of another axis")
    n, h, w, _ = x.area.shape
    columns, depth = weight.values.shape
    whole = PlannedWeight(weight.values.view(columns, 1, depth), weight.scale)
    return _product(plan, x, whole, bias, (n, h, w, columns), taps=[(0, 0)], windows=(h, w))


@plans("conv2d")
def conv2d(
    plan: StepBuilder,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    padding_mode: str,
) -> PlannedValue:
    x, weight = plan.layer(x, weight)
    refuse(x.rank != 4 or x.axis != 1, "its input is no image")
    if x.area.is_float:
        plain = groups == 1 and weight.values.shape[2:] == (1, 1)
        padded = plain and any(conv_padding(weight.values.shape, padding, pair(dilation)))
        refuse(not plain or padded, "it is a layer in float with windows or groups")
        return _float_layer(plan, x, weight, bias)
    refuse(padding_mode != "zeros", f"it pads with {padding_mode}")
    refuse(weight.axis != 0, "its weight has scales of another axis")
    stride, dilation = pair(stride), pair(dilation)
    left, right, top, bottom = conv_padding(weight.values.shape, padding, dilation)
    n, h, w, channels = x.area.shape
    columns, depth, tall, wide = weight.values.shape
    refuse(depth * groups != channels, f"its input has {channels} channels, its weight {depth * groups}")
    windows = (
        (h + top + bottom - dilation[0] * (tall - 1) - 1) // stride[0] + 1,
        (w + left + right - dilation[1] * (wide - 1) - 1) // stride[1] + 1,
    )
    refuse(min(windows) < 1, "its input is smaller than its window")
    taps = [(i * dilation[0], j * dilation[1]) for i in range(tall) for j in range(wide)]
    about: Any = {"taps": taps, "windows": windows, "first": (-top, -left), "stride": stride}
    if groups == 1:
        values = weight.values.permute(0, 2, 3, 1).reshape(columns, tall * wide, channels)
    else:
        refuse(groups != channels or columns != channels, "it has groups of several channels")
        x.area.root.room = 0  # 16 channels are read at once
        values = weight.values.reshape(columns, tall * wide)
    return _product(plan, x, PlannedWeight(values, weight.scale), bias, (n, *windows, columns), **about)


@plans("conv_transpose2d")
def conv_transpose2d(
    plan: StepBuilder,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: int,
) -> PlannedValue:
    """Each result of a window of `stride` pixels reads the taps of its own: they are so many layers in one."""
    x, weight = plan.layer(x, weight)
    refuse(x.area.is_float, "it is a layer in float")
    refuse(x.rank != 4 or x.axis != 1, "its input is no image")
    refuse(groups != 1 or pair(dilation) != (1, 1), "it has groups, or a dilation")
    n, h, w, channels = x.area.shape
    refuse(len(weight.values) != channels, f"its input has {channels} channels, its weight {len(weight.values)}")
    _, columns, tall, wide = weight.values.shape
    down, right = pair(stride)
    top, left = pair(padding)
    high = (h - 1) * down - 2 * top + tall + pair(output_padding)[0]
    broad = (w - 1) * right - 2 * left + wide + pair(output_padding)[1]
    refuse(top % down or left % right or high % down or broad % right, "its padding is no multiple of its stride")
    # pixel (down * i + r) of the result, counted from where padding begins, reads x[i - m] with the weight of
    # row (r + down * m)
    reach = [-(-size // step) for size, step in ((tall, down), (wide, right))]
    taps = [(-i, -j) for i in range(reach[0]) for j in range(reach[1])]
    values = torch.zeros(down, right, columns, len(taps), channels, dtype=torch.int8)
    for (r, s), (k, (i, j)) in itertools.product(itertools.product(range(down), range(right)), enumerate(taps)):
        row, column = r - down * i, s - right * j
        if row < tall and column < wide:
            values[r, s, :, k] = weight.values[:, :, row, column].t()
    assert weight.scale is not None
    refuse(weight.scale.dim() and weight.axis != 1, "its weight has scales of its input's channels")
    scale = weight.scale.expand(columns)
    many = down * right
    spread = [(r, s, c) for r in range(down) for s in range(right) for c in range(columns)]
    added = constant_of(bias, "bias")
    repeated = None if added is None else PlannedWeight(added.repeat(many))
    return _product(
        plan, x, PlannedWeight(values.view(many * columns, len(taps), channels), scale.repeat(many)), repeated,
        (n, high, broad, columns), taps=taps, windows=(high // down, broad // right),
        first=(top // down, left // right), placed=(0, 0, down, right), spread=spread,
    )  # fmt: skip


@plans("batch_norm")
def batch_norm(
    plan: StepBuilder, x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *, eps: float
) -> PlannedValue:
    """On integers a depthwise layer with one tap, whose weight is 1, and whose scale is that of the norm."""
    refuse(not isinstance(mean, PlannedWeight) or not isinstance(var, PlannedWeight), "it has no statistics")
    scale, by, added = torch.rsqrt(var.real + eps), constant_of(weight, "weight"), constant_of(bias, "bias")
    scale = scale if by is None else scale * by
    added = (0.0 if added is None else added) - mean.real * scale
    x = plan.read(x)
    channels = x.area.shape[3]
    refuse(x.rank not in (2, 4) or (x.rank == 4 and x.axis != 1), "its input has other channels")
    refuse(len(scale) != channels, f"its input has {channels} channels, its statistics {len(scale)}")
    if x.area.is_float:
        shape = (1, -1, 1, 1) if x.rank == 4 else (1, -1)
        x = plan.settle(binary(plan, x, PlannedWeight(scale.view(shape)), multiplies=True), None)
        return binary(plan, x, PlannedWeight(added.view(shape)), multiplies=False)
    x = plan.inside(x)
    x.area.root.room = 0  # 16 channels are read at once
    ones = PlannedWeight(torch.ones(channels, 1, dtype=torch.int8), scale)
    return _product(plan, x, ones, PlannedWeight(added), x.area.shape, taps=[(0, 0)], windows=x.area.shape[1:3])


def _float_layer(plan: StepBuilder, x: PlannedValue, weight: PlannedWeight, bias: Any) -> PlannedValue:
    """A layer in float, where each sample has one pixel."""
    refuse(x.area.shape[1:3] != (1, 1), "it is a layer in float of several pixels")
    real = weight.real.flatten(1)
    columns, depth = real.shape
    refuse(depth != x.area.shape[3], "it is a layer in float with windows or groups")
    added = constant_of(bias, "bias")
    x = plan.inside(x)
    return plan.add(LinearStep, x, (x.area.shape[0], 1, 1, columns), x=x.area, weight=real, bias=added)


def _product(
    plan: StepBuilder, x: Any, weight: PlannedWeight, bias: Any, shape: tuple[int, int, int, int], **about: Any
) -> PlannedValue:
    """A layer on integers; the weight as the step has it, with its scale."""
    assert x.grid is not None and weight.scale is not None
    columns, channels = len(weight.values), x.area.shape[3]
    wanted = columns if weight.values.dim() == 2 else weight.values.shape[2]
    refuse(wanted != channels, f"its input has {channels} channels, its weight {wanted}")
    beyond = beyond_int32(largest_sum(weight.values.flatten(1), x.grid))
    refuse(beyond is not None, beyond or "")
    added = constant_of(bias, "bias")
    scale = weight.scale.float().expand(columns)
    product = plan.add(
        ProductStep, x, shape, x=x.area, x_grid=x.grid, weight=weight.values, scale=scale, bias=added, **about
    )
    assert isinstance(product.step, ProductStep)
    refuse(not x.area.widen(product.step.border(), x.grid.zero), "what it reads has two zero points at its border")
    return product
