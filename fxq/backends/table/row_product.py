"""Linear layers with dynamic ranges: the product of the integers, then one compiled loop for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fxq.backends.kernel import PostOp, bounds
from fxq.backends.table.layer_kernel import LayerKernel


class RowProduct:
    """Product of a linear layer with dynamic activations, and the constants of the loop that scales it.

    Args:
        layer: static kernel of the layer with input scale 1, without bias and activation function.
        bias: float32 (C_out,), or None.
        post: None, a clamp or exact gelu.
        integers: whether the product is an int32 `torch._int_mm`; otherwise the float32 result of `layer`.
    """

    def __init__(self, layer: LayerKernel, bias: Tensor | None, post: PostOp | None, integers: bool) -> None:
        self._layer, self._weight = layer, layer.weight.t() if integers else None
        self._columns, self._depth = layer.weight.shape
        scale, bias = (
            None if t is None else t.to(torch.float32).resolve_neg().expand(self._columns).contiguous()
            for t in (layer.weight_scale, bias)
        )
        assert scale is not None  # every layer has one
        if self._weight is None:  # the result of the layer is scaled already
            ones = layer(torch.ones(1, self._depth, dtype=torch.uint8, device="cpu")).contiguous()
            scale = torch.ones_like(scale)
        else:
            ones = self._weight.sum(0, dtype=torch.int32)
        self._constants = ones, scale, torch.zeros_like(scale) if bias is None else bias
        self._zero = scale.new_tensor(float(layer.x.z)) if self._weight is not None else scale.new_zeros(())
        self._numbers = *(bounds(post) or (-math.inf, math.inf)), int(post is not None and post.name == "gelu")

    def bound(
        self, loops: ModuleType, x: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> Callable[..., Tensor] | None:
        """Return the function that runs the layer on inputs like these; None if the loop does not support them.

        Args:
            loops: the module `fxq.backends.loops.code.row_loops`.
            x: uint8 (..., C_in).
            scale: float32, one element or (..., 1).
            zero_point: float32, one element or (..., 1); None: that of the layer.
        """
        if x.shape[-1:] != (self._depth,):
            return None
        rows, columns, shape = x.numel() // self._depth, self._columns, (*x.shape[:-1], self._columns)
        grids = [scale] if zero_point is None else [scale, zero_point]
        if not all((g.numel() == 1 or g.shape == (*x.shape[:-1], 1)) and g.is_contiguous() for g in grids):
            return None
        scales, zeros = int(scale.numel() > 1), int(zero_point is not None and zero_point.numel() > 1)
        constants, weight, depth = self._constants, self._weight, self._depth
        addresses, numbers = tuple(tensor.data_ptr() for tensor in constants), (rows, columns, *self._numbers)
        scales_floats = weight is None
        scale_rows = loops.scale_products if scales_floats else loops.scale_sums
        multiply = self._layer.bind(x) if weight is None else lambda x: torch._int_mm(x.reshape(rows, depth), weight)

        def run(x: Tensor, scale: Tensor, zero_point: Tensor = self._zero) -> Tensor:
            product = multiply(x).contiguous()
            # in place where that is possible: a new tensor of this size, such as logits, costs more than the scaling
            y = product.view(shape) if scales_floats else torch.empty(shape, dtype=torch.float32, device="cpu")
            grid = scale.data_ptr(), scales, zero_point.data_ptr(), zeros
            scale_rows(product.data_ptr(), *grid, *addresses, 0, y.data_ptr(), *numbers)
            return y

        run.constants = constants  # type: ignore[attr-defined]  # keeps the memory at `addresses` alive
        return run
