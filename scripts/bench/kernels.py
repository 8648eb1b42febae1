"""Measure single kernels against what could stand in their place: another kernel, or the float op between conversions.

    python -m scripts.bench.kernels                     all of them, about a minute
    python -m scripts.bench.kernels --only add --only mul --seconds 1

These comparisons are why a kernel goes the way it goes, and where it changes from one way to another. Medians, in turns
of random order, on one thread, with warm caches. "times" is how many times as long as the kernel the other way takes:
below 1 the other way is the faster one on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from fxq.backends.kernel import PostOp
from fxq.backends.plain.binary import Add, Mul
from fxq.backends.plain.converters import Dequantize, PReLUQuantize, Quantize
from fxq.backends.plain.lookup import Lookup
from fxq.backends.plain.pool import Mean
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.conv_padding import Padding
from fxq.backends.x86.onednn_binary import OnednnAdd, OnednnMul
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_conv3d import Conv3d
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d
from fxq.backends.x86.squeeze_excite import SqueezeExcite
from fxq.quant.qparams import QParams
from scripts.bench import history
from scripts.bench.timing import interleaved, threads_set_to

X, OTHER, OUT = QParams.per_tensor(0.02, 64, 0, 127), QParams.per_tensor(0.03, 77), QParams.per_tensor(0.05, 119)
UNIT = QParams.per_tensor(1.0, 0)


@dataclass(frozen=True)
class Race:
    """One kernel at a size of its input, and what to time by name; the first is the kernel."""

    kernel: str
    size: str
    ways: Mapping[str, Callable[[], object]]


def integers(*shape: int) -> Tensor:
    """Random integers of the grid `X`; an image is channels-last."""
    x = torch.randint(0, 128, shape, dtype=torch.uint8)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def in_float(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """A call of the float op between conversions."""
    before, after = [Dequantize(grid) for grid in (X, OTHER)], Quantize(OUT)
    return lambda: after(function(*(kernel(x) for kernel, x in zip(before, inputs, strict=False))))


def bound(kernel: nn.Module, *inputs: Tensor) -> Callable[[], object]:
    """A call of a kernel as a bound model makes it."""
    run = kernel.bind(*inputs)  # type: ignore[operator]
    return lambda: run(*inputs)


def layer(*shape: int, out: QParams | None = OUT, **options: object) -> LayerSpec:
    """A layer with random weights."""
    weight = torch.randint(-63, 64, shape, dtype=torch.int8)
    zero = torch.zeros(len(weight), dtype=torch.int32)
    qparams = QParams(torch.rand(len(weight)) * 1e-3 + 1e-4, zero, -127, 127, torch.int8, 0)
    return LayerSpec(weight, qparams, torch.randn(len(weight)), X, out, **options)  # type: ignore[arg-type]


def table() -> Iterator[Race]:
    """A sigmoid, and a PReLU of 50 channels."""
    look_up = Lookup.of(torch.sigmoid, "sigmoid", X, OUT)
    slopes = torch.rand(50)
    lookup = Lookup.of(lambda x: F.prelu(x, slopes), "prelu", X, OUT, 50)
    for size in (1_000, 16_000, 100_000, 1_000_000):
        x, image = integers(size), integers(1, 50, size // 50)
        yield Race("table", f"{size}", {"": bound(look_up, x), "float": in_float(torch.sigmoid, x)})
        ways = {"": bound(lookup, image), "float": in_float(lambda x: F.prelu(x, slopes), image)}
        yield Race("table", f"{size}, by channel", ways)


def add() -> Iterator[Race]:
    """Two images."""
    for shape in ((24, 14, 14), (40, 28, 28), (24, 56, 56), (64, 56, 56)):
        a, b = integers(1, *shape), integers(1, *shape)
        conv, passes = OnednnAdd(X, OTHER, OUT, inplace=True), Add(X, OTHER, OUT)
        ways = {"": bound(conv, a, b), "no convolution": bound(passes, a, b), "float": in_float(torch.add, a, b)}
        yield Race("add", f"{shape}", ways)


def mul() -> Iterator[Race]:
    """Two images, and an image with a gate."""
    for shape, gate in (((64, 56, 56), False), ((672, 14, 14), True), ((240, 28, 28), True), ((32, 112, 112), True)):
        a, b = integers(1, *shape), integers(1, shape[0], *((1, 1) if gate else shape[1:]))
        ways = {"": bound(OnednnMul(X, OTHER, OUT), a, b), "no convolution": bound(Mul(X, OTHER, OUT), a, b)}
        yield Race("mul", f"{shape}{', gate' * gate}", {**ways, "float": in_float(torch.mul, a, b)})


def prelu() -> Iterator[Race]:
    """A convolution with PReLU: both sides on integers, or in float after it."""
    for channels, size in ((64, 112), (64, 56), (128, 28), (256, 14), (512, 7)):
        x, slope, options = integers(1, channels, size, size), torch.rand(channels), {"padding": 1}
        twice = OnednnConv(layer(channels, channels, 3, 3, post=PostOp("prelu"), slope=slope, **options))
        conv = bound(OnednnConv(layer(channels, channels, 3, 3, out=None, **options)), x)
        after = PReLUQuantize(slope, OUT)
        ways = {"": bound(twice, x), "prelu in float": lambda conv=conv, after=after: after(conv())}
        yield Race("prelu", f"{channels} channels, {size} x {size}", ways)


def conv3d() -> Iterator[Race]:
    """Against float32."""
    for channels, depth, size in ((64, 8, 28), (128, 4, 14)):
        x = integers(1, channels, depth, size, size)
        weight = torch.randn(channels, channels, 3, 3, 3)
        real = torch.randn(x.shape)
        ways = {"": bound(Conv3d(layer(channels, channels, 3, 3, 3, padding=1)), x)}
        ways["float"] = lambda real=real, weight=weight: F.conv3d(real, weight, padding=1)
        yield Race("conv3d", f"{channels} channels, {depth} x {size} x {size}", ways)


def linear() -> Iterator[Race]:
    """One row into float: the product of integers, against oneDNN's layer, which two rows take."""
    for inputs, outputs in ((64, 10), (512, 1000), (2048, 1000)):
        kernel = OnednnLinear(layer(outputs, inputs, out=None))
        ways = {"": bound(kernel, integers(1, inputs)), "two rows": bound(kernel, integers(2, inputs))}
        yield Race("linear", f"{inputs} -> {outputs}", ways)


