"""Weight-only kernel of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.few_rows import FewRowsProduct, refused
from fxq.backends.plain.float_steps import MAX_SAMPLES, FloatSteps, faster_steps
from fxq.backends.plain.stored_weight import float_input
from fxq.backends.plain.weight_only import WeightOnlyKernel, stored_linear
from fxq.ops import OPS


class WeightOnlyRecurrent(WeightOnlyKernel):
    """LSTM, GRU or RNN of one layer and direction.

    If that is faster, it reads the stored weights in each time step, in compiled loops (`FloatSteps`). Otherwise it
    converts its weights once per call, for all time steps.
    """

    name: ClassVar[str] = "weight_only.recurrent"

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        """float32 (T, N, I) and initial states (N, P), (N, H) -> the outputs of the op."""
        arguments = self.arguments(*map(float_input, (x, *states)))
        x, stored = arguments["x"], self.stored
        sizes = {name: weight.numel for name, weight in stored.items()}
        total = sum(sizes.values())
        is_faster = x.dim() == 3 and faster_steps(len(x), x.shape[1], total - sizes["weight_ih"], total)
        steps = self._steps(x) if is_faster and self._fits(arguments) else None
        if steps is not None:
            return self._in_steps(steps, **arguments)
        weights = {name: weight.floats(weight.empty()) for name, weight in stored.items()}
        y: Tensor = OPS[self.op].target(**arguments, **weights, **self.settings)
        return y

    def _fits(self, arguments: Mapping[str, Tensor]) -> bool:
        """Whether input and initial states have the shapes that the layer takes. PyTorch's op refuses others."""
        stored, x = self.stored, arguments["x"]
        rows, (width,) = len(stored["weight_hh"].values), stored["weight_hh"].row
        wanted = {"h": (x.shape[1], width), "c": (x.shape[1], rows // 4)}
        states = {name: tuple(arguments[name].shape) for name in wanted if name in arguments}
        return (x.shape[2],) == stored["weight_ih"].row and all(s == wanted[name] for name, s in states.items())

    def _in_steps(
        self,
        steps: FloatSteps,
        *,
        x: Tensor,
        h: Tensor | None = None,
        c: Tensor | None = None,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
    ) -> Tensor:
        inputs = self._cached("input", lambda: stored_linear(self.stored["weight_ih"], bias_ih))
        stored, samples = self.stored, x.shape[1]
        h = x.new_zeros(samples, math.prod(stored["weight_hh"].row)) if h is None else h.contiguous()
        if c is None and self.op == "lstm":
            c = x.new_zeros(samples, len(stored["weight_hh"].values) // 4)
        return steps.run(inputs(x), h, c, self.settings["reverse"], self.settings.get("cell", False))

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs with many samples if there are few, since another kernel runs then."""
        x, *states = inputs
        if 0 < x.shape[1] <= MAX_SAMPLES:
            yield (x.repeat(1, MAX_SAMPLES + 1, 1), *(state.repeat(MAX_SAMPLES + 1, 1) for state in states))
        else:
            yield (x[:, :1], *(state[:1] for state in states))

    def _steps(self, x: Tensor) -> FloatSteps | None:
        """Time steps in compiled loops; None if there are none for the weights, or for tensors like x."""
        few, steps = (loops_for(name, 0, x, *self._buffers.values()) for name in ("few_rows_loops", "step_loops"))
        if few is None or steps is None:
            return None
        return self._cached("steps", lambda: self._new_steps(few, steps))

    def _new_steps(self, few: ModuleType, steps: ModuleType) -> FloatSteps | None:
        read = {name: weight for name, weight in self.stored.items() if name != "weight_ih"}
        if any(refused(weight) is not None for weight in read.values()):
            return None
        biases = {"weight_hh": self._buffers["bias_hh"]}
        products = {name: FewRowsProduct(few, weight, biases.get(name)) for name, weight in read.items()}
        return FloatSteps(self.op, steps, products, self.settings.get("nonlinearity", "tanh") == "tanh")
