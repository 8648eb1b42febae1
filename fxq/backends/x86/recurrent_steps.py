"""Steps of recurrent layers on integers.

TorchScript runs these functions, because Python's overhead per call is as large as the arithmetic. So they read only
their arguments.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("fxq")


class StateProduct(NamedTuple):
    """Product of a weight with a state (N, K) that each step rounds to unsigned integers.

    Attributes:
        weight: int8, (K, O), or in oneDNN's layout if oneDNN multiplies.
        scale: scale of the product, float32 (O,); without the state's scale if that is dynamic.
        zeros: part of each sum that the state's zero point adds, int32 (O,).
        bias: -scale * zeros, float32 (O,), which oneDNN adds to the product.
        shift: correction for the zero point that the caller adds to the product, float32 (O,).
        qmax: number of integers of the state on each side of zero; the zero point is qmax + 1.
        state_scale: scale of the state; 0 if its range is dynamic, in each step and for each sample.
        min_range: lower bound of a dynamic range.
        is_plain: whether `torch._int_mm` multiplies.
        is_conv: whether oneDNN's convolution multiplies; if neither is set, oneDNN's linear layer does.
    """

    weight: Tensor
    scale: Tensor
    zeros: Tensor
    bias: Tensor
    shift: Tensor
    qmax: int
    state_scale: float
    min_range: float
    is_plain: bool
    is_conv: bool


class StateBuffers(NamedTuple):
    """Memory for the integers of a state of N samples and for its product.

    Attributes:
        weight, scale, zeros, bias, qmax, state_scale, min_range, is_plain, is_conv: as in `StateProduct`; copied here
            because TorchScript would look up nested tuples in every step.
        no_zeros: zero points of the weight, all 0, int32 (O,).
        clamps: whether values may exceed a static grid.
        integers: the state as integers, uint8 (N, K).
        steps: the state in steps of its grid, float32 (N, K).
        image: view of `integers` as an image of one column, (1, K, N, 1), channels-last.
        sums, real: the product, int32 and float32 (N, O).
        has_ranges: whether each sample has a dynamic range, and N is not 1.
        ranges: dynamic ranges of the samples, float32 (N, 1).
        offset: zero point plus 0.5, since the conversion to integers rounds down; float32, 0-d.
    """

    weight: Tensor
    scale: Tensor
    zeros: Tensor
    bias: Tensor
    no_zeros: Tensor
    qmax: int
    state_scale: float
    min_range: float
    is_plain: bool
    is_conv: bool
    clamps: bool
    integers: Tensor
    image: Tensor
    steps: Tensor
    sums: Tensor
    real: Tensor
    has_ranges: bool
    ranges: Tensor
    offset: Tensor


def buffers_for(product: StateProduct, h: Tensor, gate: Tensor, clamps: bool) -> StateBuffers:
    """Allocate buffers for a state like `h`, float32 (N, K), with a product like `gate`, float32 (N, O)."""
    integers = torch.empty(h.shape, dtype=torch.uint8, device="cpu")
    return StateBuffers(
        product.weight,
        product.scale,
        product.zeros,
        product.bias,
        torch.zeros_like(product.zeros),
        product.qmax,
        product.state_scale,
        product.min_range,
        product.is_plain,
        product.is_conv,
        clamps,
        integers,
        integers.view(1, len(h), 1, -1).permute(0, 3, 1, 2),
        torch.empty_like(h),
        torch.empty_like(gate, dtype=torch.int32),
        torch.empty_like(gate),
        product.state_scale == 0.0 and len(h) != 1,
        torch.empty_like(h[:, :1]),
        torch.full_like(product.scale[0], product.qmax + 1.5),
    )


def round_state(state: StateBuffers, h: Tensor) -> float:
    """Round a state to integers.

    Args:
        state: buffers that receive the integers.
        h: the state, float32 (N, K).

    Returns:
        The range of the state if it is dynamic and N is 1, else 1.
    """
    size = 1.0
    if state.state_scale != 0.0:
        torch.add(state.offset, h, alpha=1 / state.state_scale, out=state.steps)
        if state.clamps:
            state.steps.clamp_(1.0, 2.0 * state.qmax + 1.0)
    elif not state.has_ranges:
        low, high = torch.aminmax(h)
        size = max(max(-float(low), float(high)), state.min_range)
        torch.add(state.offset, h, alpha=state.qmax / size, out=state.steps)
    else:
        torch.amax(torch.abs(h), 1, True, out=state.ranges)
        state.ranges.clamp_(min=state.min_range)
        torch.addcmul(state.offset, h, state.qmax / state.ranges, out=state.steps)
    state.integers.copy_(state.steps)
    return size


def linear_product(integers: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, bias: Tensor) -> Tensor:
    """Scaled product of uint8 (N, K) plus bias, float32 (N, O), by oneDNN's linear layer."""
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        integers, 1.0, 0, weight, scale, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def conv_product(image: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, bias: Tensor) -> Tensor:
    """Scaled product plus bias, float32 (N, O), by oneDNN's convolution.

    Args:
        image: the integers as an image of one column, uint8 (1, K, N, 1), channels-last.
        weight: packed by `pack_for_conv`.
        scale: scale of the product, float32 (O,).
        zeros: zero points of the weight, int32 (O,).
        bias: float32 (O,).
    """
    y: Tensor = torch.ops.onednn.qconv2d_pointwise(
        image, 1.0, 0, weight, scale, zeros, bias, [1, 1], [0, 0], [1, 1], 1, 1.0, 0, torch.float32, "none", [], ""
    )
    return y.permute(0, 2, 3, 1).view(image.shape[2], -1)


