"""How oneDNN has to be asked for a convolution of one shape, so that its result is right."""

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
    """A convolution of images of one shape, as oneDNN is asked for it.

    Attributes:
        weight: int8, (C_out, C_in / groups, kh, kw); where the layer's is misread, with a row or column of zeros more;
            where groups are joined, with zeros for the inputs of the others.
        shape: the output's, (N, C, H, W).
        pad: what to pad the image with before: left, right, top, bottom; negative numbers cut off.
        image: the padded image's shape.
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
    """The convolution of images of `shape` (N, C, H, W).

    Args:
        weight: int8, (C_out, C_in / groups, *kernel), kernel of 1 or 2 dimensions.
        shape: of the images; a signal is an image of one row.
        stride: one number per dimension of the kernel.
        padding: likewise.
        dilation: likewise.
        groups: as in `torch.nn.Conv2d`.
        native: whether oneDNN's own padding is right.

    Raises:
        BackendError: the images are smaller than the kernel.
    """
    fill = 4 - weight.dim()
    weight, groups = _join(weight if fill == 0 else weight.unsqueeze(2), groups)
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
    if sizes[1] == 1 and steps[1] > 1:  # wrong in oneDNN; a stride along one column means nothing
        right, steps[1] = extent_w - width - left, 1
    if native and (right, bottom) == (left, top):
        inside, pad = [top, left], [0, 0, 0, 0]
    else:
        inside, pad = [0, 0], [left, right, top, bottom]
    image = [shape[0], shape[1], height + pad[2] + pad[3], width + pad[0] + pad[1]]
    result = torch.Size([shape[0], weight.shape[0], *sizes])
    return Geometry(weight, result, pad, image, (steps, inside, spread, groups))


def _join(weight: Tensor, groups: int) -> tuple[Tensor, int]:
    """The weight (C_out, C_in / groups, kh, kw) and the number of groups as oneDNN has a quick kernel for them.

    Without AVX512 and VNNI that is so where groups have multiples of four channels, in and out, or one channel each.
    Else oneDNN takes its reference, which is many times slower than float. So the fewest groups that come to such
    multiples become one, whose other weights are zeros; that takes about as long as float.
    """
    channels, each = weight.shape[1], weight.shape[0] // groups
    if groups == 1 or is_depthwise(weight.shape, groups) or cpu.has_vnni() or cpu.has_avx512():
        return weight, groups
    fits = (n for n in range(1, groups) if groups % n == 0 and n * channels % 4 == 0 and n * each % 4 == 0)
    joined = next(fits, groups)
    blocks = weight.view(groups // joined, joined, each, channels, *weight.shape[2:])
    wide = blocks.new_zeros(groups // joined, joined, each, joined, *blocks.shape[3:])
    for i in range(joined):
        wide[:, i, :, i] = blocks[:, i]
    return wide.view(len(weight), joined * channels, *weight.shape[2:]), groups // joined


def _extent(weight: Tensor, dilation: Sequence[int]) -> tuple[int, int]:
    """How many pixels the kernel spans, (rows, columns)."""
    rows, columns = (d * (k - 1) + 1 for k, d in zip(weight.shape[2:], dilation, strict=True))
    return rows, columns


def misread(weight: Tensor, dilation: Sequence[int]) -> bool:
    """Whether oneDNN may return wrong numbers for a weight (C_out, C_in / groups, kh, kw) on this CPU.

    torch 2.13 does on AMX where a row of the kernel is 128 bytes or more in complete tiles of 64 (`C * kw`; `C * kh`
    for a kernel of one column). Nothing else was wrong in 21,000 random shapes, of which 2,100 were; stride and the
    size of the picture decide which of these, groups, padding and channels out do not. Right: dilation along the
    row, 64 channels and more, C that 4 does not divide; and all shapes with the ISA capped at AVX512-VNNI (7,000) or
    AVX2-VNNI (4,900).
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
