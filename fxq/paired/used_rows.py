"""Detection of padding tokens, so that fits and errors can leave them out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, pieces_of, samples_in
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.graph.program import IsolatedGraph
from fxq.pipeline.float_form import FloatForm

log = logging.getLogger("fxq")

AT_ONCE = 8
"""Number of samples of a large batch that run at once, since all of their values are in memory."""


def used_rows(
    program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node], at_once: int | None = None
) -> dict[fx.Node, Tensor]:
    """Tokens of values that the output of the float form depends on. The others are padding.

    Padding of a text is hidden by a mask, so that its gradients are exactly zero. But gradients are also zero where a
    maximum or an argmax chooses another value. So the graph runs again with other values in these tokens: they are
    padding only if the outputs stay the same, bit by bit. This is tried only if a batch may hold padding, see
    `may_hold_padding`. All values of the network are in memory for the samples that run at once.

    Args:
        program: the qdq graph, or a float graph.
        batch: some samples.
        nodes: nodes of the values, with the channels in the last axis. Values with fewer than three axes are skipped.
        at_once: number of samples that run at once, if the first axis counts samples; None: all.

    Returns:
        By node, a bool tensor of the shape of its value without the channels: True for tokens that are used. A node is
        missing if all its tokens are used, or if it is not known, as with a network that computes without gradients.
    """
    if not nodes or not may_hold_padding(list(tensors((batch.args, batch.kwargs)))):
        return {}
    if at_once is None or (samples_in(batch) or 0) <= at_once:
        return _used_rows_at_once(program, batch, nodes)
    pieces = pieces_of(batch, at_once)
    used_by_piece = [_used_rows_at_once(program, piece, nodes) for piece in pieces]
    shapes = {node: rows.shape[1:] for used in used_by_piece for node, rows in used.items()}
    all_used: dict[fx.Node, Tensor] = {}
    for node, shape in shapes.items():
        device = next(used[node].device for used in used_by_piece if node in used)
        rows = []
        for used, piece in zip(used_by_piece, pieces, strict=True):  # a piece without padding has no entry
            every = torch.ones(samples_in(piece) or 0, *shape, dtype=torch.bool, device=device)
            rows.append(used.get(node, every))
            if rows[-1].shape != every.shape:  # its first axis does not count samples
                break
        else:
            all_used[node] = torch.cat(rows)
    return all_used


def may_hold_padding(inputs: Sequence[Tensor]) -> bool:
    """Whether some inputs may mark tokens as padding.

    These may:
        - one of several float tensors;
        - integers or bools of another shape than (samples, tokens);
        - a mask (samples, tokens) with both zeros and ones;
        - other integers (samples, tokens), such as token ids, if a value is repeated at an end of some sample and
          occurs at ends only. So padding is not detected if it is a single token in all samples.

    Empty tensors, such as the cache of a first call, may not.

    Example:
        >>> may_hold_padding([torch.tensor([[5, 7, 6], [8, 0, 0]])]), may_hold_padding([torch.tensor([[5, 7, 6]])])
        (True, False)
    """
    filled = [tensor for tensor in inputs if tensor.numel()]
    others = [tensor for tensor in filled if not tensor.is_floating_point()]
    return len(filled) - len(others) > 1 or any(map(_may_mark_padding, others))


def _may_mark_padding(values: Tensor) -> bool:
    if values.dim() != 2 or values.shape[1] < 2:
        return True
    low, high = map(int, values.aminmax())
    if low == high or (low >= 0 and high <= 1):
        return low < high
    repeated = [values[values[:, a] == values[:, b], a] for a, b in ((0, 1), (-1, -2))]
    return any(_only_at_ends(values == value) for value in torch.cat(repeated).unique())


def _only_at_ends(places: Tensor) -> bool:
    """Whether in each row, bool (N, L), all True values are before or after all False ones."""
    from_start, from_end = places.cumprod(1), places.flip(1).cumprod(1).flip(1)
    return not bool((places & ~(from_start | from_end).bool()).any())


def _used_rows_at_once(program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
    """`used_rows` for samples that run at once; empty if the graph fails with gradients or with other values."""
    try:
        with torch.inference_mode(False):  # inference mode has no gradients
            return _try_used_rows(program, batch, nodes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an op has no gradient, or a module of the user rejects the values
        log.debug("which tokens are padding is not known: %s", error)
        return {}


def _try_used_rows(program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
    """`used_rows` for samples that run at once. Raises any error of the graph."""
    run = _RecordingRun(IsolatedGraph(program.gm, program.graph), batch, nodes)
    with torch.enable_grad():
        outputs = tuple(tensors(run.run()))
        differentiable = [t for t in outputs if t.is_floating_point() and t.requires_grad]
        directions = [torch.randn_like(t) for t in differentiable]
        gradients = torch.autograd.grad(differentiable, list(run.recorded.values()), directions, allow_unused=True)
    used = {n: (g != 0).any(-1) for n, g in zip(run.recorded, gradients, strict=True) if g is not None}
    used = {node: rows for node, rows in used.items() if rows.any() and not rows.all()}
    if not used:
        return {}
    with torch.enable_grad():  # without, some ops of PyTorch run other kernels, whose last bits differ
        changed = tuple(tensors(_RecordingRun(IsolatedGraph(program.gm, program.graph), batch, nodes, used).run()))
    same = len(outputs) == len(changed) and all(map(torch.equal, outputs, changed))
    return used if same else {}


_MIN_INFINITE = 1e30
"""Absolute value from which a number is infinity in a mask, and not data."""


class _RecordingRun(FloatForm):
    """Run of a graph in float that records some values, and writes large random numbers into tokens not in `used`."""

    def __init__(
        self,
        program: IsolatedGraph,
        batch: Batch,
        nodes: Collection[fx.Node],
        used: Mapping[fx.Node, Tensor] | None = None,
    ) -> None:
        super().__init__(program.gm, copied(batch), program.graph, program.modules)
        self._nodes, self._used = set(nodes), used or {}
        self.recorded: dict[fx.Node, Tensor] = {}

    def step(self, node: fx.Node) -> Any:
        """Run the next node, and return its value."""
        value = super().step(node)
        if node not in self._nodes or not isinstance(value, Tensor) or value.dim() < 3 or not value.is_floating_point():
            return value
        value = value if value.requires_grad else value.detach().requires_grad_()
        if node in self._used:
            finite = torch.where(value.abs() < _MIN_INFINITE, value, 0.0)
            random = 2 * finite.abs().max() * torch.randn_like(finite)
            changed = torch.where(self._used[node][..., None], value, random)
            # with the strides of before: for others, an op may run another kernel, whose last bits differ
            value = torch.empty_like(value).copy_(changed)
        self.values[node] = self.recorded[node] = value
        return value
