"""How calls of the ops of the table are drawn at random, for `tests/support/fuzz.py`.

`FORMS` says how a call of each op is made. A row of the table that takes tensors alone needs no entry: it is called in
all of its spellings. `NOT_DRAWN` lists the rows that are never drawn, with the reason; a row without
spellings is no op of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops import OPS
from tests.support.helpers import ops_of_fxq

CHANNELS = (4, 3, 8, 1, 6, 12)

FILLS = (-100.0, -1e4, 100.0, -20.0, -math.inf)
"""Constants that masks, pads and fills write, besides numbers within the range of the data. Not data themselves."""

NOT_DRAWN = {
    "quantize": "made by fxq only",
    "dequantize": "made by fxq only",
    "embedding": "reads integers",
    "embedding_bag": "reads integers",
    "grouped_mm": "reads integers",
    "grid_sample": "its grid has the size of one batch",
    "hardshrink": "jumps, so that no noise is small",
    "normalize": "has no bound near zero",
    "cosine_similarity": "has no bound near zero",
}


class Picks:
    """Picks one of several things by the next number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def __call__(self, *choices: Any) -> Any:
        return choices[next(self._numbers, 0) % len(choices)]


class Options(nn.Module):
    """Holds the options of a call that is no module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in options.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


Call = Callable[..., Any]


UNBOUNDED = ("div", "log", "rsqrt", "sqrt")
"""Functions without a bound where their last value is near zero: drawn only where it is not."""


@dataclass(frozen=True)
class Form:
    """How an op is called.

    Attributes:
        make: from picks and the values that it reads: the module that holds its weights and options, or None where it
            cannot read them.
        spellings: ways to call it on (module, *values).
        reads: how many values.
    """

    make: Callable[..., nn.Module | None]
    spellings: tuple[Call, ...]
    reads: int = 1


def called(m: nn.Module, *values: Any) -> Any:
    return m(*values)


NUMBER = 0.5
"""Default of the number that every network takes besides its tensors."""


def numbered(function: Call) -> Call:
    """A way to call an op on values and the number that is an argument of forward."""

    def call(m: nn.Module, *values: Any) -> Any:
        return function(*values)

    call.numbered = True  # type: ignore[attr-defined]
    return call


FORMS: dict[str, Form] = {}


def form(name: str, *spellings: Call, reads: int = 1) -> Callable[[Any], Any]:
    """Decorator: the function makes the module of the op `name`, which may be called in these ways."""

    def register(make: Any) -> Any:
        FORMS[name] = Form(make, spellings, reads)
        return make

    return register


# ---- ops with weights


def scaled(pick: Picks, layer: nn.Module) -> nn.Module:
    """The layer as it is; with results far below zero, where functions saturate; or with large ones."""
    how = pick("plain", "plain", "plain", "saturating", "large")
    with torch.no_grad():
        if how == "saturating" and isinstance(layer.bias, Tensor):
            layer.bias.fill_(-5.0)
        elif how == "large" and isinstance(layer.weight, Tensor):
            layer.weight.mul_(100.0)
    return layer


def _conv(n: int, function: Any, module: Any) -> None:
    @form(
        f"conv{n}d",
        called,
        lambda m, x: function(x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups),
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        if x.dim() != n + 2:
            return None
        channels = x.shape[1]
        kernel, stride, dilation = pick(3, 1, 2), pick(1, 2), pick(1, 1, 2)
        padding = pick(0, 1, "same") if stride == 1 else pick(0, 1)
        mode = pick("zeros", "zeros", "circular", "replicate") if padding else "zeros"
        groups = pick(1, channels, 2 if channels % 2 == 0 else 1)
        out = channels if groups > 1 else pick(*CHANNELS)
        bias = pick(True, False)
        return scaled(pick, module(channels, out, kernel, stride, padding, dilation, groups, bias, mode))


_conv(1, F.conv1d, nn.Conv1d)
_conv(2, F.conv2d, nn.Conv2d)
_conv(3, F.conv3d, nn.Conv3d)


def _conv_transpose(n: int, function: Any, module: Any) -> None:
    @form(
        f"conv_transpose{n}d",
        called,
        lambda m, x: function(x, m.weight, m.bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation),
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        if x.dim() != n + 2:
            return None
        groups, stride, padding = pick(1, x.shape[1]), pick(1, 2), pick(0, 1)
        out = x.shape[1] if groups > 1 else pick(*CHANNELS)
        layer: nn.Module = module(
            x.shape[1], out, pick(3, 2), stride, padding, pick(0, stride - 1), groups, pick(True, False)
        )
        return layer


_conv_transpose(1, F.conv_transpose1d, nn.ConvTranspose1d)
_conv_transpose(2, F.conv_transpose2d, nn.ConvTranspose2d)
_conv_transpose(3, F.conv_transpose3d, nn.ConvTranspose3d)


@form("linear", called, lambda m, x: F.linear(x, m.weight, m.bias))
def linear(pick: Picks, x: Tensor) -> nn.Module:
    return scaled(pick, nn.Linear(x.shape[-1], pick(*CHANNELS), pick(True, False)))


def _recurrent(name: str, module: Any, *spellings: Call) -> None:
    @form(name, lambda m, x: m(x)[0], *spellings)
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        options: dict[str, Any] = {"batch_first": True, "bidirectional": pick(False, True), "bias": pick(True, False)}
        if name == "lstm":
            options["proj_size"] = pick(0, 0, 1)
        layer: nn.Module = module(x.shape[-1], pick(4, 3, 8), pick(1, 2), **options)
        return layer if x.dim() == 3 else None


_recurrent("lstm", nn.LSTM, lambda m, x: m(x)[1][0].transpose(0, 1), lambda m, x: m(x)[1][1].transpose(0, 1))
_recurrent("gru", nn.GRU, lambda m, x: m(x)[1].transpose(0, 1))
_recurrent("rnn", nn.RNN, lambda m, x: m(x)[1].transpose(0, 1))


@form(
    "batch_norm",
    called,
    lambda m, x: F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, False, 0.1, m.eps),
)
def batch_norm(pick: Picks, x: Tensor) -> nn.Module | None:
    types = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    return types[x.dim()](x.shape[1]) if x.dim() in types else None


@form("prelu", called, lambda m, x: F.prelu(x, m.weight), lambda m, x: x.prelu(m.weight))
def prelu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.PReLU(pick(1, x.shape[1]))


@form("addmm", lambda m, x: torch.addmm(m.bias, x, m.weight), lambda m, x: m.bias.addmm(x, m.weight))
def addmm(pick: Picks, x: Tensor) -> nn.Module | None:
    return Options(weight=torch.randn(x.shape[1], 4) / 2, bias=torch.randn(4)) if x.dim() == 2 else None


@form("baddbmm", lambda m, x, other: torch.baddbmm(m.bias, x, other), reads=2)
def baddbmm(pick: Picks, x: Tensor, other: Tensor) -> nn.Module | None:
    fits = x.dim() == other.dim() == 3 and (len(x), x.shape[-1]) == (len(other), other.shape[-2])
    return Options(bias=torch.randn(1)) if fits else None


@form("layer_norm", called, lambda m, x: F.layer_norm(x, m.normalized_shape, m.weight, m.bias))
def layer_norm(pick: Picks, x: Tensor) -> nn.Module:
    return nn.LayerNorm(x.shape[-1])


@form("rms_norm", called)
def rms_norm(pick: Picks, x: Tensor) -> nn.Module:
    return nn.RMSNorm(x.shape[-1])


@form("group_norm", called, lambda m, x: F.group_norm(x, m.num_groups, m.weight, m.bias))
def group_norm(pick: Picks, x: Tensor) -> nn.Module:
    return nn.GroupNorm(pick(1, 2 if x.shape[1] % 2 == 0 else 1), x.shape[1])


@form("instance_norm", called)
def instance_norm(pick: Picks, x: Tensor) -> nn.Module | None:
    """With a batch axis; or without, so that the batch stands for the channels of one sample."""
    types = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
    alone = pick(False, True) or x.dim() == 2
    n = x.dim() - (1 if alone else 2)
    fits = 1 <= n <= 3 and x.flatten(-n)[0].shape[-1] > 3  # of two numbers it gives the signs of their difference
    return types[n - 1](x.shape[0 if alone else 1]) if fits else None


@form("local_response_norm", called)
def local_response_norm(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.LocalResponseNorm(2) if x.dim() > 2 else None


# ---- pooling


def _pool(n: int, module: Any, function: Any, **extra: Any) -> None:
    @form(
        f"{'max' if 'dilation' in extra else 'avg'}_pool{n}d",
        called,
        lambda m, x: function(x, m.kernel_size, m.stride, m.padding, ceil_mode=m.ceil_mode),
        lambda m, x: function(x, (x.size(-1) + 1) // 2, stride=x.size(-1) // 2),
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        kernel, stride = pick(2, 3), pick(2, 1, None)
        layer: nn.Module = module(kernel, stride, pick(0, 1), ceil_mode=pick(False, True))
        return layer if x.dim() == n + 2 else None


_pool(1, nn.MaxPool1d, F.max_pool1d, dilation=1)
_pool(2, nn.MaxPool2d, F.max_pool2d, dilation=1)
_pool(3, nn.MaxPool3d, F.max_pool3d, dilation=1)
_pool(1, nn.AvgPool1d, F.avg_pool1d)
_pool(2, nn.AvgPool2d, F.avg_pool2d)
_pool(3, nn.AvgPool3d, F.avg_pool3d)


def _adaptive(n: int, kind: str, module: Any) -> None:
    function = getattr(F, f"adaptive_{kind}_pool{n}d")

    whole = getattr(F, f"{kind}_pool{n}d")

    @form(
        f"adaptive_{kind}_pool{n}d",
        called,
        lambda m, x: function(x, m.output_size),
        lambda m, x: function(x, [(size + 1) // 2 for size in x.shape[2:]]),
        lambda m, x: whole(x, x.size()[2:]),
        lambda m, x: whole(x, kernel_size=tuple(x.size(axis) for axis in range(2, x.dim()))),
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        layer: nn.Module = module(pick(1, 2, 4, 3))
        return layer if x.dim() == n + 2 else None


_adaptive(1, "avg", nn.AdaptiveAvgPool1d)
_adaptive(2, "avg", nn.AdaptiveAvgPool2d)
_adaptive(3, "avg", nn.AdaptiveAvgPool3d)
_adaptive(1, "max", nn.AdaptiveMaxPool1d)
_adaptive(2, "max", nn.AdaptiveMaxPool2d)
_adaptive(3, "max", nn.AdaptiveMaxPool3d)


def _reduce(name: str, *spellings: Call) -> None:
    @form(name, lambda m, x: getattr(torch, name)(x, m.dim, keepdim=m.keepdim), *spellings)
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        axes = {4: ((2, 3), 1, -1), 3: (2, 1, -1)}
        return Options(dim=pick(*axes[x.dim()]), keepdim=pick(True, False)) if x.dim() in axes else None


_reduce("mean", lambda m, x: x.mean(m.dim, m.keepdim))
_reduce("sum", lambda m, x: x.sum(m.dim, m.keepdim))
_reduce("amax", lambda m, x: x.amax(m.dim, m.keepdim))
_reduce("amin", lambda m, x: x.amin(m.dim, m.keepdim))


# ---- activations with options


@form(
    "hardtanh",
    called,
    lambda m, x: x.clamp(m.min_val, m.max_val),
    lambda m, x: torch.clamp(x, m.min_val, m.max_val),
    numbered(lambda x, number: F.hardtanh(x, -number, 2 * number)),
)
def hardtanh(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Hardtanh(*pick((-1.0, 1.0), (0.0, 2.0), (-0.5, 0.75), (0.25, 2.0)))


@form("leaky_relu", called, lambda m, x: F.leaky_relu(x, m.negative_slope), numbered(F.leaky_relu))
def leaky_relu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.LeakyReLU(pick(0.01, 0.25))


@form("gelu", called, lambda m, x: F.gelu(x, approximate=m.approximate))
def gelu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.GELU(pick("none", "tanh"))


@form("threshold", called)
def threshold(pick: Picks, x: Tensor) -> nn.Module:
    value = pick(0.1, -0.5)
    return nn.Threshold(value, value)


@form("pow", lambda m, x: x**m.exponent, lambda m, x: x.pow(m.exponent))
def pow_(pick: Picks, x: Tensor) -> nn.Module:
    return Options(exponent=pick(2, 3))


def _along(name: str, module: Any) -> None:
    @form(name, called)
    def make(pick: Picks, x: Tensor) -> nn.Module:
        layer: nn.Module = module(dim=pick(-1, 1))
        return layer


_along("softmax", nn.Softmax)
_along("log_softmax", nn.LogSoftmax)
_along("softmin", nn.Softmin)


@form("cumsum", lambda m, x: x.cumsum(m.dim), lambda m, x: torch.cumsum(x, dim=m.dim))
def cumsum(pick: Picks, x: Tensor) -> nn.Module:
    return Options(dim=pick(1, -1))


# ---- several values


@form(
    "where",
    lambda m, x, y: torch.where(m.mask, x, y),
    lambda m, x, y: x.where(m.mask, y),
    lambda m, x, y: torch.where(m.mask, x, m.value),
    lambda m, x, y: torch.where(m.mask, x, torch.full_like(x, m.value)),
    reads=2,
)
def where(pick: Picks, x: Tensor, y: Tensor) -> nn.Module | None:
    return Options(mask=torch.rand(x.shape[1:]) > 0.5, value=pick(*FILLS)) if x.shape == y.shape else None


@form(
    "masked_fill",
    lambda m, x: x.masked_fill(m.mask, m.value),
    lambda m, x: torch.masked_fill(x, m.mask, torch.tensor(m.value)),
)
def masked_fill(pick: Picks, x: Tensor) -> nn.Module:
    return Options(mask=torch.rand(x.shape[1:]) > 0.5, value=pick(0.0, 0.5, *FILLS))


@form("einsum", lambda m, x, y: torch.einsum("bij,bkj->bik", x, y), reads=2)
def einsum(pick: Picks, x: Tensor, y: Tensor) -> nn.Module | None:
    return Options() if x.dim() == y.dim() == 3 else None


@form("scaled_dot_product_attention", lambda m, *xs: F.scaled_dot_product_attention(*xs), reads=3)
def scaled_dot_product_attention(pick: Picks, *xs: Tensor) -> nn.Module | None:
    return Options() if xs[0].dim() in (3, 4) and all(x.shape == xs[0].shape for x in xs) else None


@form("stack", lambda m, *xs: torch.stack(xs, 1), lambda m, *xs: torch.stack(list(xs), dim=2), reads=2)
def stack(pick: Picks, *xs: Tensor) -> nn.Module | None:
    return Options() if xs[0].dim() in (2, 3) and xs[0].shape == xs[1].shape else None


@form("expand_as", lambda m, x, y: x.expand_as(y), reads=2)
def expand_as(pick: Picks, x: Tensor, y: Tensor) -> nn.Module | None:
    return Options() if x.dim() == y.dim() else None


@form("reshape_as", lambda m, x, y: x.reshape_as(y), reads=2)
def reshape_as(pick: Picks, x: Tensor, y: Tensor) -> nn.Module | None:
    return Options() if x.shape == y.shape else None


# ---- data movement


def _filled(m: nn.Module, x: Tensor) -> Tensor:
    return x.new_full((x.shape[0], 1, *x.shape[2:]), m.value)


@form(
    "cat",
    lambda m, *xs: torch.cat(xs, 1),
    lambda m, *xs: torch.concat(list(xs), dim=m.dim),
    lambda m, *xs: torch.cat([*xs, _filled(m, xs[0])], 1),
    reads=3,
)
def cat(pick: Picks, *xs: Tensor) -> nn.Module | None:
    same = xs[0].dim() > 1 and all(x.dim() == xs[0].dim() and x.shape[2:] == xs[0].shape[2:] for x in xs)
    return Options(dim=1, value=pick(*FILLS)) if same and sum(x.shape[1] for x in xs) <= 64 else None


@form("flatten", lambda m, x: x.flatten(1), lambda m, x: torch.flatten(x, 1), called)
def flatten(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Flatten()


@form(
    "reshape",
    *(lambda m, x: x.reshape(-1, *m.sizes), lambda m, x: torch.reshape(x, (-1, *m.sizes))),
    *(lambda m, x: x.reshape(x.shape[0], *m.sizes), lambda m, x: x.reshape(x.size(0), *m.sizes)),
)
def reshape(pick: Picks, x: Tensor) -> nn.Module | None:
    shapes = {
        4: ((x.shape[1], x[0, 0].numel()),),
        3: ((x.shape[1], 1, x.shape[-1]), (x[0].numel(),)),
        2: ((1, x.shape[-1]), (x.shape[-1], 1, 1)),
    }
    return Options(sizes=pick(*shapes[x.dim()])) if x.dim() in shapes else None


@form("permute", lambda m, x: x.permute(m.dims), lambda m, x: torch.permute(x, m.dims))
def permute(pick: Picks, x: Tensor) -> nn.Module | None:
    dims = {4: ((0, 2, 3, 1), (0, 3, 1, 2), (0, 1, 3, 2)), 3: ((0, 2, 1),)}
    return Options(dims=pick(*dims[x.dim()])) if x.dim() in dims else None


@form("transpose", lambda m, x: x.transpose(1, 2), lambda m, x: torch.transpose(x, 1, 2))
def transpose(pick: Picks, x: Tensor) -> nn.Module | None:
    return Options() if x.dim() > 2 else None


@form("pixel_shuffle", called, lambda m, x: F.pixel_shuffle(x, m.upscale_factor))
def pixel_shuffle(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.PixelShuffle(2) if x.dim() == 4 and x.shape[1] % 4 == 0 else None


@form(
    "pad",
    lambda m, x: F.pad(x, m.sides, m.mode, m.value),
    lambda m, x: F.pad(x, (0, x.size(-1) // 2)),
    numbered(lambda x, number: F.pad(x, (1, 2), value=number)),
)
def pad(pick: Picks, x: Tensor) -> nn.Module | None:
    mode = pick("constant", "reflect", "replicate", "circular")
    sides = pick((1, 1), (1, 2), (0, 1)) + (pick((1, 1), (0, 0), (2, 1)) if x.dim() == 4 else ())
    value = pick(None, 0.5, -1.0, *FILLS) if mode == "constant" else None
    return Options(mode=mode, sides=sides, value=value) if x.dim() > 2 else None


@form(
    "interpolate",
    called,
    lambda m, x: F.interpolate(x, m.size, m.scale_factor, m.mode),
    lambda m, x: F.interpolate(x, size=[2 * size for size in x.shape[2:]], mode=m.mode),
    numbered(lambda x, number: F.interpolate(x, scale_factor=3 * number)),
)
def interpolate(pick: Picks, x: Tensor) -> nn.Module | None:
    how = pick({"scale_factor": 2.0}, {"size": (5, 5)})
    return nn.Upsample(**how, mode=pick("nearest", "nearest-exact", "bilinear")) if x.dim() == 4 else None


@form("dropout", called, lambda m, x: F.dropout(x, m.p, training=False))
def dropout(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Dropout(0.3)


@form("pixel_unshuffle", called, lambda m, x: F.pixel_unshuffle(x, m.downscale_factor))
def pixel_unshuffle(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.PixelUnshuffle(2) if x.dim() == 4 else None


@form("channel_shuffle", called)
def channel_shuffle(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.ChannelShuffle(2) if x.dim() > 2 and x.shape[1] % 2 == 0 else None


@form("unfold", called)
def unfold(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.Unfold(pick(2, 3)) if x.dim() == 4 else None


@form("fold", called)
def fold(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.Fold((2, x.shape[2] + 1), 2) if x.dim() == 3 and x.shape[1] % 4 == 0 else None


@form("getitem", lambda m, x: x[m.index])
def getitem(pick: Picks, x: Tensor) -> nn.Module | None:
    every = slice(None)
    return Options(index=(every, *pick((slice(1, None),), (0,), (slice(None, None, 2),), (..., slice(0, 2)))))


def _pieces(name: str, argument: Callable[[int], Any]) -> None:
    @form(
        name,
        lambda m, x: getattr(x, name)(m.how, m.dim)[m.piece],
        lambda m, x: getattr(torch, name)(x, m.how, dim=m.dim)[m.piece],
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        has_channels = x.dim() > 1 and x.shape[1] > 1
        return Options(how=argument(x.shape[1]), piece=pick(0, 1), dim=1) if has_channels else None


_pieces("chunk", lambda size: 2)
_pieces("split", lambda size: [1, size - 1])
_pieces("tensor_split", lambda size: 2)


@form("index_select", lambda m, x: torch.index_select(x, 1, m.index), lambda m, x: x.index_select(1, m.index))
def index_select(pick: Picks, x: Tensor) -> nn.Module | None:
    return Options(index=torch.tensor(pick([0], [0, 0], list(range(x.shape[1]))[::-1]))) if x.dim() > 1 else None


def _moved(name: str, *spellings: Call) -> None:
    @form(name, *spellings)
    def make(pick: Picks, x: Tensor) -> nn.Module:
        return Options()


_moved("flip", lambda m, x: x.flip(1), lambda m, x: torch.flip(x, (-1,)))
_moved("roll", lambda m, x: x.roll(1, 1), lambda m, x: torch.roll(x, 2, dims=-1))
_moved("repeat", lambda m, x: x.repeat(1, 2, *[1] * (x.dim() - 2)))
_moved("repeat_interleave", lambda m, x: x.repeat_interleave(2, 1), lambda m, x: torch.repeat_interleave(x, 2, dim=-1))
_moved("unflatten", lambda m, x: x.unflatten(-1, (-1, 1)), lambda m, x: torch.unflatten(x, 1, (1, -1)))
_moved("unsqueeze", lambda m, x: x.unsqueeze(1), lambda m, x: torch.unsqueeze(x, -1))
_moved("expand", lambda m, x: x.expand(-1, 3, *[-1] * (x.dim() - 2)))


# ---- rows that need no entry


def _broadcast(pick: Picks, *values: Tensor) -> nn.Module | None:
    """Values of one shape, or the second broadcast over the first."""
    wide = values[0].shape
    fits = all(v.dim() == len(wide) and all(a in (b, 1) for a, b in zip(v.shape, wide, strict=True)) for v in values)
    return Options() if fits else None


def _product(pick: Picks, x: Tensor, other: Tensor) -> nn.Module | None:
    return Options() if x.dim() == other.dim() > 2 and x.shape[-1] == other.shape[-2] else None


_FITTING = {"matmul": _product}


def _plain_calls(name: str) -> Iterator[Call]:
    """The spellings of a row that can be called with its tensors alone. Those that work in place end in `_`."""
    op = OPS[name]
    probe = [torch.linspace(-2, 2, 16).view(1, 4, 4)] * len(op.tensors)
    for target in (s.target for s in op.spellings):
        label = target if isinstance(target, str) else target.__name__
        if label.partition(".")[0].endswith("_") or label in ("iadd", "imul", "isub", "itruediv"):
            continue
        if isinstance(target, str):
            call = lambda m, x, *others, target=target: getattr(x, target)(*others)  # noqa: E731
        elif isinstance(target, type):
            call = lambda m, *values, target=target: m.get_submodule(target.__name__)(*values)  # noqa: E731
        else:
            call = lambda m, *values, target=target: target(*values)  # noqa: E731
        try:
            torch.testing.assert_close(call(_modules_of(name), *probe), op.target(*probe), equal_nan=True)
        except (TypeError, RuntimeError, AttributeError, AssertionError):
            continue
        yield call


def _modules_of(name: str) -> nn.Module:
    """A module with one of each type that spells the row and needs no argument."""
    holder = Options()
    for target in (s.target for s in OPS[name].spellings):
        if isinstance(target, type):
            holder.add_module(target.__name__, target())
    return holder


def _derived_form(name: str) -> Form | None:
    """How a row is called that takes tensors alone; None for any other."""
    op = OPS[name]
    if set(op.tensors) != set(op.traits.inputs) or op.tensors == ("xs",):
        return None
    try:
        op.target(*[torch.ones(1, 4, 4)] * len(op.tensors))
    except (TypeError, RuntimeError):
        return None
    spellings = tuple(_plain_calls(name))
    make = _FITTING.get(name, _broadcast) if len(op.tensors) > 1 else lambda pick, x: _modules_of(name)
    return Form(make, spellings, len(op.tensors)) if spellings else None


def _bounded(plain: Form) -> Form:
    """The form, drawn only where the last value that it reads stays away from zero."""

    def make(pick: Picks, *xs: Tensor) -> nn.Module | None:
        near = float(xs[-1].min()) < 0.1 * float(xs[-1].max())
        return None if near else plain.make(pick, *xs)

    return Form(make, plain.spellings, plain.reads)


def _derive() -> None:
    for op in ops_of_fxq():
        derived = None if op.name in FORMS or op.name in NOT_DRAWN else _derived_form(op.name)
        if derived is not None:
            FORMS[op.name] = _bounded(derived) if op.name in UNBOUNDED else derived


_derive()
