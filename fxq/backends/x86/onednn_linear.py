"""Linear layer of the x86 backend: oneDNN's int8 kernel on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import scale_and_zero_point
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn import OnednnLayer, PackedWeight, epilogue, target
from fxq.errors import BackendError, InputError
from fxq.ops import OPS

_onednn = torch.ops.onednn
_CONV_POSTS = ("none", "relu", "hardtanh", "hardswish", "swish")
"""Of oneDNN's names of activation functions, those that a convolution has."""
LARGE = 2**16
"""From how many integers of the weight on the convolution is the faster one, where that is asked."""
PACKED = 2**20
"""From how many integers of the weight on an integer matrix product with several rows wants it packed before."""
_SINGLE_TAP: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups of a convolution that is a linear layer."""


def packed_taps(weight: Tensor, scale: Tensor) -> Tensor:
    """A linear layer's weight, int8 (O, I), and its scale (O,) packed for a convolution of any number of pixels."""
    packed: Tensor = _onednn.qconv_prepack(weight.contiguous()[..., None, None], scale, 1.0, 0, *_SINGLE_TAP, None)
    return packed


def image_of(rows: Tensor) -> Tensor:
    """(..., C) as an image of one column, (1, C, rows, 1), channels-last."""
    return rows.reshape(1, -1, 1, rows.shape[-1]).permute(0, 3, 1, 2)


def rows_of(image: Tensor, shape: torch.Size) -> Tensor:
    """The inverse: (*shape, C)."""
    return image.permute(0, 2, 3, 1).view(*shape, -1)


class OnednnLinear(OnednnLayer):
    """Linear layer over the last dimension: uint8 in, uint8 or float32 out, any leading dimensions.

    One row that becomes floats, as behind a network that sees one picture, is an integer matrix product with the scales
    applied to it: that costs less to call than oneDNN's layer. Not where PyTorch has no quick product
    (`cpu.has_int_mm`). And not of a single feature: there torch 2.13 takes the wrong one of two strides that are alike.

    Where oneDNN has no kernel of its own for a product of integers (`cpu.has_integer_matmul`), it has one for a
    convolution: there rows are an image of one column, and a large layer is a convolution with one tap, unless that
    lacks the activation function.

    Args:
        spec: weight (out_features, in_features); post None or one of `posts`, after a residual a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.linear"
    layer: ClassVar[str] = "linear layer"
    dims: ClassVar[tuple[int, ...]] = (0,)
    options: ClassVar[tuple[str, ...]] = ("x", "out", "post", "residual", "inplace")
    posts: ClassVar[tuple[str, ...]] = OPS.fused_after("linear")

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._epilogue = epilogue(self.post, self.out, fused=self.residual is None)
        self._emits_sums = self.out is None and self.post is None and self.weight.shape[1] > 1
        self._input, self._sum = scale_and_zero_point(self.x), scale_and_zero_point(self.residual)
        self._output = target(self.out)

    def _pack(self) -> PackedWeight:
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        packed = _onednn.qlinear_prepack(self.weight, None)  # with a shape it is no faster, and for some slower
        return PackedWeight(packed, scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), self.bias)

    def is_integer_product(self, rows: int) -> bool:
        """As in `LayerKernel`. It packs the weight in each call: of a large one that takes longer than it gains.

        Nor where tiles are multiplied, which want a packed weight.
        """
        is_quick = rows == 1 or (self.weight.numel() < PACKED and not cpu.has_amx())
        return cpu.has_int_mm() and self._emits_sums and is_quick

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
            weight, scale, bias = self._cached("row", self._row)
            # One row is contiguous whatever its stride, and the product looks at that.
            is_row = x.stride() == (len(weight), 1)

            def multiply(x: Tensor) -> Tensor:
                sums = torch._int_mm(x if is_row else x.contiguous().view(1, -1), weight).to(torch.float32)
                y = torch.addcmul(bias, sums, scale)
                return y if is_row else y.view(*x.shape[:-1], -1)

            return multiply
        if not cpu.has_integer_matmul() and self.weight.numel() >= LARGE and self._epilogue.name in _CONV_POSTS:
            self._check(x)
            return self._epilogue.behind(self._convolved())
        packed: PackedWeight = self._cached("", self._pack)
        if self.residual is not None:
            return self._epilogue.behind(lambda x, residual: self._add(x, residual, packed))
        op, rest = _onednn.qlinear_pointwise.default, (*self._input, *packed, *self._output, *self._epilogue[:3])
        return self._epilogue.behind(lambda x: op(x, *rest))

    def _convolved(self) -> Callable[..., Tensor]:
        """The layer as a convolution; one packed weight does for any number of rows."""
        *packed, bias = self._cached("taps", self._pack_taps)
        behind = (*_SINGLE_TAP, *self._output)
        if self.residual is None:
            rest = (self.x.s, 0, *packed, bias, *behind, *self._epilogue[:3])
            return lambda x: rows_of(_onednn.qconv2d_pointwise.default(image_of(x), *rest), x.shape[:-1])

        def add(x: Tensor, residual: Tensor | None) -> Tensor:
            added = image_of(self._taken(residual, (*x.shape[:-1], self.weight.shape[0])))
            y = _onednn.qconv2d_pointwise.binary(
                image_of(x), self.x.s, 0, *packed, added, bias, *behind, *self._sum, "sum", 1.0, *self._epilogue[:3]
            )
            return rows_of(y, x.shape[:-1])

        return add

    def _pack_taps(self) -> PackedWeight:
        """For a convolution, which is told that the input's zero point is 0: see `OnednnConv`."""
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        zeros = torch.zeros(len(scale), dtype=torch.int32, device="cpu")
        return PackedWeight(packed_taps(self.weight, scale), scale, zeros, self._row()[2])

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
