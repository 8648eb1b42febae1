"""The steps of recurrent layers on integers where Numba compiles what stands between two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.x86.recurrent_steps import Product, conv_product, linear_product

Multiply = Callable[[], Tensor]


def _multiply(loops: ModuleType, product: Product, integers: Tensor, sums: Tensor) -> Multiply:
    """What multiplies the state, whose integers change: `sums`, or float32 of its shape, scaled but for their range."""
    weight, scale, bias = product.weight, product.scale, product.bias
    if product.by_rows:
        wide = torch.zeros(weight.shape[1], dtype=torch.int16, device="cpu")
        memory, width = (integers, weight, wide, sums), integers.shape[1]

        def multiply() -> Tensor:
            read, by, state, written = (tensor.data_ptr() for tensor in memory)
            loops.multiply(read, width, state, by, written, *weight.shape)
            return sums

        return multiply
    if product.is_plain:
        return lambda: torch._int_mm(integers, weight, out=sums)
    no_zeros = torch.zeros_like(product.zeros)
    if product.is_conv:
        image = integers.view(1, len(integers), 1, -1).permute(0, 3, 1, 2)
        return lambda: conv_product(image, weight, scale, no_zeros, bias)
    return lambda: linear_product(integers, weight, scale, no_zeros, bias)


def run_steps(
    loops: ModuleType,
    op: str,
    gates: Tensor,
    y: Tensor,
    h: Tensor,
    product: Product,
    reverse: bool,
    cell: Tensor | None = None,
    new: Tensor | None = None,
    is_tanh: bool = True,
) -> None:
    """Do what `recurrent_steps` has a function for, of which these are the arguments.

    Args:
        loops: compiled functions, `fxq.backends.loops.code.step_loops`.
        op: "lstm", "gru" or "rnn".
        gates: what is added to the product in each step, float32 (T, N, gates * H).
        y: where the hidden states are written, float32 (T, N, H).
        h: the first of them, float32 (N, H).
        product: of the hidden state.
        reverse: whether the last entry is the first step.
        cell: the cell state of an lstm, (N, H), written over.
        new: what the input gives to the new gate of a gru, (T, N, H).
        is_tanh: whether an rnn's nonlinearity is tanh; else relu.
    """
    steps, samples, hidden = y.shape
    gates, new = gates.contiguous(), None if new is None else new.contiguous()
    integers = torch.empty(samples, hidden, dtype=torch.uint8, device="cpu")
    sizes = torch.empty(samples, dtype=torch.float32, device="cpu")
    sums, made = torch.empty(gates.shape[1:], dtype=torch.int32, device="cpu"), torch.empty_like(gates[0])
    multiply = _multiply(loops, product, integers, sums)
    zero, scale, scale_rows = torch.ones_like(sizes), product.scale, loops.scale_sums
    ones = product.zeros if product.by_rows or product.step == 0 else torch.zeros_like(product.zeros)
    if not (product.by_rows or product.is_plain):  # what multiplies has scaled it
        scale_rows, ones, scale = loops.scale_products, torch.zeros_like(scale), torch.ones_like(scale)
    read = sizes.data_ptr(), 1, zero.data_ptr(), 1, ones.data_ptr(), scale.data_ptr()
    numbers = made.data_ptr(), *made.shape, -math.inf, math.inf, 0
    grid = samples, hidden, float(product.qmax), product.step, product.least
    state = integers.data_ptr(), sizes.data_ptr(), *grid
    loops.keep(h.data_ptr(), *state)
    step, last, memory = getattr(loops, op), h.data_ptr(), made.data_ptr()
    for t in reversed(range(steps)) if reverse else range(steps):
        result = multiply()
        scale_rows(result.data_ptr(), *read, gates.data_ptr() + 4 * t * sums.numel(), 1, *numbers)
        now = y.data_ptr() + 4 * t * samples * hidden
        if cell is not None:
            step(memory, cell.data_ptr(), now, *state)
        elif new is not None:
            step(memory, new.data_ptr() + 4 * t * samples * hidden, last, now, *state)
        else:
            step(memory, int(is_tanh), now, *state)
        last = now
