"""A layer as a product of matrices: its inputs as patches, its weight as one row for each output channel."""

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
_MOST = 2**22
"""Values of patches that are made at a time, unless those of one sample are more."""


@dataclass(frozen=True)
class LayerMatrix:
    """What a linear layer or a convolution computes, bias apart: `patches(x) @ rows(weight).mT`, group by group.

    Attributes:
        call: the layer, one that `takes` accepts.
        shape: of its weight.
    """

    call: OpCall
    shape: tuple[int, ...]

    @staticmethod
    def takes(call: OpCall) -> bool:
        """Whether an op is such a layer, with options that are known."""
        return call.op.name in ("linear", *_CONVS, *_TRANSPOSED) and call.run_time_option is None

    @property
    def is_transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.call.op.name in _TRANSPOSED

    def rows(self, weight: Tensor) -> Tensor:
        """A weight, or what is as large (scales, integers), as (G, R, K): R output channels in each of G groups."""
        if self._axes == 0:
            return weight[None]
        grouped = weight.unflatten(0, (self._groups, -1))
        if self.is_transposed:
            grouped = grouped.transpose(1, 2).flip(tuple(range(3, grouped.dim())))
        return grouped.flatten(2)

    def weight(self, rows: Tensor) -> Tensor:
        """Inverse of `rows`."""
        if self._axes == 0:
            return rows[0]
        grouped = rows.unflatten(2, (-1, *self.shape[2:]))
        if self.is_transposed:
            grouped = grouped.flip(tuple(range(3, grouped.dim()))).transpose(1, 2)
        return grouped.reshape(self.shape)

    def patches(self, x: Tensor, most: int | None = None) -> Iterator[Tensor]:
        """What the layer multiplies with each row for one of its results, (G, n, K); some samples at a time.

        Args:
            x: an input of the layer: (..., K) of a linear one, (N, C, *size) or (C, *size) of a convolution.
            most: how many of the places of each sample are taken, at random, but the same ones each time; all: None.
        """
        if self._axes == 0:
            x = x.flatten(1, -2) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
            yield x[:, _some_of(x.shape[1], most)].flatten(0, 1)[None]
            return
        x = x if x.dim() == self._axes + 2 else x[None]
        padded = self._padded(x)
        places = self._places(padded, most)
        for part in padded.flatten(2).split(max(_MOST // max(places.numel() * x.shape[1], 1), 1)):
            found = part[:, :, places].unflatten(1, (self._groups, -1))  # (N, G, C, places, kernel)
            yield found.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)

    def _padded(self, x: Tensor) -> Tensor:
        """The input with all that the kernel runs over."""
        if not self.is_transposed:
            mode = self._option("padding_mode")
            mode = "constant" if mode == "zeros" else mode
            return F.pad(x, conv_padding(self.shape, self._option("padding"), self._option("dilation")), mode=mode)
        names = "dilation", "padding", "output_padding"
        sides = [
            (d * (k - 1) - p, d * (k - 1) - p + more)
            for k, d, p, more in zip(self.shape[2:], *map(self._option, names), strict=True)
        ]
        return F.pad(_spaced(x, self._option("stride")), [side for pair in reversed(sides) for side in pair])

    def _places(self, x: Tensor, most: int | None) -> Tensor:
        """Where the kernel reads, in the flattened axes of a padded input: one row for each place that it stands at."""
        at = torch.arange(math.prod(x.shape[2:]), device=x.device).view(x.shape[2:])
        stride = (1,) * self._axes if self.is_transposed else self._option("stride")
        for axis, (k, s, d) in enumerate(zip(self.shape[2:], stride, self._option("dilation"), strict=True)):
            at = at.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        rows = at.flatten(self._axes).flatten(0, self._axes - 1)
        return rows[_some_of(len(rows), most).to(rows.device)]

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
    """Put stride - 1 zeros between neighbours along each axis behind the first two."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spaced = x.new_zeros(*x.shape[:2], *size)
    places: list[Any] = [slice(None, None, s) for s in stride]
    spaced[(..., *places)] = x
    return spaced


def _some_of(count: int, most: int | None) -> Tensor:
    """The numbers from 0 to count, or some of them at random, the same ones each time."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].sort().values
