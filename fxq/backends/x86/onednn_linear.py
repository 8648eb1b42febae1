"""Linear layer of the x86 backend: oneDNN's int8 kernel on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import numbers
from fxq.backends.layer_spec import LayerSpec
from fxq.backends.x86.onednn import OnednnLayer, PackedWeight, epilogue, target
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.errors import BackendError, InputError

_onednn = torch.ops.onednn


class OnednnLinear(OnednnLayer):
    """Linear layer over the last dimension: uint8 in, uint8 or float32 out, any leading dimensions.

    One row that becomes floats, as behind a network that sees one picture, is an integer matrix product with the scales
    applied to it: that costs less to call than oneDNN's layer. Not where PyTorch has no quick product
    (`cpu.has_int_mm`). And not of a single feature: there torch 2.13 takes the wrong one of two strides that are alike.

    With AVX2 alone oneDNN has no kernel of its own for a product of integers, but one for a convolution: there rows are
    an image of one column, and the layer is a convolution with one tap, as far as that has the activation function.

    Args:
        spec: weight (out_features, in_features); post None or one of `posts`, after a residual a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.linear"
    layer: ClassVar[str] = "linear layer"
    dims: ClassVar[tuple[int, ...]] = (0,)
    options: ClassVar[tuple[str, ...]] = ("x", "out", "post", "residual", "inplace")
    posts: ClassVar[tuple[str, ...]] = ("relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu", "tanh")

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._epilogue = epilogue(self.post, self.out, fused=self.residual is None)
        plain = self.post is None or (self.post.name in OnednnConv.posts and self.post.name not in OnednnConv.twice)
        self._is_conv = plain and not cpu.has_integer_matmul()
        self._emits_sums = self.out is None and self.post is None and self.weight.shape[1] > 1
        self._input, self._output, self._sum = numbers(self.x), target(self.out), numbers(self.residual)

    def _pack(self) -> PackedWeight:
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        packed = _onednn.qlinear_prepack(self.weight, None)  # with a shape it is no faster, and for some slower
        return PackedWeight(packed, scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), self.bias)

    def bind(self, x: Tensor, residual: Tensor | None = None) -> Callable[..., Tensor]:
        """As in `Bindable`: which of the two ways it goes is decided, and the weights are packed."""
        if x.numel() == 0 or x.shape[-1:] != self.weight.shape[1:]:
            return self.forward
        return self._runner(x)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """uint8 (..., in_features) -> (..., out_features), on `out`'s grid or float32."""
        if x.numel() == 0:  # oneDNN loses dimensions, or divides by zero
            self._check(x)
            return x.new_empty((*x.shape[:-1], self.weight.shape[0]), dtype=self._output[2])
        try:
            run = self._runner(x)
            return run(x) if self.residual is None else run(x, residual)
        except (RuntimeError, IndexError):  # oneDNN has refused it, and says nothing of use
            self._check(x)
            raise

    def _check(self, x: Tensor) -> None:
        """Refuse an input with other features than the weight has."""
        wanted = self.weight.shape[1]
        if x.shape[-1:] != (wanted,):
            raise InputError(f"{self.name}: an input of shape {tuple(x.shape)}; the layer takes {wanted} features.")

    def _runner(self, x: Tensor) -> Callable[..., Tensor]:
        """What to call for inputs like `x`, behind it with a residual where there is one."""
        if self._emits_sums and cpu.has_int_mm() and x.numel() == self.weight.shape[1] == x.shape[-1]:
            weight, scale, bias = self._kept("row", self._row)
            # One row is contiguous whatever its stride, and the product looks at that.
            is_row = x.stride() == (len(weight), 1)

            def multiply(x: Tensor) -> Tensor:
                sums = torch._int_mm(x if is_row else x.contiguous().view(1, -1), weight).to(torch.float32)
                y = torch.addcmul(bias, sums, scale)
                return y if is_row else y.view(*x.shape[:-1], -1)

            return multiply
        if self._is_conv:
            self._check(x)
            return self._convolved(x.shape)
        packed: PackedWeight = self._kept("", self._pack)
        if self.residual is not None:
            return self._epilogue.behind(lambda x, residual: self._add(x, residual, packed))
        op, rest = _onednn.qlinear_pointwise.default, (*self._input, *packed, *self._output, *self._epilogue[:3])
        return self._epilogue.behind(lambda x: op(x, *rest))

    def _convolved(self, shape: torch.Size) -> Callable[..., Tensor]:
        """The layer as a convolution, for inputs of this shape."""
        rows, (outputs, inputs) = shape[:-1].numel(), self.weight.shape
        plan = self._kept("conv", self._conv).planned(torch.Size((1, inputs, rows, 1)))
        run, read, added = plan.run, *(((1, n, rows, 1), (rows * n, 1, n, n)) for n in (inputs, outputs))
        result = (*shape[:-1], outputs)
        strides = torch.empty(result, device="meta").stride()
        if self.residual is None:
            return lambda x: run(x.contiguous().as_strided(*read)).as_strided(result, strides)

        def add(x: Tensor, residual: Tensor | None) -> Tensor:
            given = self._taken(residual, result).as_strided(*added)
            return run(x.contiguous().as_strided(*read), given).as_strided(result, strides)

        return add

    def _conv(self) -> OnednnConv:
        spec = self.spec()
        weight, options = spec.weight[..., None, None], {name: getattr(spec, name) for name in self.options}
        return OnednnConv(LayerSpec(weight, spec.weight_qparams, spec.bias, **options))

    def _row(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weight (in_features, out_features); scale and bias of the sums, the input's zero point in the bias."""
        scale = self.weight_scale.expand(self.weight.shape[0]).double() * self.x.s
        shift = self.weight.sum(1).double() * scale * self.x.z
        bias = -shift if self.bias is None else self.bias.double() - shift
        return self.weight.t(), scale.float(), bias.float()

    def _add(self, x: Tensor, residual: Tensor | None, packed: PackedWeight) -> Tensor:
        """The layer with a residual."""
        *weight, bias = packed
        residual = self._taken(residual, (*x.shape[:-1], self.weight.shape[0]))
        _onednn.qlinear_pointwise.binary(
            x, *self._input, *weight, residual, bias, *self._output, *self._sum, "sum", 1.0, *self._epilogue[:3]
        )
        return residual

    def _taken(self, residual: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """The residual, contiguous, which the kernel may overwrite."""
        if residual is None or residual.shape != shape:
            given = None if residual is None else tuple(residual.shape)
            raise BackendError(f"{self.name}: the residual is {given}, the result {shape}.")
        return residual.contiguous() if self.inplace else residual.clone(memory_format=torch.contiguous_format)
