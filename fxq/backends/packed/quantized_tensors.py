"""PyTorch's quantized tensors and engines. No other module uses the quantized dtypes.

Kernels take and return uint8. They reinterpret its memory as `torch.quint8` and back, while PyTorch's functions
(`_make_per_tensor_quantized_tensor`, `int_repr`) copy.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

quantized = torch.ops.quantized
_ENGINE = threading.Lock()


@cache
def has_engine(name: str) -> bool:
    """Whether this build of PyTorch has a working engine of this name. Runs a linear layer on it to find out.

    PyTorch has announced the removal of the engines, so `supported_engines` may list one whose ops are gone.
    """
    engines = getattr(getattr(torch.backends, "quantized", None), "supported_engines", ())
    return name in engines and _runs(name)


def _runs(engine: str) -> bool:
    """Whether a linear layer with four weights of 1 per output computes the right result on the engine."""
    try:
        with engine_selected(engine):
            weight = as_qint8(torch.ones(2, 4, dtype=torch.int8, device="cpu"), torch.tensor(1.0), 0)
            packed = quantized.linear_prepack(weight, None)
            x = as_quint8(torch.full((1, 4), 5, dtype=torch.uint8, device="cpu"), 1.0, 0)
            return bool((as_uint8(quantized.linear(x, packed, 1.0, 0)) == 20).all())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # raised for a removed op, dtype or kernel
        return False


@contextmanager
def engine_selected(name: str) -> Iterator[None]:
    """Select an engine, which is global state of PyTorch, while the context is active."""
    with _ENGINE:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


@cache
def _silence_deprecation() -> None:
    """Trigger PyTorch's warning, given once, that the quantized dtypes are deprecated, and ignore it.

    It does not concern users of fxq: no quantized tensor leaves a kernel. When PyTorch removes the kernels, the
    backends of this folder report that they are not available.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=torch.quint8)


def as_quint8(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return the memory of a uint8 tensor as a quint8 tensor, without a copy."""
    _silence_deprecation()
    q = torch._empty_affine_quantized([0], scale=scale, zero_point=zero_point, dtype=torch.quint8)
    return q.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def as_uint8(q: Tensor) -> Tensor:
    """Return the memory of a quint8 tensor as a uint8 tensor, without a copy."""
    x = torch.empty(0, dtype=torch.uint8, device="cpu")
    return x.set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


def as_qint8(weight: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Return an int8 weight as a qint8 tensor with scales per tensor or along `axis`."""
    _silence_deprecation()
    if scale.dim() == 0:
        return torch._make_per_tensor_quantized_tensor(weight, float(scale), 0)
    zero = torch.zeros(len(scale), dtype=torch.int64, device="cpu")
    return torch._make_per_channel_quantized_tensor(weight, scale.double(), zero, axis)


def transposed_2_high_is_right() -> bool:
    """Whether fbgemm's two-dimensional transposed convolution is correct for kernel height 2."""
    return _transposed_is_right("fbgemm", 2)


def transposed_3d_is_right() -> bool:
    """Whether qnnpack's three-dimensional transposed convolution is correct."""
    return _transposed_is_right("qnnpack", 3)


def _transposed_is_right(engine: str, dims: int) -> bool:
    """Whether a transposed convolution is correct with all weights 1, inputs 5, and a stride as large as the kernel.

    Each output is then the sum of the 8 input channels.
    """
    weight, x = torch.ones(8, 8, *[2] * dims, dtype=torch.int8), torch.full((2, 8, *[3] * dims), 5, dtype=torch.uint8)
    options = [2] * dims, [0] * dims, [0] * dims, [1] * dims
    with engine_selected(engine):
        prepack = getattr(quantized, f"conv_transpose{dims}d_prepack")
        packed = prepack(as_qint8(weight, torch.tensor(1.0), 1), None, *options, 1)
        y = getattr(quantized, f"conv_transpose{dims}d")(as_quint8(x, 1.0, 0), packed, 1.0, 0)
    return bool((as_uint8(y) == 40).all())
