"""Sums and products of two uint8 tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp, activation_refused, bounds, refuse
from fxq.backends.plain.clamp_and_pad import to_integer
from fxq.backends.plain.converters import CHUNK_ELEMENTS, MAX_UNCHUNKED_ELEMENTS, ROUNDING_OFFSET, chunks, dense, line
from fxq.quant.qparams import QParams


class BinaryKernel(Kernel):
    """Base class of kernels of two activations, each on its own grid, with a clamp after them.

    Args:
        a: grid of the first tensor.
        b: grid of the second tensor.
        out: grid of the result.
        post: None or a clamp.
    """

    options: ClassVar[tuple[str, ...]] = ("a", "b", "out", "post")

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None) -> None:
        super().__init__()
        refuse(
            self.name,
            f"{post.name} is not a clamp" if post is not None and bounds(post) is None else None,
            activation_refused("the first input", a),
            activation_refused("the second input", b),
            activation_refused("the output", out),
        )
        self.a, self.b, self.out, self.post = a, b, out, post


class _Arithmetic(BinaryKernel):
    """Base class of binary kernels that compute in float32."""

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None) -> None:
        super().__init__(a, b, out, post)
        low, high = (to_integer(bound, out) for bound in bounds(post) or (0.0, 0.0))
        self._numbers = a.s, a.z, b.s, b.z, out.s
        self._low, self._high = ROUNDING_OFFSET + low, ROUNDING_OFFSET + high
        self._zero = torch.tensor(ROUNDING_OFFSET + out.z, dtype=torch.float32, device="cpu")


class Add(_Arithmetic):
    """a + sign * b, broadcast. `sign` is 1 or -1."""

    name: ClassVar[str] = "cpu.add"
    options: ClassVar[tuple[str, ...]] = ("a", "b", "out", "post", "sign")

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None, sign: int = 1) -> None:
        super().__init__(a, b, out, post)
        self.sign = sign

    def bind(self, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        scale_a, zero_a, scale_b, zero_b, step = self._numbers
        factor_a, factor_b = scale_a / step, self.sign * scale_b / step
        zero, low, high = self._zero, self._low, self._high

        def run(a: Tensor, b: Tensor) -> Tensor:
            x = a.to(torch.float32).sub_(zero_a).mul_(factor_a)
            y = torch.add(x, b.to(torch.float32).sub_(zero_b), alpha=factor_b)
            return dense(y.add_(zero).clamp_(low, high).view(torch.int32).to(torch.uint8))

        return run

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """uint8, uint8, any shapes that broadcast -> uint8, four dimensions channels-last."""
        return self.bind(a, b)(a, b)


class Mul(_Arithmetic):
    """a * b, broadcast. It rounds once, since the product of the integers is exact in float32.

    Large tensors are computed in chunks if both have one shape, or if one has a value per sample and channel, as in
    squeeze-and-excitation. Others are computed at once.

    One of the two may also be float32 with scale 1 and zero point 0, such as a gate that was computed in float.
    """

    name: ClassVar[str] = "cpu.mul"

    def bind(self, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        _, zero_a, _, zero_b, _ = self._numbers
        if max(a.numel(), b.numel()) > MAX_UNCHUNKED_ELEMENTS:
            if a.shape == b.shape:
                return self._elementwise
            if is_gate(b, a):
                return lambda a, b: self._gated(a, b, zero_a, zero_b)
            if is_gate(a, b):
                return lambda a, b: self._gated(b, a, zero_b, zero_a)
        swaps = a.numel() < b.numel()
        widened = None if _covers(*((b, a) if swaps else (a, b))) else torch.broadcast_shapes(a.shape, b.shape)

        def run(a: Tensor, b: Tensor) -> Tensor:
            x, y = _centered(a, zero_a), _centered(b, zero_b)
            if swaps:
                x, y = y, x
            if widened is not None:
                x = x.expand(widened).clone()
            return dense(self._round(x, y).to(torch.uint8))

        return run

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """uint8, uint8, any shapes that broadcast -> uint8, four dimensions channels-last."""
        return self.bind(a, b)(a, b)

    def _round(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the product on the output grid, int32. x and y are integers as float32. x is overwritten."""
        scale_a, _, scale_b, _, step = self._numbers
        torch.addcmul(self._zero, x, y, value=scale_a * scale_b / step, out=x)
        return x.clamp_(self._low, self._high).view(torch.int32)

    def _elementwise(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of tensors of one shape, in chunks."""
        _, zero_a, _, zero_b, _ = self._numbers
        if a.stride() != b.stride():
            a, b = dense(a), dense(b)
        a, flat_a = line(a)
        b, flat_b = line(b)
        out = a.new_empty(a.numel())
        for step in chunks(a.numel()):
            x = flat_a[step].to(torch.float32).sub_(zero_a)
            out[step].copy_(self._round(x, flat_b[step].to(torch.float32).sub_(zero_b)))
        return dense(out.as_strided(a.shape, a.stride()))

    def _gated(self, x: Tensor, gate: Tensor, zero_x: int, zero_gate: int) -> Tensor:
        """Return the product of x (N, C, ...) and gate (N or 1, C, 1, ...), in chunks."""
        rows = x.movedim(1, -1).contiguous()
        samples, channels = len(rows), rows.shape[-1]
        source = rows.view(samples, -1, channels)
        out = source.new_empty(source.shape)
        factor = gate.to(torch.float32).sub_(zero_gate).view(-1, 1, channels).expand(samples, 1, channels)
        size = source[0].numel()
        samples_at_once = max(CHUNK_ELEMENTS // size, 1)
        height = source.shape[1] if size <= CHUNK_ELEMENTS else max(CHUNK_ELEMENTS // channels, 1)
        for n in range(0, samples, samples_at_once):
            for start in range(0, source.shape[1], height):
                part = slice(n, n + samples_at_once), slice(start, start + height)
                steps = self._round(source[part].to(torch.float32).sub_(zero_x), factor[n : n + samples_at_once])
                out[part].copy_(steps)
        return dense(out.view(rows.shape).movedim(-1, 1))


def _centered(x: Tensor, zero: int) -> Tensor:
    """Return x - zero in float32; x itself if zero is 0 and x is float32."""
    y = x.to(torch.float32)
    return y.sub_(zero) if zero else y


def _covers(x: Tensor, y: Tensor) -> bool:
    """Whether x and y broadcast to the shape of x."""
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return x.dim() >= y.dim() and all(n in (1, m) for m, n in sizes)


def is_gate(gate: Tensor, x: Tensor) -> bool:
    """Whether `gate` has one value per channel (axis 1) of `x`, for each or for all samples. False if `x` is empty."""
    return (
        x.dim() > 2
        and gate.dim() == x.dim()
        and x.numel() > 0
        and gate.shape[0] in (1, x.shape[0])
        and gate.shape[1] == x.shape[1]
        and gate.numel() == gate.shape[0] * gate.shape[1]
    )
