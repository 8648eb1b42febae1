"""Recurrent layers that compute in float with weights in integers, or in float16: for size. They run on any CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fxq.backends.kernel import Kernel, decode
from fxq.backends.plain.stored_weight import StoredWeight, float_input
from fxq.graph.unit import OpCall
from fxq.ops import OPS

if TYPE_CHECKING:
    from typing_extensions import Self

_WEIGHTS = ("weight_ih", "weight_hh", "weight_hr")
_CONSTANTS = ("bias_ih", "bias_hh", "h", "c")


class WeightOnlyRecurrent(Kernel):
    """An lstm, gru or rnn of one layer and direction, whose weights become floats at each call, for all of its steps.

    Args:
        op: the op that it runs.
        settings: the op's options.
        takes: the names of its other arguments, in the order in which it is called with them.
        axis, block: as in `QParams`, of all weights.
        columns: how many each weight has, in the order of the op; None where they are not packed.
        signed: whether packed values may be below zero.
        tensors: `weight_ih` and so on, as stored, with `weight_ih_scale` and `weight_ih_zero_point`, as in
            `StoredWeight`; what else of the op's tensors is constant, float32.
    """

    name: ClassVar[str] = "weight_only.recurrent"
    options: ClassVar[tuple[str, ...]] = ("op", "settings", "takes", "axis", "block", "columns", "signed")

    def __init__(
        self,
        *,
        op: str,
        settings: Mapping[str, Any],
        takes: Sequence[str] = ("x",),
        axis: int | None = None,
        block: int | None = None,
        columns: Sequence[int] | None = None,
        signed: bool = True,
        **tensors: Tensor | None,
    ) -> None:
        super().__init__()
        for name in (*(f"{w}{part}" for w in _WEIGHTS for part in ("", "_scale", "_zero_point")), *_CONSTANTS):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.op, self.settings = op, {key: decode(value) for key, value in settings.items()}
        self.takes, self.axis, self.block, self.signed = tuple(takes), axis, block, signed
        self.columns = None if columns is None else tuple(columns)

    @classmethod
    def of(
        cls,
        call: OpCall,
        takes: Sequence[str],
        weights: Mapping[str, StoredWeight],
        constants: Mapping[str, Tensor],
    ) -> Self:
        """The kernel of an op, as `WeightOnlyKernel.of`."""
        first, tensors = weights["weight_ih"], dict(constants)
        for name, weight in weights.items():
            parts = {"": weight.values, "_scale": weight.scale, "_zero_point": weight.zero_point}
            tensors |= {f"{name}{part}": tensor for part, tensor in parts.items() if tensor is not None}
        columns = None if first.packed is None else [weight.row[0] for weight in weights.values()]
        return cls(
            **tensors, op=call.op.name, settings=call.options, takes=takes, axis=first.axis, block=first.block,
            columns=columns, signed=first.signed,
        )  # fmt: skip

    @property
    def stored(self) -> dict[str, StoredWeight]:
        """The weights, as their tensors are now."""
        found: dict[str, StoredWeight] = self._kept("", self._stored)
        return found

    def _stored(self) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for name in _WEIGHTS:
            values = self._buffers[name]
            scale, zero_point = (self._buffers[f"{name}_{part}"] for part in ("scale", "zero_point"))
            if values is not None:
                packed = None if self.columns is None else (self.columns[len(found)],)
                found[name] = StoredWeight(
                    values, scale, zero_point, self.axis, self.block, packed, self.signed
                )  # fmt: skip
        return found

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """float32 (T, N, I), initial states (N, P), (N, H) -> what the op returns."""
        given = dict(zip(self.takes, map(float_input, (x, *others)), strict=True))
        weights = {name: weight.floats(weight.empty()) for name, weight in self.stored.items()}
        constants = {name: self._buffers[name] for name in _CONSTANTS if name not in given}
        constants = {name: tensor for name, tensor in constants.items() if tensor is not None}
        y: Tensor = OPS[self.op].target(**given, **weights, **constants, **self.settings)
        return y
