"""Whether a model that is trained has the gradients that the float model has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import tensors
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight

FAR, SMALL = 0.2, 1e-4
"""The part of a gradient by which it is another one, as weights that are buffers stay rounded; and the part of the
largest that counts."""


def other_gradients(model: nn.Module, gm: fx.GraphModule, batch: Batch) -> list[str]:
    """Names of the parameters that have other gradients in a graph than in its model, where nothing is rounded.

    None where the model has no gradients on the batch, or fails.

    Args:
        model: in eval mode.
        gm: reads parameters of the model; those that it does not read are not looked at.
        batch: inputs.
    """
    read = {id(parameter) for parameter in fx.GraphModule(gm, gm.graph).parameters()}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in read}
    try:
        wanted = _gradients(model, batch, list(named.values()))
    except Exception:  # whatever its forward, or autograd, raises
        return []
    with _without_rounding(gm):
        found = _gradients(gm, batch, list(named.values()))
    least = SMALL * max((float(grad.norm()) for grad in (*wanted, *found)), default=0.0)
    return [
        name
        for name, own, other in zip(named, wanted, found, strict=True)
        if float((own - other).norm()) > max(FAR * float(torch.maximum(own.norm(), other.norm())), least)
    ]


def _gradients(model: nn.Module, batch: Batch, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Those of a sum of all outputs with random weights; zeros for what has none."""
    given = copied(batch)
    with untouched(model), seeded(), without_autocast(), torch.enable_grad():
        outputs = [t.nan_to_num(posinf=0.0, neginf=0.0) for t in tensors(model(*given.args, **given.kwargs))]
        torch.manual_seed(0)
        sums = [(t * torch.randn(t.shape)).sum() for t in outputs if t.is_floating_point()]
        loss = torch.stack([s.double() for s in sums]).sum() if sums else torch.zeros(())
        if not parameters or not loss.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g.to_dense().nan_to_num() for g, p in pairs]


@contextmanager
def _without_rounding(gm: fx.GraphModule) -> Iterator[None]:
    """Let fake quantizers hand on what they are given."""
    values = [(m, m.started) for m in gm.modules() if isinstance(m, FakeQuantizeValue)]
    weights = [m for m in gm.modules() if isinstance(m, FakeQuantizeWeight)]
    for value, _ in values:
        value.started = False
    for weight in weights:
        vars(weight)["forward"] = lambda tensor: tensor
    try:
        yield
    finally:
        for value, started in values:
            value.started = started
        for weight in weights:
            del vars(weight)["forward"]
