"""Check that a model with fake quantizers has the gradients of the float model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import tensors
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight

MAX_RELATIVE_ERROR = 0.2
"""Largest norm of a gradient's error relative to the gradient. It is large since weights in buffers stay rounded."""
MIN_RELATIVE_NORM = 1e-4
"""Norm of an error relative to the largest gradient of the model, below which it is ignored."""


def other_gradients(model: nn.Module, gm: fx.GraphModule, batch: Batch) -> list[str]:
    """Names of parameters whose gradients differ between a model and its graph, with fake quantizers off.

    There are none if the model has no gradients on the batch, or fails.

    Args:
        model: the float model, in eval mode.
        gm: the graph. Only parameters of the model that it reads are compared.
        batch: inputs of both.
    """
    read = {id(parameter) for parameter in fx.GraphModule(gm, gm.graph).parameters()}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in read}
    try:
        wanted = _gradients(model, batch, list(named.values()))
    except Exception:  # the forward and autograd raise errors of any type
        return []
    with _without_rounding(gm):
        got = _gradients(gm, batch, list(named.values()))
    ignored = MIN_RELATIVE_NORM * max((float(grad.norm()) for grad in (*wanted, *got)), default=0.0)

    def differ(a: Tensor, b: Tensor) -> bool:
        allowed = MAX_RELATIVE_ERROR * float(torch.maximum(a.norm(), b.norm()))
        return float((a - b).norm()) > max(allowed, ignored)

    return [name for name, a, b in zip(named, wanted, got, strict=True) if differ(a, b)]


def _gradients(model: nn.Module, batch: Batch, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradients of a randomly weighted sum of all outputs; zeros for parameters without one."""
    inputs = copied(batch)
    with untouched(model), seeded(), without_autocast(), torch.enable_grad():
        outputs = [t.nan_to_num(posinf=0.0, neginf=0.0) for t in tensors(model(*inputs.args, **inputs.kwargs))]
        torch.manual_seed(0)
        sums = [(t * torch.randn(t.shape)).sum() for t in outputs if t.is_floating_point()]
        loss = torch.stack([s.double() for s in sums]).sum() if sums else torch.zeros(())
        if not parameters or not loss.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g.to_dense().nan_to_num() for g, p in pairs]


@contextmanager
def _without_rounding(gm: fx.GraphModule) -> Iterator[None]:
    """Let fake quantizers return their inputs unchanged."""
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
