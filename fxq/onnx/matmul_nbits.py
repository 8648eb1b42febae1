"""ONNX Runtime's op type MatMulNBits: linear layers with float inputs and weights of 4 or 8 bits in blocks.

For float32 sums, ONNX Runtime has fast kernels of 4 bits alone. Weights of 8 bits are split into their high and low
halves: 16 * (high - z_high) + (low - z_low) = q - z, so the sum of two products with 4 bits is the layer's product.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.onnx.dequantized import dequantize_node, is_dequantized
from fxq.onnx.onnx_objects import INT4, UINT4
from fxq.onnx.writer import Value, Writer, refuse
from fxq.quant.packing import pack_adjacent

_MIN_BLOCK, _MAX_BLOCK = 16, 256
"""Sizes of blocks that ONNX Runtime has kernels for: the powers of two between these."""
_FLOAT32_SUMS = 1
"""`accuracy_level` with which the inputs are not rounded to integers."""
_DEFAULT_ZERO = 8
"""Zero point of unsigned 4-bit integers for which none is written."""


def matmul_nbits(w: Writer, x: Value, weight: Value) -> str | None:
    """Write the product of a linear layer as MatMulNBits; None if its input is quantized, or its weight is float.

    Args:
        w: writer of the model.
        x: input of the layer, (..., I).
        weight: weight of the layer, (O, I).

    Raises:
        NotInOnnx: the op type has no such blocks.

    Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.MatMulNBits.
    """
    source = dequantize_node(w, weight)
    q = w.constant_of(source.node.inputs[0]) if source is not None else None
    if source is None or q is None or is_dequantized(w, x):
        return None
    bits = 4 if w.type_number_of(source.node.inputs[0]) in (INT4, UINT4) else 8
    rows, depth = q.shape
    block = source.node.attributes.get("block_size") or depth
    size = _block_size(block, depth)
    refuse(
        size < _MIN_BLOCK,
        f"its weight has a scale per {block} values, and MatMulNBits takes blocks of multiples of {_MIN_BLOCK}; "
        f"quantize the layer with per=32, or leave out format",
    )
    count = math.ceil(depth / size)

    def per_block(values: Tensor) -> Tensor:
        values = values.reshape(rows, -1) if values.dim() else values.expand(rows, 1)
        return values.repeat_interleave(math.ceil(block / size), 1)[:, :count].contiguous()

    def unsigned(values: Tensor) -> Tensor:
        shift = 0 if source.zero.dtype is torch.uint8 else 2 ** (bits - 1)
        return (values.to(torch.int16) + shift).to(torch.uint8)

    def product(part: str, position: int) -> str:
        """Write the product with the four bits of the integers that start at a position."""

        def part_of(values: Tensor) -> Tensor:
            return (unsigned(values) >> position) & 15

        def integers() -> Tensor:
            return pack_adjacent(F.pad(part_of(q), (0, count * size - depth)), 4).reshape(rows, count, -1)

        key = "nbits", part, source.node.inputs[0]
        zero = part_of(per_block(source.zero))
        grid = [w.cached_constant((*key, "scale"), lambda: per_block(source.scale) * 2**position)]
        if bool((zero != _DEFAULT_ZERO).any()):
            grid.append(w.cached_constant((*key, "zero"), lambda: pack_adjacent(zero, 4)))
        q_packed = w.cached_constant((*key, "integers"), integers)
        sizes = {"K": depth, "N": rows, "bits": 4, "block_size": size}
        return w.emit("MatMulNBits", x, q_packed, *grid, accuracy_level=_FLOAT32_SUMS, **sizes)

    low = product("low", 0)
    return low if bits == 4 else w.emit("Add", product("high", 4), low)


def _block_size(block: int, depth: int) -> int:
    """Largest size that the op type takes whose blocks lie in blocks of `block`; less than `_MIN_BLOCK` if none does.

    A single block for all of a row may be cut anywhere.
    """
    if block >= depth:
        return min(max(_MIN_BLOCK, 1 << (depth - 1).bit_length()), _MAX_BLOCK)
    return min(math.gcd(block, _MAX_BLOCK), _MAX_BLOCK)
