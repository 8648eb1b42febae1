"""Rows of values that reach the output: those of padding do not, and what is fitted to values should not count them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
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
"""Of large batches, so many samples are looked at together: all of their values are kept meanwhile."""


def used_rows(
    program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node], at_once: int | None = None
) -> dict[fx.Node, Tensor]:
    """Which tokens the output of the float form depends on, of values whose last axis is that of the channels.

    A mask hides the tokens that pad a text, and a network that returns its first token has no use for the others'. The
    gradients of such a token are exactly zero. That is so, too, of what a maximum or an argmax does not choose this
    time: so it is tried whether the outputs stay the same, bit by bit, with other values in these tokens. Both is done
    only where a batch may hold padding: it has several tensors, or integers or a mask. Meanwhile the values of the
    whole network are kept for the samples that are run at once.

    Args:
        program: the qdq graph, or a float one.
        batch: some samples.
        nodes: the values to look at; those with tokens are, of three axes and more.
        at_once: so many samples are run at once, where the first axis counts samples; None: all.

    Returns:
        A bool tensor by value, of its shape without the channels. None of a value of which all tokens are used, or of
        which it is not known, as of a network that computes without gradients.
    """
    given = list(tensors((batch.args, batch.kwargs)))
    if not nodes or (len(given) < 2 and all(tensor.is_floating_point() for tensor in given)):
        return {}
    if at_once is None or (samples_in(batch) or 0) <= at_once:
        return _found(program, batch, nodes)
    pieces = pieces_of(batch, at_once)
    each = [_found(program, piece, nodes) for piece in pieces]
    shapes = {node: rows.shape[1:] for found in each for node, rows in found.items()}
    used: dict[fx.Node, Tensor] = {}
    for node, shape in shapes.items():
        device = next(found[node].device for found in each if node in found)
        rows = []
        for found, piece in zip(each, pieces, strict=True):  # in one without padding, nothing was found
            every = torch.ones(samples_in(piece) or 0, *shape, dtype=torch.bool, device=device)
            rows.append(found.get(node, every))
            if rows[-1].shape != every.shape:  # its first axis is not that of the samples
                break
        else:
            used[node] = torch.cat(rows)
    return used


def _found(program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
    """The same of samples that are run at once."""
    try:
        with torch.inference_mode(False):  # there, nothing has gradients
            return _without_padding(program, batch, nodes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an op has no gradient, or a module of the user does not take such numbers
        log.debug("which tokens are padding is not known: %s", error)
        return {}


def _without_padding(program: IsolatedGraph, batch: Batch, nodes: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
    """The same; raises whatever the graph raises with gradients, or with other numbers."""
    run = _Kept(IsolatedGraph(program.gm, program.graph), batch, nodes)
    with torch.enable_grad():
        outputs = tuple(tensors(run.run()))
        known = [t for t in outputs if t.is_floating_point() and t.requires_grad]
        toward = [torch.randn_like(t) for t in known]
        gradients = torch.autograd.grad(known, list(run.kept.values()), toward, allow_unused=True)
    found = {n: (g != 0).any(-1) for n, g in zip(run.kept, gradients, strict=True) if g is not None}
    found = {node: rows for node, rows in found.items() if rows.any() and not rows.all()}
    if not found:
        return {}
    with torch.enable_grad():  # without, some ops of PyTorch run other kernels, whose last bits differ
        others = tuple(tensors(_Kept(IsolatedGraph(program.gm, program.graph), batch, nodes, found).run()))
    same = len(outputs) == len(others) and all(map(torch.equal, outputs, others))
    return found if same else {}


_INFINITE = 1e30
"""What is no value, but stands for infinity in a mask."""


class _Kept(FloatForm):
    """Runs the graph in float, and keeps some of its values; with large random numbers in the tokens not in `used`."""

    def __init__(
        self,
        program: IsolatedGraph,
        batch: Batch,
        nodes: Collection[fx.Node],
        used: Mapping[fx.Node, Tensor] | None = None,
    ) -> None:
        super().__init__(program.gm, copied(batch), program.graph, program.modules)
        self._nodes, self._used = set(nodes), used or {}
        self.kept: dict[fx.Node, Tensor] = {}

    def step(self, node: fx.Node) -> Any:
        """Run the next node; its value."""
        value = super().step(node)
        if node not in self._nodes or not isinstance(value, Tensor) or value.dim() < 3 or not value.is_floating_point():
            return value
        value = value if value.requires_grad else value.detach().requires_grad_()
        if node in self._used:
            real = torch.where(value.abs() < _INFINITE, value, 0.0)
            others = 2 * real.abs().max() * torch.randn_like(real)
            changed = torch.where(self._used[node][..., None], value, others)
            # in memory as before: for another order, an op may run another kernel, whose last bits differ
            value = torch.empty_like(value).copy_(changed)
        self.values[node] = self.kept[node] = value
        return value
