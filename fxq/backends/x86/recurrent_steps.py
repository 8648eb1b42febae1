"""The steps of recurrent layers on integers, one after the other.

These functions are written so that TorchScript can run them, for between two calls Python takes as long as the
arithmetic. So they read nothing but their arguments.
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


class Product(NamedTuple):
    """The product of a weight with a state (N, K) that is rounded to integers anew in each step.

    The integers of the state are unsigned.

    Attributes:
        weight: int8, (K, O); in oneDNN's layout where that multiplies.
        scale: that of the product, float32 (O,), without the state's where that is measured.
        zeros: int32 (O,): how much of each sum is the zero point's.
        bias: -scale * zeros, float32 (O,), which oneDNN adds to the product.
        shift: what has to be added to the product, float32 (O,): the part of the zero point where it is not taken off.
        qmax: how many integers the state has on either side of zero, for which qmax + 1 stands.
        step: the scale of the state; 0: it is measured in each step, for each sample.
        least: the least range that is measured.
        is_plain: whether it is PyTorch's own product.
        is_conv: whether it is oneDNN's convolution; else, if not PyTorch's own, its linear layer.
        by_rows: whether it is a compiled loop of our own, for one sample (see `jit_steps.py`); nothing here runs it,
            and the weight is (O, K or more).
    """

    weight: Tensor
    scale: Tensor
    zeros: Tensor
    bias: Tensor
    shift: Tensor
    qmax: int
    step: float
    least: float
    is_plain: bool
    is_conv: bool
    by_rows: bool


class State(NamedTuple):
    """A state of N samples, its product, and memory for that.

    Attributes:
        weight, scale, zeros, bias, qmax, step, least, is_plain, is_conv: as in `Product`, of which TorchScript does not
            look up each one anew in each step where they stand here.
        no_zeros: the zero points of the weight, int32 (O,).
        clamps: whether values may lie outside of a grid that is not measured.
        integers, steps: the state, uint8 and float32 (N, K).
        image: the same integers as an image of one column, (1, K, N, 1), channels-last.
        sums, real: the product, int32 and float32 (N, O).
        many: whether there is a range of each sample: it is measured, and N is not 1.
        ranges: these, float32 (N, 1).
        half: what stands for zero, and 0.5, since what follows is rounded down; float32, 0-d.
    """

    weight: Tensor
    scale: Tensor
    zeros: Tensor
    bias: Tensor
    no_zeros: Tensor
    qmax: int
    step: float
    least: float
    is_plain: bool
    is_conv: bool
    clamps: bool
    integers: Tensor
    image: Tensor
    steps: Tensor
    sums: Tensor
    real: Tensor
    many: bool
    ranges: Tensor
    half: Tensor


def state_of(product: Product, h: Tensor, gate: Tensor, clamps: bool) -> State:
    """A state like `h`, float32 (N, K), whose product is like `gate`, float32 (N, O)."""
    integers = torch.empty(h.shape, dtype=torch.uint8, device="cpu")
    return State(
        product.weight,
        product.scale,
        product.zeros,
        product.bias,
        torch.zeros_like(product.zeros),
        product.qmax,
        product.step,
        product.least,
        product.is_plain,
        product.is_conv,
        clamps,
        integers,
        integers.view(1, len(h), 1, -1).permute(0, 3, 1, 2),
        torch.empty_like(h),
        torch.empty_like(gate, dtype=torch.int32),
        torch.empty_like(gate),
        product.step == 0.0 and len(h) != 1,
        torch.empty_like(h[:, :1]),
        torch.full_like(product.scale[0], product.qmax + 1.5),
    )


def keep(state: State, h: Tensor) -> float:
    """Take in a state, float32 (N, K); its range, where that is measured and N is 1, else 1."""
    size = 1.0
    if state.step != 0.0:
        torch.add(state.half, h, alpha=1 / state.step, out=state.steps)
        if state.clamps:
            state.steps.clamp_(1.0, 2.0 * state.qmax + 1.0)
    elif not state.many:
        low, high = torch.aminmax(h)
        size = max(max(-float(low), float(high)), state.least)
        torch.add(state.half, h, alpha=state.qmax / size, out=state.steps)
    else:
        torch.amax(torch.abs(h), 1, True, out=state.ranges)
        state.ranges.clamp_(min=state.least)
        torch.addcmul(state.half, h, state.qmax / state.ranges, out=state.steps)
    state.integers.copy_(state.steps)
    return size


def linear_product(integers: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, bias: Tensor) -> Tensor:
    """oneDNN's linear layer of uint8 (N, K): the scaled product and the bias, float32 (N, O)."""
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        integers, 1.0, 0, weight, scale, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def conv_product(image: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, bias: Tensor) -> Tensor:
    """The same by oneDNN's convolution, of an image of one column, (1, K, N, 1), channels-last."""
    y: Tensor = torch.ops.onednn.qconv2d_pointwise(
        image, 1.0, 0, weight, scale, zeros, bias, [1, 1], [0, 0], [1, 1], 1, 1.0, 0, torch.float32, "none", [], ""
    )
    return y.permute(0, 2, 3, 1).view(image.shape[2], -1)


