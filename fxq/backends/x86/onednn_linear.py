"""Linear layer of the x86 backend, on oneDNN's int8 kernels or PyTorch's integer matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import scale_and_zero_point
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn import OnednnLayer, PackedWeight, epilogue, output_grid
from fxq.errors import BackendError, InputError
from fxq.ops import OPS

_onednn = torch.ops.onednn
_CONV_POSTS = ("none", "relu", "hardtanh", "hardswish", "swish")
"""Post-ops that oneDNN's convolution has, by oneDNN's names."""
MIN_CONV_WEIGHT_ELEMENTS = 2**16
"""Elements of the weight from which a convolution is faster, on CPUs without an integer matrix product in oneDNN."""
MIN_PACKED_WEIGHT_ELEMENTS = 2**20
"""Elements of the weight from which a product of several rows is faster with a packed weight."""
_SINGLE_TAP: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups of a convolution that computes a linear layer."""


def pack_for_conv(weight: Tensor, scale: Tensor) -> Tensor:
    """Pack the weight of a linear layer for a 1 x 1 convolution of any number of pixels.

    Args:
        weight: int8, (O, I).
        scale: float32, (O,).
    """
    packed: Tensor = _onednn.qconv_prepack(weight.contiguous()[..., None, None], scale, 1.0, 0, *_SINGLE_TAP, None)
    return packed


def image_of(rows: Tensor) -> Tensor:
    """View of (..., C) as an image of one column, (1, C, rows, 1), channels-last."""
    return rows.reshape(1, -1, 1, rows.shape[-1]).permute(0, 3, 1, 2)


def rows_of(image: Tensor, shape: torch.Size) -> Tensor:
    """View of an image of `image_of` as rows, (*shape, C)."""
    return image.permute(0, 2, 3, 1).view(*shape, -1)


