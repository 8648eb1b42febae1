"""Linear layer of the x86 backend: oneDNN's int8 kernel on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.kernel import (
    Post,
    WeightedKernel,
    activation_refused,
    first_reason,
    numbers,
    post_refused,
    refuse,
    weight_refused,
)
from fxq.backends.x86.onednn import PackedWeight, check_overflow, epilogue, target
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams

_onednn = torch.ops.onednn


class OnednnLinear(WeightedKernel):
    """Linear layer over the last dimension: uint8 in, uint8 or float32 out, any leading dimensions.

    One row that becomes floats, as behind a network that sees one picture, is an integer matrix product with the scales
    applied to it: that costs less to call than oneDNN's layer (AVX512-VNNI, one thread, us; in brackets with cold
    caches):

    ============  ============  ============
    features      layer         product
    ============  ============  ============
    64 -> 10      34 (65)       12 (23)
    512 -> 1000   46 (91)       23 (48)
    2048 -> 1000  69 (162)      45 (114)
    ============  ============  ============

    Not where PyTorch has no quick product (`cpu.has_int_mm`). And not of a single feature: there torch 2.13 takes the
    wrong one of two strides that are alike (of 12,000 other shapes none was wrong).

    Args:
        weight: int8, (out_features, in_features).
        weight_qparams: per tensor or per channel along axis 0, zero point 0.
        bias: float32, (out_features,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        post: None or one of `posts`; after a residual only clamps.
        residual: grid of a uint8 tensor of the output's shape that is added before `post`.
        inplace: the kernel may overwrite the residual.

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.linear"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "post", "residual", "inplace")
    posts: ClassVar[tuple[str, ...]] = ("relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu", "tanh")

    def __init__(
        self,
        weight: Tensor,
        weight_qparams: QParams,
        bias: Tensor | None,
        x: QParams,
        out: QParams | None,
        *,
        post: Post | None = None,
        residual: QParams | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        known: dict[str, Any] = {"weight": weight_qparams, "x": x, "out": out, "post": post}
        reason = self.refuses(**known, residual=residual is not None, to_float=out is None)
        refuse(self.name, reason or activation_refused("the residual", residual))
        check_overflow(self.name, x, weight)
        self.x, self.out, self.residual, self.post, self.inplace = x, out, residual, post, inplace
        self._epilogue = epilogue(post, out, fused=residual is None)
        self._emits_sums = out is None and post is None and weight.shape[1] > 1
        self._input, self._output, self._sum = numbers(x), target(out), numbers(residual)

    @classmethod
    def refuses(
        cls,
        *,
        weight: QParams | None = None,
        x: QParams | None = None,
        out: QParams | None = None,
        post: Post | None = None,
        residual: bool = False,
        to_float: bool = False,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        reasons = [
            post_refused(post, cls.posts, residual),
            "it adds a residual and emits float32; the sum is uint8" if residual and to_float else None,
        ]
        reasons += [
            weight_refused(weight, 0),
            activation_refused("the input", x),
            activation_refused("the output", out),
        ]
        return first_reason(reasons)

    def _pack(self) -> PackedWeight:
        scale = self.weight_scale.expand(self.weight.shape[0]).contiguous()
        packed = _onednn.qlinear_prepack(self.weight, None)  # a shape makes no difference in time
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
        packed: PackedWeight = self._kept("", self._pack)
        if self.residual is not None:
            return self._epilogue.behind(lambda x, residual: self._add(x, residual, packed))
        op, rest = _onednn.qlinear_pointwise.default, (*self._input, *packed, *self._output, *self._epilogue[:3])
        return self._epilogue.behind(lambda x: op(x, *rest))

    def _row(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weight (in_features, out_features); scale and bias of the sums, the input's zero point in the bias."""
        scale = self.weight_scale.expand(self.weight.shape[0]).double() * self.x.s
        shift = self.weight.sum(1).double() * scale * self.x.z
        bias = -shift if self.bias is None else self.bias.double() - shift
        return self.weight.t(), scale.float(), bias.float()

    def _add(self, x: Tensor, residual: Tensor | None, packed: PackedWeight) -> Tensor:
        """The layer with a residual."""
        *weight, bias = packed
        shape = (*x.shape[:-1], self.weight.shape[0])
        if residual is None or residual.shape != shape:
            given = None if residual is None else tuple(residual.shape)
            raise BackendError(f"{self.name}: the residual is {given}, the result {shape}.")
        residual = residual.contiguous() if self.inplace else residual.clone(memory_format=torch.contiguous_format)
        _onednn.qlinear_pointwise.binary(
            x, *self._input, *weight, residual, bias, *self._output, *self._sum, "sum", 1.0, *self._epilogue[:3]
        )
        return residual
