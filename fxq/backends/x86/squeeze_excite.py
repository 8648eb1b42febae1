"""Squeeze-and-excitation of the x86 backend, as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, activation_refused, refuse
from fxq.backends.x86.onednn import check_image
from fxq.backends.x86.onednn_binary import OnednnMul
from fxq.ops import OPS
from fxq.quant.qparams import QParams

FUNCTIONS = OPS.fused_after("excite")
"""Activation functions of the first layer."""
GATES = OPS.fused_after("gate")
"""Activation functions of the second layer."""
_INPLACE: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, f"{name}_", None) or partial(getattr(F, name), inplace=True) for name in (*FUNCTIONS, *GATES)
}
_UNIT = QParams.per_tensor(1.0, 0)


class SqueezeExcite(Kernel):
    """x times a factor per channel, which two layers compute from the channels' means: uint8 in, uint8 or float32 out.

    The factors are computed in float32, and the product is rounded once. On integers, the overhead of the five calls
    would exceed the arithmetic.

    Args:
        squeeze: weight of the first layer, int8, (S, C).
        squeeze_scale: its scale, float32, (S,) or ().
        squeeze_bias: its bias, float32, (S,), or None.
        excite: weight of the second layer, int8, (C, S).
        excite_scale: its scale, float32, (C,) or ().
        excite_bias: its bias, float32, (C,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        function: activation function after the first layer, one of `FUNCTIONS`.
        gate: activation function after the second layer, one of `GATES`.

    Source: Hu et al. 2018, "Squeeze-and-Excitation Networks", section 3.
    """

    name: ClassVar[str] = "x86.squeeze_excite"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "function", "gate")
    squeeze: Tensor
    squeeze_scale: Tensor
    squeeze_bias: Tensor | None
    excite: Tensor
    excite_scale: Tensor
    excite_bias: Tensor | None

    def __init__(
        self,
        squeeze: Tensor,
        squeeze_scale: Tensor,
        excite: Tensor,
        excite_scale: Tensor,
        x: QParams,
        out: QParams | None,
        function: str,
        gate: str,
        squeeze_bias: Tensor | None = None,
        excite_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        refuse(self.name, activation_refused("the input", x), activation_refused("the output", out))
        layers = {"squeeze": (squeeze, squeeze_scale, squeeze_bias), "excite": (excite, excite_scale, excite_bias)}
        for name, (weight, scale, bias) in layers.items():
            self.register_buffer(name, weight.detach())
            self.register_buffer(f"{name}_scale", scale.detach().to(torch.float32))
            self.register_buffer(f"{name}_bias", None if bias is None else bias.detach().to(torch.float32, copy=True))
        self.x, self.out, self.function, self.gate = x, out, function, gate
        self._product = None if out is None else OnednnMul(x, _UNIT, out)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        if x.dim() != 4 or x.shape[1] != self.squeeze.shape[1]:
            check_image(self.name, x.shape, 2, self.squeeze.shape[1])
        squeeze, (weight, bias) = self._cached("", self._layers)
        function, gate, shape = _INPLACE[self.function], _INPLACE[self.gate], (*x.shape[:2], 1, 1)
        scale, zero = self.x.s, self.x.z

        def factor(x: Tensor) -> Tensor:
            y = function(F.linear(x.mean((2, 3), dtype=torch.float32), *squeeze))
            return gate(torch.addmm(bias, y, weight)).view(shape)

        if self._product is None:
            return lambda x: x.to(torch.float32).sub_(zero).mul_(scale).mul_(factor(x))
        product = self._product.bind(x, torch.empty(shape))
        return lambda x: product(x, factor(x))

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, H, W), any strides -> `out`'s grid or float32, channels-last."""
        return self.bind(x)(x)

    def _layers(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Weight and bias of both layers in float32; the first layer reads the means of the integers of x.

        Both weights are (S, C), with the longer axis last, which is faster for products of few rows.
        """
        first, second = (
            weight.double() * scale.double().reshape(-1, 1)
            for weight, scale in ((self.squeeze, self.squeeze_scale), (self.excite, self.excite_scale))
        )
        first *= self.x.s
        shift = first.sum(1) * self.x.z
        bias = -shift if self.squeeze_bias is None else self.squeeze_bias.double() - shift
        after = torch.zeros(len(second), device="cpu") if self.excite_bias is None else self.excite_bias
        return (first.float(), bias.float()), (second.float().t().contiguous(), after)
