"""`TimeSteps`: the time steps of a recurrent layer on integers, in one compiled loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.backends.plain.column_jobs import column_parts
from fxq.ops.recurrent import MIN_STATE_RANGE

_LANES, _GROUP = 16, 4
"""Units of a block, and integers of the state that are multiplied at once."""
_MIN_PART_BYTES = 1 << 18
"""Least number of bytes of a weight for each thread: waking a thread takes as long as reading some of it."""


def in_blocks(rows: Tensor, gates: int) -> Tensor:
    """Order rows by block, gate and unit of the block, with zeros for units that do not exist.

    Args:
        rows: one for each gate and unit, (gates * H, ...).
        gates: number of gates.

    Returns:
        (blocks * gates * 16, ...).
    """
    rows = rows.unflatten(0, (gates, -1))
    missing = -rows.shape[1] % _LANES
    padded = F.pad(rows, (*[0] * 2 * (rows.dim() - 2), 0, missing))
    return padded.unflatten(1, (-1, _LANES)).transpose(0, 1).flatten(0, 2).contiguous()


class StateGrid(NamedTuple):
    """Grid of a hidden state.

    Attributes:
        qmax: number of integers on each side of zero; the zero point is qmax + 1.
        scale: scale; None if it is dynamic, in each step and for each sample.
    """

    qmax: int
    scale: float | None


class _Steps(NamedTuple):
    """Time steps of a call, divided among threads.

    Attributes:
        kind: number of steps, number of parts of each, and whether they run in reverse.
        table: int64 (steps, parts, fields).
        counts: number of parts of each step, int64 (steps,).
        job: description for the pool of threads.
    """

    kind: tuple[int, int, bool]
    table: Tensor
    counts: Tensor
    job: Job


class TimeSteps:
    """Time steps of an lstm, gru or rnn of one direction, and the constants of their loop.

    Args:
        loops: the module `fxq.backends.loops.code.recurrent_loops`.
        kind: one of the loop's `KINDS`.
        weight: int8, (gates * H, H).
        scale: its scale, float32 (gates * H,).
        grid: grid of the hidden state.
        bias: what is added to the state's part of the new gate of a gru, float32 (H,); None for other layers.
    """

    def __init__(
        self, loops: ModuleType, kind: str, weight: Tensor, scale: Tensor, grid: StateGrid, bias: Tensor | None = None
    ) -> None:
        rows, self._hidden = weight.shape
        gates = rows // self._hidden
        width = self._hidden + -self._hidden % _LANES
        packed = F.pad(in_blocks(weight, gates), (0, width - self._hidden))
        packed = packed.view(-1, gates, _LANES, width // _GROUP, _GROUP).permute(0, 3, 1, 2, 4).contiguous()
        zero = grid.qmax + 1
        start = in_blocks(weight.sum(1, dtype=torch.int32), gates).mul_(loops.X_OFFSET - zero)
        factor = 1 / grid.qmax if grid.scale is None else grid.scale
        numbers = torch.tensor([grid.qmax, grid.scale or 0.0, MIN_STATE_RANGE], dtype=torch.float32, device="cpu")
        new_bias = torch.zeros(self._hidden, dtype=torch.float32, device="cpu") if bias is None else bias
        self._constants = (
            packed, start, in_blocks(scale * factor, gates), F.pad(new_bias, (0, width - self._hidden)), numbers
        )  # fmt: skip
        self._loops, self._kind, self._width, self._bytes = loops, loops.KINDS.index(kind), width, packed.numel()
        self._steps: _Steps | None = None

    def run(self, gates: Tensor, h: Tensor, cell: Tensor | None, reverse: bool) -> Tensor:
        """Run all time steps, on all threads if the weight is large. Results are equal with any number of threads.

        Args:
            gates: contribution of the input and the biases to the gates, contiguous float32 (T, N, outputs), with
                outputs in the order of `in_blocks`.
            h: initial hidden state, contiguous float32 (N, H).
            cell: cell state of an lstm, float32 (N, H), updated in place.
            reverse: whether to start from the last time step.

        Returns:
            The hidden states, float32 (T, N, H).
        """
        count, samples, _ = gates.shape
        y = torch.empty(count, samples, self._hidden, dtype=torch.float32, device="cpu")
        own_cell = None if cell is None else F.pad(cell, (0, self._width - self._hidden)).contiguous()
        self.bound(count, samples, reverse)(gates, h, y, 0 if own_cell is None else own_cell.data_ptr())
        if cell is not None and own_cell is not None:
            cell.copy_(own_cell[:, : self._hidden])
        return y

    @property
    def width(self) -> int:
        """Number of units of all blocks, of which the last may not exist: the loop needs room for their cell state."""
        return self._width

    def bound(self, count: int, samples: int, reverse: bool) -> Callable[[Tensor, Tensor, Tensor, int], None]:
        """Return the function that runs `count` time steps, on as many threads as PyTorch has now.

        Its arguments are `gates` and `h` as of `run`, the hidden states, float32 (T, N, H), written, and the address of
        the cell state, float32 (N, 16 * blocks), or 0.
        """
        parts = max(min(usable_threads(), self._bytes // _MIN_PART_BYTES, self._width // _LANES), 1)
        steps, loops = self._divided(count, parts, reverse), self._loops
        weight, start, scale, bias, numbers = (tensor.data_ptr() for tensor in self._constants)
        fields = {
            "KIND": self._kind, "GATES": 0, "OUT": 0, "STATE": 0, "CELL": 0, "WEIGHT": weight, "START": start,
            "SCALE": scale, "BIAS": bias, "SAMPLES": samples, "HIDDEN": self._hidden, "INTEGERS": 0, "SIZES": 0,
            "NUMBERS": numbers,
        }  # fmt: skip
        names = list(loops.LayerField.__members__)
        layer_type, empty, run_steps = ctypes.c_int64 * len(names), torch.empty, loops.run_steps
        template = bytes(layer_type(*(fields[name] for name in names)))
        at_gates, at_out, at_state, at_cell, at_integers, at_sizes = (
            names.index(name) for name in ("GATES", "OUT", "STATE", "CELL", "INTEGERS", "SIZES")
        )
        sizes_bytes, rows = 4 * parts * samples, steps.table.data_ptr()
        scratch_bytes = sizes_bytes + parts * samples * self._width

        def run(gates: Tensor, h: Tensor, y: Tensor, cell: int) -> None:
            layer = layer_type.from_buffer_copy(template)
            scratch = empty(scratch_bytes, dtype=torch.uint8, device="cpu")
            at_scratch = scratch.data_ptr()
            layer[at_gates], layer[at_out] = gates.data_ptr(), y.data_ptr()
            layer[at_state], layer[at_cell] = h.data_ptr(), cell
            layer[at_integers], layer[at_sizes] = at_scratch + sizes_bytes, at_scratch
            if parts == 1 or not run_together(steps.job, parts, ctypes.addressof(layer), 0):
                run_steps(rows, count * parts, layer)

        run.keeps = steps, self._constants  # type: ignore[attr-defined]  # the addresses are theirs
        return run

    def _divided(self, count: int, parts: int, reverse: bool) -> _Steps:
        """Divide time steps among threads; those of the last call are kept."""
        kind, last = (count, parts, reverse), self._steps
        if last is not None and last.kind == kind:
            return last
        columns = self._loops.StepField
        table = torch.zeros(count, parts, len(columns), dtype=torch.int64, device="cpu")
        times = torch.arange(count, device="cpu")
        table[..., columns.TIME] = (times.flip(0) if reverse else times)[:, None]
        table[1:, :, columns.PREVIOUS] = table[:-1, :, columns.TIME]
        table[:1, :, columns.PREVIOUS] = -1
        ends = torch.tensor(column_parts(self._width // _LANES, parts, 1), dtype=torch.int64, device="cpu")
        table[..., columns.FIRST], table[..., columns.END] = ends.unbind(1)
        table[..., columns.PART] = torch.arange(parts, device="cpu")
        counts = torch.full((count,), parts, dtype=torch.int64, device="cpu")
        row_bytes, function = 8 * len(columns), code_address(self._loops.run_steps)
        job = Job(function, table.data_ptr(), counts.data_ptr(), count, parts * row_bytes, row_bytes)
        self._steps = _Steps(kind, table, counts, job)
        return self._steps


GATES = {"lstm": 4, "gru": 3, "rnn": 1}
"""Number of gates of each op."""
