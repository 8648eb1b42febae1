"""Sums and products of two uint8 tensors on the x86 backend, computed by convolutions if they are large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import PostOp
from fxq.backends.plain import binary as arithmetic
from fxq.backends.plain.binary import is_gate
from fxq.backends.plain.converters import MAX_UNCHUNKED_ELEMENTS, dense
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn import epilogue, output_grid
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams

_onednn = torch.ops.onednn
_MIN_SUM_ELEMENTS, _MIN_INPLACE_SUM_ELEMENTS, _MIN_GATED_ELEMENTS = 65536, 32768, 65536
"""Elements (of one sample, for a gate) from which a convolution is faster."""


class OnednnAdd(arithmetic.Add):
    """a + b or a - b of uint8 tensors with two different grids.

    Large tensors are added by an identity depthwise 1 x 1 convolution of one operand, with the other as its residual.
    `onednn::qadd` is not used: on AVX512, torch 2.13 reads its values above 127 as int8. If `inplace` is set, the
    kernel may overwrite the second operand.
    """

    name: ClassVar[str] = "x86.add"
    options: ClassVar[tuple[str, ...]] = ("a", "b", "out", "post", "sign", "inplace")
    inplace: bool
    _channels: ClassVar[int] = 64

    def __init__(
        self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None, sign: int = 1, inplace: bool = False
    ) -> None:
        super().__init__(a, b, out, post, sign)
        self.inplace = inplace

    def bind(self, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        overwrites = self.inplace and self.sign == 1
        if a.shape != b.shape or a.numel() < (_MIN_INPLACE_SUM_ELEMENTS if overwrites else _MIN_SUM_ELEMENTS):
            return super().bind(a, b)
        # The channel of an element does not matter, so take as many channels as fill a vector register.
        channels = next(c for c in (self._channels, 32, 16, 8, 4, 2, 1) if a.numel() % c == 0)
        key = channels, overwrites
        conv: OnednnConv = self._cached(key, lambda: self._conv(channels, overwrites))
        swaps = self.sign != 1
        (n, *rest), is_image = a.shape, a.dim() == 4
        run = conv.bind(*(_as_image(x, channels) for x in ((b, a) if swaps else (a, b))))

        def summed(a: Tensor, b: Tensor) -> Tensor:
            x, residual = (b, a) if swaps else (a, b)
            y = run(_as_image(x, channels), _as_image(residual, channels)).permute(0, 2, 3, 1)
            return y.reshape(n, *rest[1:], rest[0]).permute(0, 3, 1, 2) if is_image else y.reshape(n, *rest)

        return summed

    def _conv(self, channels: int, inplace: bool) -> OnednnConv:
        """Convolution that multiplies one operand by the sign and adds the other as its residual."""
        sign = torch.full((channels, 1, 1, 1), self.sign, dtype=torch.int8, device="cpu")
        unit = QParams.per_tensor(1.0, 0, -128, 127, torch.int8)
        x, residual = (self.a, self.b) if self.sign == 1 else (self.b, self.a)
        options: dict[str, Any] = {"groups": channels, "post": self.post, "residual": residual, "inplace": inplace}
        return OnednnConv(LayerSpec(sign, unit, None, x, self.out, **options))


def _as_image(x: Tensor, channels: int) -> Tensor:
    """View of a tensor as a channels-last image (1, channels, 1, n / channels), in the order of `dense`."""
    x = dense(x).permute(0, 2, 3, 1) if x.dim() == 4 else dense(x)
    return x.view(1, 1, -1, channels).permute(0, 3, 1, 2)


class OnednnMul(arithmetic.Mul):
    """a * b of uint8 tensors, with broadcasting.

    A large image times one value per channel is a depthwise convolution whose scale is that value. Its weights are
    ones, so they are packed once; scale and bias are arguments of the kernel.
    """

    name: ClassVar[str] = "x86.mul"

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None) -> None:
        super().__init__(a, b, out, post)
        self._epilogue = epilogue(post, out)
        # Per unit of a gate above its zero point: the scale of x, and the bias that removes the zero point of x.
        grids = ((self.b, self.a), (self.a, self.b))
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self._factors = [torch.tensor([[gate.s], [-gate.s * x.s * x.z]], **options) for gate, x in grids]
        self._zeros = [torch.tensor(float(gate.z), **options) for gate, _ in grids]

    def bind(self, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        if _is_large_gated(a, b):
            return lambda a, b: self._convolved(a, b, 0)
        if _is_large_gated(b, a):
            return lambda a, b: self._convolved(b, a, 1)
        return super().bind(a, b)

    def _convolved(self, x: Tensor, gate: Tensor, x_position: int) -> Tensor:
        """Multiply an image by a gate, one sample after the other.

        Args:
            x: uint8, (N, C, H, W).
            gate: uint8, (N or 1, C, 1, 1).
            x_position: 0 if `x` is the first operand, 1 if it is the second.
        """
        x = dense(x)
        grid = (self.a, self.b)[x_position]
        channels = x.shape[1]
        key = x.shape[1:], torch.get_num_threads()
        weight, zero, after = self._cached_for_size(key, lambda: self._pack(channels, list(x.shape[2:]), grid))
        centered = torch.sub(gate.reshape(len(gate), 1, channels), self._zeros[x_position])
        # contiguous: the product is not if the gate is a transposed view
        factors = torch.mul(self._factors[x_position], centered).contiguous()
        y = [
            _onednn.qconv2d_pointwise.default(x[i : i + 1], grid.s, 0, weight, scale, zero, bias, *after)
            for i, (scale, bias) in ((i, factors[i % len(gate)]) for i in range(len(x)))
        ]
        return self._epilogue.finish(torch.cat(y) if len(y) > 1 else y[0])

    def _pack(self, channels: int, size: list[int], x: QParams) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Packed weights, their zero points, and the arguments of the kernel after the bias."""
        ones = torch.ones(channels, 1, 1, 1, dtype=torch.int8, device="cpu")
        scale = torch.ones(channels, dtype=torch.float32, device="cpu")
        geometry = [1, 1], [0, 0], [1, 1], channels
        packed = _onednn.qconv_prepack(ones, scale, x.s, 0, *geometry, [1, channels, *size])
        after = *geometry, *output_grid(self.out), *self._epilogue[:3]
        return packed, torch.zeros(channels, dtype=torch.int32, device="cpu"), after


def _is_large_gated(x: Tensor, gate: Tensor) -> bool:
    """Whether `x` is a large image and `gate` has one value per channel."""
    return (
        x.numel() > MAX_UNCHUNKED_ELEMENTS
        and x.dim() == 4
        and x.shape[1:].numel() >= _MIN_GATED_ELEMENTS
        and is_gate(gate, x)
    )
