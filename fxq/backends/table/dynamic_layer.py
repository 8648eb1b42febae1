"""Layers whose input has a grid that is measured at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.by_name import kernel_named
from fxq.backends.kernel import Kernel, PostOp, bounds, decode, refuse
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.table.row_product import RowProduct

if TYPE_CHECKING:
    from typing_extensions import Self


class DynamicLayer(Kernel):
    """A layer on integers in steps of 1, as another kernel runs it; its result is scaled, biased and activated behind.

    So the scale is an input: one number, or one for each row. The zero point is known before; or it is an input, too:
    then the other kernel takes it for 0, and what that adds to the result is the zero point times the layer of ones.

    Args:
        kernel: the name of the kernel that runs the layer, without bias and activation function.
        settings: that kernel's `config()`.
        post: None, a clamp or gelu.
        weight, weight_scale: that kernel's.
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
        self._layer()  # refuses what it cannot run

    @classmethod
    def of(cls, kernel: type[LayerKernel], spec: LayerSpec) -> Self:
        """The kernel of a layer, run by another kernel.

        Raises:
            BackendError: that one refuses the layer.
        """
        layer = kernel(_bare(spec))
        bias = None if spec.bias is None else spec.bias.detach().to(torch.float32, copy=True)
        return cls(kernel.name, layer.config(), spec.post, layer.weight, layer.weight_scale, bias)

    @staticmethod
    def refuses(kernel: type[LayerKernel], spec: LayerSpec) -> str | None:
        """Why it cannot run a layer by that kernel, or None."""
        if spec.residual is not None:
            return "it adds a residual to a result whose scale is measured"
        return kernel.refuses(_bare(spec))

    def _layer(self) -> LayerKernel:
        """The layer on steps of 1, with the tensors as they are now."""
        made = kernel_named(self.kernel).from_config(
            {name: decode(value) for name, value in self.settings.items()},
            {"weight": self.weight, "weight_scale": self.weight_scale},
        )
        assert isinstance(made, LayerKernel)  # `of` has made it
        return made

    def bind(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Callable[..., Tensor]:
        """As in `Bindable`: the layer's kernel is bound to its integers."""
        layer, bias, post = self._cached("", self._made)
        in_one_loop = self._in_one_loop(x, scale, zero_point)
        if in_one_loop is not None:
            return in_one_loop
        run = layer.bind(x)
        if zero_point is None:
            return lambda x, scale: _scaled(run(x), scale, bias, post)
        ones = self._ones(layer, x)
        return lambda x, scale, zero_point: _scaled(_shifted(run(x), zero_point, ones), scale, bias, post)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        """uint8 as the layer takes it, its scale (float32) and zero point (float32, whole) -> float32.

        Scale and zero point broadcast with the result.
        """
        given = (x, scale) if zero_point is None else (x, scale, zero_point)
        return self.bind(*given)(*given)

    def _in_one_loop(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Callable[..., Tensor] | None:
        """As `forward`, of rows, with one loop over what the layer gives; None where there is none."""
        layer, _, _ = self._cached("", self._made)
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
        """What the layer makes of one sample of ones; where every pixel has the same of a channel, (C, 1, ...)."""
        shape = x.shape[-1 - layer.axes :]

        def make() -> Tensor:
            y = layer(torch.ones(shape, dtype=torch.uint8, device=x.device))
            first = y[(slice(None), *[slice(1)] * layer.axes)]
            return first.clone() if torch.equal(first.expand_as(y), y) else y

        ones: Tensor = self._cached_for_size(("ones", shape), make)
        return ones

    def _made(self) -> tuple[LayerKernel, Tensor | None, Callable[[Tensor], Tensor] | None]:
        """The layer, the bias shaped as its result, and the activation function, which may write to its argument."""
        layer = self._layer()
        bias = self.bias if self.bias is None else self.bias.reshape(-1, *[1] * layer.axes)
        if self.post is None:
            return layer, bias, None
        clamp = bounds(self.post)
        if clamp is not None:
            return layer, bias, lambda y: y.clamp_(*clamp)
        refuse(self.name, None if self.post.name == "gelu" else f"{self.post} is no clamp and no gelu")
        return layer, bias, partial(F.gelu, approximate=self.post.algorithm)


def _shifted(y: Tensor, zero_point: Tensor, ones: Tensor) -> Tensor:
    """y - zero_point * ones, in the memory of `y`."""
    return y.addcmul_(zero_point, ones, value=-1)


def _scaled(y: Tensor, scale: Tensor, bias: Tensor | None, post: Callable[[Tensor], Tensor] | None) -> Tensor:
    """post(y * scale + bias), where it can in the memory of `y`."""
    y = y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)
    return y if post is None else post(y)


def _bare(spec: LayerSpec) -> LayerSpec:
    return replace(spec, bias=None, out=None, post=None, slope=None, residual=None)
