"""Layers that compute in float with weights in integers, or in float16: for size. They run on any CPU.

A weight becomes floats in pieces that stay in the cache, so that the memory is read but once, and there a quarter or an
eighth as much as a float weight has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, decode
from fxq.backends.plain.stored_weight import StoredWeight, float_input
from fxq.graph.unit import OpCall
from fxq.ops import OPS

if TYPE_CHECKING:
    from typing_extensions import Self

_AT_ONCE = 1 << 18
"""Values that become floats at once: a megabyte, which the second cache of a core holds."""


class WeightOnlyKernel(Kernel):
    """A layer with a stored weight.

    Args:
        weight: its integers, in its own shape or packed; or float16.
        weight_scale: float32, as `QParams.scale`; None for float16.
        weight_zero_point: integers of the same shape; None where all are 0.
        bias: float32, (C_out,), or None.
        op: the op that it runs.
        settings: the op's options.
        takes: the names of its other arguments, in the order in which it is called with them.
        axis, block: as in `QParams`.
        packed: the shape of a row of packed values; else None.
        signed: whether packed values may be below zero.
        constants: those of its other arguments that are constants, by name.
    """

    options: ClassVar[tuple[str, ...]] = ("op", "settings", "takes", "axis", "block", "packed", "signed")
    weight: Tensor
    weight_scale: Tensor | None
    weight_zero_point: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor | None = None,
        weight_zero_point: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        op: str,
        settings: Mapping[str, Any],
        takes: Sequence[str] = ("x",),
        axis: int | None = None,
        block: int | None = None,
        packed: tuple[int, ...] | None = None,
        signed: bool = True,
        **constants: Tensor | None,
    ) -> None:
        super().__init__()
        tensors = {"weight": weight, "weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias}
        for name, tensor in {**tensors, **constants}.items():
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.op, self.settings = op, {key: decode(value) for key, value in settings.items()}
        self.takes = tuple(takes)
        self.axis, self.block, self.packed, self.signed = axis, block, packed, signed

    @classmethod
    def of(
        cls,
        call: OpCall,
        takes: Sequence[str],
        weights: Mapping[str, StoredWeight],
        constants: Mapping[str, Tensor],
    ) -> Self:
        """The kernel of an op with a weight of the qdq graph.

        Args:
            call: the op.
            takes: as above.
            weights: its weight, by the name of the argument.
            constants: its bias, and others of its arguments that are constants.
        """
        (weight,) = weights.values()
        others = {name: tensor for name, tensor in constants.items() if name != "bias"}
        return cls(
            weight.values, weight.scale, weight.zero_point, constants.get("bias"), op=call.op.name,
            settings=call.options, takes=takes, axis=weight.axis, block=weight.block, packed=weight.packed,
            signed=weight.signed, **others,
        )  # fmt: skip

    @property
    def stored(self) -> StoredWeight:
        """The weight, as its tensors are now."""
        found: StoredWeight = self._kept("", self._stored)
        return found

    def _stored(self) -> StoredWeight:
        return StoredWeight(
            self.weight, self.weight_scale, self.weight_zero_point, self.axis, self.block, self.packed, self.signed
        )


class WeightOnlyLinear(WeightOnlyKernel):
    """A linear layer. Some rows of the weight at a time; a scale for each channel is applied to the result."""

    name: ClassVar[str] = "weight_only.linear"

    def forward(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O)."""
        x, (pieces, scale, room) = float_input(x), self._kept("pieces", self._pieces)
        read = StoredWeight.floats if scale is None else StoredWeight.integers
        bias = self.bias if scale is None else None
        if len(pieces) == 1:
            y = F.linear(x, read(pieces[0], pieces[0].empty()), bias)
        else:
            held = torch.empty(room, device=x.device)
            y = torch.cat([F.linear(x, read(p, held[: len(p.values)])) for p in pieces], -1)
            y = y if bias is None else y.add_(bias)
        if scale is None:
            return y
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale, out=y)

    def _pieces(self) -> tuple[list[StoredWeight], Tensor | None, tuple[int, int]]:
        """The weight in pieces of some rows; a scale that goes to the result; the shape of the largest piece."""
        stored = self._stored()
        rows, size = max(_AT_ONCE // stored.row[0], 1), len(self.weight)
        pieces = [stored.some(lambda t, i=i: t[i : i + rows]) for i in range(0, size, rows)]  # type: ignore[misc]
        return pieces, stored.scale if stored.scales_results else None, (min(rows, size), stored.row[0])


class WeightOnlyConv(WeightOnlyKernel):
    """A convolution, perhaps a transposed one. Scales go to the weight or to the result, whichever is smaller."""

    name: ClassVar[str] = "weight_only.conv"

    def forward(self, x: Tensor) -> Tensor:
        """float32 (N, C, *size) -> float32 (N, O, *size')."""
        x, stored, run = float_input(x), self.stored, OPS[self.op].target
        behind = stored.scales_results and stored.scale is not None and x.numel() < stored.numel
        weight = stored.integers(stored.empty()) if behind else stored.floats(stored.empty())
        if not behind:
            return run(x, weight, self.bias, **self.settings)
        y: Tensor = run(x, weight, None, **self.settings)
        ones, scale = [1] * (weight.dim() - 2), stored.scale
        assert scale is not None  # as asked above
        if self.axis == 1:
            scale = scale.repeat(self.settings["groups"])
        if scale.dim():
            scale = scale.view(-1, *ones)
        y.mul_(scale)
        return y if self.bias is None else y.add_(self.bias.view(-1, *ones))


class WeightOnlyEmbedding(WeightOnlyKernel):
    """An embedding: gathers rows of integers, and makes floats of these alone."""

    name: ClassVar[str] = "weight_only.embedding"

    def forward(self, x: Tensor) -> Tensor:
        """Integers, any shape -> float32 (*shape, D)."""
        return _rows(self.stored, x).view(*x.shape, *self.stored.row)


class WeightOnlyBag(WeightOnlyKernel):
    """Sums, means or maxima of rows of an embedding: those of a bag. Makes floats of the rows that are read."""

    name: ClassVar[str] = "weight_only.embedding_bag"

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Integers (B, N), or (N,) with offsets (B,) -> float32 (B, D). Weights are of the shape of x."""
        given = {**self._buffers, **dict(zip(self.takes[1:], others, strict=True))}
        offsets, per_sample_weights = given.get("offsets"), given.get("per_sample_weights")
        rows, settings = _rows(self.stored, x), dict(self.settings)
        numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
        pad = settings.pop("padding_idx")
        if pad is not None:
            pad %= len(self.weight)
            rows = F.pad(rows, (0, 0, 0, 1))  # a row that stands for all that pad
            numbers = numbers.masked_fill(x == pad, x.numel())
            settings["padding_idx"] = x.numel()
        if offsets is not None:
            offsets = offsets.to(numbers.dtype)
        return OPS[self.op].target(numbers, rows, offsets, per_sample_weights, **settings)


KERNELS: Mapping[str, type[WeightOnlyKernel]] = {
    "linear": WeightOnlyLinear,
    **dict.fromkeys((*OPS.family("conv"), *OPS.family("conv_transpose")), WeightOnlyConv),
    "embedding": WeightOnlyEmbedding,
    "embedding_bag": WeightOnlyBag,
}
"""By op."""


def _rows(stored: StoredWeight, numbers: Tensor) -> Tensor:
    """Rows by their numbers, any shape -> float32, (as many, ...)."""
    some = stored.some(lambda t: t.index_select(0, numbers.reshape(-1)))
    return some.floats(some.empty())
