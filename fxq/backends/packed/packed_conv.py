"""Convolutions and transposed convolutions of PyTorch's packed quantized kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from fxq.backends.kernel import Post, first_reason, is_depthwise, padding_refused, pair, refuse
from fxq.backends.packed.packed_kernel import EMITS, PackedKernel
from fxq.backends.packed.quantized_tensors import as_qint8, as_quint8, quantized
from fxq.backends.plain.converters import dense
from fxq.quant.qparams import QParams


class PackedConv(PackedKernel):
    """conv1d, conv2d and conv3d: uint8 in, uint8 out.

    Args:
        weight: int8, (C_out, C_in / groups, *kernel), kernel of 1 to 3 dimensions.
        weight_qparams: per tensor or per channel along axis 0, zero point 0.
        bias: float32, (C_out,), or None.
        x: grid of the input.
        out: grid of the output; None, which means float32, is refused.
        stride, padding, dilation: int or one per spatial dimension; padding also "valid" or "same".
        groups: as in `torch.nn.Conv2d`.
        post: None or a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    options: ClassVar[tuple[str, ...]] = ("x", "out", "stride", "padding", "dilation", "groups", "post")

    def __init__(
        self,
        weight: Tensor,
        weight_qparams: QParams,
        bias: Tensor | None,
        x: QParams,
        out: QParams | None,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        post: Post | None = None,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        known: dict[str, Any] = {"weight": weight_qparams, "x": x, "out": out, "post": post}
        reason = self.refuses(kernel_size=weight.shape[2:], padding=padding, dilation=dilation, **known)
        refuse(self.name, reason or (EMITS if out is None else None))
        self._set(x, out, post, is_depthwise(weight.shape, groups))
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    @classmethod
    def refuses(
        cls,
        *,
        kernel_size: Sequence[int] | None = None,
        weight: QParams | None = None,
        x: QParams | None = None,
        out: QParams | None = None,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        padded = padding_refused(padding, padding_mode, kernel_size, dilation)
        return first_reason([padded, *cls._reasons(weight, x, out, post)])

    def _pack(self) -> Any:
        options = _geometry(self.padding, self.weight, stride=self.stride, dilation=self.dilation)
        prepack = getattr(quantized, f"conv{self.weight.dim() - 2}d_prepack")
        order = (options[name] for name in ("stride", "padding", "dilation"))
        return prepack(as_qint8(self.weight.contiguous(), self.weight_scale, 0), self.bias, *order, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, *size) or (C, *size), any strides -> uint8; a picture comes out channels-last."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self._check(x.shape[1], self.weight.shape[1] * self.groups)
        op = getattr(quantized, f"conv{dims}d{'_relu' if self._finish.relu else ''}")
        weight = self._weight()  # first: it refuses tensors that are no plain ones
        return self._finish(op(as_quint8(x, *self._input), weight, *self._output))


class PackedConvTranspose(PackedKernel):
    """Transposed convolution of 1 to 3 dimensions: uint8 in, uint8 out.

    Args:
        weight: int8, (C_in, C_out / groups, *kernel).
        weight_qparams: per tensor, or where `scales_refused` lets it, per channel along axis 1.
        bias: float32, (C_out,), or None.
        x: grid of the input.
        out: grid of the output; None, which means float32, is refused.
        stride, padding, output_padding, dilation: int or one per spatial dimension.
        groups: as in `torch.nn.ConvTranspose2d`.
        post: None or a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    options: ClassVar[tuple[str, ...]] = (
        "x", "out", "stride", "padding", "output_padding", "dilation", "groups", "post",
    )  # fmt: skip
    channel_axis: ClassVar[int] = 1
    has_relu: ClassVar[bool] = False
    deepens: ClassVar[bool] = False
    """Whether two dimensions run as three, the first of them of size 1."""

    def __init__(
        self,
        weight: Tensor,
        weight_qparams: QParams,
        bias: Tensor | None,
        x: QParams,
        out: QParams | None,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        post: Post | None = None,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        known: dict[str, Any] = {"weight": weight_qparams, "x": x, "out": out, "post": post}
        reason = self.refuses(kernel_size=weight.shape[2:], groups=groups, **known)
        refuse(self.name, reason or (EMITS if out is None else None))
        self._set(x, out, post)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    @classmethod
    def refuses(
        cls,
        *,
        kernel_size: Sequence[int] | None = None,
        groups: int = 1,
        weight: QParams | None = None,
        x: QParams | None = None,
        out: QParams | None = None,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        per_channel = weight is not None and weight.axis is not None
        reasons = [cls.wrong(len(kernel_size or ())), cls.scales_refused(groups) if per_channel else None]
        return first_reason([*reasons, *cls._reasons(weight, x, out, post)])

    @classmethod
    def wrong(cls, dims: int) -> str | None:
        """Why the engine's kernel of so many dimensions cannot be trusted, or None."""
        return None

    @classmethod
    def scales_refused(cls, groups: int) -> str | None:
        """Why the engine takes one scale for the whole weight only, or None where it takes one per channel."""
        raise NotImplementedError

    def _pack(self) -> Any:
        options = _geometry(
            self.padding, self.weight, stride=self.stride, output_padding=self.output_padding, dilation=self.dilation
        )
        weight = self.weight.unsqueeze(2) if self._deep else self.weight
        plain = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
        order = [[plain[name]] * self._deep + options[name] for name in plain]
        prepack = getattr(quantized, f"conv_transpose{weight.dim() - 2}d_prepack")
        return prepack(as_qint8(weight.contiguous(), self.weight_scale, 1), self.bias, *order, self.groups)

    @property
    def _deep(self) -> bool:
        return self.deepens and self.weight.dim() == 4

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C_in, *size) or (C_in, *size), any strides -> uint8."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self._check(x.shape[1], self.weight.shape[0])
        if self._deep:
            q = as_quint8(dense(x).unsqueeze(2), *self._input)
            return self._finish(quantized.conv_transpose3d(q, self._weight(), *self._output)).squeeze(2)
        op = getattr(quantized, f"conv_transpose{dims}d")
        weight = self._weight()  # first: it refuses tensors that are no plain ones
        return self._finish(op(as_quint8(x, *self._input), weight, *self._output))


def _geometry(padding: Any, weight: Tensor, **options: int | Sequence[int]) -> dict[str, list[int]]:
    """The options of a convolution as lists of one number per spatial dimension."""
    dims = weight.dim() - 2
    made = {name: list(pair(value, dims)) for name, value in options.items()}
    if isinstance(padding, str):
        sizes = zip(weight.shape[2:], made["dilation"], strict=True)
        padding = [d * (k - 1) // 2 if padding == "same" else 0 for k, d in sizes]
    return {**made, "padding": list(pair(padding, dims))}
