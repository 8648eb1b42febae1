"""Padding for convolutions of the x86 backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

REUSED = 1 << 20
"""Bytes of a padded image up to which its memory is kept for the next call."""


class Padded(NamedTuple):
    """A padded image, channels-last.

    Attributes:
        image: (N, C, H, W).
        inside: the view of it without the padding, where its memory is kept; else None.
    """

    image: Tensor
    inside: Tensor | None = None


class Padding:
    """Pads uint8 images of one shape with an integer.

    The padding of a small image is written once, and its memory used again: only the inside is copied. Two calls at the
    same time use memory of their own.

    Args:
        shape: of the images, (N, C, H, W).
        pad: left, right, top, bottom; a negative number cuts off.
        value: the integer.
    """

    def __init__(self, shape: torch.Size, pad: Sequence[int], value: int) -> None:
        self.shape, self.pad, self.value = shape, list(pad), value
        left, right, top, bottom = pad
        self._padded = shape[0], shape[1], shape[2] + top + bottom, shape[3] + left + right
        self._keeps = min(pad) >= 0 and torch.Size(self._padded).numel() <= REUSED
        self._free: list[Padded] = []

    def take(self, x: Tensor) -> Padded:
        """`x` padded; to be given back when it has been read."""
        if not self._keeps:
            return Padded(F.pad(x, self.pad, value=self.value).contiguous(memory_format=torch.channels_last))
        try:
            padded = self._free.pop()  # in one step, so that no other thread gets it
        except IndexError:
            padded = self._make()
        assert padded.inside is not None  # it is kept
        padded.inside.copy_(x)
        return padded

    def give_back(self, padded: Padded) -> None:
        """Nobody reads it any longer."""
        if padded.inside is not None:
            self._free.append(padded)

    def _make(self) -> Padded:
        left, _, top, _ = self.pad
        height, width = self.shape[2:]
        with torch.inference_mode(False):  # what is made in inference mode could not be written to outside of it
            image = torch.full(self._padded, self.value, dtype=torch.uint8, device="cpu")
            image = image.contiguous(memory_format=torch.channels_last)
            return Padded(image, image[:, :, top : top + height, left : left + width])
