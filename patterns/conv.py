"""Fusions around convolutions."""

from __future__ import annotations

from fxq.graph import info
from fxq.pattern import fusion

ACTIVATIONS = ("relu", "relu6", "hardtanh", "hardswish", "silu", "leaky_relu")
CONVS = ("conv1d", "conv2d", "conv_transpose2d")


@fusion("{conv}_{act}", conv=CONVS, act=ACTIVATIONS)
def conv_act(op, x, w, b, *, conv: str, act: str):
    return op[act](op[conv](x, w, b))


@fusion("{conv}_prelu", conv=CONVS)
def conv_prelu(op, x, w, b, slope, *, conv: str):
    return op.prelu(op[conv](x, w, b), slope)


@fusion("{conv}_add", conv=("conv1d", "conv2d"))
def conv_add(op, x, w, b, residual, *, conv: str):
    return op.add(op[conv](x, w, b), residual, alpha=1)


@fusion("{conv}_add_relu", conv=("conv1d", "conv2d"))
def conv_add_relu(op, x, w, b, residual, *, conv: str):
    return op.relu(op.add(op[conv](x, w, b), residual, alpha=1))


@conv_add.unless
@conv_add_relu.unless
def residual_is_broadcast(m):
    """The kernels add a tensor of the convolution's own shape; neither may be the one that is broadcast."""
    return any((info(n).shape, info(n).dtype) != (m.residual.shape, m.residual.dtype) for n in m.nodes)
