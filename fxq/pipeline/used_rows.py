"""Rows of values that reach the output: those of padding do not, and what is fitted to values should not count them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.graph.run import Modules
from fxq.pipeline.float_form import FloatForm


def used_rows(
    gm: fx.GraphModule, batch: Batch, channels: Mapping[fx.Node, int], modules: Modules = None
) -> dict[fx.Node, Tensor]:
    """Which rows of values the output of the float form depends on: a row has all channels, as a token's values do.

    A mask hides the tokens that pad a text, and a network that returns its first token has no use for the others'. The
    gradients of such a row are exactly zero. They are asked for only where a batch may hold padding: it has several
    tensors, or integers or a mask.

    Args:
        gm: the qdq graph.
        batch: some samples.
        channels: the axis of the channels of each value, counted from the end.
        modules: as for `Runner`.

    Returns:
        A bool tensor by value, of its shape without the channels. None of a value of which all rows are used, or of
        which it is not known, as of a network that computes without gradients.
    """
    given = list(tensors((batch.args, batch.kwargs)))
    if len(given) < 2 and all(tensor.is_floating_point() for tensor in given):
        return {}
    run = _Kept(gm, batch, channels, modules)
    try:
        with torch.enable_grad():
            outputs = [t for t in tensors(run.run()) if t.is_floating_point() and t.requires_grad]
            toward = [torch.randn_like(t) for t in outputs]
            gradients = torch.autograd.grad(outputs, list(run.kept.values()), toward, allow_unused=True)
    except RuntimeError:  # no output depends on them, or an op has no gradient, or changes in place what one needs
        return {}
    known = zip(run.kept, gradients, strict=True)
    found = {node: (gradient != 0).any(channels[node]) for node, gradient in known if gradient is not None}
    return {node: rows for node, rows in found.items() if rows.any() and not rows.all()}


class _Kept(FloatForm):
    """Runs the graph in float, and keeps some of its values."""

    def __init__(self, gm: fx.GraphModule, batch: Batch, channels: Mapping[fx.Node, int], modules: Modules) -> None:
        super().__init__(gm, copied(batch), modules=modules)
        self._channels = channels
        self.kept: dict[fx.Node, Tensor] = {}

    def compute(self, node: fx.Node) -> Any:
        value, axis = super().compute(node), self._channels.get(node)
        if axis is None or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < -axis:
            return value
        self.kept[node] = value if value.requires_grad else value.detach().requires_grad_()
        return self.kept[node]
