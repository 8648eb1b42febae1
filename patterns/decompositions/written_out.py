"""Rewrites of functions that are written out as arithmetic, such as x * sigmoid(x), which becomes silu.

Numbers are captured and compared with a tolerance, since models round 1 / sqrt(2) differently.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch

from fxq.graph.query import is_op, options_of
from fxq.rewriting.pattern import rewrite


def _is(m: Any, name: str, wanted: float) -> bool:
    """Whether a capture is this number, up to float32 rounding."""
    value = m.captures[name]
    return isinstance(value, (int, float)) and math.isclose(value, wanted, rel_tol=1e-6)


# ---- clips


@rewrite
def clip_relu6(op, x):
    return op.hardtanh(x, min_val=0.0, max_val=6.0)


@rewrite
def clip_relu(op, x):
    return op.hardtanh(x, min_val=0.0, max_val=float("inf"))


# ---- hard functions


@rewrite
def hardsigmoid_by_div(op, x):
    return op.div(op.relu6(op.add(x, 3, alpha=1)), 6, rounding_mode=None)


@rewrite
def hardsigmoid_by_mul(op, x, sixth):
    return op.mul(op.relu6(op.add(x, 3, alpha=1)), sixth)


@hardsigmoid_by_mul.unless
def factor_is_not_one_sixth(m):
    return not _is(m, "sixth", 1 / 6)


@rewrite
def hardswish_by_hardsigmoid(op, x):
    return op.mul(x, op.hardsigmoid(x))


@rewrite
def hardswish_by_div(op, x):
    return op.div(op.mul(x, op.relu6(op.add(x, 3, alpha=1))), 6, rounding_mode=None)


@rewrite
def hardswish_by_mul(op, x, sixth):
    return op.mul(op.mul(x, op.relu6(op.add(x, 3, alpha=1))), sixth)


hardswish_by_mul.unless(factor_is_not_one_sixth)


# ---- smooth functions


@rewrite
def silu_by_sigmoid(op, x):
    return op.mul(x, op.sigmoid(x))


@rewrite
def mish_by_tanh(op, x):
    return op.mul(x, op.tanh(op.softplus(x, beta=1, threshold=20)))


def _normal(op: Any, x: Any, factor: Any, how: str) -> Any:
    """Pattern of 1 + erf(x / sqrt(2)), as a division or a product."""
    inside = op.div(x, factor, rounding_mode=None) if how == "div" else op.mul(x, factor)
    return op.add(op.erf(inside), 1, alpha=1)


_HOW = ("div", "mul")


@rewrite("gelu_half_x_first_{how}", how=_HOW)
def gelu_half_x_first(op, x, half, factor, *, how: str):
    return op.mul(op.mul(x, half), _normal(op, x, factor, how))


@rewrite("gelu_half_last_{how}", how=_HOW)
def gelu_half_last(op, x, half, factor, *, how: str):
    return op.mul(op.mul(x, _normal(op, x, factor, how)), half)


@rewrite("gelu_half_normal_{how}", how=_HOW)
def gelu_half_normal(op, x, half, factor, *, how: str):
    return op.mul(x, op.mul(_normal(op, x, factor, how), half))


@gelu_half_x_first.unless
@gelu_half_last.unless
@gelu_half_normal.unless
def numbers_are_not_those_of_gelu(m):
    factor = math.sqrt(2) if m.rule.variant["how"] == "div" else math.sqrt(0.5)
    return not (_is(m, "half", 0.5) and _is(m, "factor", factor))


@rewrite
def gelu_by_tanh(op, x, half, factor, cubic):
    cube = op.add(x, op.mul(op.pow(x, exponent=3), cubic), alpha=1)
    return op.mul(op.mul(x, half), op.add(op.tanh(op.mul(cube, factor)), 1, alpha=1))


@gelu_by_tanh.unless
def numbers_are_not_those_of_tanh_gelu(m):
    return not (_is(m, "half", 0.5) and _is(m, "factor", math.sqrt(2 / math.pi)) and _is(m, "cubic", 0.044715))


@gelu_by_tanh.becomes
def _tanh_gelu(op, m):
    return op.gelu(m.x, approximate="tanh")


# ---- norms


@rewrite("layer_norm_by_moments_{square}", square=("pow", "mul"))
def layer_norm_by_moments(op, x, eps, gamma, beta, *, square: str):
    centred = op.sub(x, op.mean(x, keepdim=True), alpha=1)
    squares = op.pow(centred, exponent=2) if square == "pow" else op.mul(centred, centred)
    deviation = op.sqrt(op.add(op.mean(squares, keepdim=True), eps, alpha=1))
    return op.add(op.mul(op.div(centred, deviation, rounding_mode=None), gamma), beta, alpha=1)


@layer_norm_by_moments.unless
def means_are_not_those_of_the_last_axis(m):
    last = len(m.x.shape or ()) - 1
    dims = [options_of(node)["dim"] for node in m.nodes if is_op(node, "mean")]
    axes = [tuple(dim) if isinstance(dim, (tuple, list)) else (dim,) for dim in dims]
    return last < 0 or any(axis not in ((last,), (-1,)) for axis in axes)


@layer_norm_by_moments.unless
def factors_are_not_those_of_channels(m):
    """Refuse unless there is a constant float32 factor and shift for each entry of the last axis, and a number eps."""
    if m.x.dtype is not torch.float32 or not isinstance(m.captures["eps"], float):
        return True
    tensors = [m.gamma.tensor, m.beta.tensor]
    return any(t is None or tuple(t.shape) != tuple(m.x.shape[-1:]) or t.dtype is not torch.float32 for t in tensors)


@layer_norm_by_moments.becomes
def _layer_norm(op, m):
    return op.layer_norm(m.x, m.gamma, m.beta, normalized_shape=tuple(m.x.shape[-1:]), eps=m.captures["eps"])


# ---- linear layers


@rewrite
def linear_by_matmul(op, x, w):
    return op.matmul(x, w)


@rewrite
def linear_by_addmm(op, x, w, b):
    return op.addmm(b, x, w, beta=1, alpha=1)


@linear_by_matmul.unless
@linear_by_addmm.unless
def second_operand_is_not_a_weight(m):
    return m.w.tensor is None or m.w.tensor.dim() != 2 or m.x.tensor is not None


@linear_by_addmm.unless
def added_value_is_not_a_bias(m):
    return m.b.tensor is None or m.b.tensor.dim() != 1


@linear_by_matmul.becomes
@linear_by_addmm.becomes
def _linear(op, m):
    name = str(m.w.node.target).removeprefix("fxq_data.")
    weight = op.computed(lambda w: w.t().contiguous(), f"{name}_t", m.w)
    return op.linear(m.x, weight, m.b if "b" in m.captures else None)


@rewrite
def linear_add_bias(op, x, w, none, b):
    return op.add(op.linear(x, w, none), b, alpha=1)


@linear_add_bias.unless
def sum_is_not_that_of_a_bias(m):
    """Refuse unless the layer has no bias and the added value is a constant with one number for each output."""
    if m.captures["none"] is not None or not hasattr(m.b, "tensor") or m.b.tensor is None:
        return True
    return m.w.tensor is None or tuple(m.b.tensor.shape) != (m.w.shape[0],) or m.b.tensor.dtype != m.w.tensor.dtype


@linear_add_bias.becomes
def _linear_with_bias(op, m):
    return op.linear(m.x, m.w, m.b)


@rewrite
def experts_by_grouped_mm(op, x, w, offs, none):
    return op.grouped_mm(x, w, offs, none, out_dtype=None)


@experts_by_grouped_mm.unless
def product_is_not_that_of_experts(m):
    is_constant = m.w.tensor is not None and m.w.tensor.dim() == 3 and m.w.tensor.dtype is torch.float32
    return m.captures["none"] is not None or not is_constant or m.x.tensor is not None or m.offs is None


@experts_by_grouped_mm.becomes
def _experts(op, m):
    name = str(m.w.node.target).removeprefix("fxq_data.")
    weight = op.computed(lambda w: w.transpose(1, 2).reshape(-1, w.shape[1]).contiguous(), f"{name}_rows", m.w)
    return op.expert_linear(m.x, weight, m.offs)


FUNCTIONS = {
    "relu6": (clip_relu6,),
    "relu": (clip_relu,),
    "hardsigmoid": (hardsigmoid_by_div, hardsigmoid_by_mul),
    "hardswish": (hardswish_by_hardsigmoid, hardswish_by_div, hardswish_by_mul),
    "silu": (silu_by_sigmoid,),
    "mish": (mish_by_tanh,),
    "gelu": (gelu_half_x_first, gelu_half_last, gelu_half_normal),
}
"""Rewrites of each function of x alone, by its op name."""
for _name, _rewrites in FUNCTIONS.items():
    for _rewrite in _rewrites:
        _rewrite.becomes(lambda op, m, name=_name: op[name](m.x))

LINEAR = (linear_by_matmul, linear_by_addmm, linear_add_bias, experts_by_grouped_mm)

WRITTEN_OUT = (*chain.from_iterable(FUNCTIONS.values()), gelu_by_tanh, layer_norm_by_moments, *LINEAR)
