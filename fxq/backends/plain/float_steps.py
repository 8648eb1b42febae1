"""`FloatSteps`: the time steps of a recurrent layer with float states, whose weights stay as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.plain.few_rows import FewRowsProduct
from fxq.ops.recurrent import rows_of_cell


class FloatSteps:
    """Time steps of an lstm, gru or rnn of one direction. Each step reads the stored weight of the state once.

    Args:
        op: "lstm", "gru" or "rnn".
        loops: the module `fxq.backends.loops.code.step_loops`.
        products: products with `weight_hh` and its bias and, if the layer has a projection, with `weight_hr`, by name.
        is_tanh: whether an rnn's nonlinearity is tanh; else relu.
    """

    def __init__(
        self, op: str, loops: ModuleType, products: Mapping[str, FewRowsProduct], is_tanh: bool = True
    ) -> None:
        self.op, self.is_tanh, self._step = op, is_tanh, getattr(loops, f"float_{op}")
        self._state, self._projection = products["weight_hh"], products.get("weight_hr")

    def run(self, inputs: Tensor, h: Tensor, c: Tensor | None, reverse: bool, cell: bool) -> Tensor:
        """Run all time steps.

        Args:
            inputs: product of the input with `weight_ih`, and its bias, contiguous float32 (T, N, gates * H).
            h: initial hidden state, contiguous float32 (N, P).
            c: initial cell state of an lstm, float32 (N, H); it is not changed.
            reverse: whether to start from the last time step.
            cell: whether the last cell state follows the hidden states, see `fxq.ops.recurrent.lstm`.

        Returns:
            The hidden states, float32 (T, N, P).
        """
        count, samples, _ = inputs.shape
        y = torch.empty(count, *h.shape, dtype=torch.float32, device="cpu")
        c = None if c is None else c.clone(memory_format=torch.contiguous_format)
        hidden = h.shape[1] if c is None else c.shape[1]
        projection = self._projection
        state = None if projection is None else torch.empty(samples, hidden, dtype=torch.float32, device="cpu")
        step_bytes, at_inputs = inputs[:1].numel() * 4, inputs.data_ptr()
        for t in reversed(range(count)) if reverse else range(count):
            gates, out = self._state(h), y[t]
            written = out if state is None else state
            middle = c if c is not None else h  # what an lstm and a gru read besides the gates
            read = int(self.is_tanh) if self.op == "rnn" else middle.data_ptr()
            self._step(gates.data_ptr(), at_inputs + t * step_bytes, read, written.data_ptr(), samples, hidden)
            if projection is not None and state is not None:
                out.copy_(projection(state))
            h = out
        return torch.cat([y, rows_of_cell(c, h.shape[1])]) if cell and c is not None else y


def faster_steps(steps: int, samples: int, values: int, stored: int) -> bool:
    """Whether `FloatSteps` takes less time than converting all weights once for PyTorch's layer.

    Args:
        steps: number of time steps.
        samples: number of samples.
        values: number of values of the weights that each step reads.
        stored: number of values of all weights.
    """
    return steps > 0 and 0 < samples <= MAX_SAMPLES and (steps * _CALL_VALUES < stored or values >= _MIN_VALUES)


MAX_SAMPLES = 4
"""Maximum number of samples. For more, converting the weights once is faster."""
_CALL_VALUES = 1 << 16
"""Number of values that are converted to float32 in the time that the calls of one step take."""
_MIN_VALUES = 1 << 19
"""Number of values whose float32 do not fit into the second-level cache of most CPUs: a step reads them from memory,
and stored integers in less time."""