def multiply(state: StateBuffers, size: float, bias: Tensor, out: Tensor) -> None:
    """Write the product of a state plus a bias to `out`.

    Args:
        state: buffers of the rounded state.
        size: result of `round_state`.
        bias: float32, (N, O) or (O,).
        out: float32, (N, O).
    """
    if not state.is_plain:
        if state.is_conv:
            y = conv_product(state.image, state.weight, state.scale, state.no_zeros, state.bias).view(out.shape)
        else:
            y = linear_product(state.integers, state.weight, state.scale, state.no_zeros, state.bias)
        if state.has_ranges:
            torch.addcmul(bias, y, state.ranges, out=out)
        else:
            torch.add(bias, y, alpha=size, out=out)
        return
    torch._int_mm(state.integers, state.weight, out=state.sums)
    if state.state_scale == 0.0:
        state.sums.sub_(state.zeros)
    state.real.copy_(state.sums)
    if state.has_ranges:
        torch.addcmul(bias, state.real, state.scale * state.ranges, out=out)
    else:
        torch.addcmul(bias, state.real, state.scale, value=size, out=out)


def in_order(x: Tensor, reverse: bool) -> list[Tensor]:
    """Split (T, N, ...) into one view per step, (N, ...), in the order of the steps."""
    steps = list(x.unbind(0))
    if reverse:
        steps.reverse()
    return steps


def lstm(
    gates: Tensor,
    y: Tensor,
    h: Tensor,
    cell: Tensor,
    product: StateProduct,
    projection: StateProduct | None,
    clamps: bool,
    reverse: bool,
) -> None:
    """Run the steps of an lstm. All tensors are float32.

    Args:
        gates: contribution of the input and biases to the input, forget and output gates, and -2 times that to the cell
            gate, since tanh(x) = 1 - 2 * sigmoid(-2 x); (T, N, 4 * H).
        y: output for the hidden states, (T, N, P).
        h: initial hidden state, (N, P).
        cell: cell state, (N, H), updated in place.
        product: product of the hidden state.
        projection: product that projects (N, H) to the hidden state (N, P); None without projection.
        clamps: whether hidden states may exceed a static grid.
        reverse: whether to start from the last time step.
    """
    gate, tanh = torch.empty_like(gates[0]), torch.empty_like(cell)
    i, f, o, g = gate.chunk(4, 1)
    steps, states = in_order(gates, reverse), in_order(y, reverse)
    state = buffers_for(product, h, gate, clamps)
    inner, shift = buffers_for(product if projection is None else projection, cell, h, False), h
    if projection is not None:
        shift = projection.shift
    size = round_state(state, h)
    for t in range(len(steps)):
        h = states[t]
        multiply(state, size, steps[t], gate)
        gate.sigmoid_()
        torch.addcmul(i, f, cell, out=cell)
        cell.addcmul_(i, g, value=-2)
        torch.tanh(cell, out=tanh)
        if projection is None:
            torch.mul(tanh, o, out=h)
        else:
            multiply(inner, round_state(inner, tanh.mul_(o)), shift, h)
        size = round_state(state, h)


def gru(gates: Tensor, new: Tensor, y: Tensor, h: Tensor, product: StateProduct, clamps: bool, reverse: bool) -> None:
    """Run the steps of a gru. All tensors are float32.

    Args:
        gates: contribution of the input and biases to the reset and update gates, and the state's bias for the new
            gate, (T, N, 3 * H).
        new: contribution of the input to the new gate, (T, N, H).
        y: output for the hidden states, (T, N, H).
        h: initial hidden state, (N, H).
        product: product of the hidden state.
        clamps: whether hidden states may exceed a static grid.
        reverse: whether to start from the last time step.
    """
    gate, hidden = torch.empty_like(gates[0]), h.shape[1]
    both, candidate = gate.split([2 * hidden, hidden], 1)
    reset, update = both.chunk(2, 1)
    steps, inputs, states = in_order(gates, reverse), in_order(new, reverse), in_order(y, reverse)
    state = buffers_for(product, h, gate, clamps)
    size = round_state(state, h)
    for t in range(len(steps)):
        multiply(state, size, steps[t], gate)
        both.sigmoid_()
        torch.addcmul(inputs[t], reset, candidate, out=candidate)
        h = torch.lerp(candidate.tanh_(), h, update, out=states[t])
        size = round_state(state, h)


def rnn(gates: Tensor, y: Tensor, h: Tensor, product: StateProduct, is_tanh: bool, clamps: bool, reverse: bool) -> None:
    """Run the steps of an rnn. All tensors are float32.

    Args:
        gates: contribution of the input and biases, (T, N, H).
        y: output for the hidden states, (T, N, H).
        h: initial hidden state, (N, H).
        product: product of the hidden state.
        is_tanh: whether the nonlinearity is tanh; else relu.
        clamps: whether hidden states may exceed a static grid.
        reverse: whether to start from the last time step.
    """
    steps, states = in_order(gates, reverse), in_order(y, reverse)
    state = buffers_for(product, h, h, clamps)
    size = round_state(state, h)
    for t in range(len(steps)):
        h = states[t]
        multiply(state, size, steps[t], h)
        if is_tanh:
            h.tanh_()
        else:
            h.relu_()
        size = round_state(state, h)


@cache
def scripted(steps: Callable[..., None]) -> Callable[..., None]:
    """Compile one of these functions with TorchScript; return it unchanged if TorchScript is not available."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated; the script stays inside of the kernel
            script: Callable[..., None] = torch.jit.script(steps)
    except Exception as error:  # without TorchScript it is only slower
        log.info("TorchScript cannot compile the steps of a recurrent layer, which run in Python instead: %s", error)
        return steps
    return script