def multiply(state: State, size: float, bias: Tensor, out: Tensor) -> None:
    """Write the product and what is added to it, (N, O) or (O,), to `out`, (N, O); `size` is what `keep` returned."""
    if not state.is_plain:
        if state.is_conv:
            y = conv_product(state.image, state.weight, state.scale, state.no_zeros, state.bias).view(out.shape)
        else:
            y = linear_product(state.integers, state.weight, state.scale, state.no_zeros, state.bias)
        if state.many:
            torch.addcmul(bias, y, state.ranges, out=out)
        else:
            torch.add(bias, y, alpha=size, out=out)
        return
    torch._int_mm(state.integers, state.weight, out=state.sums)
    if state.step == 0.0:
        state.sums.sub_(state.zeros)
    state.real.copy_(state.sums)
    if state.many:
        torch.addcmul(bias, state.real, state.scale * state.ranges, out=out)
    else:
        torch.addcmul(bias, state.real, state.scale, value=size, out=out)


def in_order(x: Tensor, reverse: bool) -> list[Tensor]:
    """What each step reads or writes, (N, ...), of (T, N, ...), the last first where they run in reverse."""
    steps = list(x.unbind(0))
    if reverse:
        steps.reverse()
    return steps


def lstm(
    gates: Tensor,
    y: Tensor,
    h: Tensor,
    cell: Tensor,
    product: Product,
    projection: Product | None,
    clamps: bool,
    reverse: bool,
) -> None:
    """The steps of an lstm.

    Args:
        gates: what is added to the product for the input, forget and output gate and for twice the negative of the cell
            gate, of which the sigmoid is (1 - tanh) / 2; (T, N, 4 * H).
        y: where the hidden states are written, (T, N, P).
        h: the first hidden state, (N, P).
        cell: the cell state, (N, H), written over.
        product: of the hidden state.
        projection: of what becomes the hidden state, (N, H); None: that is it.
        clamps: whether hidden states may lie outside of a grid that is not measured.
        reverse: whether the last entry is the first step.
    """
    gate, tanh = torch.empty_like(gates[0]), torch.empty_like(cell)
    i, f, o, g = gate.chunk(4, 1)
    steps, states = in_order(gates, reverse), in_order(y, reverse)
    state = state_of(product, h, gate, clamps)
    inner, shift = state_of(product if projection is None else projection, cell, h, False), h
    if projection is not None:
        shift = projection.shift
    size = keep(state, h)
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
            multiply(inner, keep(inner, tanh.mul_(o)), shift, h)
        size = keep(state, h)


def gru(gates: Tensor, new: Tensor, y: Tensor, h: Tensor, product: Product, clamps: bool, reverse: bool) -> None:
    """The steps of a gru.

    Args:
        gates: what is added to the product for the reset, update and new gate, (T, N, 3 * H).
        new: what the input gives to the new gate, (T, N, H).
        y: where the hidden states are written, (T, N, H).
        h: the first hidden state, (N, H).
        product: of the hidden state.
        clamps: whether hidden states may lie outside of a grid that is not measured.
        reverse: whether the last entry is the first step.
    """
    gate, hidden = torch.empty_like(gates[0]), h.shape[1]
    both, other = gate.split([2 * hidden, hidden], 1)
    reset, update = both.chunk(2, 1)
    steps, inputs, states = in_order(gates, reverse), in_order(new, reverse), in_order(y, reverse)
    state = state_of(product, h, gate, clamps)
    size = keep(state, h)
    for t in range(len(steps)):
        multiply(state, size, steps[t], gate)
        both.sigmoid_()
        torch.addcmul(inputs[t], reset, other, out=other)
        h = torch.lerp(other.tanh_(), h, update, out=states[t])
        size = keep(state, h)


def rnn(gates: Tensor, y: Tensor, h: Tensor, product: Product, is_tanh: bool, clamps: bool, reverse: bool) -> None:
    """The steps of an rnn.

    Args:
        gates: what is added to the product, (T, N, H).
        y: where the hidden states are written, (T, N, H).
        h: the first hidden state, (N, H).
        is_tanh: whether the nonlinearity is tanh; else relu.
        product: of the hidden state.
        clamps: whether hidden states may lie outside of a grid that is not measured.
        reverse: whether the last entry is the first step.
    """
    steps, states = in_order(gates, reverse), in_order(y, reverse)
    state = state_of(product, h, h, clamps)
    size = keep(state, h)
    for t in range(len(steps)):
        h = states[t]
        multiply(state, size, steps[t], h)
        if is_tanh:
            h.tanh_()
        else:
            h.relu_()
        size = keep(state, h)


@cache
def scripted(steps: Callable[..., None]) -> Callable[..., None]:
    """One of these functions as TorchScript runs it; as it stands where PyTorch or Python has that no more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and nothing of it leaves the kernel
            script: Callable[..., None] = torch.jit.script(steps)
    except Exception as error:  # it is only slower
        log.info("TorchScript does not run the steps of a recurrent layer: %s", error)
        return steps
    return script
