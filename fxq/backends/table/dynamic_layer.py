"""`DynamicLayer`: kernel of a layer whose input has a dynamic range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.by_name import kernel_named
from fxq.backends.kernel import Kernel, PostOp, bounds, decode, refuse
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct, refused
from fxq.backends.plain.many_rows import ManyRowsProduct
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.plain.weight_only import VERIFIED_ROWS
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.table.row_product import RowProduct

if TYPE_CHECKING:
    from typing_extensions import Self


class DynamicLayer(Kernel):
    """Layer with dynamic activations. A static kernel runs it with input scale 1; then its result is scaled.

    The static kernel has neither bias nor activation function. They are applied to the scaled result.

    The scale is an input of the call: one number, or one per row. If the zero point is an input, too, the static kernel
    uses 0, and the zero point times the layer's result for ones is subtracted.

    Args:
        kernel: name of the static kernel.
        settings: `config()` of the static kernel.
        post: None, a clamp or gelu.
        weight, weight_scale: tensors of the static kernel.
        bias: float32, (C_out,), or None.
    """

    name: ClassVar[str] = "dynamic_layer"
    options: ClassVar[tuple[str, ...]] = ("kernel", "settings", "post")
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        kernel: str,
        settings: Mapping[str, Any],
        post: PostOp | None,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.kernel, self.settings, self.post = kernel, dict(settings), post
        for name, tensor in (("weight", weight), ("weight_scale", weight_scale), ("bias", bias)):
            self.register_buffer(name, tensor)
        self._layer()  # raises if the static kernel cannot be made

    @classmethod
    def of(cls, kernel: type[LayerKernel], spec: LayerSpec) -> Self:
        """Return the dynamic kernel of a layer that uses the static kernel `kernel`.

        Raises:
            BackendError: the static kernel refuses the layer.
        """
        layer = kernel(_bare(spec))
        bias = None if spec.bias is None else spec.bias.detach().to(torch.float32, copy=True)
        return cls(kernel.name, layer.config(), spec.post, layer.weight, layer.weight_scale, bias)

    @staticmethod
    def refuses(kernel: type[LayerKernel], spec: LayerSpec) -> str | None:
        """Why it cannot run a layer with that static kernel; None if it can."""
        if spec.residual is not None:
            return "it adds a residual to a result with a dynamic scale"
        return kernel.refuses(_bare(spec))

    def _layer(self) -> LayerKernel:
        """Return the static kernel with input scale 1, with the current tensors."""
        layer = kernel_named(self.kernel).from_config(
            {name: decode(value) for name, value in self.settings.items()},
            {"weight": self.weight, "weight_scale": self.weight_scale},
        )
        assert isinstance(layer, LayerKernel)  # `of` has made it
        return layer

    def bind(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Callable[..., Tensor]:
        """Return the function for inputs like these, in which the static kernel is bound, too. See `Bindable.bind`."""
        layer, bias, post = self._cached("", self._prepared)
        in_one_loop = self._of_few_rows(x, scale, zero_point, post) or self._in_one_loop(x, scale, zero_point)
        if in_one_loop is not None:
            return in_one_loop
        run = layer.bind(x)
        if zero_point is None:
            return lambda x, scale: _scaled(run(x), scale, bias, post)
        ones = self._ones(layer, x)
        return lambda x, scale, zero_point: _scaled(_shifted(run(x), zero_point, ones), scale, bias, post)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Args:
            x: uint8, of the shape that the static kernel takes.
            scale: float32; broadcasts with the result.
            zero_point: float32 with whole numbers; broadcasts with the result. None: that of the static kernel.

        Returns:
            float32.
        """
        inputs = (x, scale) if zero_point is None else (x, scale, zero_point)
        return self.bind(*inputs)(*inputs)

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs of a linear layer with few rows if there are many, and the reverse, since another kernel runs then."""
        return () if self.weight.dim() > 2 else at_other_rows(*inputs)

    def few_rows(self, x: Tensor) -> FewRowsProduct | None:
        """Compiled product of a linear layer for integers like these; None if it is not faster, or there is none."""
        outputs, columns = self.weight.shape[0], self.weight.shape[-1]
        is_small = x.shape[-1:] == (columns,) and 0 < x.numel() <= MAX_ROWS * columns
        loops = loops_for("few_rows_loops", 0, x, *self._buffers.values()) if is_small else None
        if loops is None or x.numel() > loops.MAX_INTEGER_ROWS * columns or self.weight.dim() > 2:
            return None

        def make() -> FewRowsProduct | None:
            scale = self.weight_scale.expand(outputs)
            stored = StoredWeight(self.weight, scale, axis=0)
            return None if refused(stored) else FewRowsProduct(loops, stored, self.bias)

        product: FewRowsProduct | None = self._cached("few_rows", make)
        return product

    def _of_few_rows(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, post: Callable[[Tensor], Tensor] | None
    ) -> Callable[..., Tensor] | None:
        """Return a function for few rows, whose products a compiled loop adds as it reads the weight; None if none."""
        product, (layer, *_) = self.few_rows(x), self._cached("", self._prepared)
        zero = torch.tensor(float(layer.x.z), device="cpu") if zero_point is None else zero_point
        return None if product is None else integer_product(product, x, scale, zero, post)

    def _in_one_loop(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Callable[..., Tensor] | None:
        """Return a function that follows the product of a linear layer by one compiled loop; None if it cannot."""
        layer, _, _ = self._cached("", self._prepared)
        rows, columns = x.numel() // self.weight.shape[-1], len(self.weight)
        loops = loops_for("row_loops", rows * columns, x, scale, zero_point) if rows and not layer.axes else None
        if loops is None or (self.post is not None and self.post.algorithm == "tanh"):
            return None
        integers = layer.is_integer_product(rows)
        product: RowProduct = self._cached(
            ("rows", integers), lambda: RowProduct(layer, self.bias, self.post, integers)
        )
        return product.bound(loops, x, scale, zero_point)

    def _ones(self, layer: LayerKernel, x: Tensor) -> Tensor:
        """Result of the static kernel for one sample of ones; (C, 1, ...) if all positions of a channel are equal."""
        shape = x.shape[-1 - layer.axes :]

        def make() -> Tensor:
            y = layer(torch.ones(shape, dtype=torch.uint8, device=x.device))
            first = y[(slice(None), *[slice(1)] * layer.axes)]
            return first.clone() if torch.equal(first.expand_as(y), y) else y

        ones: Tensor = self._cached_for_size(("ones", shape), make)
        return ones

    def _prepared(self) -> tuple[LayerKernel, Tensor | None, Callable[[Tensor], Tensor] | None]:
        """Static kernel, bias that broadcasts with its result, and activation function, which may be in place."""
        layer = self._layer()
        bias = self.bias if self.bias is None else self.bias.reshape(-1, *[1] * layer.axes)
        return layer, bias, after_sum(self.name, self.post)


def after_sum(name: str, post: PostOp | None) -> Callable[[Tensor], Tensor] | None:
    """Activation function after the sum of a layer, which may be in place; None without one.

    Raises:
        BackendError: kernels do not apply the function. `name` is that of the kernel.
    """
    clamp = None if post is None else bounds(post)
    if post is None:
        return None
    if clamp is not None:
        return partial(_clamped, bounds=clamp)
    refuse(name, None if post.name == "gelu" else f"{post.name} is neither a clamp nor gelu")
    return partial(F.gelu, approximate=post.algorithm)


def _clamped(y: Tensor, bounds: tuple[Any, Any]) -> Tensor:
    return y.clamp_(*bounds)


def integer_product(
    product: FewRowsProduct | ManyRowsProduct,
    x: Tensor,
    scale: Tensor,
    zero: Tensor,
    after: Callable[[Tensor], Tensor] | None,
) -> Callable[..., Tensor] | None:
    """Return the function that computes a layer for rows of integers; None if the loop does not support the grid.

    Args:
        product: product with the weight.
        x: integers like those of the calls.
        scale: their scale.
        zero: their zero point, which calls of a symmetric grid leave out.
        after: activation function, see `after_sum`.
    """
    if not all((t.numel() == 1 or t.shape == (*x.shape[:-1], 1)) and t.is_contiguous() for t in (scale, zero)):
        return None

    def run(x: Tensor, scale: Tensor, zero: Tensor = zero) -> Tensor:
        y = product.of_integers(x, scale, zero)
        return y if after is None else after(y)

    return run


def at_other_rows(*inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Integers of other numbers of rows with their grids, for which other code runs: fewer, and many."""
    first = inputs[0]
    count = first.numel() // max(first.shape[-1], 1)
    rows = [x.reshape(-1, x.shape[-1]) if x.dim() else x for x in inputs]
    if not count or any(x.dim() and len(x) not in (1, count) for x in rows):
        return ()

    def with_rows(x: Tensor, wanted: int) -> Tensor:
        if not x.dim() or len(x) != count:
            return x
        return x[:wanted] if wanted < count else x[:1].repeat(wanted, 1)

    loops = loops_for("few_rows_loops", 0, *inputs)
    most = MAX_ROWS if loops is None else loops.MAX_INTEGER_ROWS
    others = [min(VERIFIED_ROWS, most)] if count > most else []
    others += [MAX_ROWS + 1] if count <= MAX_ROWS else []
    return [tuple(with_rows(x, wanted) for x in rows) for wanted in others]


def _shifted(y: Tensor, zero_point: Tensor, ones: Tensor) -> Tensor:
    """Return y - zero_point * ones, computed in place."""
    return y.addcmul_(zero_point, ones, value=-1)


def _scaled(y: Tensor, scale: Tensor, bias: Tensor | None, post: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return post(y * scale + bias), computed in place where possible."""
    y = y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)
    return y if post is None else post(y)


def _bare(spec: LayerSpec) -> LayerSpec:
    return replace(spec, bias=None, out=None, post=None, slope=None, residual=None)
