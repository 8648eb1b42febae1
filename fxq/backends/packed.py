"""PyTorch's packed quantized kernels, which fbgemm and qnnpack run: the one module that touches the quantized dtypes.

The graph around the kernels stays plain: a kernel takes and gives uint8. To look at the same memory as `torch.quint8`
and back costs 3 + 2 us at any size; PyTorch's own way (`_make_per_tensor_quantized_tensor`, `int_repr`) copies, 65 us
for 1 x 64 x 56 x 56 (AVX512, one thread).

The kernels emit uint8 only; fbgemm's linear layer has a form that emits float32. The engine that is selected when a
weight is packed is the one that runs it, whatever is selected later.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.convert import dense, dequantize
from fxq.backends.elementwise import to_integer
from fxq.backends.kernel import (
    Kernel,
    Post,
    WeightedKernel,
    activation_refused,
    bounds,
    first_reason,
    padding_refused,
    pair,
    post_refused,
    refuse,
    weight_refused,
)
from fxq.backends.rows import CLAMPS
from fxq.qparams import QParams

_quantized = torch.ops.quantized
_ENGINE = threading.Lock()


def has_engine(name: str) -> bool:
    """Whether this build of PyTorch runs the engine here."""
    return name in torch.backends.quantized.supported_engines


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """Select an engine, which is global state of PyTorch, for as long as it takes to pack a weight."""
    with _ENGINE:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


@cache
def _say_nothing() -> None:
    """Let PyTorch say once, unheard, that the quantized dtypes are deprecated.

    It is no news to users of fxq: no quantized tensor leaves this module, and when PyTorch removes the kernels, the
    backends refuse and x86 and reference stay.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=torch.quint8)


