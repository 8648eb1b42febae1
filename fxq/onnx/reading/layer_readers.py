"""Readers of ONNX ops with weights: convolutions, matrix products, norms and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.onnx.reading.graph_builder import Traced
from fxq.onnx.reading.movement_readers import padded, rank_of
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import refuse

_CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_BATCH_NORM = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _filled(layer: nn.Module, **tensors: Any) -> nn.Module:
    """Set parameters and buffers of a layer that was made without data."""
    for name, tensor in tensors.items():
        held = getattr(layer, name)
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        setattr(layer, name, nn.Parameter(value) if isinstance(held, nn.Parameter) else value)
    return layer


def pads_of(
    sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    auto_pad: str, pads: Sequence[int] | None,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Amounts of padding before and after each spatial axis."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        amounts = list(pads) if pads is not None else [0] * (2 * rank)
        return amounts[:rank], amounts[rank:]
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    begins, ends = [], []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        if stride == 1:
            total = (k - 1) * dilation
        else:
            refuse(varies(size), f"auto_pad={auto_pad!r} of a dynamic size")
            total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        less = total // 2
        begins.append(less if auto_pad == "SAME_UPPER" else total - less)
        ends.append(total - less if auto_pad == "SAME_UPPER" else less)
    return begins, ends


@reads("Conv", "FusedConv")
def conv(
    r: Reader, x: Any, weight: Any, bias: Any = None, *, strides: Any = None, dilations: Any = None, group: int = 1,
    pads: Any = None, auto_pad: str = "NOTSET", kernel_shape: Any = None, activation: str = "",
    activation_params: Any = (),
) -> Any:  # fmt: skip
    shape = r.shape_of(weight)
    rank = len(shape) - 2
    refuse(rank not in (1, 2, 3), f"it has {rank} spatial axes")
    strides, dilations = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    begins, ends = pads_of(r.shape_of(x)[2:], shape[2:], strides, dilations, auto_pad, pads)
    if begins != ends or any(map(varies, begins)):
        x, begins = padded(r, x, begins, ends), [0] * rank
    padding = tuple(begins)
    if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)) and weight.is_floating_point():

        def build() -> nn.Module:
            layer = _CONV[rank](
                shape[1] * group,
                shape[0],
                shape[2:],
                strides,
                padding,
                dilations,
                group,
                bias is not None,
                device="meta",
            )
            return _filled(layer, weight=weight, **({} if bias is None else {"bias": bias}))

        result = r.layer(("conv", strides, padding, dilations, group, id(bias)), weight, build, x)
    else:
        function = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[rank]
        result = r.call(function, x, weight, bias, strides, padding, dilations, group)
    return activated(r, result, activation, activation_params)


def activated(r: Reader, x: Any, activation: str, parameters: Sequence[float] = ()) -> Any:
    """Apply the activation function that ONNX Runtime fused with a layer."""
    from fxq.onnx.reading.reader import OP_READERS

    if not activation:
        return x
    names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max")}.get(activation, ())
    return OP_READERS[activation](r, x, **dict(zip(names, parameters, strict=False)))


@reads("ConvTranspose")
def conv_transpose(
    r: Reader, x: Any, weight: Any, bias: Any = None, *, strides: Any = None, dilations: Any = None, group: int = 1,
    pads: Any = None, auto_pad: str = "NOTSET", output_padding: Any = None, output_shape: Any = None,
    kernel_shape: Any = None,
) -> Any:  # fmt: skip
    shape = r.shape_of(weight)
    rank = len(shape) - 2
    refuse(rank not in (1, 2, 3), f"it has {rank} spatial axes")
    strides, dilations = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    extra = list(output_padding or [0] * rank)
    begins, ends = list((pads or [0] * 2 * rank)[:rank]), list((pads or [0] * 2 * rank)[rank:])
    if output_shape is not None or auto_pad not in ("NOTSET", "", "VALID"):
        sizes = r.shape_of(x)[2:]
        refuse(any(map(varies, sizes)), "its output shape is fixed, but its input is dynamic")
        for i, size in enumerate(sizes):
            wanted = output_shape[i - len(sizes)] if output_shape is not None else size * strides[i]
            total = strides[i] * (size - 1) + extra[i] + (shape[2 + i] - 1) * dilations[i] + 1 - wanted
            if total < 0:  # the output ends after the last product, where it is the bias
                extra[i], total = extra[i] - total, 0
            less = total // 2
            begins[i], ends[i] = (less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less)
    refuse(bias is not None and min(begins + ends, default=0) < 0, "its padding is negative")
    same = all(type(a) is int and a == b and a >= 0 for a, b in zip(begins, ends, strict=True))
    padding = tuple(begins) if same else (0,) * rank
    # PyTorch allows extra output only below the stride; ONNX computes it, and zeros beyond it are cropped below.
    if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)):

        def build() -> nn.Module:
            layer = _CONV_TRANSPOSE[rank](
                shape[0],
                shape[1] * group,
                shape[2:],
                strides,
                padding,
                tuple(extra),
                group,
                bias is not None,
                dilations,
                device="meta",
            )
            return _filled(layer, weight=weight, **({} if bias is None else {"bias": bias}))

        result = r.layer(("transposed", strides, padding, dilations, group, tuple(extra), id(bias)), weight, build, x)
    else:
        function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[rank]
        result = r.call(function, x, weight, bias, strides, padding, tuple(extra), group, dilations)
    return result if same else padded(r, result, [-a for a in begins], [-b for b in ends])


def _linear(r: Reader, x: Any, weight: Tensor, bias: Any, transposed: bool, label: Any = "linear") -> Any:
    """Call a linear layer whose weight is (in, out), or (out, in) if `transposed`."""
    rows = weight if transposed else r.permuted(weight, (1, 0))

    def build() -> nn.Module:
        layer = nn.Linear(rows.shape[1], rows.shape[0], bias is not None, device="meta")
        return _filled(layer, weight=rows, **({} if bias is None else {"bias": bias}))

    return r.layer((label, id(bias)), rows, build, x)


@reads("Gemm")
def gemm(
    r: Reader, x: Any, weight: Any, bias: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Any:  # fmt: skip
    a = r.call(torch.transpose, x, 0, 1) if transA else x
    plain_bias = bias is None or (isinstance(bias, Tensor) and bias.dim() == 1 and bias.numel() > 1 and beta == 1)
    if (
        isinstance(weight, Tensor)
        and isinstance(a, Traced)
        and plain_bias
        and alpha == 1
        and weight.is_floating_point()
    ):
        return _linear(r, a, weight, bias, bool(transB))
    b = r.call(torch.transpose, weight, 0, 1) if transB else weight
    product = r.call(torch.matmul, a, b)
    product = product if alpha == 1 else r.call(torch.mul, product, alpha)
    if bias is None:
        return product
    return r.call(torch.add, product, bias if beta == 1 else r.call(torch.mul, bias, beta))


@reads("MatMul")
def matmul(r: Reader, x: Any, other: Any) -> Any:
    if isinstance(other, Tensor) and other.dim() == 2 and isinstance(x, Traced) and other.is_floating_point():
        return _linear(r, x, other, None, transposed=False)
    return r.call(torch.matmul, x, other)


@reads("FusedMatMul")
def fused_matmul(
    r: Reader, x: Any, other: Any, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, **rest: Any
) -> Any:
    refuse(any(rest.values()), "it transposes the batch")
    a = r.call(torch.transpose, x, -2, -1) if transA else x
    b = r.call(torch.transpose, other, -2, -1) if transB else other
    product = matmul(r, a, b)
    return product if alpha == 1 else r.call(torch.mul, product, alpha)


@reads("Einsum")
def einsum(r: Reader, *xs: Any, equation: str) -> Any:
    return r.call(torch.einsum, equation, *xs)


@reads("BatchNormalization")
def batch_norm(
    r: Reader, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *, epsilon: float = 1e-5, **attributes: Any
) -> Any:  # fmt: skip
    refuse(attributes.get("training_mode"), "it is in training mode")
    parts = (weight, bias, mean, variance)
    rank = rank_of(r, x)
    if all(isinstance(part, Tensor) for part in parts) and rank in _BATCH_NORM and isinstance(x, Traced):

        def build() -> nn.Module:
            layer = _BATCH_NORM[rank](mean.numel(), eps=epsilon, device="meta")
            _filled(layer, weight=weight, bias=bias, running_mean=mean, running_var=variance)
            layer.num_batches_tracked = torch.zeros((), dtype=torch.int64)
            return layer

        return r.layer(("batch norm", epsilon, id(bias), id(mean), id(variance)), weight, build, x)
    return r.call(F.batch_norm, x, mean, variance, weight, bias, False, 0.1, epsilon)


@reads("InstanceNormalization")
def instance_norm(r: Reader, x: Any, weight: Any, bias: Any, *, epsilon: float = 1e-5) -> Any:
    return r.call(F.instance_norm, x, None, None, weight, bias, True, 0.1, epsilon)


@reads("LayerNormalization")
def layer_norm(
    r: Reader, x: Any, weight: Any, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    shape = r.shape_of(x)
    axes = tuple(range(axis % len(shape), len(shape)))
    normalized = tuple(shape[axis % len(shape) :])
    refuse(any(map(varies, normalized)), "it normalizes a dynamic axis")
    if r.like(weight).dim() != len(normalized):
        result = r.call(torch.mul, r.call(F.layer_norm, x, normalized, None, None, epsilon), weight)
        result = result if bias is None else r.call(torch.add, result, bias)
    else:
        result = r.call(F.layer_norm, x, normalized, weight, bias, epsilon)
    if r.outputs == 1:
        return result
    mean = r.call(torch.mean, x, axes, True)
    square = r.call(torch.square, r.call(torch.sub, x, mean))
    variance = r.call(torch.mean, square, axes, True)
    return result, mean, r.call(torch.rsqrt, r.call(torch.add, variance, epsilon))


@reads("GroupNormalization")
def group_norm(
    r: Reader, x: Any, weight: Any, bias: Any, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    if r.like(weight).shape[0] == num_groups != r.shape_of(x)[1]:  # before opset 21: one number for each group
        repeats = r.shape_of(x)[1] // num_groups
        weight, bias = (r.call(torch.repeat_interleave, value, repeats) for value in (weight, bias))
    return r.call(F.group_norm, x, num_groups, weight, bias, epsilon)


@reads("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(r: Reader, x: Any, weight: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Any:
    shape = r.shape_of(x)
    return r.call(F.rms_norm, x, tuple(shape[axis % len(shape) :]), weight, epsilon)


@reads("LRN")
def lrn(r: Reader, x: Any, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Any:
    if size % 2:
        return r.call(F.local_response_norm, x, size, alpha, beta, bias)
    # An even window has one more channel after its middle in ONNX, and before it in PyTorch.
    turned = r.call(F.local_response_norm, r.call(torch.flip, x, (1,)), size, alpha, beta, bias)
    return r.call(torch.flip, turned, (1,))


@reads("LpNormalization")
def lp_normalization(r: Reader, x: Any, *, axis: int = -1, p: int = 2) -> Any:
    return r.call(F.normalize, x, float(p), axis)


@reads("GlobalAveragePool")
def global_average_pool(r: Reader, x: Any) -> Any:
    return r.call({3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}[rank_of(r, x)], x, 1)


@reads("GlobalMaxPool")
def global_max_pool(r: Reader, x: Any) -> Any:
    return r.call(torch.amax, x, tuple(range(2, rank_of(r, x))), True)


def _extra(size: Any, kernel: int, stride: int, dilation: int, begin: Any, end: Any) -> int:
    """Padding at the end that a pool needs so that its last, partial window counts, as with ceil_mode."""
    refuse(varies(size), "its ceil_mode depends on a dynamic size")
    reach = dilation * (kernel - 1) + 1
    count = math.ceil((size + begin + end - reach) / stride) + 1
    if (count - 1) * stride >= size + begin:  # a window that starts in the padding is left out
        count -= 1
    return max(0, (count - 1) * stride + reach - (size + begin + end))


def _with_indices(r: Reader, x: Any, kernel: tuple[int, ...], *options: Any) -> Any:
    """Max pooling with the positions of the maxima in the whole input: PyTorch counts them in each channel."""
    pools: dict[int, Any] = {
        1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices
    }  # fmt: skip
    values, indices = r.call(pools[len(kernel)], x, kernel, *options)
    batch, channels, *sizes = r.shape_of(x)
    first = r.call(torch.arange, batch * channels)
    first = r.call(torch.reshape, r.call(torch.mul, first, math.prod(sizes)), (batch, channels, *[1] * len(sizes)))
    return values, r.call(torch.add, indices, first)


@reads("MaxPool")
def max_pool(
    r: Reader, x: Any, *, kernel_shape: Sequence[int], strides: Any = None, dilations: Any = None, pads: Any = None,
    auto_pad: str = "NOTSET", ceil_mode: int = 0, storage_order: int = 0,
) -> Any:  # fmt: skip
    rank = len(kernel_shape)
    strides, dilations = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    if rank == 1 and not r.like(x).is_floating_point():  # PyTorch pools integers in two axes alone
        pads = [0, pads[0], 0, pads[1]] if pads else None
        pooled = max_pool(
            r, r.call(torch.unsqueeze, x, 2), kernel_shape=(1, *kernel_shape), strides=(1, *strides),
            dilations=(1, *dilations), pads=pads, auto_pad=auto_pad, ceil_mode=ceil_mode, storage_order=storage_order,
        )  # fmt: skip
        if r.outputs > 1:
            return tuple(r.call(torch.squeeze, part, 2) for part in pooled)
        return r.call(torch.squeeze, pooled, 2)
    sizes = r.shape_of(x)[2:]
    begins, ends = pads_of(sizes, kernel_shape, strides, dilations, auto_pad, pads)
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[rank]
    symmetric = begins == ends and all(2 * begin <= k for begin, k in zip(begins, kernel_shape, strict=True))
    refuse(r.outputs > 1 and (storage_order or not symmetric), "it returns indices in another order than PyTorch's")
    if r.outputs > 1:
        return _with_indices(r, x, tuple(kernel_shape), strides, tuple(begins), dilations, bool(ceil_mode))
    if symmetric:
        return r.call(function, x, tuple(kernel_shape), strides, tuple(begins), dilations, bool(ceil_mode))
    if ceil_mode:
        extras = map(_extra, sizes, kernel_shape, strides, dilations, begins, ends)
        ends = [end + extra for end, extra in zip(ends, extras, strict=True)]
    dtype = r.like(x).dtype
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    return r.call(function, padded(r, x, begins, ends, value=lowest), tuple(kernel_shape), strides, 0, dilations)


def _dilated_sum(r: Reader, x: Any, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """Sum of each window of entries that are `dilations` apart."""
    channels = r.shape_of(x)[1]
    convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[len(kernel)]
    refuse(varies(channels), "its number of channels is dynamic")
    ones = torch.ones(channels, 1, *kernel, dtype=r.like(x).dtype)
    return r.call(convolve, x, ones, None, tuple(strides), 0, tuple(dilations), channels)


@reads("AveragePool")
def average_pool(
    r: Reader, x: Any, *, kernel_shape: Sequence[int], strides: Any = None, dilations: Any = None, pads: Any = None,
    auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
) -> Any:  # fmt: skip
    rank = len(kernel_shape)
    strides, dilations = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    sizes = r.shape_of(x)[2:]
    begins, ends = pads_of(sizes, kernel_shape, strides, dilations, auto_pad, pads)
    if any(d != 1 for d in dilations):
        refuse(any(map(varies, sizes)), "it is dilated, and its size is dynamic")
        extras = list(map(_extra, sizes, kernel_shape, strides, dilations, begins, ends)) if ceil_mode else [0] * rank
        ones = padded(r, torch.ones(1, 1, *sizes), begins, ends, value=float(count_include_pad))
        counts = _dilated_sum(r, padded(r, ones, [0] * rank, extras), kernel_shape, strides, dilations)
        last = [end + extra for end, extra in zip(ends, extras, strict=True)]
        total = _dilated_sum(r, padded(r, x, begins, last), kernel_shape, strides, dilations)
        return r.call(torch.div, total, counts)
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[rank]
    symmetric = begins == ends and all(2 * begin <= k for begin, k in zip(begins, kernel_shape, strict=True))
    if symmetric:
        return r.call(pool, x, tuple(kernel_shape), strides, tuple(begins), bool(ceil_mode), bool(count_include_pad))
    extras = list(map(_extra, sizes, kernel_shape, strides, dilations, begins, ends)) if ceil_mode else [0] * rank
    if count_include_pad:
        refuse(any(extras), "it counts padding that ceil_mode adds")
        return r.call(pool, padded(r, x, begins, ends), tuple(kernel_shape), strides)
    refuse(any(map(varies, sizes)), "its padding is not symmetric, and its size is dynamic")
    last = [end + extra for end, extra in zip(ends, extras, strict=True)]
    counts = pool(padded(r, torch.ones(1, 1, *sizes), begins, last), tuple(kernel_shape), strides)
    return r.call(torch.div, r.call(pool, padded(r, x, begins, last), tuple(kernel_shape), strides), counts)


@reads("LpPool")
def lp_pool(
    r: Reader, x: Any, *, kernel_shape: Sequence[int], strides: Any = None, dilations: Any = None, pads: Any = None,
    auto_pad: str = "NOTSET", ceil_mode: int = 0, p: int = 2,
) -> Any:  # fmt: skip
    rank = len(kernel_shape)
    refuse(rank not in (1, 2, 3) or ceil_mode, "it has options that PyTorch lacks")
    strides, dilations = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    begins, ends = pads_of(r.shape_of(x)[2:], kernel_shape, strides, dilations, auto_pad, pads)
    powers = r.call(torch.pow, r.call(torch.abs, padded(r, x, begins, ends)), p)
    total = _dilated_sum(r, powers, kernel_shape, strides, dilations)
    return r.call(torch.pow, total, 1 / p)


@reads("SkipLayerNormalization")
def skip_layer_norm(
    r: Reader, x: Any, skip: Any, weight: Any, beta: Any = None, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:
    total = r.call(torch.add, x, skip)
    total = total if bias is None else r.call(torch.add, total, bias)
    refuse(r.outputs > 1 and r.outputs != 4, "it returns its mean")
    result = r.call(F.layer_norm, total, (r.shape_of(x)[-1],), weight, beta, epsilon)
    return (result, None, None, total) if r.outputs == 4 else result
