"""The steps of recurrent layers on integers where Numba compiles what stands between two products."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.x86.recurrent_steps import Product, conv_product, linear_product

Multiply = Callable[[], Tensor]


def _multiply(loops: ModuleType, product: Product, by_rows: bool, integers: Tensor, sums: Tensor) -> Multiply:
    """What multiplies the state, whose integers change: `sums`, or float32 of its shape, scaled but for their range."""
    weight, scale, bias = product.weight, product.scale, product.bias
    if by_rows:
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
    by_rows: bool,
    reverse: bool,
    cell: Tensor | None = None,
    new: Tensor | None = None,
    is_tanh: bool = True,
) -> None:
    """Do what `recurrent_steps` has a function for, of which these are the arguments.

    Args:
        loops: the compiled functions, `fxq.backends.jit.step_loops`.
        op: "lstm", "gru" or "rnn".
        gates: what is added to the product in each step, float32 (T, N, gates * H).
        y: where the hidden states are written, float32 (T, N, H).
        h: the first of them, float32 (N, H).
        product: of the hidden state.
        by_rows: whether it is a `row_product`; for one sample.
        reverse: whether the last entry is the first step.
        cell: the cell state of an lstm, (N, H), written over.
        new: what the input gives to the new gate of a gru, (T, N, H).
        is_tanh: whether an rnn's nonlinearity is tanh; else relu.
    """
    steps, samples, hidden = y.shape
    gates, new = gates.contiguous(), None if new is None else new.contiguous()
    integers = torch.empty(samples, hidden, dtype=torch.uint8, device="cpu")
    sizes, memory = torch.empty(samples, device="cpu", dtype=torch.float32), torch.empty_like(gates[0, 0])
    sums = torch.empty(gates.shape[1:], dtype=torch.int32, device="cpu")
    zeros = product.zeros if by_rows or product.step == 0 else torch.zeros_like(product.zeros)
    grid = float(product.qmax), product.step, product.least
    loops.keep(h.data_ptr(), integers.data_ptr(), sizes.data_ptr(), samples, hidden, *grid)
    multiply = _multiply(loops, product, by_rows, integers, sums)
    is_plain, scales = int(by_rows or product.is_plain), (zeros.data_ptr(), product.scale.data_ptr())
    state = integers.data_ptr(), sizes.data_ptr(), samples, hidden, *grid
    step, last = getattr(loops, op), h.data_ptr()
    for t in reversed(range(steps)) if reverse else range(steps):
        made = multiply()
        address = made.data_ptr()
        now = y.data_ptr() + 4 * t * samples * hidden
        read = address, address, is_plain, *scales, gates.data_ptr() + 4 * t * sums.numel()
        if cell is not None:
            step(*read, memory.data_ptr(), cell.data_ptr(), now, *state)
        elif new is not None:
            step(*read, memory.data_ptr(), new.data_ptr() + 4 * t * samples * hidden, last, now, *state)
        else:
            step(*read, int(is_tanh), now, *state)
        last = now
