"""ONNX of layers with weights, of products, norms and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.ops import OPS
from fxq.ops.convolution import conv_padding

_PADS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def onnx_pads(pad: Sequence[int], rank: int) -> list[int]:
    """Numbers in `F.pad`'s order as ONNX has them: all beginnings, then all ends, first axis first."""
    pairs = [(0, 0)] * (rank - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [begin for begin, _ in pairs] + [end for _, end in pairs]


@writes(*OPS.family("conv"))
def conv(
    w: Writer,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    *,
    stride: Sequence[int],
    padding: Any,
    dilation: Sequence[int],
    groups: int,
    padding_mode: str,
) -> str:
    refuse(x.rank != weight.rank, "its input has no batch axis")
    pads = conv_padding(weight.shape, padding, dilation)
    read: Operand = x
    if padding_mode != "zeros":
        read = w.emit("Pad", x, w.ints(onnx_pads(pads, x.rank)), mode=_PADS[padding_mode])
        pads = (0,) * len(pads)
    return w.emit(
        "Conv", read, _weight(w, x, weight), _bias(w, x, weight, bias), strides=list(stride), group=groups,
        dilations=list(dilation), pads=onnx_pads(pads, x.rank - 2), kernel_shape=list(weight.shape[2:]),
    )  # fmt: skip


@writes(*OPS.family("conv_transpose"))
def conv_transpose(
    w: Writer,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> str:
    refuse(x.rank != weight.rank, "its input has no batch axis")
    return w.emit(
        "ConvTranspose", x, _weight(w, x, weight), _bias(w, x, weight, bias), strides=list(stride), group=groups,
        dilations=list(dilation), pads=[*padding, *padding], output_padding=list(output_padding),
        kernel_shape=list(weight.shape[2:]),
    )  # fmt: skip


def _weight(w: Writer, x: Value, weight: Value) -> Value | Tensor:
    """The weight; in float32 where the input is no dequantized value: else it would be made that in every call."""
    node = w.made_by(weight.name)
    if node is None or node.kind != "DequantizeLinear" or is_dequantized(w, x):
        return weight
    q, scale, zero = (w.value_of(name) for name in node.reads)
    if q is None or scale is None or zero is None or "block_size" in node.attributes:
        return weight
    shape = [1] * q.dim()
    if scale.dim() == 1:
        shape[node.attributes["axis"]] = -1
    return w.kept(("real", weight.name), lambda: (q.float() - zero.reshape(shape)) * scale.reshape(shape))


def is_dequantized(w: Writer, x: Value) -> bool:
    """Whether a value is that of integers."""
    node = w.made_by(x.name)
    return node is not None and node.kind == "DequantizeLinear"


_INT32 = 2**31 - 1


def _bias(w: Writer, x: Value, weight: Value, bias: Value | None) -> Operand:
    """The bias; in int32 with the scale of the accumulator, where input and weight are dequantized and it fits."""
    real = w.value_of(bias.name) if bias is not None else None
    if real is None or not w.integer_bias:
        return bias
    scales = []
    for read in (x, weight):
        node = w.made_by(read.name)
        scale = w.value_of(node.reads[1]) if node is not None and node.kind == "DequantizeLinear" else None
        if scale is None or (node is not None and node.attributes.get("block_size")):
            return bias
        scales.append(scale.double())
    scale = (scales[0] * scales[1]).to(torch.float32).expand(len(real)).contiguous()
    steps = (real.double() / scale.double()).round()
    if not bool((steps.abs() <= _INT32).all()) or not bool((scale > 0).all()):
        return bias
    return w.emit("DequantizeLinear", steps.to(torch.int32), scale, axis=0)


@writes("linear")
def linear(w: Writer, x: Value, weight: Value, bias: Value | None = None) -> str:
    matrix = _weight(w, x, weight)
    turned: Operand = transposed(w, weight)
    if isinstance(matrix, Tensor):
        turned = w.kept(("t", weight.name), matrix.t().contiguous)
    if x.rank == 2 and bias is not None:
        return w.emit("Gemm", x, turned, _bias(w, x, weight, bias))
    product = w.emit("MatMul", x, turned)
    return product if bias is None else w.emit("Add", product, bias)


def transposed(w: Writer, weight: Value) -> str:
    """A matrix with its axes exchanged; where it is a dequantized constant, the integers are."""
    constant = w.value_of(weight.name)
    if constant is not None:
        return w.constant(w.kept(("t", weight.name), lambda: constant.t().contiguous()))
    node = w.made_by(weight.name)
    stored = w.value_of(node.reads[0]) if node is not None and node.kind == "DequantizeLinear" else None
    if node is None or stored is None or stored.dim() != 2:
        return w.emit("Transpose", weight, perm=[1, 0])
    attributes = dict(node.attributes)
    if "axis" in attributes:
        attributes["axis"] = 1 - attributes["axis"]
    turned = [w.kept(("t", name), partial(_turned, w, name)) for name in node.reads]
    return w.emit(node.kind, *turned, **attributes)


def _turned(w: Writer, name: str) -> Tensor:
    tensor = w.value_of(name)
    assert tensor is not None  # a scale of a constant is one
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


@writes("matmul")
def matmul(w: Writer, x: Value, other: Value) -> str:
    return w.emit("MatMul", x, other)


@writes("addmm", "baddbmm")
def add_product(w: Writer, bias: Value, x: Value, other: Value, *, beta: float, alpha: float) -> str:
    product: Operand = w.emit("MatMul", x, other)
    product = product if alpha == 1 else w.emit("Mul", product, w.number(alpha, x))
    added: Operand = bias if beta == 1 else w.emit("Mul", bias, w.number(beta, bias))
    return w.emit("Add", product, added)


@writes("einsum")
def einsum(w: Writer, xs: Sequence[Value], *, equation: str) -> str:
    return w.emit("Einsum", *xs, equation=equation)


@writes("softmax", "softmin")
def softmax(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("Softmax", x, axis=dim)


@writes("softmin")
def softmin(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("Softmax", w.emit("Neg", x), axis=dim)


@writes("log_softmax")
def log_softmax(w: Writer, x: Value, *, dim: int) -> str:
    return w.emit("LogSoftmax", x, axis=dim)


@writes("cumsum")
def cumsum(w: Writer, x: Value, *, dim: int) -> str:
    refuse(x.dtype is torch.bool, "it counts truth values")
    return w.emit("CumSum", x, w.ints([dim]).squeeze(0))


@writes("normalize")
def normalize(w: Writer, x: Value, *, p: float, dim: int, eps: float) -> str:
    refuse(p not in (1.0, 2.0), f"its norm is of order {p}")
    size = w.emit("ReduceL2" if p == 2.0 else "ReduceL1", x, w.ints([dim]), keepdims=1)
    return w.emit("Div", x, w.emit("Max", size, w.number(eps, x)))


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
    """Factors and summands of a norm, made up where it has none."""
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
    least = torch.finfo(x.dtype).eps if eps is None else eps
    made = w.emit("Div", x, w.emit("Sqrt", w.emit("Add", mean, w.number(least, x))))
    return made if weight is None else w.emit("Mul", made, weight)


@writes("group_norm")
def group_norm(
    w: Writer, x: Value, weight: Value | None = None, bias: Value | None = None, *, num_groups: int, eps: float
) -> str:
    groups = w.reshaped(x, (x.shape[0], num_groups, -1))
    ones = torch.ones(num_groups, device="cpu")
    normed = w.emit("InstanceNormalization", groups, ones, torch.zeros_like(ones), epsilon=eps)
    made = w.reshaped(normed, x.shape)
    shape = (x.shape[1], *[1] * (x.rank - 2))
    made = made if weight is None else w.emit("Mul", made, w.reshaped(weight, shape))
    return made if bias is None else w.emit("Add", made, w.reshaped(bias, shape))


@writes("instance_norm")
def instance_norm(
    w: Writer, x: Value, weight: Value | None = None, bias: Value | None = None, *, eps: float, batched: bool
) -> str:
    refuse(not batched, "its input has no batch axis")
    scale, shift = _affine(weight, bias, x.shape[1:2])
    return w.emit("InstanceNormalization", x, scale, shift, epsilon=eps)


@writes("local_response_norm")
def local_response_norm(w: Writer, x: Value, *, size: int, alpha: float, beta: float, k: float) -> str:
    refuse(size % 2 == 0, "its neighbours are not as many on both sides")
    return w.emit("LRN", x, size=size, alpha=float(alpha), beta=float(beta), bias=float(k))


@writes("embedding")
def embedding(w: Writer, x: Value, weight: Value) -> str:
    return w.emit("Gather", weight, x, axis=0)


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
    refuse(enable_gqa, "its queries share keys")
    refuse(dropout_p, "it drops values at random")
    factor = 1 / math.sqrt(x.shape[-1]) if scale is None else scale
    turned = w.emit("Transpose", key, perm=[*range(key.rank - 2), key.rank - 1, key.rank - 2])
    scores = w.emit("MatMul", w.emit("Mul", x, w.number(factor, x)), turned)
    if is_causal:
        seen = torch.ones(x.shape[-2], key.shape[-2], dtype=torch.bool, device="cpu").tril()
        scores = w.emit("Add", scores, torch.zeros(seen.shape).masked_fill_(~seen, -math.inf))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = w.emit("Where", attn_mask, scores, w.number(-math.inf, x))
    elif attn_mask is not None:
        scores = w.emit("Add", scores, attn_mask)
    return w.emit("MatMul", w.emit("Softmax", scores, axis=-1), value)
