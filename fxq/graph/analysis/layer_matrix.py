"""Linear layers and convolutions as matrix products: inputs as patches, the weight as one row per output channel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.graph.unit import OpCall
from fxq.ops import OPS
from fxq.ops.convolution import conv_padding

_CONVS = OPS.family("conv")
_TRANSPOSED = OPS.family("conv_transpose")
MAX_PATCH_VALUES = 2**22
"""Limit of the values in patches that are computed at a time; at least one sample is."""


@dataclass(frozen=True)
class LayerMatrix:
    """A linear layer or convolution as a matrix product per group: `patches(x) @ rows(weight).mT`, without bias.

    Attributes:
        call: the layer, for which `takes` returns True.
        shape: shape of its weight.
    """

    call: OpCall
    shape: tuple[int, ...]

    @staticmethod
    def takes(call: OpCall) -> bool:
        """Whether an op is a linear layer or convolution whose options are constants."""
        return call.op.name in ("linear", *_CONVS, *_TRANSPOSED) and call.run_time_option is None

    @property
    def is_transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.call.op.name in _TRANSPOSED

    def rows(self, weight: Tensor) -> Tensor:
        """Reshape a weight, or a tensor of its shape (scales, integers), to (G, R, K).

        R is the number of output channels in each of G groups, K the number of products per output.
        """
        if self._axes == 0:
            return weight[None]
        grouped = weight.unflatten(0, (self._groups, -1))
        if self.is_transposed:
            grouped = grouped.transpose(1, 2).flip(tuple(range(3, grouped.dim())))
        return grouped.flatten(2)

    def weight(self, rows: Tensor) -> Tensor:
        """Reshape (G, R, K) back to the shape of the weight; inverse of `rows`."""
        if self._axes == 0:
            return rows[0]
        grouped = rows.unflatten(2, (-1, *self.shape[2:]))
        if self.is_transposed:
            grouped = grouped.flip(tuple(range(3, grouped.dim()))).transpose(1, 2)
        return grouped.reshape(self.shape)

    def patches(self, x: Tensor, most: int | None = None) -> Iterator[Tensor]:
        """Yield the input values of each output position, as (G, n, K), for some samples at a time.

        Args:
            x: input of the layer: (..., K) for a linear layer, (N, C, *size) or (C, *size) for a convolution.
            most: number of output positions to take of each sample, in a fixed random selection; None for all.
        """
        if self._axes == 0:
            x = x.flatten(1, -2) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
            yield x[:, _selected(x.shape[1], most)].flatten(0, 1)[None]
            return
        x = x if x.dim() == self._axes + 2 else x[None]
        padded = self._padded(x)
        indices = self._patch_indices(padded, most)
        for samples in padded.flatten(2).split(max(MAX_PATCH_VALUES // max(indices.numel() * x.shape[1], 1), 1)):
            patches = samples[:, :, indices].unflatten(1, (self._groups, -1))  # (N, G, C, positions, kernel)
            yield patches.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)

    def _padded(self, x: Tensor) -> Tensor:
        """The padded input; for a transposed convolution, with zeros between its elements."""
        if not self.is_transposed:
            mode = self._option("padding_mode")
            mode = "constant" if mode == "zeros" else mode
            return F.pad(x, conv_padding(self.shape, self._option("padding"), self._option("dilation")), mode=mode)
        names = "dilation", "padding", "output_padding"
        sides = [
            (d * (k - 1) - p, d * (k - 1) - p + extra)
            for k, d, p, extra in zip(self.shape[2:], *map(self._option, names), strict=True)
        ]
        return F.pad(_spaced(x, self._option("stride")), [side for pair in reversed(sides) for side in pair])

    def _patch_indices(self, x: Tensor, most: int | None) -> Tensor:
        """Indices into the flattened axes of a padded input that each output position reads, (positions, kernel)."""
        indices = torch.arange(math.prod(x.shape[2:]), device=x.device).view(x.shape[2:])
        stride = (1,) * self._axes if self.is_transposed else self._option("stride")
        for axis, (k, s, d) in enumerate(zip(self.shape[2:], stride, self._option("dilation"), strict=True)):
            indices = indices.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        rows = indices.flatten(self._axes).flatten(0, self._axes - 1)
        return rows[_selected(len(rows), most).to(rows.device)]

    def _option(self, name: str) -> Any:
        return self.call.options[name]

    @property
    def _axes(self) -> int:
        return len(self.shape) - 2

    @property
    def _groups(self) -> int:
        groups: int = self._option("groups")
        return groups


def _spaced(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert stride - 1 zeros between neighbours along each axis after the first two."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spaced = x.new_zeros(*x.shape[:2], *size)
    slices: list[Any] = [slice(None, None, s) for s in stride]
    spaced[(..., *slices)] = x
    return spaced


def _selected(count: int, most: int | None) -> Tensor:
    """The indices 0..count-1, or `most` of them in a fixed random selection."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].sort().values
