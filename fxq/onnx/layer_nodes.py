"""ONNX form of layers with weights, matrix products and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from fxq.graph.analysis.integer_sums import MAX_8BIT_REACH, MAX_INT32
from fxq.onnx.dequantized import (
    bias_for,
    dequantize_node,
    dynamic_dequantize_node,
    is_dequantized,
    transposed,
    weight_for,
)
from fxq.onnx.dynamic_steps import linear_of_steps
from fxq.onnx.matmul_nbits import matmul_nbits
from fxq.onnx.onnx_objects import INT4, UINT4, NotInOnnx, OnnxNode
from fxq.onnx.padding_nodes import onnx_pads, padded
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.ops import OPS
from fxq.ops.convolution import conv_padding


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
    if padding_mode != "zeros":
        x = padded(w, x, pads, padding_mode)
        pads = (0,) * len(pads)
    return w.emit(
        "Conv", x, weight_for(w, x, weight), bias_for(w, x, weight, bias), strides=list(stride), group=groups,
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
        "ConvTranspose", x, weight_for(w, x, weight), bias_for(w, x, weight, bias, 1), strides=list(stride),
        group=groups, dilations=list(dilation), pads=[*padding, *padding], output_padding=list(output_padding),
        kernel_shape=list(weight.shape[2:]),
    )  # fmt: skip


@writes("linear")
def linear(w: Writer, x: Value, weight: Value, bias: Value | None = None) -> str:
    if x.name in w.dynamic_steps and (written := linear_of_steps(w, x, weight, bias)) is not None:
        return written
    if (dequantize := dynamic_dequantize_node(w, x)) is not None and (
        not w.portable or _has_products(w, dequantize, weight)
    ):
        return _dynamic_linear(w, x, dequantize, weight, bias)
    if w.nbits and (product := matmul_nbits(w, x, weight)) is not None:
        return product if bias is None else w.emit("Add", product, bias)
    matrix = transposed(w, weight_for(w, x, weight))
    source = dequantize_node(w, x)
    if x.rank == 2 and bias is not None:
        return w.emit("Gemm", x, matrix, bias_for(w, x, weight, bias))
    if (
        w.integer_bias and source is not None and bias is not None
    ):  # with an int32 bias, ONNX Runtime runs one integer op
        rows = w.reshaped(source.node.inputs[0], (-1, x.shape[-1]))
        flat = w.emit("DequantizeLinear", rows, source.scale, source.zero)
        product = w.emit("Gemm", flat, matrix, bias_for(w, x, weight, bias))
        return w.reshaped(product, (*x.shape[:-1], weight.shape[0]))
    product = w.emit("MatMul", w.reshaped(x, (1, *x.shape)) if x.rank == 1 else x, matrix)
    product = product if bias is None else w.emit("Add", product, bias)
    return (
        w.reshaped(product, (weight.shape[0],)) if x.rank == 1 else product
    )  # OpenVINO returns vectors in another shape


def _has_products(w: Writer, dequantize: OnnxNode, weight: Value) -> bool:
    """Whether `_dynamic_linear` can write a layer with this weight and this input."""
    grid, attributes, rounded = dequantize_node(w, weight), dequantize.attributes, w.producer(dequantize.inputs[0])
    if rounded is None or rounded.op_type not in ("QuantizeLinear", "DynamicQuantizeLinear"):
        return False  # stored integers
    if grid is None or bool(grid.zero.any()) or grid.node.attributes.get("block_size"):
        return False
    return "block_size" in attributes or "axis" not in attributes


def _dynamic_linear(w: Writer, x: Value, dequantize: OnnxNode, weight: Value, bias: Value | None) -> str:
    """Write a linear layer whose input has a dynamic range: an integer product, then its scale.

    The product node takes one scale and one zero point. With a grid per row, the product runs without them and is
    scaled per row afterwards. The part that the zero points add, zero_point * scale * (column sums of the weight), is
    subtracted together with the bias, in a float product.
    """
    weight_source, matrix = dequantize_node(w, weight), w.producer(transposed(w, weight))
    if weight_source is None or matrix is None or bool(weight_source.zero.any()) or matrix.attributes.get("block_size"):
        raise NotInOnnx("its weight has a zero point, or is per block, or is not quantized")
    integers, steps, _ = (w.constant_of(name) for name in matrix.inputs)
    assert integers is not None and steps is not None  # the integers and scale of a weight are constants
    if weight.name in w.weights:
        integers = integers.clone()  # see `weight_for`
    w.weights.add(weight.name)
    no_zero = torch.zeros((), dtype=torch.int8, device="cpu")

    def product(scale: Operand, zero: Operand, added: Value | None = None) -> str:
        if w.portable:  # both unsigned: with mixed signs, ONNX Runtime accumulates in 16 bits on CPUs without VNNI
            unsigned = w.cached_constant(
                ("unsigned", id(integers)), lambda: (integers.to(torch.int16) + 128).to(torch.uint8)
            )
            middle = torch.tensor(128, dtype=torch.uint8, device="cpu")
            summed = w.cast(w.emit("MatMulInteger", dequantize.inputs[0], unsigned, zero, middle), torch.float32)
            scaled = w.emit("Mul", summed, w.emit("Mul", scale, steps))
            return scaled if added is None else w.emit("Add", scaled, added)
        return w.emit("MatMulIntegerToFloat", dequantize.inputs[0], integers, scale, steps, zero, no_zero, added)

    scale, zero = dequantize.inputs[1:]
    zero_node = w.producer(zero)
    is_expanded = zero_node is not None and zero_node.op_type == "Expand"  # one constant for all rows
    row_zero = w.constant_of(zero_node.inputs[0] if is_expanded and zero_node is not None else zero)
    if "block_size" not in dequantize.attributes:
        return product(scale, zero, bias)
    if x.like.numel() == x.shape[-1]:  # one row
        return product(w.reshaped(scale, ()), w.reshaped(zero, ()), bias)
    unit_scale = torch.ones((), device="cpu")
    scaled = w.emit("Mul", product(unit_scale, None if row_zero is None else row_zero.flatten()[0]), scale)
    added: Operand = bias
    if row_zero is None:
        column_terms = [-integers.sum(0, dtype=torch.float64) * steps]
        row_factors = [w.emit("Mul", scale, w.cast(zero, torch.float32) if zero_node is None else zero_node.inputs[0])]
        if w.sizes is not None:
            scaled = w.emit("Add", scaled, w.emit("Mul", row_factors[0], column_terms[0].float()))
        else:
            if bias is not None and (constant_bias := w.constant_of(bias.name)) is not None:
                column_terms.append(constant_bias.double())
                shape = *x.shape[:-1], 1
                ones = w.cached_constant(("ones", shape), lambda: torch.ones(shape, device="cpu"))
                row_factors.append(w.constant(ones))
                added = None
            factors = w.reshaped(w.joined(row_factors, -1), (-1, len(row_factors)))
            rows = w.reshaped(scaled, (-1, weight.shape[0]))
            scaled = w.emit("Gemm", factors, torch.stack(column_terms).float(), rows)
            scaled = w.reshaped(scaled, (*x.shape[:-1], weight.shape[0]))
    return scaled if added is None else w.emit("Add", scaled, added)


@writes("matmul")
def matmul(w: Writer, x: Value, other: Value) -> str:
    """Product of activations; split along its depth if the integer sums of a runtime could overflow int32."""
    depth, max_depth = x.shape[-1], MAX_INT32 // MAX_8BIT_REACH**2
    if varies(depth) or depth <= max_depth or not (is_dequantized(w, x) and is_dequantized(w, other)):
        return w.emit("MatMul", x, other)
    axis = max(other.rank - 2, 0)
    spans = [(i, min(i + max_depth, depth)) for i in range(0, depth, max_depth)]
    products = [w.emit("MatMul", w.cut(x, x.rank - 1, *span), w.cut(other, axis, *span)) for span in spans]
    return reduce(partial(w.emit, "Add"), products)


@writes("addmm", "baddbmm")
def add_product(w: Writer, bias: Value, x: Value, other: Value, *, beta: float, alpha: float) -> str:
    product: Operand = matmul(w, x, other)
    product = product if alpha == 1 else w.emit("Mul", product, w.number(alpha, x))
    added: Operand = bias if beta == 1 else w.emit("Mul", bias, w.number(beta, bias))
    return w.emit("Add", product, added)


@writes("einsum")
def einsum(w: Writer, xs: Sequence[Value], *, equation: str) -> str:
    return w.emit("Einsum", *xs, equation=equation)


@writes("embedding")
def embedding(w: Writer, x: Value, weight: Value) -> str:
    """Rows of a table; rows of a quantized table are dequantized after the look-up."""
    x, source = w.index(x, weight.shape[0]), dequantize_node(w, weight)
    q = w.constant_of(source.node.inputs[0]) if source is not None and not w.floats else None
    if source is None or q is None or w.type_number_of(source.node.inputs[0]) in (INT4, UINT4):
        return w.emit("Gather", weight, x, axis=0)
    block, grid = source.node.attributes.get("block_size") or q.shape[1], [source.scale, source.zero]
    if source.scale.dim() < 2:  # per row or per tensor
        grid = [part.expand(len(q)).reshape(-1, 1).contiguous() for part in grid]
    integers, scale, zero = (w.emit("Gather", part, x, axis=0) for part in (q, *grid))
    if block < q.shape[1]:
        blocks = torch.arange(q.shape[1], device="cpu") // block
        scale, zero = (w.emit("Gather", part, blocks, axis=-1) for part in (scale, zero))
    # without DequantizeLinear: OpenVINO has no blocks of dynamic shape, and layers would take the rows for rounded ones
    steps = w.cast(integers, torch.float32)
    if bool(grid[1].any()):
        steps = w.emit("Sub", steps, w.cast(zero, torch.float32))
    return w.emit("Mul", steps, scale)


@writes("embedding_bag")
def embedding_bag(
    w: Writer,
    x: Value,
    weight: Value,
    offsets: Value | None = None,
    per_sample_weights: Value | None = None,
    *,
    mode: str,
    include_last_offset: bool,
    padding_idx: int | None,
) -> str:
    refuse(offsets is not None or x.rank != 2, "its bags have different sizes")
    refuse(padding_idx is not None, "it has a padding_idx")
    rows: Operand = w.emit("Gather", weight, w.index(x, weight.shape[0]), axis=0)
    if per_sample_weights is not None:
        rows = w.emit("Mul", rows, w.reshaped(per_sample_weights, (*x.shape, 1)))
    reductions = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax"}
    return w.emit(reductions[mode], rows, w.ints([1]), keepdims=0)
