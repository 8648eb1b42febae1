"""Arguments for oneDNN's convolution that avoid its wrong results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.table.layer_spec import is_depthwise
from fxq.errors import BackendError


class Geometry(NamedTuple):
    """Arguments of oneDNN's convolution for images of one shape.

    Attributes:
        weight: int8, (C_out, C_in / groups, kh, kw). It has an extra row or column of zeros if oneDNN would misread the
            layer's weight, and zeros between the groups if groups are joined.
        shape: shape of the output, (N, C, H, W).
        pad: padding to apply before the call: left, right, top, bottom; negative numbers crop.
        image: shape of the padded image.
        arguments: stride, padding and dilation (two numbers each), and groups.
    """

    weight: Tensor
    shape: torch.Size
    pad: list[int]
    image: list[int]
    arguments: tuple[list[int], list[int], list[int], int]


def geometry(
    weight: Tensor,
    shape: torch.Size,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    native: bool,
) -> Geometry:
    """Return the arguments of oneDNN's convolution for images of `shape`.

    Args:
        weight: int8, (C_out, C_in / groups, *kernel), kernel of 1 or 2 dimensions.
        shape: shape of the images, (N, C, H, W); a signal is an image of one row.
        stride: one number per dimension of the kernel.
        padding: one number per dimension of the kernel.
        dilation: one number per dimension of the kernel.
        groups: number of groups.
        native: whether oneDNN's own padding is right.

    Raises:
        BackendError: the images are smaller than the kernel.
    """
    fill = 4 - weight.dim()
    weight, groups = _join_groups(weight if fill == 0 else weight.unsqueeze(2), groups)
    steps = [1] * fill + list(stride)
    spread = [d if taps > 1 else 1 for taps, d in zip(weight.shape[2:], [1] * fill + list(dilation), strict=True)]
    (top, left), (height, width) = [0] * fill + list(padding), shape[2:]
    extent_h, extent_w = _extent(weight, spread)
    sizes = (height + 2 * top - extent_h) // steps[0] + 1, (width + 2 * left - extent_w) // steps[1] + 1
    if min(sizes) <= 0:
        raise BackendError(f"an input of {height} x {width} pixels is smaller than the convolution's kernel.")
    if misread(weight, spread):
        weight = F.pad(weight, (0, 1) if weight.shape[3] > 1 else (0, 0, 0, 1))
        extent_h, extent_w = _extent(weight, spread)
    bottom = max(top, (sizes[0] - 1) * steps[0] + extent_h - height - top)
    right = max(left, (sizes[1] - 1) * steps[1] + extent_w - width - left)
    if sizes[1] == 1 and steps[1] > 1:  # oneDNN is wrong here; along one column the stride has no effect
        right, steps[1] = extent_w - width - left, 1
    if native and (right, bottom) == (left, top):
        inside, pad = [top, left], [0, 0, 0, 0]
    else:
        inside, pad = [0, 0], [left, right, top, bottom]
    image = [shape[0], shape[1], height + pad[2] + pad[3], width + pad[0] + pad[1]]
    result = torch.Size([shape[0], weight.shape[0], *sizes])
    return Geometry(weight, result, pad, image, (steps, inside, spread, groups))


def _join_groups(weight: Tensor, groups: int) -> tuple[Tensor, int]:
    """Join groups of a convolution until oneDNN has a fast kernel for it.

    Without AVX512 and VNNI, oneDNN's fast kernels need groups with a multiple of four input and output channels, or
    depthwise convolutions. For other groups it runs its reference, which is many times slower than float. As few groups
    as possible are joined, with zeros as the weights between them. That is about as fast as float.

    Args:
        weight: int8, (C_out, C_in / groups, kh, kw).
        groups: number of groups.

    Returns:
        The weight and the number of groups to call oneDNN with.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    if groups == 1 or is_depthwise(weight.shape, groups) or cpu.has_vnni() or cpu.has_avx512():
        return weight, groups
    fits = (n for n in range(1, groups) if groups % n == 0 and n * inputs % 4 == 0 and n * outputs % 4 == 0)
    joined = next(fits, groups)
    blocks = weight.view(groups // joined, joined, outputs, inputs, *weight.shape[2:])
    padded = blocks.new_zeros(groups // joined, joined, outputs, joined, *blocks.shape[3:])
    for i in range(joined):
        padded[:, i, :, i] = blocks[:, i]
    return padded.view(len(weight), joined * inputs, *weight.shape[2:]), groups // joined


def _extent(weight: Tensor, dilation: Sequence[int]) -> tuple[int, int]:
    """Pixels that the dilated kernel spans, (rows, columns)."""
    rows, columns = (d * (k - 1) + 1 for k, d in zip(weight.shape[2:], dilation, strict=True))
    return rows, columns


def misread(weight: Tensor, dilation: Sequence[int]) -> bool:
    """Whether oneDNN may return wrong numbers for a weight (C_out, C_in / groups, kh, kw) on this CPU.

    With AMX, torch 2.13 may be wrong if a row of the kernel (`C * kw` bytes; `C * kh` for a kernel of one column) is a
    multiple of 64 and at least 128 bytes. Whether it is wrong then depends on the stride and the image size, not on
    groups, padding or output channels. It is right with dilation along the row, with 64 or more channels, and if C is
    not a multiple of 4. Checked on 21,000 random shapes with AMX, and on 11,900 without it, none of which was wrong.
    """
    if not cpu.has_amx():
        return False
    channels, height, width = weight.shape[1:]
    row, spread = (channels * width, dilation[1]) if width > 1 else (channels * height, dilation[0])
    return channels % 4 == 0 and channels < 64 and spread == 1 and row >= 128 and row % 64 == 0


def sum_is_misread(weight: Tensor, dilation: Sequence[int], groups: int) -> bool:
    """Whether oneDNN may add a residual incorrectly to a convolution on this CPU.

    With AVX2-VNNI, torch 2.13 is wrong for dilated depthwise convolutions whose output has zero point 0, depending on
    the number of channels and the image width. It is right without a residual, and for all other convolutions of
    2,500 random shapes.

    Args:
        weight: weight of the convolution, (C_out, C_in / groups, kh, kw).
        dilation: dilation of each spatial axis.
        groups: number of groups.
    """
    return cpu.has_avx2_vnni() and is_depthwise(weight.shape, groups) and max(dilation) > 1
