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
from fxq.backends.x86.recurrent_steps import Product, gru, lstm, rnn, scripted
from fxq.errors import InputError
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.ops.recurrent import rows_of_cell
from fxq.quant.qparams import QParams, as_float32

GATES = {"lstm": 4, "gru": 3, "rnn": 1}


class RecurrentLoop(Kernel):
    """An lstm, gru or rnn of one layer and direction: uint8 (T, N, I) in, what the op returns out.

    What both products give is scaled to float32, in which gates and states are computed: each step calls few functions,
    since a call costs as much as the arithmetic. The cell gate of an lstm is 1 - 2 * sigmoid(-2 x), which is tanh(x):
    one sigmoid computes all four gates.

    Args:
        weight_ih, weight_hh, weight_hr: int8, as in `fxq/ops/recurrent.py`, with their scales, float32, 0-d or (rows,).
        bias_ih, bias_hh: float32, or None.
        h, c: initial states that are constants; None: those that are `given`, or zeros.
        op: "lstm", "gru" or "rnn".
        x: the grid of the input; of steps of 1 where its scale is `measured`.
        out: the grid of the result; None: float32.
        measured: whether the scale of the input comes behind it: float32, 0-d or (T, N, 1); its zero point may follow,
            float32, too, and that of `x` is 0.
        given: the initial states that are inputs, in the order h, c.
        reverse, cell, nonlinearity, state_qmax, state_scale: as in `fxq/ops/recurrent.py`.

    Raises:
        BackendError: products would saturate on this machine, sums could overflow int32, or the state has no grid.
    """

    name: ClassVar[str] = "x86.recurrent"
    options: ClassVar[tuple[str, ...]] = (
        *("op", "x", "out", "measured", "given", "reverse", "cell", "nonlinearity", "state_qmax", "state_scale"),
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
        measured: bool = False,
        given: tuple[str, ...] = (),
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
        self.op, self.x, self.out, self.measured, self.given = op, x, out, measured, tuple(given)
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
            None if 1 <= self.state_qmax <= 127 else "its hidden state is on no grid",
            *(beyond_int32(largest_sum(weight, grid)) for weight, grid in weights),
            *(overflow_refused(grid, weight) for weight, grid in weights if overflows),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether no hidden state is further from zero than its grid reaches."""
        within = self.nonlinearity == "tanh" and self.weight_hr is None and "h" not in self.given and self.h is None
        return within and self.state_scale is not None and self.state_qmax * self.state_scale > 1 - 1e-6

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """uint8 (T, N, I), what is measured of its grid, initial states (N, P), (N, H) -> what the op returns."""
        if x.dim() != 3 or x.shape[2] != self.weight_ih.shape[1]:
            wanted = self.weight_ih.shape[1]
            raise InputError(f"{self.name}: an input of shape {tuple(x.shape)}; the layer takes (T, N, {wanted}).")
        count = len(others) - len(self.given)
        states = dict(zip(self.given, others[count:], strict=True))
        layer: _Prepared = self._cached("", lambda: _Prepared(self))
        h, c = (
            self._initial(states.get(name, own), x.shape[1], width)
            for name, own, width in (("h", self.h, layer.width), ("c", self.c, layer.hidden))
        )
        y, c = layer.run(x, others[:count], h, c)
        result = torch.cat([y, rows_of_cell(c, y.shape[2])]) if self.cell and c is not None else y
        return result if self.out is None else quantize(result, self.out.s, self.out.z, self.out.qmax, self.out.qmin)

    def _initial(self, state: Tensor | None, samples: int, width: int) -> Tensor | None:
        """An initial state in float32. What writes into memory would take one of another shape as one for all."""
        if state is None:
            return None
        if state.shape != (samples, width):
            given = f"{self.name}: an initial state of shape {tuple(state.shape)}"
            raise InputError(f"{given}; for this input the layer takes ({samples}, {width}).")
        return as_float32(state).contiguous()


class _Prepared:
    """A kernel's tensors in the form in which its steps read them."""

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
        if cpu.has_int_mm():  # else the shift is zero, and what is packed for it may never be needed
            bias_hh = bias_hh + self.product.shift
        if kernel.op == "gru":  # the new gate multiplies what the state gives
            self.bias_new = bias_hh[2 * self.hidden :].clone()
            bias_hh[2 * self.hidden :] = 0
        self.input = input_product(kernel.weight_ih[rows], scale_ih, bias_ih + bias_hh, kernel.x, kernel.measured)
        self.projection: Product | None = None
        if kernel.weight_hr is not None and kernel.weight_hr_scale is not None:
            scale = kernel.weight_hr_scale.expand(self.width)
            self.projection = state_product(kernel.weight_hr, scale, qmax, 1 / qmax if fixed is not None else None)

    @cached_property
    def product(self) -> Product:
        """That of the hidden state, by PyTorch's kernels."""
        return state_product(*self._state)

    @cached_property
    def row_product(self) -> Product:
        """That of the hidden state of one sample, by a loop of our own."""
        return row_product(*self._state)

    def run(
        self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor | None, c: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states (T, N, P), and the last cell state of an lstm."""
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
        with torch.inference_mode():  # it spares each call what autograd asks; what is handed out was made before
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