def _wrap(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """The memory of a uint8 tensor as a quint8 tensor: nothing is copied."""
    _say_nothing()
    q = torch._empty_affine_quantized([0], scale=scale, zero_point=zero_point, dtype=torch.quint8)
    return q.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _unwrap(q: Tensor) -> Tensor:
    """The memory of a quint8 tensor as a uint8 tensor: nothing is copied."""
    x = torch.empty(0, dtype=torch.uint8)
    return x.set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


def _wrap_weight(weight: Tensor, scale: Tensor, axis: int) -> Tensor:
    """An int8 weight as a qint8 tensor."""
    _say_nothing()
    if scale.dim() == 0:
        return torch._make_per_tensor_quantized_tensor(weight, float(scale), 0)
    zero = torch.zeros(len(scale), dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(weight, scale.double(), zero, axis)


class _Finish:
    """A clamp, and the grid of the result, on what a kernel has rounded: rounding keeps the order, so it is exact.

    Attributes:
        relu: the kernel clamps by itself, for the lower bound is zero and there is no upper one.
        clamp: the integer bounds, or None.
    """

    def __init__(self, out: QParams, post: Post | None, has_relu: bool = True) -> None:
        low, high = (to_integer(bound, out) for bound in bounds(post) or (0.0, 0.0))
        self.relu = has_relu and post is not None and (low, high) == (out.z, 255)
        self.clamp = None if self.relu or (low, high) == (0, 255) else (low, high)

    def __call__(self, q: Tensor) -> Tensor:
        y = _unwrap(q)
        return y if self.clamp is None else y.clamp_(*self.clamp)


def _geometry(padding: Any, weight: Tensor, **options: int | Sequence[int]) -> dict[str, list[int]]:
    """The options of a convolution as lists of one number per spatial dimension."""
    dims = weight.dim() - 2
    made = {name: list(pair(value, dims)) for name, value in options.items()}
    if isinstance(padding, str):
        sizes = zip(weight.shape[2:], made["dilation"], strict=True)
        padding = [d * (k - 1) // 2 if padding == "same" else 0 for k, d in sizes]
    return {**made, "padding": list(pair(padding, dims))}


def is_depthwise(shape: Sequence[int], groups: int) -> bool:
    """Whether a convolution with a weight of this shape sees one channel per output channel, and makes one of each."""
    return shape[1] == 1 and shape[0] == groups


class PackedKernel(WeightedKernel):
    """A kernel with a weight that one of PyTorch's quantized engines has packed.

    Args:
        weight: int8.
        weight_qparams: per tensor, or per channel along `channel_axis`; zero point 0.
        bias: float32, or None.
        x: grid of the input.
        out: grid of the output.
        post: None or a clamp.
    """

    engine: ClassVar[str]
    x: QParams
    out: QParams | None
    post: Post | None

    has_relu: ClassVar[bool] = True
    """Whether the engine has a form of the kernel that clamps to positive values."""

    def _set(self, x: QParams, out: QParams | None, post: Post | None) -> None:
        self.x, self.out, self.post = x, out, post
        self._input = x.s, x.z
        if out is not None:
            self._output, self._finish = (out.s, out.z), _Finish(out, post, self.has_relu)

    @classmethod
    def overflows(cls, x: QParams | None, depthwise: bool = False) -> str | None:
        """Why the engine would add activations `x` wrongly, or None."""
        return None

    @classmethod
    def _reasons(
        cls, weight: QParams | None, x: QParams | None, out: QParams | None, post: Post | None
    ) -> list[str | None]:
        return [
            post_refused(post, CLAMPS, residual=False),
            weight_refused(weight, cls.channel_axis),
            activation_refused("the input", x),
            activation_refused("the output", out),
            cls.overflows(x),
        ]

    def _pack(self) -> Any:
        """The packed weight. Opaque: it cannot be copied or pickled."""
        raise NotImplementedError

    def _weight(self) -> Any:
        """The packed weight, packed on first use."""
        packed = self._packed.get("")
        if packed is None:
            with _engine(self.engine):
                packed = self._remember("", self._pack())
        return packed


class Conv(PackedKernel):
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
        known["depthwise"] = is_depthwise(weight.shape, groups)
        reason = self.refuses(kernel_size=weight.shape[2:], padding=padding, dilation=dilation, **known)
        refuse(self.name, reason or (_EMITS if out is None else None))
        self._set(x, out, post)
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
        depthwise: bool = False,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        reasons = [*cls._reasons(weight, x, out, post), cls.overflows(x, depthwise)]
        return first_reason([padding_refused(padding, padding_mode, kernel_size, dilation), *reasons])

    def _pack(self) -> Any:
        options = _geometry(self.padding, self.weight, stride=self.stride, dilation=self.dilation)
        prepack = getattr(_quantized, f"conv{self.weight.dim() - 2}d_prepack")
        order = (options[name] for name in ("stride", "padding", "dilation"))
        return prepack(_wrap_weight(self.weight.contiguous(), self.weight_scale, 0), self.bias, *order, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, *size) or (C, *size), any strides -> uint8; a picture comes out channels-last."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        op = getattr(_quantized, f"conv{dims}d{'_relu' if self._finish.relu else ''}")
        return self._finish(op(_wrap(x, *self._input), self._weight(), *self._output))


class ConvTranspose(PackedKernel):
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
        refuse(self.name, reason or (_EMITS if out is None else None))
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
        prepack = getattr(_quantized, f"conv_transpose{weight.dim() - 2}d_prepack")
        return prepack(_wrap_weight(weight.contiguous(), self.weight_scale, 1), self.bias, *order, self.groups)

    @property
    def _deep(self) -> bool:
        return self.deepens and self.weight.dim() == 4

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C_in, *size) or (C_in, *size), any strides -> uint8."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if self._deep:
            q = _wrap(dense(x).unsqueeze(2), *self._input)
            return self._finish(_quantized.conv_transpose3d(q, self._weight(), *self._output)).squeeze(2)
        op = getattr(_quantized, f"conv_transpose{dims}d")
        return self._finish(op(_wrap(x, *self._input), self._weight(), *self._output))


class Linear(PackedKernel):
    """Linear layer over the last dimension: uint8 in, uint8 out, or float32 where the engine has it.

    Args:
        weight: int8, (out_features, in_features).
        weight_qparams: per tensor or per channel along axis 0, zero point 0.
        bias: float32, (out_features,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        post: None or a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    emits_float: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ("x", "out", "post")

    def __init__(
        self,
        weight: Tensor,
        weight_qparams: QParams,
        bias: Tensor | None,
        x: QParams,
        out: QParams | None,
        *,
        post: Post | None = None,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        reason = self.refuses(weight=weight_qparams, x=x, out=out, post=post)
        refuse(self.name, reason or (_EMITS if out is None and not self.emits_float else None))
        self._set(x, out, post)

    @classmethod
    def refuses(
        cls,
        *,
        weight: QParams | None = None,
        x: QParams | None = None,
        out: QParams | None = None,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        return first_reason(cls._reasons(weight, x, out, post))

    def _pack(self) -> Any:
        return _quantized.linear_prepack(_wrap_weight(self.weight.contiguous(), self.weight_scale, 0), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (..., in_features) -> (..., out_features), on `out`'s grid or float32."""
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if self.out is None:
            return self._float(x)
        op = _quantized.linear_relu if self._finish.relu else _quantized.linear
        return self._finish(op(_wrap(x, *self._input), self._weight(), *self._output))

    def _float(self, x: Tensor) -> Tensor:
        """The kernel takes float32 and rounds it to the grid, on which it lies already."""
        op = _quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y = op(dequantize(x, *self._input), *self._input, self._weight())
        return y if self.post is None else y.clamp_(*bounds(self.post))  # type: ignore[misc]


class Binary(Kernel):
    """a + b or a * b, uint8 on two grids, broadcast.

    The engine does not matter: where qnnpack is selected, PyTorch's sum of equal shapes is qnnpack's.

    Args:
        a: grid of the first tensor.
        b: grid of the second.
        out: grid of the result.
        post: None or a clamp.
    """

    op: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ("a", "b", "out", "post")

    def __init__(self, a: QParams, b: QParams, out: QParams, post: Post | None = None) -> None:
        super().__init__()
        refuse(self.name, self.refuses(a=a, b=b, out=out, post=post))
        self.a, self.b, self.out, self.post = a, b, out, post
        self._a, self._b, self._output, self._finish = (a.s, a.z), (b.s, b.z), (out.s, out.z), _Finish(out, post)

    @classmethod
    def refuses(
        cls,
        *,
        a: QParams | None = None,
        b: QParams | None = None,
        out: QParams | None = None,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None."""
        reasons = [
            post_refused(post, CLAMPS, residual=False),
            activation_refused("the first input", a),
            activation_refused("the second input", b),
            activation_refused("the output", out),
        ]
        return first_reason(reasons)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """uint8, uint8, shapes that broadcast -> uint8."""
        op = getattr(_quantized, self.op + ("_relu" if self._finish.relu else ""))
        return self._finish(op(_wrap(dense(a), *self._a), _wrap(dense(b), *self._b), *self._output))


_EMITS = "its result is wanted in float32, the kernel emits uint8"


def transposed_2_high_is_right() -> bool:
    """fbgemm's transposed convolution of two dimensions, where it takes a shortcut."""
    return _transposed_is_right("fbgemm", 2)


def transposed_3d_is_right() -> bool:
    """qnnpack's transposed convolution of three dimensions."""
    return _transposed_is_right("qnnpack", 3)


def _transposed_is_right(engine: str, dims: int) -> bool:
    """All weights 1, stride as the kernel: every output is the sum of the 8 input channels."""
    weight, x = torch.ones(8, 8, *[2] * dims, dtype=torch.int8), torch.full((2, 8, *[3] * dims), 5, dtype=torch.uint8)
    options = [2] * dims, [0] * dims, [0] * dims, [1] * dims
    with _engine(engine):
        prepack = getattr(_quantized, f"conv_transpose{dims}d_prepack")
        packed = prepack(_wrap_weight(weight, torch.tensor(1.0), 1), None, *options, 1)
        y = getattr(_quantized, f"conv_transpose{dims}d")(_wrap(x, 1.0, 0), packed, 1.0, 0)
    return bool((_unwrap(y) == 40).all())
