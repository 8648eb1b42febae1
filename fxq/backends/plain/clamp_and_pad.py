"""Clamps and padding on plain uint8 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp, activation_refused, bounds, refuse
from fxq.backends.plain.converters import dense
from fxq.quant.qparams import QParams


class Clamp(Kernel):
    """relu, relu6 or hardtanh: clamps integers to the two bounds on their grid. Output grid as the input's.

    Args:
        x: grid of input and output.
        post: the clamp.
    """

    name: ClassVar[str] = "cpu.clamp"
    options: ClassVar[tuple[str, ...]] = ("x", "post")

    def __init__(self, x: QParams, post: PostOp) -> None:
        super().__init__()
        interval = bounds(post) or (0.0, 0.0)
        refuse(
            self.name,
            f"{post.name} is not a clamp" if bounds(post) is None else None,
            activation_refused("the input", x),
        )
        self.x, self.post = x, post
        self.low, self.high = (to_integer(bound, x) for bound in interval)

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> uint8, the same shape."""
        return x.clamp(self.low, self.high)


class Pad(Kernel):
    """`F.pad` on uint8. A constant is rounded to the nearest integer of the grid.

    Args:
        x: grid of input and output.
        pad: as for `F.pad`.
        mode: "constant", "reflect", "replicate" or "circular".
        value: the constant, as a real number.
    """

    name: ClassVar[str] = "cpu.pad"
    returns_view: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("x", "pad", "mode", "value")

    def __init__(self, x: QParams, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        is_supported = mode in ("constant", "reflect", "replicate", "circular")
        refuse(self.name, None if is_supported else f"pads with mode {mode!r}", activation_refused("the input", x))
        self.x, self.pad, self.mode, self.value = x, tuple(pad), mode, value

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape that `F.pad` takes -> uint8, four dimensions channels-last."""
        if self.mode == "constant":
            return dense(F.pad(x, self.pad, value=to_integer(self.value, self.x)))
        return dense(F.pad(x, self.pad, self.mode))


def to_integer(value: float, qp: QParams) -> int:
    """Return the integer on the grid `qp` that is nearest to `value`; for infinities the end of the grid."""
    scaled = min(max(value, float(qp.low)), float(qp.high)) / qp.s
    return min(max(round(scaled) + qp.z, qp.qmin), qp.qmax)
