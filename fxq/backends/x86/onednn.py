"""What oneDNN's kernels share: packed weights, and how a kernel finishes."""

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
    """What happens to a kernel's float result.

    Attributes:
        name: oneDNN's name of the post-op.
        args: its arguments.
        algorithm: its variant.
        clamp: integer bounds to apply to the uint8 result, or None.
    """

    name: str
    args: list[float]
    algorithm: str
    clamp: tuple[int, int] | None

    def finish(self, y: Tensor) -> Tensor:
        """Apply `clamp` in place."""
        return y if self.clamp is None else y.clamp_(*self.clamp)

    def behind(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run`, and then `finish`."""
        return run if self.clamp is None else lambda *values: self.finish(run(*values))


def epilogue(post: PostOp | None, out: QParams | None, fused: bool = True) -> Epilogue:
    """The cheapest way to get `post` and the grid of `out` (kernels saturate at 0 and 255 only).

    Args:
        post: the activation function.
        out: the grid of the result; None for a float result.
        fused: whether the kernel can clamp in float; if not (after a residual), only relu and none are left to it.
    """
    interval = bounds(post)
    narrow = out is not None and (out.qmin, out.qmax) != (0, 255)
    if interval is None:
        assert post is not None  # bounds(None) is an interval
        clamp = (out.qmin, out.qmax) if out is not None and narrow else None
        return Epilogue(_KERNEL_NAME.get(post.name, post.name), list(post.args), post.algorithm, clamp)
    plain = post is None or post.name == "relu"
    if plain and not narrow:
        return Epilogue("none" if post is None else "relu", [], "", None)
    if out is None:
        return Epilogue("hardtanh", list(interval), "", None)
    low, high = (min(max(bound, float(out.low)), float(out.high)) for bound in interval)
    if fused:
        return Epilogue("hardtanh", [low, high], "", None)
    return Epilogue("none", [], "", (round(low / out.s) + out.z, round(high / out.s) + out.z))


class OnednnLayer(LayerKernel):
    """A layer on oneDNN's kernels."""

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether oneDNN adds pairs of products in int16 on this CPU."""
        return not (cpu.has_exact_depthwise() if depthwise else cpu.has_vnni())


class PackedWeight(NamedTuple):
    """A weight in oneDNN's layout, with what goes with it."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None


def check_image(name: str, shape: torch.Size, dims: int, channels: int) -> None:
    """Refuse an input of a convolution that is not (N, channels, *size) or (channels, *size), `dims` sizes."""
    if len(shape) not in (dims + 1, dims + 2):
        raise InputError(
            f"{name}: an input of shape {tuple(shape)}; the layer takes {dims + 2} dimensions, or {dims + 1} without a "
            "batch."
        )
    if shape[-1 - dims] != channels:
        raise InputError(f"{name}: an input with {shape[-1 - dims]} channels; the layer takes {channels}.")


def target(out: QParams | None) -> tuple[float, int, torch.dtype]:
    """Scale, zero point and type of a result; None: float32."""
    return (*scale_and_zero_point(out), torch.float32 if out is None else torch.uint8)