def pool() -> Iterator[Race]:
    """Means of all pixels, and of windows."""
    for channels, size in ((72, 28), (960, 7), (32, 112)):
        x = integers(1, channels, size, size)
        ways = {"": bound(Mean(X, OUT, (2, 3)), x), "float": in_float(lambda x: x.mean((2, 3)), x)}
        yield Race("mean", f"{channels} x {size} x {size}", ways)
    for channels, size in ((72, 28), (96, 56)):
        x = integers(1, channels, size, size)
        ways = {"": bound(AdaptiveAvgPool2d(X, OUT, (7, 7)), x)}
        ways["float"] = in_float(lambda x: F.adaptive_avg_pool2d(x, 7), x)
        yield Race("adaptive pool", f"{channels} x {size} x {size}", ways)


def scale() -> Iterator[Race]:
    """Scale and shift per channel: a depthwise convolution against a table."""
    for channels, size in ((72, 28), (120, 28), (128, 56)):
        x, factor = integers(1, channels, size, size), torch.rand(channels)
        look_up = Lookup.of(lambda x, factor=factor: x * factor, "scale", X, OUT, channels)
        ways = {"": bound(OnednnConv(layer(channels, 1, 1, 1, groups=channels)), x), "table": bound(look_up, x)}
        yield Race("batch norm", f"{channels} x {size} x {size}", ways)


def pad() -> Iterator[Race]:
    """Padding whose memory is kept."""
    for channels, size in ((16, 112), (72, 28), (240, 14)):
        x = integers(1, channels, size, size)
        padding = Padding(x.shape, [1, 1, 1, 1], 64)
        ways = {"": lambda x=x, padding=padding: padding.give_back(padding.take(x))}
        ways["F.pad"] = lambda x=x: F.pad(x, [1, 1, 1, 1], value=64).contiguous(memory_format=torch.channels_last)
        yield Race("padding", f"{channels} x {size} x {size}", ways)


def excite() -> Iterator[Race]:
    """Squeeze-and-excitation as one kernel, or as four and a sigmoid."""
    for channels, few, size in ((72, 24, 28), (960, 240, 7)):
        squeeze, back, x = layer(few, channels, 1, 1), layer(channels, few, 1, 1), integers(1, channels, size, size)
        weights = (squeeze.weight.flatten(1), squeeze.weight_qparams.scale, back.weight.flatten(1))
        whole = SqueezeExcite(*weights, back.weight_qparams.scale, X, OUT, "relu", "sigmoid")
        sigmoid, product = Lookup.of(torch.sigmoid, "sigmoid", OUT, UNIT), OnednnMul(X, UNIT, OUT)
        gate = nn.Sequential(Mean(X, X, (2, 3), True), OnednnConv(squeeze), OnednnConv(back), sigmoid)
        ways = {"": bound(whole, x), "5 kernels": lambda x=x, gate=gate, product=product: product(x, gate(x))}
        yield Race("squeeze-excite", f"{channels} x {size} x {size}", ways)


RACES = {f.__name__: f for f in (table, add, mul, prelu, conv3d, linear, pool, scale, pad, excite)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RACES, action="append", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row of kernels (default: 0.5)")
    history.add_argument(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with threads_set_to(1), torch.no_grad():
        for race in (race for name in options.only or RACES for race in RACES[name]()):
            own, *others = interleaved(race.ways, options.seconds).values()
            for name, seconds in zip(list(race.ways)[1:], others, strict=True):
                rows.append([race.kernel, race.size, 1e6 * own, name, 1e6 * seconds, seconds / own])
    print(tabulate(rows, headers=["kernel", "size", "us", "other way", "us", "times"], floatfmt=".1f"))
    ratios = [
        (f"{kernel}, {size}", f"times faster than {baseline}", ratio, "times")
        for kernel, size, _, baseline, _, ratio in rows
    ]
    history.append(options.history, "bench.kernels", ratios)


if __name__ == "__main__":
    main()
