"""A layer as a product of matrices: its inputs as patches, its weight as one row for each output channel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        return call.op.name in ("linear", *_CONVS, *_TRANSPOSED) and call.computed is None

    def rows(self, weight: Tensor) -> Tensor:
        """A weight, or what is as large (scales, integers), as (G, R, K): R output channels in each of G groups."""
        if self._axes == 0:
            return weight[None]
        grouped = weight.unflatten(0, (self._groups, -1))
        if self._transposed:
            grouped = grouped.transpose(1, 2).flip(tuple(range(3, grouped.dim())))
        return grouped.flatten(2)

    def weight(self, rows: Tensor) -> Tensor:
        """Inverse of `rows`."""
        if self._axes == 0:
            return rows[0]
        grouped = rows.unflatten(2, (-1, *self.shape[2:]))
        if self._transposed:
            grouped = grouped.flip(tuple(range(3, grouped.dim()))).transpose(1, 2)
        return grouped.reshape(self.shape)

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """What the layer multiplies with each row for one of its results, (G, n, K); some samples at a time.

        Args:
            x: an input of the layer: (..., K) of a linear one, (N, C, *size) or (C, *size) of a convolution.
        """
        if self._axes == 0:
            yield x.reshape(1, -1, x.shape[-1])
            return
        x = x if x.dim() == self._axes + 2 else x[None]
        each = math.prod(self.shape[2:]) * x[0].numel()
        for part in x.split(max(_MOST // max(each, 1), 1)):
            yield self._unfolded(part)

    def _unfolded(self, x: Tensor) -> Tensor:
        kernel, stride, dilation = self.shape[2:], self._option("stride"), self._option("dilation")
        if self._transposed:  # a convolution of stride 1, of the input with zeros between its values
            x = _spaced(x, stride)
            sides = [
                (d * (k - 1) - p, d * (k - 1) - p + more)
                for k, d, p, more in zip(
                    kernel, dilation, self._option("padding"), self._option("output_padding"), strict=True
                )
            ]
            x = F.pad(x, [side for pair in reversed(sides) for side in pair])
            stride = (1,) * self._axes
        else:
            mode = self._option("padding_mode")
            mode = "constant" if mode == "zeros" else mode
            x = F.pad(x, conv_padding(self.shape, self._option("padding"), dilation), mode=mode)
        for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        x = x.unflatten(1, (self._groups, -1))  # (N, G, C, *out, *kernel)
        inside = [1, 0, *range(3, 3 + self._axes), 2, *range(3 + self._axes, x.dim())]
        return x.permute(inside).flatten(2 + self._axes).flatten(1, 1 + self._axes)

    def _option(self, name: str) -> Any:
        return self.call.options[name]

    @property
    def _axes(self) -> int:
        return len(self.shape) - 2

    @property
    def _groups(self) -> int:
        groups: int = self._option("groups")
        return groups

    @property
    def _transposed(self) -> bool:
        return self.call.op.name in _TRANSPOSED


def _spaced(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Put stride - 1 zeros between neighbours along each axis behind the first two."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spaced = x.new_zeros(*x.shape[:2], *size)
    places: list[Any] = [slice(None, None, s) for s in stride]
    spaced[(..., *places)] = x
    return spaced
