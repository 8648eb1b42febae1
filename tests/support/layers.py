"""Integer layers as single steps of a program, beside their exact results."""

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.program_steps import CLAMP, Function
from fxq.quant.qparams import QParams
from tests.support.program_runs import applied, distance, real, run_steps

FLOATS = "floats"
"""Stands for the grid of a residual of floats."""
RELU, RELU6 = Function("clamp", 0.0), Function("clamp", 0.0, 6.0)
FUNCTIONS = [CLAMP, RELU, RELU6, *map(Function, ("silu", "hardswish", "gelu", "sigmoid", "tanh", "hardsigmoid"))]
X_GRID, GRID = QParams.per_tensor(0.02, 37), QParams.per_tensor(0.11, 98)
GRIDS = st.sampled_from([None, GRID, QParams.per_tensor(0.05, 3, 2, 201), QParams.per_tensor(0.4, 128, 0, 127)])


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def weights(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def check(result, exact, grid):
    """Sums are exact; what is computed of them has 32 bits, which turns few integers, and no one far from a half."""
    if grid is not None:
        assert distance(result, exact, grid) <= 0.5 + 2e-3
    else:
        torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6 * max(exact.abs().max().item(), 1))


def conv(
    shape, columns, size=(1, 1), *, stride=(1, 1), padding=(0, 0), dilation=(1, 1), function=CLAMP, grid=GRID,
    depthwise=False, residual=None, room=0, x=None, weight=None, border=(0, 0, 0, 0), loops=None,
):  # fmt: skip
    """Result of a convolution step, integers or floats, and the exact one in float64."""
    n, h, w, channels = shape
    windows = [(a + 2 * p - d * (k - 1) - 1) // s + 1 for a, p, d, k, s in
               zip((h, w), padding, dilation, size, stride, strict=True)]  # fmt: skip
    taps = [(i * dilation[0], j * dilation[1]) for i in range(size[0]) for j in range(size[1])]
    weight = weights(columns, *([] if depthwise else [channels]), *size) if weight is None else weight
    x = pixels(*shape) if x is None else x
    scale, bias = (torch.rand(columns) + 0.5) / (20 * math.prod(weight.shape[1:])), torch.randn(columns)
    area, out = Area(shape, False, room, zero=X_GRID.z), Area((n, *windows, columns), grid is None, border=border)
    values = weight.flatten(1) if depthwise else weight.permute(0, 2, 3, 1).reshape(columns, len(taps), channels)
    step = ProductStep(
        "layer", out, function, grid, x=area, x_grid=X_GRID, weight=values, taps=taps, scale=scale, bias=bias,
        windows=windows, first=(-padding[0], -padding[1]), stride=stride,
    )  # fmt: skip
    memory = {area: x}
    exact = F.conv2d(
        (x.double() - X_GRID.z).permute(0, 3, 1, 2),
        weight.double().view(columns, 1 if depthwise else channels, *size),
        None, stride, padding, dilation, channels if depthwise else 1,
    ).permute(0, 2, 3, 1)  # fmt: skip
    exact = exact * (scale.double() * X_GRID.s) + bias.double()
    if residual is not None:
        is_float = residual == FLOATS
        step.residual, step.residual_grid = Area(out.shape, is_float), None if is_float else residual
        memory[step.residual] = torch.randn(out.shape) if is_float else pixels(*out.shape)
        exact = exact + (memory[step.residual].double() if is_float else real(memory[step.residual], residual))
    area.widen(step.border())
    return run_steps([step], memory, loops), applied(function, exact)
