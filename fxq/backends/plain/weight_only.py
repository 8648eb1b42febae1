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
    """An op with stored weights.

    Args:
        op: the op that it runs.
        settings: the op's options.
        takes: the names of the arguments with which it is called, in order; all others are constants.
        axis, block: as in `QParams`, of all weights.
        packed: the shape of a row of each weight, where two values are in a byte; else None.
        signed: whether packed values may be below zero.
        tensors: by the names of the op's arguments. Each weight as it is stored, with its scale and zero point under
            `weight_scale` and `weight_zero_point` (see `StoredWeight`); those that are constants, float32.
    """

    options: ClassVar[tuple[str, ...]] = ("op", "settings", "takes", "axis", "block", "packed", "signed")
    bias: Tensor | None

    def __init__(
        self,
        *,
        op: str,
        settings: Mapping[str, Any],
        takes: Sequence[str] = ("x",),
        axis: int | None = None,
        block: int | None = None,
        packed: Sequence[Sequence[int]] | None = None,
        signed: bool = True,
        **tensors: Tensor | None,
    ) -> None:
        super().__init__()
        weights = [name for name in OPS[op].tensors if OPS[op].traits.role(name) == "weight"]
        constants = [name for name in OPS[op].tensors if name not in (*weights, *takes)]
        for name in (*(f"{weight}{part}" for weight in weights for part in _PARTS), *constants):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.op, self.settings = op, {key: decode(value) for key, value in settings.items()}
        self.takes, self.axis, self.block, self.signed = tuple(takes), axis, block, signed
        self.packed = None if packed is None else tuple(map(tuple, packed))
        self._weights, self._constants = weights, constants

    @classmethod
    def of(
        cls,
        call: OpCall,
        takes: Sequence[str],
        weights: Mapping[str, StoredWeight],
        constants: Mapping[str, Tensor],
    ) -> Self:
        """The kernel of an op with weights of the qdq graph.

        Args:
            call: the op.
            takes: as above.
            weights: by the names of the arguments; all are stored alike.
            constants: others of its arguments, such as the bias.
        """
        tensors = dict(constants)
        for name, weight in weights.items():
            parts = zip(_PARTS, (weight.values, weight.scale, weight.zero_point), strict=True)
            tensors |= {f"{name}{part}": tensor for part, tensor in parts if tensor is not None}
        first = next(iter(weights.values()))
        packed = None if first.packed is None else [weight.row for weight in weights.values()]
        return cls(
            **tensors, op=call.op.name, settings=call.options, takes=takes, axis=first.axis, block=first.block,
            packed=packed, signed=first.signed,
        )  # fmt: skip

    @property
    def stored(self) -> dict[str, StoredWeight]:
        """The weights by name, as their tensors are now."""
        found: dict[str, StoredWeight] = self._cached("", self._stored)
        return found

    def _stored(self) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for name in self._weights:
            values, scale, zero_point = (self._buffers[f"{name}{part}"] for part in _PARTS)
            if values is not None:
                row = None if self.packed is None else self.packed[len(found)]
                found[name] = StoredWeight(values, scale, zero_point, self.axis, self.block, row, self.signed)
        return found

    def only(self) -> StoredWeight:
        """The weight of an op that has one."""
        return self.stored["weight"]

    def given(self, *inputs: Tensor) -> dict[str, Tensor]:
        """What it is called with, and its constants, by the names of the op's arguments."""
        constants = {name: tensor for name in self._constants if (tensor := self._buffers[name]) is not None}
        return constants | dict(zip(self.takes, inputs, strict=True))


_PARTS = ("", "_scale", "_zero_point")


class WeightOnlyLinear(WeightOnlyKernel):
    """A linear layer. Some rows of the weight at a time; a scale for each channel is applied to the result."""

    name: ClassVar[str] = "weight_only.linear"

    def forward(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O)."""
        x, (pieces, scale, room) = float_input(x), self._cached("pieces", self._pieces)
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
        stored = self.only()
        rows, size = max(_AT_ONCE // stored.row[0], 1), len(stored.values)
        pieces = [stored.some(lambda t, i=i: t[i : i + rows]) for i in range(0, size, rows)]  # type: ignore[misc]
        return pieces, stored.scale if stored.scales_results else None, (min(rows, size), stored.row[0])


class WeightOnlyConv(WeightOnlyKernel):
    """A convolution, perhaps a transposed one. Scales go to the weight or to the result, whichever is smaller."""

    name: ClassVar[str] = "weight_only.conv"

    def forward(self, x: Tensor) -> Tensor:
        """float32 (N, C, *size) -> float32 (N, O, *size')."""
        x, stored, run = float_input(x), self.only(), OPS[self.op].target
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
        return _rows(self.only(), x).view(*x.shape, *self.only().row)


class WeightOnlyBag(WeightOnlyKernel):
    """Sums, means or maxima of rows of an embedding: those of a bag. Makes floats of the rows that are read."""

    name: ClassVar[str] = "weight_only.embedding_bag"

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Integers (B, N), or (N,) with offsets (B,) -> float32 (B, D). Weights are of the shape of x."""
        given = self.given(x, *others)
        offsets, per_sample_weights = given.get("offsets"), given.get("per_sample_weights")
        rows, settings = _rows(self.only(), x), dict(self.settings)
        numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
        pad = settings.pop("padding_idx")
        if pad is not None:
            pad %= len(self.only().values)
            rows = F.pad(rows, (0, 0, 0, 1))  # a row that stands for all that pad
            numbers = numbers.masked_fill(x == pad, x.numel())
            settings["padding_idx"] = x.numel()
        if offsets is not None:
            offsets = offsets.to(numbers.dtype)
        return OPS[self.op].target(numbers, rows, offsets, per_sample_weights, **settings)


class WeightOnlyRecurrent(WeightOnlyKernel):
    """An lstm, gru or rnn of one layer and direction. Its weights become floats at each call, for all of its steps."""

    name: ClassVar[str] = "weight_only.recurrent"

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        """float32 (T, N, I), initial states (N, P), (N, H) -> what the op returns."""
        weights = {name: weight.floats(weight.empty()) for name, weight in self.stored.items()}
        y: Tensor = OPS[self.op].target(**self.given(*map(float_input, (x, *states))), **weights, **self.settings)
        return y


KERNELS: Mapping[str, type[WeightOnlyKernel]] = {
    "linear": WeightOnlyLinear,
    **dict.fromkeys((*OPS.family("conv"), *OPS.family("conv_transpose")), WeightOnlyConv),
    "embedding": WeightOnlyEmbedding,
    "embedding_bag": WeightOnlyBag,
    **dict.fromkeys(("lstm", "gru", "rnn"), WeightOnlyRecurrent),
}
"""By op."""


def _rows(stored: StoredWeight, numbers: Tensor) -> Tensor:
    """Rows by their numbers, any shape -> float32, (as many, ...)."""
    some = stored.some(lambda t: t.index_select(0, numbers.reshape(-1)))
    return some.floats(some.empty())
