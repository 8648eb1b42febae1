"""Steps of recurrent layers on integers, with loops that Numba compiles between the products."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.x86.recurrent_steps import StateProduct, conv_product, linear_product

Multiply = Callable[[], Tensor]


def _multiply(product: StateProduct, integers: Tensor, sums: Tensor) -> Multiply:
    """Return a function that multiplies the current `integers` of the state by the weight.

    It returns `sums`, int32 (N, O), or if oneDNN multiplies, float32 (N, O), scaled except for the state's range.
    """
    weight, scale, bias = product.weight, product.scale, product.bias
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
    product: StateProduct,
    reverse: bool,
    cell: Tensor | None = None,
    new: Tensor | None = None,
    is_tanh: bool = True,
) -> None:
    """Run the steps of a recurrent layer like the function of `op` in `recurrent_steps`, with compiled loops.

    Args:
        loops: compiled functions, `fxq.backends.loops.code.step_loops`.
        op: "lstm", "gru" or "rnn".
        gates: contribution of the input and biases to the gates, float32 (T, N, gates * H).
        y: output for the hidden states, float32 (T, N, H).
        h: initial hidden state, float32 (N, H).
        product: product of the hidden state.
        reverse: whether to start from the last time step.
        cell: cell state of an lstm, float32 (N, H), updated in place.
        new: contribution of the input to the new gate of a gru, float32 (T, N, H).
        is_tanh: whether an rnn's nonlinearity is tanh; else relu.
    """
    steps, samples, hidden = y.shape
    gates, new = gates.contiguous(), None if new is None else new.contiguous()
    integers = torch.empty(samples, hidden, dtype=torch.uint8, device="cpu")
    ranges = torch.empty(samples, dtype=torch.float32, device="cpu")
    sums, summed = torch.empty(gates.shape[1:], dtype=torch.int32, device="cpu"), torch.empty_like(gates[0])
    multiply = _multiply(product, integers, sums)
    zero, scale, scale_rows = torch.ones_like(ranges), product.scale, loops.scale_sums
    zero_sums = product.zeros if product.state_scale == 0 else torch.zeros_like(product.zeros)
    if not product.is_plain:  # oneDNN has scaled the product
        scale_rows, zero_sums, scale = loops.scale_products, torch.zeros_like(scale), torch.ones_like(scale)
    grids = ranges.data_ptr(), 1, zero.data_ptr(), 1, zero_sums.data_ptr(), scale.data_ptr()
    output = summed.data_ptr(), *summed.shape, -math.inf, math.inf, 0
    grid = samples, hidden, float(product.qmax), product.state_scale, product.min_range
    state = integers.data_ptr(), ranges.data_ptr(), *grid
    loops.keep(h.data_ptr(), *state)
    step, previous, memory = getattr(loops, op), h.data_ptr(), summed.data_ptr()
    for t in reversed(range(steps)) if reverse else range(steps):
        result = multiply()
        scale_rows(result.data_ptr(), *grids, gates.data_ptr() + 4 * t * sums.numel(), 1, *output)
        current = y.data_ptr() + 4 * t * samples * hidden
        if cell is not None:
            step(memory, cell.data_ptr(), current, *state)
        elif new is not None:
            step(memory, new.data_ptr() + 4 * t * samples * hidden, previous, current, *state)
        else:
            step(memory, int(is_tanh), current, *state)
        previous = current
