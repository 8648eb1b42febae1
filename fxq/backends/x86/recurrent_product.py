"""The two products of a recurrent layer on integers: with the inputs of all steps, and with the state of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import Kernel
from fxq.backends.loops.code import MULTIPLE
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_linear import OnednnLinear, packed_taps
from fxq.backends.x86.recurrent_steps import Product
from fxq.ops.recurrent import MIN_STATE_RANGE
from fxq.quant.qparams import QParams


def input_product(weight: Tensor, scale: Tensor, bias: Tensor, x: QParams, measured: bool) -> Kernel:
    """The linear layer of uint8 (..., I), and of what is measured of its grid, to float32 (..., O).

    Args:
        weight: int8, (O, I).
        scale: its scale, (O,).
        bias: what is added, (O,).
        x: the grid of the input.
        measured: whether its scale, and perhaps its zero point, come behind it.
    """
    grid = QParams(scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), -128, 127, torch.int8, 0)
    layer = LayerSpec(weight, grid, bias, x, None)
    return DynamicLayer.of(OnednnLinear, layer) if measured else OnednnLinear(layer)


def state_product(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> Product:
    """The product of a weight with a state that is rounded to integers anew in each step.

    Where PyTorch has a quick integer product it is that (`cpu.has_int_mm`), of the integers as they are; else oneDNN's
    linear layer, or where that is slow a convolution (`cpu.has_integer_matmul`).

    Args:
        weight: int8, (O, K).
        scale: its scale, (O,).
        qmax: how many integers the state has on either side of zero.
        state_scale: the scale of the state; None: measured in each step, for each sample.
    """
    # Of a single feature torch 2.13 takes the wrong one of two strides that are alike.
    is_plain = cpu.has_int_mm() and weight.shape[1] > 1
    is_conv = not is_plain and not cpu.has_integer_matmul()
    product = _unpacked(weight, scale, qmax, state_scale)._replace(is_plain=is_plain, is_conv=is_conv)
    if is_plain:
        shift = product.shift if state_scale is None else product.bias
        return product._replace(weight=product.weight.t(), shift=shift)
    if is_conv:
        return product._replace(weight=packed_taps(weight, product.scale))
    return product._replace(weight=torch.ops.onednn.qlinear_prepack(product.weight, None))


def row_product(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> Product:
    """The same for a loop of our own: the weight is (O, K) with zeros behind, so that K is a `MULTIPLE`."""
    product = _unpacked(weight, scale, qmax, state_scale)
    return product._replace(by_rows=True, weight=F.pad(product.weight, (0, -weight.shape[1] % MULTIPLE)))


def _unpacked(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> Product:
    scale = (scale / qmax if state_scale is None else scale * state_scale).contiguous()
    zeros = weight.sum(1, dtype=torch.int32).mul_(qmax + 1)
    shift, step = torch.zeros_like(scale), state_scale or 0.0
    return Product(
        weight.contiguous(), scale, zeros, -scale * zeros, shift, qmax, step, MIN_STATE_RANGE, False, False, False
    )
