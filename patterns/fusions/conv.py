"""Fusions around convolutions: an activation function, such as relu, or an add after one.

`ACTIVATIONS` are the ops whose row in the op table has "conv" in `fused_after`, such as relu in
`fxq/ops/activations.py`.

A sigmoid or gelu after a convolution is not fused, since no backend has a kernel for both: in a unit, the convolution
would emit float for the function. Apart, both run on integers, the function as a lookup table. Functions with slopes
are fused, since one kernel computes both; the slopes may be a tensor.
"""

from __future__ import annotations

from fxq.graph.info import info
from fxq.ops import OPS
from fxq.rewriting.pattern import fusion

ACTIVATIONS = OPS.fused_after("conv")
ADDING = OPS.family("conv")
CONVS = (*ADDING, *OPS.family("conv_transpose"))


@fusion("{conv}_{act}", conv=CONVS, act=ACTIVATIONS)
def conv_act(op, x, weight, bias, *, conv: str, act: str):
    return op[act](op[conv](x, weight, bias))


@fusion("{conv}_{act}", conv=CONVS, act=OPS.with_slopes(tensors=True))
def conv_slopes(op, x, weight, bias, slope, *, conv: str, act: str):
    return op[act](op[conv](x, weight, bias), slope)


@fusion("{conv}_add", conv=ADDING)
def conv_add(op, x, weight, bias, residual, *, conv: str):
    return op.add(op[conv](x, weight, bias), residual, alpha=1)


@fusion("{conv}_add_relu", conv=ADDING)
def conv_add_relu(op, x, weight, bias, residual, *, conv: str):
    return op.relu(op.add(op[conv](x, weight, bias), residual, alpha=1))


@conv_add.unless
@conv_add_relu.unless
def residual_is_broadcast(m):
    """Refuse broadcasting: kernels add a tensor of the shape and dtype of the convolution's output."""
    return any((info(n).shape, info(n).dtype) != (m.residual.shape, m.residual.dtype) for n in m.nodes)
