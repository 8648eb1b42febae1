"""ONNX of layers with weights, of products and of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from fxq.graph.analysis.integer_sums import MAX_8BIT_REACH, MAX_INT32
from fxq.onnx.dequantized import bias_for, dequantized, is_of_integers, measured, transposed, weight_for
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
    if (made := measured(w, x)) is not None and (not w.portable or _has_products(w, made, weight)):
        return _dynamic_linear(w, x, made, weight, bias)
    matrix = transposed(w, weight_for(w, x, weight))
    found = dequantized(w, x)
    if x.rank == 2 and bias is not None:
        return w.emit("Gemm", x, matrix, bias_for(w, x, weight, bias))
    if w.integer_bias and found is not None and bias is not None:  # with the bias it is one integer op
        rows = w.reshaped(found.node.reads[0], (-1, x.shape[-1]))
        flat = w.emit("DequantizeLinear", rows, found.scale, found.zero)
        product = w.emit("Gemm", flat, matrix, bias_for(w, x, weight, bias))
        return w.reshaped(product, (*x.shape[:-1], weight.shape[0]))
    product = w.emit("MatMul", w.reshaped(x, (1, *x.shape)) if x.rank == 1 else x, matrix)
    product = product if bias is None else w.emit("Add", product, bias)
    return w.reshaped(product, (weight.shape[0],)) if x.rank == 1 else product  # OpenVINO gives vectors another shape


def _has_products(w: Writer, made: OnnxNode, weight: Value) -> bool:
    """Whether `_dynamic_linear` takes a weight, and the scales of what it is multiplied with."""
    grid, attributes, rounded = dequantized(w, weight), made.attributes, w.made_by(made.reads[0])
    if rounded is None or rounded.kind not in ("QuantizeLinear", "DynamicQuantizeLinear"):
        return False  # rows of a table
    if grid is None or bool(grid.zero.any()) or grid.node.attributes.get("block_size"):
        return False
    return "block_size" in attributes or "axis" not in attributes


def _dynamic_linear(w: Writer, x: Value, made: OnnxNode, weight: Value, bias: Value | None) -> str:
    """A linear layer on integers of a measured grid: their product, scaled behind.

    The node takes one scale and one zero point. Where each row has its own, the product is scaled by them behind, and
    what the zero points add is taken off with the bias: in a product of these, as real values, with the sums of the
    weight's columns.
    """
    of_weight, matrix = dequantized(w, weight), w.made_by(transposed(w, weight))
    if of_weight is None or matrix is None or bool(of_weight.zero.any()) or matrix.attributes.get("block_size"):
        raise NotInOnnx("its weight has a zero point, or blocks, or is not in integers")
    integers, steps, _ = (w.value_of(name) for name in matrix.reads)
    assert integers is not None and steps is not None  # those of a weight are constants
    if weight.name in w.weights:
        integers = integers.clone()  # see `weight_for`
    w.weights.add(weight.name)
    nothing = torch.zeros((), dtype=torch.int8, device="cpu")

    def product(scale: Operand, zero: Operand, added: Value | None = None) -> str:
        if w.portable:  # both unsigned: of mixed signs, ONNX Runtime adds products in 16 bits on CPUs without VNNI
            unsigned = w.kept(("unsigned", id(integers)), lambda: (integers.to(torch.int16) + 128).to(torch.uint8))
            middle = torch.tensor(128, dtype=torch.uint8, device="cpu")
            summed = w.cast(w.emit("MatMulInteger", made.reads[0], unsigned, zero, middle), torch.float32)
            real = w.emit("Mul", summed, w.emit("Mul", scale, steps))
            return real if added is None else w.emit("Add", real, added)
        return w.emit("MatMulIntegerToFloat", made.reads[0], integers, scale, steps, zero, nothing, added)

    scale, zero = made.reads[1:]
    maker = w.made_by(zero)
    middle = w.value_of(maker.reads[0] if maker is not None and maker.kind == "Expand" else zero)  # one for all rows
    if "block_size" not in made.attributes:
        return product(scale, zero, bias)
    if x.like.numel() == x.shape[-1]:  # one row
        return product(w.reshaped(scale, ()), w.reshaped(zero, ()), bias)
    one = torch.ones((), device="cpu")
    real = w.emit("Mul", product(one, None if middle is None else middle.flatten()[0]), scale)
    added: Operand = bias
    if middle is None:
        lines = [-integers.sum(0, dtype=torch.float64) * steps]
        parts = [w.emit("Mul", scale, w.cast(zero, torch.float32) if maker is None else maker.reads[0])]
        if w.sizes is not None:
            real = w.emit("Add", real, w.emit("Mul", parts[0], lines[0].float()))
        else:
            if bias is not None and (known := w.value_of(bias.name)) is not None:
                lines.append(known.double())
                shape = *x.shape[:-1], 1
                parts.append(w.constant(w.kept(("ones", shape), lambda: torch.ones(shape, device="cpu"))))
                added = None
            of_rows, rows = w.reshaped(w.joined(parts, -1), (-1, len(parts))), w.reshaped(real, (-1, weight.shape[0]))
            real = w.emit("Gemm", of_rows, torch.stack(lines).float(), rows)
            real = w.reshaped(real, (*x.shape[:-1], weight.shape[0]))
    return real if added is None else w.emit("Add", real, added)


@writes("matmul")
def matmul(w: Writer, x: Value, other: Value) -> str:
    """Product of activations, split along its depth where a runtime would overflow int32 computing it on integers."""
    depth, most = x.shape[-1], MAX_INT32 // MAX_8BIT_REACH**2
    if varies(depth) or depth <= most or not (is_of_integers(w, x) and is_of_integers(w, other)):
        return w.emit("MatMul", x, other)
    axis = max(other.rank - 2, 0)
    parts = [(i, min(i + most, depth)) for i in range(0, depth, most)]
    products = [w.emit("MatMul", w.cut(x, x.rank - 1, *part), w.cut(other, axis, *part)) for part in parts]
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
    """Rows of a table; of one of integers they are read as these, with their scales, and made floats behind."""
    x, found = w.index(x, weight.shape[0]), dequantized(w, weight)
    q = w.value_of(found.node.reads[0]) if found is not None and not w.floats else None
    if found is None or q is None or w.type_of(found.node.reads[0]) in (INT4, UINT4):
        return w.emit("Gather", weight, x, axis=0)
    block, grid = found.node.attributes.get("block_size") or q.shape[1], [found.scale, found.zero]
    if found.scale.dim() < 2:  # one for each row, or for all
        grid = [part.expand(len(q)).reshape(-1, 1).contiguous() for part in grid]
    ids = w.reshaped(x, (1,)) if x.rank == 0 else x  # one row has an axis less than there are blocks for
    read = [w.emit("Gather", part, ids, axis=0) for part in (q, *grid)]
    if w.portable and block == q.shape[1]:  # written out: OpenVINO has no blocks of integers whose shape varies
        integers, zero = (w.cast(part, torch.float32) for part in (read[0], read[2]))
        rows = w.emit("Mul", w.emit("Sub", integers, zero) if bool(grid[1].any()) else integers, read[1])
    else:
        rows = w.emit("DequantizeLinear", *read, axis=-1, block_size=block)
    return w.reshaped(rows, weight.shape[1:]) if x.rank == 0 else rows


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
    refuse(offsets is not None or x.rank != 2, "its bags are not of one size")
    refuse(padding_idx is not None, "it leaves out entries")
    rows: Operand = w.emit("Gather", weight, w.index(x, weight.shape[0]), axis=0)
    if per_sample_weights is not None:
        rows = w.emit("Mul", rows, w.reshaped(per_sample_weights, (*x.shape, 1)))
    kinds = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax"}
    return w.emit(kinds[mode], rows, w.ints([1]), keepdims=0)
