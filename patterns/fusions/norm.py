"""Rewrites that fold a batch norm into the layer before it, or else into the layer after it."""

from __future__ import annotations

import torch
from torch import Tensor

from fxq.ops import OPS
from fxq.rewriting.pattern import rewrite

INTO_NEXT = (*OPS.family("conv"), "linear")
INTO_PREVIOUS = (*INTO_NEXT, *OPS.family("conv_transpose"))


@rewrite("fold_batch_norm_{layer}", layer=INTO_PREVIOUS)
def norm_after_layer(op, x, w, b, mean, var, gamma, beta, *, layer: str):
    return op.batch_norm(op[layer](x, w, b), mean, var, gamma, beta)


@rewrite("fold_batch_norm_into_next_{layer}", layer=INTO_NEXT)
def norm_before_layer(op, x, w, b, mean, var, gamma, beta, *, layer: str):
    return op[layer](op.batch_norm(x, mean, var, gamma, beta), w, b)


@norm_before_layer.unless
@norm_after_layer.unless
def weight_is_computed_at_run_time(m):
    return any(not c.is_none and c.tensor is None for c in (m.w, m.b, m.mean, m.var, m.gamma, m.beta))


@norm_before_layer.unless
def padding_is_not_normalized(m):
    """Refuse padding if the shift is not 0: the convolution pads the norm's output with zeros, not its input."""
    options = m.options(m.rule.variant["layer"])
    if not any(options.get("padding", ())):
        return False
    return bool(_scale_and_shift_of(m)[1].any())


@norm_before_layer.unless
@norm_after_layer.unless
def channels_are_not_the_second_axis(m):
    """Refuse a linear over (N, L, K): its channels are the last axis, those of batch norm axis 1."""
    return m.rule.variant["layer"] == "linear" and len(m.x.shape or ()) != 2


@norm_after_layer.becomes
def folded(op, m):
    """Layer with the scale of the batch norm in its weight, and the shift in its bias."""
    layer = m.rule.variant["layer"]
    options = m.options(layer)
    norm = (m.mean.tensor, m.var.tensor, m.gamma.tensor, m.beta.tensor, m.options("batch_norm")["eps"])
    new, new_bias = fold(m.w.tensor, m.b.tensor, *norm, OPS[layer].traits.axis or 0, options.get("groups", 1))
    name = str(m.w.node.target).removesuffix(".weight").removeprefix("fxq_data.")
    return op[layer](
        m.x, op.constant(new, f"{name}.weight_folded"), op.constant(new_bias, f"{name}.bias_folded"), **options
    )


def _scale_and_shift_of(m) -> tuple[Tensor, Tensor]:
    return scale_and_shift(m.mean.tensor, m.var.tensor, m.gamma.tensor, m.beta.tensor, m.options("batch_norm")["eps"])


def fold(weight, bias, mean, var, gamma, beta, eps: float, axis: int, groups: int) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into the weight and bias of the layer before it.

    Args:
        weight: weight of the layer, of the shape that `scaled_channels` takes.
        bias: bias of the layer (O,), or None.
        mean: running mean of the batch norm (O,).
        var: running variance (O,).
        gamma: weight of the batch norm (O,), or None.
        beta: bias of the batch norm (O,), or None.
        eps: added to the variance.
        axis: axis of the output channels, 0 or 1.
        groups: groups of the layer.

    Returns:
        The new weight and bias.
    """
    scale, shift = scale_and_shift(mean, var, gamma, beta, eps)
    return scaled_channels(weight, scale, axis, groups), shift if bias is None else bias * scale + shift


def scaled_channels(weight: Tensor, scale: Tensor, axis: int, groups: int) -> Tensor:
    """Multiply each output channel of a layer's weight by a factor.

    Args:
        weight: (O, I/groups, ...), for a transposed convolution (I, O/groups, ...).
        scale: factors (O,).
        axis: axis of the output channels, 0 or 1.
        groups: groups of the layer.
    """
    along = [-1] + [1] * (weight.dim() - 1 - axis)
    if axis == 1 and groups > 1:  # the groups are along axis 0
        split = weight.reshape(groups, -1, *weight.shape[1:])
        return (split * scale.reshape(groups, 1, *along)).reshape(weight.shape)
    return weight * scale.reshape(along)


@norm_before_layer.becomes
def folded_into_next(op, m):
    """Layer with the scale in the columns of its weight, and the weighted sum of the shift in its bias."""
    layer = m.rule.variant["layer"]
    options = m.options(layer)
    scale, shift = _scale_and_shift_of(m)
    weight, bias, groups = m.w.tensor, m.b.tensor, options.get("groups", 1)
    outputs, inputs = weight.shape[0], weight.shape[1]
    per_output = [v.reshape(groups, 1, inputs).expand(groups, outputs // groups, inputs) for v in (scale, shift)]
    scale, shift = (v.reshape(outputs, inputs, *[1] * (weight.dim() - 2)) for v in per_output)
    added = (weight.double() * shift).flatten(1).sum(1).to(weight.dtype)
    name = str(m.w.node.target).removesuffix(".weight").removeprefix("fxq_data.")
    return op[layer](
        m.x,
        op.constant(weight * scale, f"{name}.weight_folded"),
        op.constant(added if bias is None else bias + added, f"{name}.bias_folded"),
        **options,
    )


def scale_and_shift(mean, var, gamma, beta, eps: float) -> tuple[Tensor, Tensor]:
    """Scale and shift (C,) of batch_norm(y) = y * scale + shift.

    scale = gamma / sqrt(var + eps), shift = beta - mean * scale.
    """
    scale = norm_scale(var, gamma, eps)
    shift = -mean.double() * scale
    if beta is not None:
        shift = shift + beta.double()
    return scale.to(mean.dtype), shift.to(mean.dtype).detach()


def norm_scale(var: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Scale of a batch norm, gamma / sqrt(var + eps): float64 (C,), without a gradient."""
    scale = torch.rsqrt(var.detach().double() + eps)
    return scale if gamma is None else scale * gamma.detach().double()
