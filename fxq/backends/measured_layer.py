"""Layers whose input has a scale that is measured at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.by_name import kernel_named
from fxq.backends.kernel import Kernel, Post, bounds, decode, refuse
from fxq.backends.layer_kernel import LayerKernel
from fxq.backends.layer_spec import LayerSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class MeasuredLayer(Kernel):
    """A layer on integers in steps of 1, as another kernel runs it; its result is scaled, biased and clamped behind.

    So the scale is an input: one number, or one for each row. Its zero point is known before.

    Args:
        kernel: the name of the kernel that runs the layer, without bias and activation function.
        settings: that kernel's `config()`.
        post: None or a clamp.
        weight, weight_scale: that kernel's.
        bias: float32, (C_out,), or None.
    """

    name: ClassVar[str] = "measured_layer"
    options: ClassVar[tuple[str, ...]] = ("kernel", "settings", "post")
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        kernel: str,
        settings: Mapping[str, Any],
        post: Post | None,
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

    def bind(self, x: Tensor, scale: Tensor) -> Callable[..., Tensor]:
        """As in `Bindable`: the layer's kernel is bound to its integers."""
        layer, bias, clamp = self._kept("", self._made)
        run = layer.bind(x)
        return lambda x, scale: _scaled(run(x), scale, bias, clamp)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """uint8 as the layer takes it, and its scale, float32, that broadcasts with the result -> float32."""
        layer, bias, clamp = self._kept("", self._made)
        return _scaled(layer(x), scale, bias, clamp)

    def _made(self) -> tuple[LayerKernel, Tensor | None, tuple[float, float] | None]:
        """The layer, the bias shaped as its result, and the clamp."""
        layer = self._layer()
        bias = self.bias if self.bias is None else self.bias.reshape(-1, *[1] * layer.axes)
        clamp = bounds(self.post) if self.post is not None else None
        refuse(self.name, f"{self.post} is no clamp" if self.post is not None and clamp is None else None)
        return layer, bias, clamp


def _scaled(y: Tensor, scale: Tensor, bias: Tensor | None, clamp: tuple[float, float] | None) -> Tensor:
    """clamp(y * scale + bias), in the memory of `y`."""
    y = y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)
    return y if clamp is None else y.clamp_(*clamp)


def _bare(spec: LayerSpec) -> LayerSpec:
    return replace(spec, bias=None, out=None, post=None, slope=None, residual=None)
