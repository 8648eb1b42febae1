"""Data for the demo: two photographs and the 8x8 digits that ship with scikit-learn. Nothing is downloaded.

The photographs are cut into fixed rectangles, some for training and some held out. Every rectangle is cut before it is
resized, so no training pixel depends on a held-out one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_image  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor

SCALE = 2
"""How much smaller a low-resolution picture is, per side."""


class Region(NamedTuple):
    """A rectangle of one photograph, in pixels; sides are even, so that halving is exact."""

    photograph: str
    top: int
    left: int
    height: int
    width: int


class Pair(NamedTuple):
    """Pictures small, (N, 1, h, w), and large, (N, 1, SCALE * h, SCALE * w); float32 luma in [0, 1]."""

    low: Tensor
    high: Tensor


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) float32 in [0, 1], labels (N,) int64 in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


HELD_OUT_REGIONS = {
    "pagoda": Region("china", 40, 210, 192, 128),
    "foliage": Region("china", 298, 416, 128, 128),
    "petals": Region("flower", 100, 304, 160, 128),
}
TRAINING_REGIONS = (
    Region("china", 0, 0, 426, 210),
    Region("china", 232, 210, 194, 206),
    Region("china", 0, 338, 232, 302),
    Region("china", 298, 544, 128, 96),
    Region("flower", 0, 0, 426, 304),
    Region("flower", 0, 304, 100, 128),
    Region("flower", 260, 304, 166, 128),
    Region("flower", 0, 432, 426, 208),
)


def photographs() -> dict[str, Tensor]:
    """scikit-learn's sample photographs by name: (427, 640) float32 luma in [0, 1] (ITU-R BT.601, section 2.5.1)."""
    weights = torch.tensor([0.299, 0.587, 0.114])
    pictures = {name: torch.tensor(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")}
    return {name: (picture.float() / 255) @ weights for name, picture in pictures.items()}


def downsample(high: Tensor) -> Tensor:
    """Halve (N, 1, 2h, 2w) to (N, 1, h, w): bicubic with antialiasing, clamped to [0, 1]."""
    return F.interpolate(high, scale_factor=1 / SCALE, mode="bicubic", antialias=True).clamp(0, 1)


def bicubic(low: Tensor) -> Tensor:
    """Double (N, 1, h, w) to (N, 1, 2h, 2w): the baseline for super-resolution.

    torch's kernel here is Keys' with a = -0.75. With antialias=True it would be a = -0.5, which scores 0.1 dB lower.
    """
    return F.interpolate(low, scale_factor=SCALE, mode="bicubic").clamp(0, 1)


def held_out_pairs() -> dict[str, Pair]:
    """The held-out regions by name, each a Pair with N = 1."""
    pictures = photographs()
    highs = {name: _cut(pictures, region) for name, region in HELD_OUT_REGIONS.items()}
    return {name: Pair(downsample(high), high) for name, high in highs.items()}


def training_pairs(
    side: int = 48, stride: int = 16, sizes: tuple[float, ...] = (1.0, 0.8, 0.6), least_detail: float = 0.02
) -> Pair:
    """Patches of the training regions: low (N, 1, side / 2, side / 2), high (N, 1, side, side).

    Each region is also taken at the smaller `sizes`, which have finer detail (Dong et al. 2016, section 4.1). Patches
    whose standard deviation is below `least_detail` (sky, blurred background) are left out: any filter restores them.
    """
    pictures = photographs()
    lows, highs = [], []
    for region in TRAINING_REGIONS:
        whole = _cut(pictures, region)
        for size in sizes:
            height, width = (int(length * size / SCALE) * SCALE for length in whole.shape[2:])
            high = F.interpolate(whole, (height, width), mode="bicubic", antialias=True).clamp(0, 1)
            highs.append(_patches(high, side, stride))
            lows.append(_patches(downsample(high), side // SCALE, stride // SCALE))
    low, high = torch.cat(lows), torch.cat(highs)
    detailed = high.std(dim=(1, 2, 3)) >= least_detail
    return Pair(low[detailed], high[detailed])


def digits(test_share: float = 0.25, seed: int = 0) -> Digits:
    """scikit-learn's 1797 handwritten digits, split at random with every class in the same proportion in both parts."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    train, test = train_test_split(range(len(labels)), test_size=test_share, random_state=seed, stratify=labels)
    return Digits(images[train], labels[train], images[test], labels[test])


def psnr(a: Tensor, b: Tensor, border: int = 4) -> float:
    """Peak signal-to-noise ratio in dB of two pictures (..., h, w) with peak 1: -10 log10(mean((a - b)^2)).

    Both are clamped to [0, 1] first, as a stored picture is, and `border` pixels are cut from each side, where the
    padding of a network is seen more than its weights. Infinite for equal pictures.
    """
    if a.shape != b.shape:
        raise ValueError(f"psnr needs pictures of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    inner = slice(border, -border or None)
    error = a[..., inner, inner].double().clamp(0, 1) - b[..., inner, inner].double().clamp(0, 1)
    return float(-10 * torch.log10(error.square().mean()))


def _cut(pictures: dict[str, Tensor], region: Region) -> Tensor:
    rows = slice(region.top, region.top + region.height)
    columns = slice(region.left, region.left + region.width)
    return pictures[region.photograph][rows, columns][None, None]


def _patches(picture: Tensor, side: int, stride: int) -> Tensor:
    """All (side, side) patches of a (1, 1, h, w) picture on a grid of `stride`, as (N, 1, side, side)."""
    columns = F.unfold(picture, side, stride=stride)
    return columns.transpose(1, 2).reshape(-1, 1, side, side)
