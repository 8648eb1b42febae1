"""Planning of layers: linear, convolutions, batch norm."""

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
    x, weight = plan.layer_inputs(x, weight)
    refuse(x.axis != x.rank - 1, "its channels are not the last axis")
    if x.area.is_float:
        return _plan_float_layer(plan, x, weight, bias)

    refuse(weight.axis != 0, "its weight has scales of another axis")
    n, h, w, _ = x.area.shape
    columns, depth = weight.values.shape
    taps_weight = PlannedWeight(weight.values.view(columns, 1, depth), weight.scale)
    return _plan_product(plan, x, taps_weight, bias, (n, h, w, columns), taps=[(0, 0)], windows=(h, w))


@plans("conv1d", "conv2d")
def conv(
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
    x, weight = plan.layer_inputs(x, weight)
    weight, stride, dilation, padding = _as_image_layer(x, weight, (stride, 1), (dilation, 1), (padding, 0))
    if x.area.is_float:
        is_pointwise = groups == 1 and weight.values.shape[2:] == (1, 1)
        is_padded = is_pointwise and any(conv_padding(weight.values.shape, padding, dilation))
        refuse(not is_pointwise or is_padded, "it is a float layer with windows or groups")
        return _plan_float_layer(plan, x, weight, bias)
    refuse(padding_mode != "zeros", f"it pads with {padding_mode}")
    refuse(weight.axis != 0, "its weight has scales of another axis")
    left, right, top, bottom = conv_padding(weight.values.shape, padding, dilation)
    n, h, w, channels = x.area.shape
    columns, depth, kernel_rows, kernel_columns = weight.values.shape
    refuse(depth * groups != channels, f"its input has {channels} channels, its weight {depth * groups}")
    windows = (
        (h + top + bottom - dilation[0] * (kernel_rows - 1) - 1) // stride[0] + 1,
        (w + left + right - dilation[1] * (kernel_columns - 1) - 1) // stride[1] + 1,
    )
    refuse(min(windows) < 1, "its input is smaller than its window")
    taps = [(i * dilation[0], j * dilation[1]) for i in range(kernel_rows) for j in range(kernel_columns)]
    options: Any = {"taps": taps, "windows": windows, "first": (-top, -left), "stride": stride}
    if groups == 1:
        values = weight.values.permute(0, 2, 3, 1).reshape(columns, kernel_rows * kernel_columns, channels)
    else:
        refuse(groups != channels or columns != channels, "it has groups of several channels")
        x.area.root.room = 0  # 16 channels are read at once
        values = weight.values.reshape(columns, kernel_rows * kernel_columns)
    return _plan_product(plan, x, PlannedWeight(values, weight.scale), bias, (n, *windows, columns), **options)


@plans("conv_transpose1d", "conv_transpose2d")
def conv_transpose(
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
    """Plan a transposed convolution as one layer.

    Its columns are the results of a window of `stride` pixels: each result reads taps of its own.
    """
    x, weight = plan.layer_inputs(x, weight)
    refuse(x.area.is_float, "it is a float layer")
    weight, (down, right), (top, left), added, dilation = _as_image_layer(
        x, weight, (stride, 1), (padding, 0), (output_padding, 0), (dilation, 1)
    )
    refuse(groups != 1 or dilation != (1, 1), "it has groups, or a dilation")
    n, h, w, channels = x.area.shape
    refuse(len(weight.values) != channels, f"its input has {channels} channels, its weight {len(weight.values)}")
    _, columns, kernel_rows, kernel_columns = weight.values.shape
    out_rows = (h - 1) * down - 2 * top + kernel_rows + added[0]
    out_columns = (w - 1) * right - 2 * left + kernel_columns + added[1]
    refuse(out_rows % down or out_columns % right, "the size of its result is no multiple of its stride")
    # Row (down * i + r) of the result reads x[i + m] with row (r + top - down * m) of the weight.
    taps = list(itertools.product(_tap_range(top, down, kernel_rows), _tap_range(left, right, kernel_columns)))
    values = torch.zeros(down, right, columns, len(taps), channels, dtype=torch.int8)
    for (r, s), (k, (i, j)) in itertools.product(itertools.product(range(down), range(right)), enumerate(taps)):
        row, column = r + top - down * i, s + left - right * j
        if row in range(kernel_rows) and column in range(kernel_columns):
            values[r, s, :, k] = weight.values[:, :, row, column].t()
    assert weight.scale is not None
    refuse(weight.scale.dim() and weight.axis != 1, "its weight has scales of its input's channels")
    scale = weight.scale.expand(columns)
    results_per_window = down * right
    spread = [(r, s, c) for r in range(down) for s in range(right) for c in range(columns)]
    bias_values = constant_of(bias, "bias")
    repeated_bias = None if bias_values is None else PlannedWeight(bias_values.repeat(results_per_window))
    return _plan_product(
        plan, x, PlannedWeight(values.view(-1, len(taps), channels), scale.repeat(results_per_window)), repeated_bias,
        (n, out_rows, out_columns, columns), taps=taps, windows=(out_rows // down, out_columns // right),
        out_stride=(down, right), spread=spread,
    )  # fmt: skip


def _as_image_layer(x: PlannedValue, weight: PlannedWeight, *options: tuple[Any, int]) -> tuple[Any, ...]:
    """Weight and options of a convolution for two axes: a sequence is an image of height 1.

    Args:
        x: Input, whose channels must be axis 1.
        weight: Weight, (., ., kernel) or (., ., kernel rows, kernel columns).
        options: Options, each with the number that has no effect along the height.
    """
    refuse(x.rank != weight.values.dim() or x.axis != 1, "its input is no image or sequence with its channels first")
    if x.rank == 4:
        return weight, *(value if isinstance(value, str) else pair(value) for value, _ in options)
    along = [value if isinstance(value, str) else (no_effect, *pair(value, 1)) for value, no_effect in options]
    return PlannedWeight(weight.values.unsqueeze(2), weight.scale, weight.axis), *along


def _tap_range(padding: int, stride: int, size: int) -> range:
    """Elements of the input, relative to the window, that a transposed convolution reads along an axis."""
    return range((stride - 1 + padding) // stride, -((size - 1 - padding) // stride) - 1, -1)


@plans("batch_norm")
def batch_norm(
    plan: StepBuilder, x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *, eps: float
) -> PlannedValue:
    """Plan a batch norm: on integers a depthwise layer with one tap of weight 1, scaled by the norm."""
    refuse(not isinstance(mean, PlannedWeight) or not isinstance(var, PlannedWeight), "it has no statistics")
    scale, factor, shift = torch.rsqrt(var.real + eps), constant_of(weight, "weight"), constant_of(bias, "bias")
    scale = scale if factor is None else scale * factor
    shift = (0.0 if shift is None else shift) - mean.real * scale
    x = plan.read(x)
    channels = x.area.shape[3]
    refuse(x.axis != 1, "its input has its channels on another axis")
    refuse(len(scale) != channels, f"its input has {channels} channels, its statistics {len(scale)}")
    if x.area.is_float:
        shape = (1, -1, *[1] * (x.rank - 2))
        x = plan.settle(binary(plan, x, PlannedWeight(scale.view(shape)), multiplies=True), None)
        return binary(plan, x, PlannedWeight(shift.view(shape)), multiplies=False)
    x = plan.in_arena(x)
    x.area.root.room = 0  # 16 channels are read at once
    ones = PlannedWeight(torch.ones(channels, 1, dtype=torch.int8), scale)
    return _plan_product(plan, x, ones, PlannedWeight(shift), x.area.shape, taps=[(0, 0)], windows=x.area.shape[1:3])


def _plan_float_layer(plan: StepBuilder, x: PlannedValue, weight: PlannedWeight, bias: Any) -> PlannedValue:
    """Plan a float layer on images of one pixel."""
    refuse(x.area.shape[1:3] != (1, 1), "it is a float layer on several pixels")
    real_weight = weight.real.flatten(1)
    columns, depth = real_weight.shape
    refuse(depth != x.area.shape[3], "it is a float layer with windows or groups")
    bias_values = constant_of(bias, "bias")
    x = plan.in_arena(x)
    return plan.add(LinearStep, x, (x.area.shape[0], 1, 1, columns), x=x.area, weight=real_weight, bias=bias_values)


def _plan_product(
    plan: StepBuilder, x: Any, weight: PlannedWeight, bias: Any, shape: tuple[int, int, int, int], **options: Any
) -> PlannedValue:
    """Plan an integer layer.

    Args:
        plan: The builder.
        x: Input, integers on a grid.
        weight: Weight in the layout of `ProductStep`, with its scale.
        bias: Bias of the layer, or None.
        shape: (N, H, W, C) of the result.
        options: Further attributes of `ProductStep`.
    """
    assert x.grid is not None and weight.scale is not None
    columns, channels = len(weight.values), x.area.shape[3]
    weight_channels = columns if weight.values.dim() == 2 else weight.values.shape[2]
    refuse(weight_channels != channels, f"its input has {channels} channels, its weight {weight_channels}")
    overflow = beyond_int32(largest_sum(weight.values.flatten(1), x.grid))
    refuse(overflow is not None, overflow or "")
    bias_values = constant_of(bias, "bias")
    scale = weight.scale.float().expand(columns)
    product = plan.add(
        ProductStep, x, shape, x=x.area, x_grid=x.grid, weight=weight.values, scale=scale, bias=bias_values, **options
    )
    assert isinstance(product.step, ProductStep)
    refuse(not x.area.widen(product.step.border(), x.grid.z), "its input would need a border with two zero points")
    return product
