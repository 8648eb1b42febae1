"""`DynamicLinear`: linear layer with dynamic activations and a weight of few bits, or with scales per block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import PostOp
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.many_rows import ManyRowsProduct, many_rows_refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.plain.weight_only import WeightOnlyLinear
from fxq.backends.table.dynamic_layer import after_sum, at_other_rows, integer_product
from fxq.backends.table.kernel_table import KernelRequest
from fxq.graph.region import Weight
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.packing import Packing
from fxq.quant.spec import LOW_BITS


class DynamicLinear(WeightOnlyLinear):
    """Linear layer on integers with dynamic scales, for weights that `suits` selects. Those of 2 to 6 bits are packed.

    Rows are multiplied as integers in compiled loops, see `FewRowsProduct.of_integers` and `ManyRowsProduct`. Without
    these, the real values of input and weight are multiplied.

    Args:
        post: None, a clamp or gelu.
        zero: zero point of the input where the call has none.
        options: as of `WeightOnlyKernel`.

    Attributes:
        arranges: whether a weight of 8 bits is also kept in the order of the loop for many rows.
    """

    name: ClassVar[str] = "dynamic.linear"
    options: ClassVar[tuple[str, ...]] = (*WeightOnlyLinear.options, "post", "zero")
    arranges: ClassVar[bool] = False

    def __init__(self, *, post: PostOp | None = None, zero: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.post, self.zero = post, zero
        self._after = after_sum(self.name, post)
        self._zero = torch.tensor(float(zero), device="cpu")

    @staticmethod
    def suits(weight: Weight) -> bool:
        """Whether this kernel is for a weight: of few bits, with scales per block, or with zero points."""
        qp = weight.qparams
        return qp.block is not None or qp.bits <= LOW_BITS or bool(qp.zero_point.any())

    @classmethod
    def of_request(cls, request: KernelRequest) -> DynamicLinear:
        """Return the kernel of a layer whose input has a dynamic grid."""
        weight, bias, x = map(request.captures.get, ("weight", "bias", "x"))
        assert isinstance(weight, Weight) and isinstance(x, DynamicGrid)
        qp = weight.qparams
        packing = Packing.of_grid(qp.qmin, qp.qmax, tuple(weight.values.shape[1:]))
        if weight.packing is None and packing is not None:
            weight = Weight(packing.pack(weight.values), qp, packing)
        stored = {"weight": StoredWeight.of(weight, None)}
        kernel = cls.of(request.calls[0], ("x",), stored, {} if bias is None else {"bias": bias})
        return cls.from_config(
            {**kernel.config(), "post": request.post, "zero": x.unit_grid.z}, dict(kernel.named_buffers())
        )

    def bind(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Callable[..., Tensor]:  # type: ignore[override]
        """Return the function for inputs like these. See `Bindable.bind`."""
        few, columns = self.few_rows(x), math.prod(self.stored_weight().row)
        is_fastest = few is not None and x.numel() <= few.max_integer_rows * columns and not self.arranges
        product = few if is_fastest else self._of_many_rows(x) or few
        zero = self._zero if zero_point is None else zero_point
        run = None if product is None else integer_product(product, x, scale, zero, self._after)
        return self._in_floats if run is None else run

    def _of_many_rows(self, x: Tensor) -> ManyRowsProduct | None:
        """Compiled product for many rows of integers; None if there is none, or it is not faster than one of floats."""
        columns = math.prod(self.stored_weight().row)
        fits = x.shape[-1:] == (columns,) and x.numel() > 0
        few = self._product(x, 0) if fits else None
        loops = None if few is None else loops_for("many_rows_loops", 0, x, *self._buffers.values())
        if loops is None or few is None or not loops.IS_FASTER or x.numel() < loops.ROWS * columns:
            return None

        def make() -> ManyRowsProduct | None:
            stored = self.stored_weight()
            return None if many_rows_refused(stored) else ManyRowsProduct(loops, stored, few, self.arranges)

        product: ManyRowsProduct | None = self._cached("many_rows", make)
        return product

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute the layer.

        Args:
            x: uint8 (..., K).
            scale: float32, one number or (..., 1).
            zero_point: float32 with whole numbers, likewise; None: `zero`.

        Returns:
            float32 (..., O).
        """
        inputs = (x, scale) if zero_point is None else (x, scale, zero_point)
        return self.bind(*inputs)(*inputs)

    def _in_floats(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        """Compute `forward` with the real values of input and weight."""
        zero = self._zero if zero_point is None else zero_point
        y = self.of_many_rows((x.to(torch.float32) - zero).mul_(scale))
        return y if self._after is None else self._after(y)

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs with few rows if there are many, and the reverse, since another kernel runs then."""
        return at_other_rows(*inputs)
