"""The two products of a recurrent layer on integers: with the inputs of all steps, and with the state of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.x86.recurrent_steps import Product
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
        step, zero = x.s, x.z
        own: Tensor | None = bias
        one_scale = measured is not None and measured.dim() == 0
        if measured is not None and one_scale:
            step, zero = float(measured), x.z if zero_point is None else int(zero_point)
        elif measured is not None:
            own = None
        y: Tensor = _onednn.qlinear_pointwise.default(
            q, step, zero, packed, scale, zeros, own, 1.0, 0, torch.float32, "none", [], ""
        )
        if measured is None or one_scale:
            return y
        if zero_point is not None:
            y.addcmul_(zero_point, ones, value=-1)
        return torch.addcmul(bias, y, measured, out=y)

    return multiply


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in oneDNN's layout, and its zero points."""
    packed = _onednn.qlinear_prepack(weight.contiguous(), None)
    return packed, torch.zeros(len(weight), dtype=torch.int32, device="cpu")


def state_product(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> Product:
    """The product of a weight with a state that is rounded to integers anew in each step.

    Where PyTorch has a quick integer product it is that (`cpu.has_int_mm`), of the integers as they are; else oneDNN's
    layer.

    Args:
        weight: int8, (O, K).
        scale: its scale, (O,).
        qmax: how many integers the state has on either side of zero.
        state_scale: the scale of the state; None: measured in each step, for each sample.
    """
    scale = (scale / qmax if state_scale is None else scale * state_scale).contiguous()
    # Of a single feature torch 2.13 takes the wrong one of two strides that are alike.
    is_plain, shift = cpu.has_int_mm() and weight.shape[1] > 1, torch.zeros_like(scale)
    if is_plain:
        packed, zeros = weight.contiguous().t(), weight.sum(1, dtype=torch.int32).mul_(qmax + 1)
        if state_scale is not None:
            shift = -scale * zeros
    else:
        packed, zeros = _packed(weight)
    return Product(packed, scale, zeros, shift, qmax, state_scale or 0.0, TINY, is_plain)
