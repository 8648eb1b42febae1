"""Padding for convolutions of the x86 backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_REUSED_IMAGE_BYTES = 1 << 20
"""Size of a padded image up to which its memory is reused by the next call."""


class PaddedImage(NamedTuple):
    """Padded image, channels-last.

    Attributes:
        image: uint8, (N, C, H, W).
        inside: view of `image` without the padding, if its memory is reused; else None.
    """

    image: Tensor
    inside: Tensor | None = None


class Padding:
    """Pads uint8 images of one shape with an integer.

    The padding of a small image is written once. Later calls reuse its memory and copy only the inside. Concurrent
    calls use separate memory.

    Args:
        shape: shape of the images, (N, C, H, W).
        pad: pixels on the left, right, top and bottom; negative numbers crop.
        value: integer to pad with.
    """

    def __init__(self, shape: torch.Size, pad: Sequence[int], value: int) -> None:
        self.shape, self.pad, self.value = shape, list(pad), value
        left, right, top, bottom = pad
        self._padded = shape[0], shape[1], shape[2] + top + bottom, shape[3] + left + right
        self._reuses = min(pad) >= 0 and torch.Size(self._padded).numel() <= MAX_REUSED_IMAGE_BYTES
        self._free: list[PaddedImage] = []

    def take(self, x: Tensor) -> PaddedImage:
        """Return `x` padded. The caller gives it back after reading it."""
        if not self._reuses:
            return PaddedImage(F.pad(x, self.pad, value=self.value).contiguous(memory_format=torch.channels_last))
        try:
            padded = self._free.pop()  # in one step, so that no other thread gets it
        except IndexError:
            padded = self._allocate()
        assert padded.inside is not None  # its memory is reused
        padded.inside.copy_(x)
        return padded

    def give_back(self, padded: PaddedImage) -> None:
        """Free the memory of a padded image for the next call."""
        if padded.inside is not None:
            self._free.append(padded)

    def _allocate(self) -> PaddedImage:
        left, _, top, _ = self.pad
        height, width = self.shape[2:]
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
            image = torch.full(self._padded, self.value, dtype=torch.uint8, device="cpu")
            image = image.contiguous(memory_format=torch.channels_last)
            return PaddedImage(image, image[:, :, top : top + height, left : left + width])
