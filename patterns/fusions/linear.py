"""Fusions around linear layers."""

from __future__ import annotations

from fxq.graph.info import info
from fxq.ops import OPS
from fxq.rewriting.pattern import fusion

ACTIVATIONS = OPS.fused_after("linear")


@fusion("linear_{act}", act=ACTIVATIONS)
def linear_act(op, x, weight, bias, *, act: str):
    return op[act](op.linear(x, weight, bias))


@fusion("linear_add")
def linear_add(op, x, weight, bias, residual):
    return op.add(op.linear(x, weight, bias), residual, alpha=1)


@fusion("linear_add_relu")
def linear_add_relu(op, x, weight, bias, residual):
    return op.relu(op.add(op.linear(x, weight, bias), residual, alpha=1))


@linear_add.unless
@linear_add_relu.unless
def residual_is_broadcast(m):
    """Refuse broadcasting: kernels add a tensor of the shape and dtype of the layer's output."""
    return any((info(n).shape, info(n).dtype) != (m.residual.shape, m.residual.dtype) for n in m.nodes)
