"""The two products of a recurrent layer on integers: with the inputs of all steps, and with the state of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.ops.recurrent import TINY
from fxq.quant.qparams import QParams

_onednn = torch.ops.onednn


def input_product(weight: Tensor, scale: Tensor, bias: Tensor, x: QParams) -> Callable[..., Tensor]:
    """A function of uint8 (..., I), and of its scale and zero point as far as they are measured, to float32 (..., O).

    Args:
        weight: int8, (O, I).
        scale: its scale, (O,).
        bias: what is added, (O,).
        x: the grid of the input.
    """
    packed, zeros = _packed(weight)
    scale = scale.contiguous()
    ones = weight.sum(1) * scale

    def multiply(q: Tensor, measured: Tensor | None = None, zero_point: Tensor | None = None) -> Tensor:
        own = bias if measured is None else None
        y: Tensor = _onednn.qlinear_pointwise.default(
            q, x.s, x.z, packed, scale, zeros, own, 1.0, 0, torch.float32, "none", [], ""
        )
        if zero_point is not None:
            y.addcmul_(zero_point, ones, value=-1)
        return y if measured is None else torch.addcmul(bias, y, measured, out=y)

    return multiply


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in oneDNN's layout, and its zero points."""
    packed = _onednn.qlinear_prepack(weight.contiguous(), None)
    return packed, torch.zeros(len(weight), dtype=torch.int32, device="cpu")


class StateProduct:
    """The product of a weight with a state that is rounded to integers anew in each step.

    The integers are unsigned, qmax + 1 stands for zero. Where PyTorch has a quick integer product it is that
    (`cpu.has_int_mm`), of the integers as they are; else oneDNN's layer.

    Args:
        weight: int8, (O, K).
        scale: its scale, (O,).
        qmax: how many integers the state has on either side of zero.
        state_scale: the scale of the state; None: measured in each step, for each sample.

    Attributes:
        shift: what has to be added to the result, (O,): the part of the zero point, where that is always the same.
    """

    def __init__(self, weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> None:
        self.qmax, self.zero, self.state_scale = qmax, qmax + 1, state_scale
        self.scale = (scale / qmax if state_scale is None else scale * state_scale).contiguous()
        self.weight, self.sums = weight.contiguous(), weight.sum(1, dtype=torch.int32).mul_(self.zero)
        # Of a single feature torch 2.13 takes the wrong one of two strides that are alike.
        self.is_plain = cpu.has_int_mm() and weight.shape[1] > 1
        self.layer: tuple[Any, ...] = ()
        if not self.is_plain:
            packed, zeros = _packed(self.weight)
            self.layer = (packed, self.scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        fixed = self.is_plain and state_scale is not None
        self.shift = -self.scale * self.sums if fixed else torch.zeros_like(self.scale)


class State:
    """The state of one run, (N, K) on integers, and memory for its product.

    Args:
        product: the product.
        samples: N.
        clamps: whether values may lie outside of a grid that is not measured.
    """

    def __init__(self, product: StateProduct, samples: int, clamps: bool) -> None:
        self.product, self.clamps = product, clamps and product.state_scale is not None
        rows, columns = product.weight.shape
        self._integers = torch.empty(samples, columns, dtype=torch.uint8, device="cpu")
        self._steps = torch.empty(samples, columns, device="cpu")
        self._sums = torch.empty(samples, rows, dtype=torch.int32, device="cpu")
        self._real, self._scales = torch.empty(2, samples, rows, device="cpu").unbind()
        self._size, self._factor = torch.empty(2, samples, 1, device="cpu").unbind()
        self._most = torch.tensor(float(product.qmax), device="cpu")
        self._zero = torch.tensor(product.zero + 0.5, device="cpu")  # what follows is rounded down
        self._weight = product.weight.t()

    def keep(self, h: Tensor) -> None:
        """Take in a state, float32 (N, K)."""
        product, steps = self.product, self._steps
        if product.state_scale is None:
            torch.linalg.vector_norm(h, torch.inf, 1, True, out=self._size)
            torch.div(self._most, self._size.clamp_(min=TINY), out=self._factor)
            torch.addcmul(self._zero, h, self._factor, out=steps)
        else:
            torch.add(self._zero, h, alpha=1 / product.state_scale, out=steps)
            if self.clamps:
                steps.clamp_(1.0, 2 * product.qmax + 1.0)
        self._integers.copy_(steps)

    def multiply(self, bias: Tensor, out: Tensor) -> None:
        """Write the product and what is added to it, (N, O) or (O,), to `out`, (N, O)."""
        product, real = self.product, self._real
        measured = product.state_scale is None
        if not product.is_plain:
            y = _onednn.qlinear_pointwise.default(self._integers, 1.0, product.zero, *product.layer)
            torch.addcmul(bias, y, self._size, out=out) if measured else torch.add(bias, y, out=out)
            return
        torch._int_mm(self._integers, self._weight, out=self._sums)
        if measured:
            torch.sub(self._sums, product.sums, out=real)
            torch.mul(product.scale, self._size, out=self._scales)
            torch.addcmul(bias, real, self._scales, out=out)
        else:
            real.copy_(self._sums)
            torch.addcmul(bias, real, product.scale, out=out)
