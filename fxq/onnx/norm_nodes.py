"""ONNX form of norms, softmax and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.onnx.writer import Operand, Value, Writer, refuse, writes


@writes("softmax")
def softmax(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("Softmax", x, axis=dim)


@writes("softmin")
def softmin(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("Softmax", w.emit("Neg", x), axis=dim)


@writes("log_softmax")
def log_softmax(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("LogSoftmax", x, axis=dim)


@writes("normalize")
def normalize(w: Writer, x: Value, *, p: float, dim: Any, eps: float) -> str:
    refuse(p not in (1.0, 2.0), f"its norm is of order {p}")
    axes = w.ints(dim if isinstance(dim, (tuple, list)) else [dim])
    size = w.emit("ReduceL2" if p == 2.0 else "ReduceL1", x, axes, keepdims=1)
    return w.emit("Div", x, w.emit("Max", size, w.number(eps, x)))


@writes("cosine_similarity")
def cosine_similarity(w: Writer, x: Value, other: Value, *, dim: int, eps: float) -> str:
    rank = max(x.rank, other.rank)
    axis = dim % rank - rank  # from the end, for inputs of different rank
    refuse(axis < -min(x.rank, other.rank), "one of its inputs lacks the axis")
    normalized = [normalize(w, value, p=2.0, dim=axis, eps=eps) for value in (x, other)]
    return w.emit("ReduceSum", w.emit("Mul", *normalized), w.ints([axis]), keepdims=0)


@writes("batch_norm")
def batch_norm(
    w: Writer,
    x: Value,
    running_mean: Value,
    running_var: Value,
    weight: Value | None = None,
    bias: Value | None = None,
    *,
    eps: float,
) -> str:
    scale, shift = _affine(weight, bias, running_mean.shape)
    return w.emit("BatchNormalization", x, scale, shift, running_mean, running_var, epsilon=eps)


def _affine(weight: Value | None, bias: Value | None, shape: Sequence[int]) -> tuple[Operand, Operand]:
    """Weight and bias of a norm; ones and zeros if it has none."""
    ones = torch.ones(tuple(shape), device="cpu")
    return weight if weight is not None else ones, bias if bias is not None else torch.zeros_like(ones)


@writes("layer_norm")
def layer_norm(
    w: Writer,
    x: Value,
    weight: Value | None = None,
    bias: Value | None = None,
    *,
    normalized_shape: Sequence[int],
    eps: float,
) -> str:
    scale, shift = _affine(weight, bias, normalized_shape)
    return w.emit("LayerNormalization", x, scale, shift, axis=-len(normalized_shape), epsilon=eps)


@writes("rms_norm")
def rms_norm(
    w: Writer, x: Value, weight: Value | None = None, *, normalized_shape: Sequence[int], eps: float | None
) -> str:
    axes = w.ints(range(-len(normalized_shape), 0))
    mean = w.emit("ReduceMean", w.emit("Mul", x, x), axes, keepdims=1)
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    normed = w.emit("Div", x, w.emit("Sqrt", w.emit("Add", mean, w.number(epsilon, x))))
    return normed if weight is None else w.emit("Mul", normed, weight)


@writes("group_norm")
def group_norm(
    w: Writer, x: Value, weight: Value | None = None, bias: Value | None = None, *, num_groups: int, eps: float
) -> str:
    groups = w.reshaped(x, (x.shape[0], num_groups, -1))
    ones = torch.ones(num_groups, device="cpu")
    normed = w.emit("InstanceNormalization", groups, ones, torch.zeros_like(ones), epsilon=eps)
    result = w.reshaped(normed, x.shape)
    shape = (x.shape[1], *[1] * (x.rank - 2))
    result = result if weight is None else w.emit("Mul", result, w.reshaped(weight, shape))
    return result if bias is None else w.emit("Add", result, w.reshaped(bias, shape))


@writes("instance_norm")
def instance_norm(
    w: Writer, x: Value, weight: Value | None = None, bias: Value | None = None, *, eps: float, batched: bool
) -> str:
    refuse(not batched, "its input has no batch axis")
    scale, shift = _affine(weight, bias, x.shape[1:2])
    return w.emit("InstanceNormalization", x, scale, shift, epsilon=eps)


@writes("local_response_norm")
def local_response_norm(w: Writer, x: Value, *, size: int, alpha: float, beta: float, k: float) -> str:
    # ONNX's LRN uses other neighbours for an even size.
    squares = w.reshaped(w.emit("Mul", x, x), (x.shape[0], 1, x.shape[1], -1))
    pads = [size // 2, 0, (size - 1) // 2, 0]
    mean = w.emit("AveragePool", squares, kernel_shape=[size, 1], pads=pads, count_include_pad=1)
    divisor = w.emit("Add", w.emit("Mul", w.reshaped(mean, x.shape), w.number(alpha, x)), w.number(k, x))
    return w.emit("Div", x, w.emit("Pow", divisor, w.number(beta, x)))


@writes("scaled_dot_product_attention")
def attention(
    w: Writer,
    x: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str:
    refuse(enable_gqa, "it has grouped queries (enable_gqa)")
    refuse(dropout_p, "it drops values at random")
    factor = 1 / math.sqrt(x.shape[-1]) if scale is None else scale
    transposed_key = w.emit("Transpose", key, perm=[*range(key.rank - 2), key.rank - 1, key.rank - 2])
    scores = w.emit("MatMul", w.emit("Mul", x, w.number(factor, x)), transposed_key)
    if is_causal:
        later = torch.ones(x.shape[-2], key.shape[-2], dtype=torch.bool, device="cpu").triu(1)
        scores = w.emit("Add", scores, torch.zeros(later.shape, device="cpu").masked_fill_(later, -math.inf))
    if attn_mask is None:
        return w.emit("MatMul", w.emit("Softmax", scores, axis=-1), value)
    mask = attn_mask
    if attn_mask.dtype is torch.bool:
        added = w.emit("Where", attn_mask, w.number(0.0, x), w.number(-math.inf, x))
        mask = Value(added, torch.empty_like(attn_mask.like, dtype=x.dtype))
    # The mask alone tells which rows are masked, so that nothing else reads the scores: engines fuse attention then.
    product = w.emit("MatMul", w.emit("Softmax", w.emit("Add", scores, mask), axis=-1), value)
    # A query whose keys are all masked gets zeros; its softmax would be NaN.
    is_masked = w.emit("Less", w.emit("ReduceMax", mask, w.ints([-1]), keepdims=1), w.number(_MIN_FINITE_SCORE, x))
    return w.emit("Where", is_masked, w.number(0.0, x), product)


_MIN_FINITE_SCORE = -3e38
"""Number near the lowest float32; lower summands of scores count as minus infinity."""


@writes("attention_mask")
def attention_mask(w: Writer, padding: Value | None, attention: Value | None, *, heads: int) -> str:
    masks = []
    if padding is not None:
        samples, keys = padding.shape
        masks.append(w.reshaped(_additive_mask(w, padding), (samples, 1, 1, keys)))
    if attention is not None:
        shape = attention.shape if attention.rank == 2 else (-1, heads, *attention.shape[1:])
        masks.append(w.reshaped(_additive_mask(w, attention), shape))
    return w.emit("Add", *masks) if len(masks) > 1 else masks[0]


def _additive_mask(w: Writer, mask: Value) -> Operand:
    """Mask as a summand of scores: minus infinity where a bool mask is true."""
    if mask.dtype is not torch.bool:
        return mask
    return w.emit("Where", mask, *(torch.tensor(number, device="cpu") for number in (-math.inf, 0.0)))
