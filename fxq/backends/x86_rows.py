"""The table of the x86 backend: which op starts a kernel, what the kernel takes along, and how it is made."""

from __future__ import annotations

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.backends.rows import (
    CLAMPS,
    PLAIN,
    Operands,
    Parts,
    Row,
    global_mean,
    kernel_size_of,
    never,
    second,
    wanted,
    weighted,
)
from fxq.backends.x86_conv import Conv
from fxq.backends.x86_elementwise import Add, Mul
from fxq.backends.x86_linear import Linear
from fxq.backends.x86_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.backends.x86_transpose import ConvTranspose2d


def _conv_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    return Conv.refuses(
        kernel_size=kernel_size_of(parts), padding=options["padding"], padding_mode=options["padding_mode"],
        dilation=options["dilation"], post=parts.post, residual=parts.residual is not None,
    )  # fmt: skip


def _conv(parts: Parts, operands: Operands) -> Kernel:
    options = {k: v for k, v in parts.first.options.items() if k != "padding_mode"}
    return Conv(*weighted(operands), **options, post=parts.post, residual=second(operands), slope=operands.slope)


def _linear_refuses(parts: Parts, node: fx.Node) -> str | None:
    return Linear.refuses(post=parts.post, residual=parts.residual is not None)


def _linear(parts: Parts, operands: Operands) -> Kernel:
    return Linear(*weighted(operands), post=parts.post, residual=second(operands))


def _transpose_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    return ConvTranspose2d.refuses(kernel_size=kernel_size_of(parts), dilation=options["dilation"], post=parts.post)


def _transpose(parts: Parts, operands: Operands) -> Kernel:
    options = {k: v for k, v in parts.first.options.items() if k != "dilation"}
    return ConvTranspose2d(*weighted(operands), **options, post=parts.post, slope=operands.slope)


def _avg_pool_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    asked = {k: options[k] for k in ("padding", "ceil_mode", "count_include_pad", "divisor_override") if k in options}
    return AvgPool2d.refuses(dims=len(options["kernel_size"]), **asked)


def _avg_pool(parts: Parts, operands: Operands) -> Kernel:
    options = parts.first.options
    sizes = {k: options[k] for k in ("kernel_size", "stride", "padding")}
    return AvgPool2d(operands.grids[0], operands.out, **sizes, dims=len(options["kernel_size"]))


def _adaptive(parts: Parts, operands: Operands) -> Kernel:
    size = parts.first.options["output_size"]
    if all(n == 1 for n in size):
        return global_mean(parts, operands)
    return AdaptiveAvgPool2d(operands.grids[0], operands.out, size)


def _of_two_refuses(parts: Parts, node: fx.Node) -> str | None:
    if len(parts.first.activations) != 2:
        return f"{parts.first.op.name} with a constant has no kernel"
    return Add.refuses(post=parts.post)


def _add(parts: Parts, operands: Operands) -> Kernel:
    sign = -1 if parts.first.op.name == "sub" else 1
    return Add(operands.grids[0], operands.grids[-1], wanted(operands), post=parts.post, sign=sign)


def _mul(parts: Parts, operands: Operands) -> Kernel:
    return Mul(operands.grids[0], operands.grids[-1], wanted(operands), post=parts.post)


_CONV_ROW = Row(_conv, _conv_refuses, Conv.posts, adds=True, twice=Conv.twice)
ROWS: dict[str, Row] = {
    **PLAIN,
    "conv1d": _CONV_ROW,
    "conv2d": _CONV_ROW,
    "linear": Row(_linear, _linear_refuses, Linear.posts, adds=True),
    "conv_transpose2d": Row(_transpose, _transpose_refuses, Conv.posts, twice=Conv.twice),
    "avg_pool1d": Row(_avg_pool, _avg_pool_refuses),
    "avg_pool2d": Row(_avg_pool, _avg_pool_refuses),
    "adaptive_avg_pool2d": Row(_adaptive, never),
    "add": Row(_add, _of_two_refuses, CLAMPS),
    "sub": Row(_add, _of_two_refuses, CLAMPS),
    "mul": Row(_mul, _of_two_refuses, CLAMPS),
}