class OnednnLinear(OnednnLayer):
    """Linear layer over the last dimension: uint8 in, uint8 or float32 out, any leading dimensions.

    A single row with a float32 result, such as the classifier of one image, is computed by `torch._int_mm`, which costs
    less per call than oneDNN's layer. This needs a fast `_int_mm` (`cpu.has_int_mm`) and more than one input feature:
    for one feature, torch 2.13 confuses two equal strides.

    On CPUs where oneDNN has an integer convolution but no integer matrix product (`cpu.has_integer_matmul`), a large
    layer is computed as a 1 x 1 convolution, with its rows as an image of one column, if the convolution has the
    activation function.

    Args:
        spec: weight (out_features, in_features); post None or one of `posts`, after a residual a clamp.

    Raises:
        BackendError: `refuses` gives a reason.
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
        self._input, self._output, self._sum = (
            scale_and_zero_point(self.x),
            output_grid(self.out),
            scale_and_zero_point(self.residual),
        )

    def _pack(self) -> PackedWeight:
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        packed = _onednn.qlinear_prepack(self.weight, None)  # packing for an input shape is not faster
        return PackedWeight(packed, scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), self.bias)

    def is_integer_product(self, rows: int) -> bool:
        """Whether an integer matrix product of this many rows is faster than oneDNN's layer.

        `torch._int_mm` packs the weight in each call, which is too slow for large weights, and on CPUs with AMX.
        """
        is_fast = rows == 1 or (self.weight.numel() < MIN_PACKED_WEIGHT_ELEMENTS and not cpu.has_amx())
        return cpu.has_int_mm() and self._emits_sums and is_fast

    def bind(self, x: Tensor, residual: Tensor | None = None) -> Callable[..., Tensor]:
        """Return a function for inputs like `x`, with its kernel chosen and its weight packed."""
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
        except (RuntimeError, IndexError):  # oneDNN's message does not say what is wrong with the input
            self._check(x)
            raise

    def _check(self, x: Tensor) -> None:
        """Raise `InputError` if an input has another number of features than the weight."""
        wanted = self.weight.shape[1]
        if x.shape[-1:] != (wanted,):
            raise InputError(f"{self.name}: the input has shape {tuple(x.shape)}; the layer takes {wanted} features.")

    def _runner(self, x: Tensor) -> Callable[..., Tensor]:
        """Return the function to call with inputs like `x`, and with the residual if the kernel adds one."""
        if self._emits_sums and cpu.has_int_mm() and x.numel() == self.weight.shape[1] == x.shape[-1]:
            weight, scale, bias = self._cached("row", self._row)
            # `_int_mm` checks the strides, though one row is contiguous with any stride.
            is_row = x.stride() == (len(weight), 1)

            def multiply(x: Tensor) -> Tensor:
                sums = torch._int_mm(x if is_row else x.contiguous().view(1, -1), weight).to(torch.float32)
                y = torch.addcmul(bias, sums, scale)
                return y if is_row else y.view(*x.shape[:-1], -1)

            return multiply
        is_large = self.weight.numel() >= MIN_CONV_WEIGHT_ELEMENTS
        if not cpu.has_integer_matmul() and is_large and self._epilogue.name in _CONV_POSTS:
            self._check(x)
            return self._epilogue.appended_to(self._convolved())
        packed: PackedWeight = self._cached("", self._pack)
        if self.residual is not None:
            return self._epilogue.appended_to(lambda x, residual: self._add(x, residual, packed))
        op, rest = _onednn.qlinear_pointwise.default, (*self._input, *packed, *self._output, *self._epilogue[:3])
        return self._epilogue.appended_to(lambda x: op(x, *rest))

    def _convolved(self) -> Callable[..., Tensor]:
        """Return a call of the layer as a convolution; one packed weight serves any number of rows."""
        *packed, bias = self._cached("taps", self._pack_taps)
        after = (*_SINGLE_TAP, *self._output)
        if self.residual is None:
            rest = (self.x.s, 0, *packed, bias, *after, *self._epilogue[:3])
            return lambda x: rows_of(_onednn.qconv2d_pointwise.default(image_of(x), *rest), x.shape[:-1])

        def add(x: Tensor, residual: Tensor | None) -> Tensor:
            added = image_of(self._taken(residual, (*x.shape[:-1], self.weight.shape[0])))
            y = _onednn.qconv2d_pointwise.binary(
                image_of(x), self.x.s, 0, *packed, added, bias, *after, *self._sum, "sum", 1.0, *self._epilogue[:3]
            )
            return rows_of(y, x.shape[:-1])

        return add

    def _pack_taps(self) -> PackedWeight:
        """Pack the weight for a convolution, which takes the input's zero point as part of the bias (`OnednnConv`)."""
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        zeros = torch.zeros(len(scale), dtype=torch.int32, device="cpu")
        return PackedWeight(pack_for_conv(self.weight, scale), scale, zeros, self._row()[2])

    def _row(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weight (in_features, out_features), and scale and bias of its integer product.

        The bias includes the input's zero point.
        """
        scale = self.weight_scale.expand(self.weight.shape[0]).double() * self.x.s
        shift = self.weight.sum(1).double() * scale * self.x.z
        bias = -shift if self.bias is None else self.bias.double() - shift
        return self.weight.t(), scale.float(), bias.float()

    def _add(self, x: Tensor, residual: Tensor | None, packed: PackedWeight) -> Tensor:
        """Run the layer and add the residual, into whose memory the result is written."""
        *weight, bias = packed
        residual = self._taken(residual, (*x.shape[:-1], self.weight.shape[0]))
        _onednn.qlinear_pointwise.binary(
            x, *self._input, *weight, residual, bias, *self._output, *self._sum, "sum", 1.0, *self._epilogue[:3]
        )
        return residual

    def _taken(self, residual: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Contiguous residual that the kernel may overwrite.

        Raises:
            BackendError: the residual is missing, or has another shape than the result.
        """
        if residual is None or residual.shape != shape:
            residual_shape = None if residual is None else tuple(residual.shape)
            raise BackendError(f"{self.name}: the residual is {residual_shape}, the result {shape}.")
        return residual.contiguous() if self.inplace else residual.clone(memory_format=torch.contiguous_format)
