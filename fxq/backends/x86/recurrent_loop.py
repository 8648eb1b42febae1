"""Recurrent layers of the x86 backend: one integer product for the inputs of all steps, then a loop over the steps."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import Kernel, activation_refused, refuse
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.converters import quantize
from fxq.backends.table.layer_spec import overflow_refused
from fxq.backends.x86.jit_steps import run_steps
from fxq.backends.x86.onednn import OnednnLayer
from fxq.backends.x86.recurrent_product import input_product, row_product, state_product
from fxq.backends.x86.recurrent_steps import StateProduct, gru, lstm, rnn, scripted
from fxq.errors import InputError
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.ops.recurrent import rows_of_cell
from fxq.quant.qparams import QParams, as_float32

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
"""Number of gates of each op."""


class RecurrentLoop(Kernel):
    """An lstm, gru or rnn of one layer and direction: uint8 (T, N, I) in, the op's result out.

    Both products are on integers; gates and states are computed in float32. Each step calls few functions, because a
    call costs as much as the arithmetic. The cell gate of an lstm is computed as tanh(x) = 1 - 2 * sigmoid(-2 x), so
    that one sigmoid computes all four gates.

    Args:
        weight_ih, weight_hh, weight_hr: int8, as in `fxq/ops/recurrent.py`, with their scales, float32, 0-d or (rows,).
        bias_ih, bias_hh: float32, or None.
        h, c: constant initial states; None if they are inputs or zeros.
        op: "lstm", "gru" or "rnn".
        x: grid of the input; with a `dynamic` range, a grid with scale 1.
        out: grid of the result; None for float32.
        dynamic: whether the range of the input is dynamic. The call then takes its scale after the input, float32, 0-d
            or (T, N, 1). Its zero point may follow, float32; then the zero point of `x` is 0.
        state_inputs: names of the initial states that are inputs, in the order h, c.
        reverse, cell, nonlinearity, state_qmax, state_scale: as in `fxq/ops/recurrent.py`.

    Raises:
        BackendError: products would saturate on this machine, sums could overflow int32, or the state has no grid.
    """

    name: ClassVar[str] = "x86.recurrent"
    options: ClassVar[tuple[str, ...]] = (
        *("op", "x", "out", "dynamic", "state_inputs", "reverse", "cell", "nonlinearity", "state_qmax", "state_scale"),
    )
    weight_ih: Tensor
    weight_ih_scale: Tensor
    weight_hh: Tensor
    weight_hh_scale: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None
    weight_hr_scale: Tensor | None
    h: Tensor | None
    c: Tensor | None

    def __init__(
        self,
        weight_ih: Tensor,
        weight_ih_scale: Tensor,
        weight_hh: Tensor,
        weight_hh_scale: Tensor,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
        weight_hr: Tensor | None = None,
        weight_hr_scale: Tensor | None = None,
        h: Tensor | None = None,
        c: Tensor | None = None,
        *,
        op: str,
        x: QParams,
        out: QParams | None = None,
        dynamic: bool = False,
        state_inputs: tuple[str, ...] = (),
        reverse: bool = False,
        cell: bool = False,
        nonlinearity: str = "tanh",
        state_qmax: int = 127,
        state_scale: float | None = None,
    ) -> None:
        super().__init__()
        weights = {"weight_ih": weight_ih, "weight_hh": weight_hh, "weight_hr": weight_hr}
        scales = {"weight_ih": weight_ih_scale, "weight_hh": weight_hh_scale, "weight_hr": weight_hr_scale}
        for name, weight in weights.items():
            self.register_buffer(name, weight if weight is None else weight.detach().contiguous())
            self.register_buffer(f"{name}_scale", scales[name])
        for name, tensor in {"bias_ih": bias_ih, "bias_hh": bias_hh, "h": h, "c": c}.items():
            self.register_buffer(name, tensor if tensor is None else tensor.detach())
        self.op, self.x, self.out, self.dynamic, self.state_inputs = op, x, out, dynamic, tuple(state_inputs)
        self.reverse, self.cell, self.nonlinearity = reverse, cell, nonlinearity
        self.state_qmax, self.state_scale = state_qmax, state_scale
        self._check_grids()

    def _check_grids(self) -> None:
        state = QParams.per_tensor(1.0, self.state_qmax + 1, 1, 2 * self.state_qmax + 1)
        read = {"weight_ih": self.x, "weight_hh": state, "weight_hr": state}
        weights = [(w, grid) for name, grid in read.items() if (w := self._buffers[name]) is not None]
        overflows = OnednnLayer.adds_in_int16(False)
        refuse(
            self.name,
            activation_refused("the input", self.x),
            activation_refused("the output", self.out),
            None if 1 <= self.state_qmax <= 127 else "its hidden state has no grid",
            *(beyond_int32(largest_sum(weight, grid)) for weight, grid in weights),
            *(overflow_refused(grid, weight) for weight, grid in weights if overflows),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether every hidden state is within its grid."""
        starts_at_zero = "h" not in self.state_inputs and self.h is None
        is_tanh = self.nonlinearity == "tanh" and self.weight_hr is None
        return (
            is_tanh
            and starts_at_zero
            and self.state_scale is not None
            and self.state_qmax * self.state_scale > 1 - 1e-6
        )

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Run the layer.

        Args:
            x: uint8, (T, N, I).
            others: scale and zero point of the input if its range is dynamic; then the initial states that are inputs,
                (N, P) and (N, H).
        """
        if x.dim() != 3 or x.shape[2] != self.weight_ih.shape[1]:
            wanted = self.weight_ih.shape[1]
            raise InputError(f"{self.name}: the input has shape {tuple(x.shape)}; the layer takes (T, N, {wanted}).")
        count = len(others) - len(self.state_inputs)
        states = dict(zip(self.state_inputs, others[count:], strict=True))
        layer: _PreparedTensors = self._cached("", lambda: _PreparedTensors(self))
        h, c = (
            self._initial(states.get(name, own), x.shape[1], width)
            for name, own, width in (("h", self.h, layer.width), ("c", self.c, layer.hidden))
        )
        y, c = layer.run(x, others[:count], h, c)
        result = torch.cat([y, rows_of_cell(c, y.shape[2])]) if self.cell and c is not None else y
        return result if self.out is None else quantize(result, self.out.s, self.out.z, self.out.qmax, self.out.qmin)

    def _initial(self, state: Tensor | None, samples: int, width: int) -> Tensor | None:
        """Initial state in float32, (samples, width); None stays None.

        Raises:
            InputError: it has another shape, which the steps would broadcast silently.
        """
        if state is None:
            return None
        if state.shape != (samples, width):
            shape = tuple(state.shape)
            message = f"{self.name}: an initial state has shape {shape}; for this input the layer takes "
            raise InputError(f"{message}({samples}, {width}).")
        return as_float32(state).contiguous()


class _PreparedTensors:
    """Tensors of a `RecurrentLoop` in the layout that its steps read."""

    def __init__(self, kernel: RecurrentLoop) -> None:
        self.kernel = kernel
        count, self.width = kernel.weight_hh.shape
        self.hidden = count // GATES[kernel.op]
        rows, factor = torch.arange(count, device="cpu"), torch.ones(count, dtype=torch.float32, device="cpu")
        if kernel.op == "lstm":  # the cell gate last, see `recurrent_steps.lstm`
            first, second, third, fourth = rows.chunk(4)
            rows = torch.cat([first, second, fourth, third])
            factor[3 * self.hidden :] = -2
        scale_ih, scale_hh = (
            (s.to(torch.float32).expand(count)[rows] * factor).contiguous()
            for s in (kernel.weight_ih_scale, kernel.weight_hh_scale)
        )
        bias_ih, bias_hh = (
            torch.zeros(count, dtype=torch.float32, device="cpu") if b is None else b[rows] * factor
            for b in (kernel.bias_ih, kernel.bias_hh)
        )
        qmax, fixed = kernel.state_qmax, kernel.state_scale
        self._state = kernel.weight_hh[rows], scale_hh, qmax, fixed
        if cpu.has_int_mm():  # else the shift is zero, and packing `product` may be wasted
            bias_hh = bias_hh + self.product.shift
        if kernel.op == "gru":  # the reset gate multiplies the state's part of the new gate
            self.bias_new = bias_hh[2 * self.hidden :].clone()
            bias_hh[2 * self.hidden :] = 0
        self.input = input_product(kernel.weight_ih[rows], scale_ih, bias_ih + bias_hh, kernel.x, kernel.dynamic)
        self.projection: StateProduct | None = None
        if kernel.weight_hr is not None and kernel.weight_hr_scale is not None:
            scale = kernel.weight_hr_scale.expand(self.width)
            self.projection = state_product(kernel.weight_hr, scale, qmax, 1 / qmax if fixed is not None else None)

    @cached_property
    def product(self) -> StateProduct:
        """Product of the hidden state, for PyTorch's or oneDNN's kernels."""
        return state_product(*self._state)

    @cached_property
    def row_product(self) -> StateProduct:
        """Product of the hidden state of one sample, for fxq's compiled loop."""
        return row_product(*self._state)

    def run(
        self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor | None, c: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run all steps.

        Args:
            x: uint8, (T, N, I).
            grid: scale and zero point of `x` if its range is dynamic; else empty.
            h: initial hidden state, float32 (N, P); None for zeros.
            c: initial cell state, float32 (N, H); None for zeros.

        Returns:
            The hidden states, float32 (T, N, P), and the last cell state of an lstm, (N, H), else None.
        """
        kernel = self.kernel
        steps, samples, _ = x.shape
        y = torch.empty(steps, samples, self.width, dtype=torch.float32, device="cpu")
        h = torch.zeros(samples, self.width, dtype=torch.float32, device="cpu") if h is None else h
        cell = None
        if kernel.op == "lstm":
            cell = torch.zeros(samples, self.hidden, dtype=torch.float32, device="cpu") if c is None else c.clone()
        if x.numel() == 0:  # oneDNN divides by zero
            return y, cell
        clamps, reverse = not kernel.is_bounded, kernel.reverse
        with torch.inference_mode():  # no autograd overhead per call; the returned tensors are created outside
            gates = self.input(x, *grid)
            new = None
            if kernel.op == "gru":
                new = gates[..., 2 * self.hidden :].clone()
                gates[..., 2 * self.hidden :] = self.bias_new
            is_tanh = kernel.nonlinearity == "tanh"
            loops = loops_for("step_loops", gates[0].numel(), x, h, c) if self.projection is None else None
            if loops is not None:
                product = self.row_product if samples == 1 and not cpu.has_int_mm() else self.product
                run_steps(loops, kernel.op, gates, y, h, product, reverse, cell, new, is_tanh)
            elif cell is not None:
                scripted(lstm)(gates, y, h, cell, self.product, self.projection, clamps, reverse)
            elif new is not None:
                scripted(gru)(gates, new, y, h, self.product, clamps, reverse)
            else:
                scripted(rnn)(gates, y, h, self.product, is_tanh, clamps, reverse)
        return y, cell
