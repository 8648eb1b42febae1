"""The x86 backend's sums and products of two uint8 tensors, through convolutions where those are faster."""

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
from fxq.backends.x86.onednn import epilogue, target
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams

_onednn = torch.ops.onednn
_SUM, _SUM_INPLACE, _GATE = 65536, 32768, 65536
"""From how many elements on (of one sample, for a gate) a convolution is the faster way."""


class OnednnAdd(arithmetic.Add):
    """a + b or a - b, uint8 with two different grids; a large one through a convolution that only adds.

    An identity depthwise 1 x 1 convolution of one with the other as its residual.

    `onednn::qadd` would do, but on AVX512 torch 2.13 reads values above 127 as int8 there. Where it is `inplace`, the
    kernel may overwrite the second tensor.
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
        if a.shape != b.shape or a.numel() < (_SUM_INPLACE if overwrites else _SUM):
            return super().bind(a, b)
        # Which channel an element belongs to is of no importance: take as many channels as fill a vector register.
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
        """The convolution of the operand with the sign, with the other as its residual."""
        one = torch.full((channels, 1, 1, 1), self.sign, dtype=torch.int8, device="cpu")
        unit = QParams.per_tensor(1.0, 0, -128, 127, torch.int8)
        x, residual = (self.a, self.b) if self.sign == 1 else (self.b, self.a)
        options: dict[str, Any] = {"groups": channels, "post": self.post, "residual": residual, "inplace": inplace}
        return OnednnConv(LayerSpec(one, unit, None, x, self.out, **options))


def _as_image(x: Tensor, channels: int) -> Tensor:
    """A tensor as a channels-last image (1, channels, 1, n / channels), in the order of `dense`."""
    x = dense(x).permute(0, 2, 3, 1) if x.dim() == 4 else dense(x)
    return x.view(1, 1, -1, channels).permute(0, 3, 1, 2)


class OnednnMul(arithmetic.Mul):
    """a * b, broadcast; a large image times a value per channel through a convolution with that value as its scale.

    The weights are ones, so they are packed once; scale and bias are arguments of the kernel.
    """

    name: ClassVar[str] = "x86.mul"

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None) -> None:
        super().__init__(a, b, out, post)
        self._epilogue = epilogue(post, out)
        # Behind a gate's zero point: its scale, and what it adds to the bias for the zero point of the other.
        grids = ((self.b, self.a), (self.a, self.b))
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self._factors = [torch.tensor([[gate.s], [-gate.s * x.s * x.z]], **kind) for gate, x in grids]
        self._zeros = [torch.tensor(float(gate.z), **kind) for gate, _ in grids]

    def bind(self, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        if _is_large_gated(a, b):
            return lambda a, b: self._convolved(a, b, 0)
        if _is_large_gated(b, a):
            return lambda a, b: self._convolved(b, a, 1)
        return super().bind(a, b)

    def _convolved(self, x: Tensor, gate: Tensor, which: int) -> Tensor:
        """x (N, C, H, W) times gate (N or 1, C, 1, 1), one sample after the other; `which` of the two x is."""
        x = dense(x)
        grid = (self.a, self.b)[which]
        channels = x.shape[1]
        key = x.shape[1:], torch.get_num_threads()
        weight, zero, after = self._cached_for_size(key, lambda: self._pack(channels, list(x.shape[2:]), grid))
        centered = torch.sub(gate.reshape(len(gate), 1, channels), self._zeros[which])
        factors = torch.mul(
            self._factors[which], centered
        ).contiguous()  # as is not where the gate is a transposed view
        y = [
            _onednn.qconv2d_pointwise.default(x[i : i + 1], grid.s, 0, weight, scale, zero, bias, *after)
            for i, (scale, bias) in ((i, factors[i % len(gate)]) for i in range(len(x)))
        ]
        return self._epilogue.finish(torch.cat(y) if len(y) > 1 else y[0])

    def _pack(self, channels: int, size: list[int], x: QParams) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """The ones, their zero points, and the arguments of the kernel behind the bias."""
        ones = torch.ones(channels, 1, 1, 1, dtype=torch.int8, device="cpu")
        scale = torch.ones(channels, dtype=torch.float32, device="cpu")
        geometry = [1, 1], [0, 0], [1, 1], channels
        packed = _onednn.qconv_prepack(ones, scale, x.s, 0, *geometry, [1, channels, *size])
        after = *geometry, *target(self.out), *self._epilogue[:3]
        return packed, torch.zeros(channels, dtype=torch.int32, device="cpu"), after


def _is_large_gated(x: Tensor, gate: Tensor) -> bool:
    """Whether `x` is a large image, and `gate` has a value for each of its channels."""
    return x.numel() > MAX_UNCHUNKED_ELEMENTS and x.dim() == 4 and x.shape[1:].numel() >= _GATE and is_gate(gate, x)
