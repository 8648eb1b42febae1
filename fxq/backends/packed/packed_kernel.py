"""What PyTorch's packed quantized kernels share. They take plain uint8 tensors.

They emit uint8 only; fbgemm's linear layer has a form that emits float32. The engine that is selected when a weight is
packed is the one that runs it, whatever is selected later.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fxq.backends.kernel import (
    Post,
    WeightedKernel,
    activation_refused,
    bounds,
    overflow_refused,
    post_refused,
    refuse,
    weight_refused,
)
from fxq.backends.kernel_table import CLAMPS
from fxq.backends.packed.quantized_tensors import as_uint8, engine_selected
from fxq.backends.plain.clamp_and_pad import to_integer
from fxq.errors import InputError
from fxq.quant.qparams import QParams

EMITS = "its result is wanted in float32, the kernel emits uint8"
"""Why a kernel cannot hand out float32."""


class Finish:
    """A clamp, and the grid of the result, on what a kernel has rounded: rounding keeps the order, so it is exact.

    Attributes:
        relu: the kernel clamps by itself, for the lower bound is zero and there is no upper one.
        clamp: the integer bounds, or None.
    """

    def __init__(self, out: QParams, post: Post | None, has_relu: bool = True) -> None:
        low, high = (to_integer(bound, out) for bound in bounds(post) or (0.0, 0.0))
        self.relu = has_relu and post is not None and (low, high) == (out.z, 255)
        self.clamp = None if self.relu or (low, high) == (0, 255) else (low, high)

    def __call__(self, q: Tensor) -> Tensor:
        y = as_uint8(q)
        return y if self.clamp is None else y.clamp_(*self.clamp)


class PackedKernel(WeightedKernel):
    """A kernel with a weight that one of PyTorch's quantized engines has packed.

    Args:
        weight: int8.
        weight_qparams: per tensor, or per channel along `channel_axis`; zero point 0.
        bias: float32, or None.
        x: grid of the input.
        out: grid of the output.
        post: None or a clamp.
    """

    engine: ClassVar[str]
    x: QParams
    out: QParams | None
    post: Post | None

    has_relu: ClassVar[bool] = True
    """Whether the engine has a form of the kernel that clamps to positive values."""

    def _set(self, x: QParams, out: QParams | None, post: Post | None, depthwise: bool = False) -> None:
        if self.adds_in_int16(depthwise):
            refuse(self.name, overflow_refused(x, self.weight))
        self.x, self.out, self.post = x, out, post
        self._input = x.s, x.z
        if out is not None:
            self._output, self._finish = (out.s, out.z), Finish(out, post, self.has_relu)

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether the engine adds pairs of products in int16 here."""
        return False

    @classmethod
    def _reasons(
        cls, weight: QParams | None, x: QParams | None, out: QParams | None, post: Post | None
    ) -> list[str | None]:
        return [
            post_refused(post, CLAMPS, residual=False),
            weight_refused(weight, cls.channel_axis),
            activation_refused("the input", x),
            activation_refused("the output", out),
        ]

    def _check(self, given: int, wanted: int) -> None:
        """Refuse an input with other channels than the weight has: qnnpack would read whatever lies behind it."""
        if given != wanted:
            raise InputError(f"{self.name}: an input with {given} channels; the layer takes {wanted}.")

    def _pack(self) -> Any:
        """The packed weight. Opaque: it cannot be copied or pickled."""
        raise NotImplementedError

    def _weight(self) -> Any:
        """The packed weight, packed on first use."""

        def pack() -> Any:
            with engine_selected(self.engine):
                return self._pack()

        return self._kept("", pack)
