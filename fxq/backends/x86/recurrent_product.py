"""Integer products of a recurrent layer: of the inputs of all steps, and of the state in each step."""

from __future__ import annotations

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import Kernel
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_linear import OnednnLinear, pack_for_conv
from fxq.backends.x86.recurrent_steps import StateProduct
from fxq.ops.recurrent import MIN_STATE_RANGE
from fxq.quant.qparams import QParams


def input_product(weight: Tensor, scale: Tensor, bias: Tensor, x: QParams, dynamic: bool) -> Kernel:
    """Linear layer of uint8 (..., I) to float32 (..., O).

    Args:
        weight: int8, (O, I).
        scale: scale of the weight, float32, (O,).
        bias: float32, (O,).
        x: grid of the input.
        dynamic: whether the input's range is dynamic; the layer then takes scale and zero point after the input.
    """
    grid = QParams(scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), -128, 127, torch.int8, 0)
    layer = LayerSpec(weight, grid, bias, x, None)
    return DynamicLayer.of(OnednnLinear, layer) if dynamic else OnednnLinear(layer)


def state_product(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> StateProduct:
    """Product of a weight with a state that each step rounds to integers.

    It uses `torch._int_mm` if that is fast (`cpu.has_int_mm`), else oneDNN's linear layer, or oneDNN's convolution if
    the linear layer is slow (`cpu.has_integer_matmul`).

    Args:
        weight: int8, (O, K).
        scale: scale of the weight, float32, (O,).
        qmax: number of integers of the state on each side of zero.
        state_scale: scale of the state; None if its range is dynamic, in each step and for each sample.
    """
    # With a single feature, torch 2.13 confuses two equal strides in `_int_mm`.
    is_plain = cpu.has_int_mm() and weight.shape[1] > 1
    is_conv = not is_plain and not cpu.has_integer_matmul()
    product = _unpacked(weight, scale, qmax, state_scale)._replace(is_plain=is_plain, is_conv=is_conv)
    if is_plain:
        shift = product.shift if state_scale is None else product.bias
        return product._replace(weight=product.weight.t(), shift=shift)
    if is_conv:
        return product._replace(weight=pack_for_conv(weight, product.scale))
    return product._replace(weight=torch.ops.onednn.qlinear_prepack(product.weight, None))


def _unpacked(weight: Tensor, scale: Tensor, qmax: int, state_scale: float | None) -> StateProduct:
    scale = (scale / qmax if state_scale is None else scale * state_scale).contiguous()
    zeros = weight.sum(1, dtype=torch.int32).mul_(qmax + 1)
    shift, grid_scale = torch.zeros_like(scale), state_scale or 0.0
    bias = -scale * zeros
    return StateProduct(weight.contiguous(), scale, zeros, bias, shift, qmax, grid_scale, MIN_STATE_RANGE, False, False)
