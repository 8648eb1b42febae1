"""Packed weights, post-ops and input checks of the kernels that call oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import PostOp, bounds, scale_and_zero_point
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.errors import InputError
from fxq.quant.qparams import QParams

_KERNEL_NAME = {"relu6": "hardtanh", "silu": "swish"}


class Epilogue(NamedTuple):
    """oneDNN post-op of a kernel, and a clamp of its result.

    Attributes:
        name: oneDNN's name of the post-op.
        args: arguments of the post-op.
        algorithm: variant of the post-op.
        clamp: integer bounds of the uint8 result that the kernel does not apply, or None.
    """

    name: str
    args: list[float]
    algorithm: str
    clamp: tuple[int, int] | None

    def finish(self, y: Tensor) -> Tensor:
        """Apply `clamp` to a result in place."""
        return y if self.clamp is None else y.clamp_(*self.clamp)

    def appended_to(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that calls `run`, then `finish`."""
        return run if self.clamp is None else lambda *values: self.finish(run(*values))


def epilogue(post: PostOp | None, out: QParams | None, fused: bool = True) -> Epilogue:
    """Return the fastest post-op for an activation function and an output grid.

    oneDNN's kernels saturate at 0 and 255 only, so a grid with other limits needs a clamp.

    Args:
        post: the activation function.
        out: grid of the result; None for a float result.
        fused: whether the kernel can clamp in float. With a residual it cannot: it applies relu or nothing.
    """
    interval = bounds(post)
    has_limits = out is not None and (out.qmin, out.qmax) != (0, 255)
    if interval is None:
        assert post is not None  # bounds(None) is an interval
        clamp = (out.qmin, out.qmax) if out is not None and has_limits else None
        return Epilogue(_KERNEL_NAME.get(post.name, post.name), list(post.args), post.algorithm, clamp)
    plain = post is None or post.name == "relu"
    if plain and not has_limits:
        return Epilogue("none" if post is None else "relu", [], "", None)
    if out is None:
        return Epilogue("hardtanh", list(interval), "", None)
    low, high = (min(max(bound, float(out.low)), float(out.high)) for bound in interval)
    if fused:
        return Epilogue("hardtanh", [low, high], "", None)
    return Epilogue("none", [], "", (round(low / out.s) + out.z, round(high / out.s) + out.z))


class OnednnLayer(LayerKernel):
    """Layer that oneDNN's kernels run."""

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether oneDNN adds pairs of products in int16 on this CPU, which may saturate."""
        return not (cpu.has_exact_depthwise() if depthwise else cpu.has_vnni())


class PackedWeight(NamedTuple):
    """Weight in oneDNN's layout, with scale, zero point and bias as oneDNN's ops take them."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None


def check_image(name: str, shape: torch.Size, dims: int, channels: int) -> None:
    """Raise `InputError` unless an input is (N, channels, *size) or (channels, *size).

    Args:
        name: name of the kernel, for the message.
        shape: shape of the input.
        dims: number of spatial dimensions.
        channels: number of input channels.
    """
    if len(shape) not in (dims + 1, dims + 2):
        raise InputError(
            f"{name}: the input has shape {tuple(shape)}; the layer takes {dims + 2} dimensions, "
            f"or {dims + 1} without a batch axis."
        )
    if shape[-1 - dims] != channels:
        raise InputError(f"{name}: the input has {shape[-1 - dims]} channels; the layer takes {channels}.")


def output_grid(out: QParams | None) -> tuple[float, int, torch.dtype]:
    """Scale, zero point and dtype of a result on the grid `out`; None is a float32 result."""
    return (*scale_and_zero_point(out), torch.float32 if out is None else torch.uint8)
