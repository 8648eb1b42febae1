"""Recurrent layers of the x86 backend: oneDNN or a compiled loop multiplies the states."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.time_steps import GATES
from fxq.backends.table.recurrent_kernel import CompiledSteps, RecurrentKernel
from fxq.backends.x86.jit_steps import run_steps
from fxq.backends.x86.onednn import OnednnLayer
from fxq.backends.x86.recurrent_product import input_product, state_product
from fxq.backends.x86.recurrent_steps import StateProduct, gru, lstm, rnn, scripted

_MAX_COMPILED_SAMPLES = 32
"""Number of samples up to which one compiled loop runs all time steps. For more, other products are faster."""


class RecurrentLoop(RecurrentKernel):
    """Recurrent layer whose input oneDNN multiplies by its weight, and whose time steps run in one compiled loop.

    Without that loop, and for many samples, PyTorch's or oneDNN's kernels multiply the states. Each step calls few
    functions then, because a call costs as much as the arithmetic.

    Args: see `RecurrentKernel`.
    """

    name: ClassVar[str] = "x86.recurrent"

    def adds_in_int16(self) -> bool:
        """Whether oneDNN adds pairs of products in int16 on this machine."""
        return OnednnLayer.adds_in_int16(False)

    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, c: Tensor | None) -> Tensor:
        """Run all time steps, see `RecurrentKernel.run`."""
        compiled = self.compiled_steps(x, h, c, *grid)
        if compiled is not None:
            return compiled.run(x, grid, h, c)
        prepared: _PreparedTensors = self._cached("", lambda: _PreparedTensors(self))
        return prepared.run(x, grid, h, c)

    def compiled_steps(self, x: Tensor, *others: Tensor | None) -> CompiledSteps | None:
        """Compiled time steps for few samples; None where Numba is missing or an input has no memory of its own."""
        is_small = self.weight_hr is None and x.shape[1] <= _MAX_COMPILED_SAMPLES
        loops = loops_for("recurrent_loops", 0, x, *others) if is_small else None
        if loops is None:
            return None
        compiled: CompiledSteps = self._cached("steps", lambda: CompiledSteps(self, loops, self._input_product))
        return compiled

    def _input_product(self, weight: Tensor, scale: Tensor, bias: Tensor) -> Kernel:
        """Product of the input, see `input_product`."""
        return input_product(weight, scale, bias, self.x, self.dynamic)


class _PreparedTensors:
    """Tensors of a `RecurrentLoop` in the layout that PyTorch's or oneDNN's kernels read.

    The cell gate of an lstm is computed as tanh(x) = 1 - 2 * sigmoid(-2 x), so that one sigmoid computes all four
    gates.
    """

    def __init__(self, kernel: RecurrentLoop) -> None:
        self.kernel = kernel
        count, self.width = kernel.weight_hh.shape
        self.hidden = count // GATES[kernel.op]
        rows, factor = torch.arange(count, device="cpu"), torch.ones(count, dtype=torch.float32, device="cpu")
        if kernel.op == "lstm":  # the cell gate last, see `recurrent_steps.lstm`
            first, second, third, fourth = rows.chunk(4)
            rows = torch.cat([first, second, fourth, third])
            factor[3 * self.hidden :] = -2
        scale_ih, scale_hh = ((scale[rows] * factor).contiguous() for scale in kernel.factors())
        bias_ih, bias_hh = (
            torch.zeros(count, dtype=torch.float32, device="cpu") if b is None else b[rows] * factor
            for b in (kernel.bias_ih, kernel.bias_hh)
        )
        qmax, fixed = kernel.state_qmax, kernel.state_scale
        self.product = state_product(kernel.weight_hh[rows], scale_hh, qmax, fixed)
        bias_hh = bias_hh + self.product.shift
        if kernel.op == "gru":  # the reset gate multiplies the state's part of the new gate
            self.bias_new = bias_hh[2 * self.hidden :].clone()
            bias_hh[2 * self.hidden :] = 0
        self.input = input_product(kernel.weight_ih[rows], scale_ih, bias_ih + bias_hh, kernel.x, kernel.dynamic)
        self.projection: StateProduct | None = None
        if kernel.weight_hr is not None and kernel.weight_hr_scale is not None:
            scale = kernel.weight_hr_scale.expand(self.width)
            self.projection = state_product(kernel.weight_hr, scale, qmax, 1 / qmax if fixed is not None else None)

    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, cell: Tensor | None) -> Tensor:
        """Run all time steps, see `RecurrentKernel.run`."""
        kernel = self.kernel
        steps, samples, _ = x.shape
        y = torch.empty(steps, samples, self.width, dtype=torch.float32, device="cpu")
        clamps, reverse = not kernel.is_bounded, kernel.reverse
        with torch.inference_mode():  # no autograd overhead per call; the returned tensors are created outside
            gates = self.input(x, *grid)
            new = None
            if kernel.op == "gru":
                new = gates[..., 2 * self.hidden :].clone()
                gates[..., 2 * self.hidden :] = self.bias_new
            is_tanh = kernel.nonlinearity == "tanh"
            loops = loops_for("step_loops", gates[0].numel(), x, h, cell) if self.projection is None else None
            if loops is not None:
                run_steps(loops, kernel.op, gates, y, h, self.product, reverse, cell, new, is_tanh)
            elif cell is not None:
                scripted(lstm)(gates, y, h, cell, self.product, self.projection, clamps, reverse)
            elif new is not None:
                scripted(gru)(gates, new, y, h, self.product, clamps, reverse)
            else:
                scripted(rnn)(gates, y, h, self.product, is_tanh, clamps, reverse)
        return y
