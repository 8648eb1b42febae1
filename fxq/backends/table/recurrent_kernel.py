"""Recurrent layers: one integer product for the inputs of all time steps, then a loop over the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel, activation_refused, refuse
from fxq.backends.plain.converters import quantize
from fxq.backends.plain.time_steps import GATES, StateGrid, TimeSteps, in_blocks
from fxq.backends.table.kernel_table import KernelRequest, KernelRow
from fxq.backends.table.layer_spec import overflow_refused, weight_refused
from fxq.errors import BackendError, InputError
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.graph.region import Weight
from fxq.ops.recurrent import rows_of_cell
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams, as_float32


class RecurrentKernel(Kernel):
    """Base class of kernels of an lstm, gru or rnn of one layer and direction: uint8 (T, N, I) in, its result out.

    Both products are on integers; gates and states are computed in float32.

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
        overflows = self.adds_in_int16()
        refuse(
            self.name,
            activation_refused("the input", self.x),
            activation_refused("the output", self.out),
            None if 1 <= self.state_qmax <= 127 else "its hidden state has no grid",
            *(beyond_int32(largest_sum(weight, grid)) for weight, grid in weights),
            *(overflow_refused(grid, weight) for weight, grid in weights if overflows),
        )

    def adds_in_int16(self) -> bool:
        """Whether the kernel adds pairs of products in int16 on this machine."""
        return False

    @abstractmethod
    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, c: Tensor | None) -> Tensor:
        """Run all time steps.

        Args:
            x: uint8, (T, N, I), not empty.
            grid: scale and zero point of `x` if its range is dynamic; else empty.
            h: initial hidden state, contiguous float32 (N, P).
            c: cell state of an lstm, contiguous float32 (N, H), which is updated in place; else None.

        Returns:
            The hidden states, float32 (T, N, P).
        """

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
        steps, samples, (rows, width) = *x.shape[:2], self.weight_hh.shape
        h = self._initial(states.get("h", self.h), samples, width)
        c = self._initial(states.get("c", self.c), samples, rows // GATES[self.op]) if self.op == "lstm" else None
        if x.numel():
            y = self.run(x, others[:count], h, c)
        else:  # oneDNN divides by zero
            y = torch.empty(steps, samples, width, dtype=torch.float32, device="cpu")
        result = torch.cat([y, rows_of_cell(c, width)]) if self.cell and c is not None else y
        return result if self.out is None else quantize(result, self.out.s, self.out.z, self.out.qmax, self.out.qmin)

    def bind(self, x: Tensor, *others: Tensor) -> Callable[..., Tensor]:
        """Return the function for inputs like these, see `Bindable.bind`: `forward`, or calls of compiled code."""
        fits = x.dim() == 3 and x.shape[2] == self.weight_ih.shape[1] and x.numel() > 0
        compiled = self.compiled_steps(x, *others) if fits else None
        states = (*others[len(others) - len(self.state_inputs) :], self.h, self.c)
        wanted = (*x.shape[1:2], self.weight_hh.shape[1])
        if compiled is None or any(state is not None and state.shape != wanted for state in states):
            return self.forward
        return compiled.bound(self, x, others)

    def compiled_steps(self, x: Tensor, *others: Tensor | None) -> CompiledSteps | None:
        """Compiled time steps of the layer for inputs like these; None if other code runs them."""
        return None

    def _initial(self, state: Tensor | None, samples: int, width: int) -> Tensor:
        """Copy of an initial state, float32 (samples, width). None means zeros.

        Raises:
            InputError: it has another shape, which the steps would broadcast silently.
        """
        if state is None:
            return torch.zeros(samples, width, dtype=torch.float32, device="cpu")
        if state.shape != (samples, width):
            shape = tuple(state.shape)
            message = f"{self.name}: an initial state has shape {shape}; for this input the layer takes "
            raise InputError(f"{message}({samples}, {width}).")
        return as_float32(state).clone(memory_format=torch.contiguous_format)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Scales of the weights of the input and of the state, float32 (rows,) each."""
        rows = len(self.weight_hh)
        scales = self.weight_ih_scale, self.weight_hh_scale
        return tuple(scale.to(torch.float32).expand(rows) for scale in scales)  # type: ignore[return-value]


InputProduct = Callable[[Tensor, Tensor, Tensor], Kernel]
"""Makes a linear layer of uint8 (..., I) from a weight, int8 (O, I), its scale, (O,), and a bias, (O,)."""


class CompiledSteps:
    """Tensors of a recurrent layer without projection, whose time steps run in one compiled loop.

    Args:
        kernel: the layer.
        loops: the module `fxq.backends.loops.code.recurrent_loops`.
        make: makes the product of the input.
        takes_scale: whether that takes the scale of the input as an argument, also if the range is static.
    """

    def __init__(
        self, kernel: RecurrentKernel, loops: ModuleType, make: InputProduct, takes_scale: bool = False
    ) -> None:
        self._reverse, gates = kernel.reverse, GATES[kernel.op]
        self._scale = (
            () if kernel.dynamic or not takes_scale else (torch.tensor(kernel.x.s, dtype=torch.float32, device="cpu"),)
        )
        scale_ih, scale_hh = kernel.factors()
        biases = [torch.zeros_like(scale_ih) if b is None else b for b in (kernel.bias_ih, kernel.bias_hh)]
        bias, new_bias = biases[0] + biases[1], None
        if kernel.op == "gru":  # the reset gate multiplies the state's part of the new gate
            new_bias = biases[1].chunk(gates)[-1]
            bias = torch.cat([*bias.chunk(gates)[:-1], biases[0].chunk(gates)[-1]])
        self._product = make(*(in_blocks(rows, gates) for rows in (kernel.weight_ih, scale_ih, bias)))
        grid = StateGrid(kernel.state_qmax, kernel.state_scale)
        kind = f"rnn_{kernel.nonlinearity}" if kernel.op == "rnn" else kernel.op
        self._steps = TimeSteps(loops, kind, kernel.weight_hh, scale_hh, grid, new_bias)

    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, c: Tensor | None) -> Tensor:
        """Run all time steps, see `RecurrentKernel.run`."""
        with torch.inference_mode():
            gates = self._product(x, *self._scale, *grid).contiguous()
        return self._steps.run(gates, h, c, self._reverse)

    def bound(self, kernel: RecurrentKernel, x: Tensor, others: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Return the function that runs the layer for inputs like these, see `Bindable.bind`.

        Args:
            kernel: the layer.
            x: uint8, (T, N, I), not empty.
            others: further inputs, see `RecurrentKernel.forward`.
        """
        (count, samples, _), hidden = x.shape, kernel.weight_hh.shape[1]
        dynamic = len(others) - len(kernel.state_inputs)
        product = self._product.bind(x, *self._scale, *others[:dynamic])
        steps = self._steps.bound(count, samples, self._reverse)
        initial = (self._initial_of(kernel, name, dynamic, (samples, hidden)) for name in ("h", "c"))
        (constant_h, h_index), (constant_c, c_index) = initial
        is_lstm, scale, width, out = kernel.op == "lstm", self._scale, self._steps.width, kernel.out
        returns_cell, is_joined = is_lstm and kernel.cell, is_lstm and kernel.cell and width == hidden
        rows, empty = count + is_joined, torch.empty

        def run(x: Tensor, *others: Tensor) -> Tensor:
            y, cell = empty(rows, samples, hidden, dtype=torch.float32, device="cpu"), None
            if is_lstm:
                cell = y[count] if is_joined else torch.zeros(samples, width, dtype=torch.float32, device="cpu")
            with torch.inference_mode():
                h = constant_h if h_index is None else as_float32(others[h_index]).contiguous()
                if cell is not None:
                    cell[:, :hidden] = constant_c if c_index is None else others[c_index]
                gates = product(x, *scale, *others[:dynamic]).contiguous()
                steps(gates, h, y, 0 if cell is None else cell.data_ptr())
            if cell is not None and returns_cell and not is_joined:
                y = torch.cat([y, rows_of_cell(cell[:, :hidden], hidden)])
            return y if out is None else quantize(y, out.s, out.z, out.qmax, out.qmin)

        return run

    @staticmethod
    def _initial_of(
        kernel: RecurrentKernel, name: str, first: int, shape: tuple[int, int]
    ) -> tuple[Tensor, int | None]:
        """Initial state of a name, float32 (N, H), and the index of the input that replaces it, if one does.

        Args:
            kernel: the layer.
            name: "h" or "c".
            first: number of inputs before the states.
            shape: (N, H).
        """
        constant = kernel.h if name == "h" else kernel.c
        index = first + kernel.state_inputs.index(name) if name in kernel.state_inputs else None
        if constant is None:
            constant = torch.zeros(shape, dtype=torch.float32, device="cpu")
        return as_float32(constant).contiguous(), index


def recurrent_rows(kernel: type[RecurrentKernel]) -> dict[str, KernelRow]:
    """Rows of a kernel table for recurrent layers, with static and with dynamic ranges."""
    row = KernelRow(partial(_recurrent, kernel), dynamic=KernelRow(partial(_recurrent, kernel)))
    return dict.fromkeys(GATES, row)


def _recurrent(kernel: type[RecurrentKernel], request: KernelRequest) -> Kernel:
    """Return the kernel of a recurrent layer."""
    row, captures, options = request.calls[0].op, dict(request.captures), dict(request.options)
    if options.pop("state_affine", False):
        raise BackendError("the grid of its state is not symmetric")
    tensors: dict[str, Any] = {}
    for name in (row.traits.weight, *row.traits.more_weights):
        weight = captures.pop(name or "", None)
        if weight is None:
            continue
        reason = weight_refused(weight.qparams, 0) if isinstance(weight, Weight) else "its weight is not quantized"
        if reason is not None:
            raise BackendError(reason)
        tensors |= {f"{name}": weight.values, f"{name}_scale": weight.qparams.scale}
    is_dynamic, (x,) = isinstance(captures.pop("x"), DynamicGrid), request.with_unit_scales.grids
    state_inputs = tuple(name for name, value in captures.items() if isinstance(value, fx.Node))
    tensors |= {name: value for name, value in captures.items() if name not in state_inputs}
    return kernel(
        **tensors, op=row.name, x=x, out=request.out, dynamic=is_dynamic, state_inputs=state_inputs, **options
    )
