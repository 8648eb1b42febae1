"""Random networks of table ops: what `tests/test_fuzz.py` quantizes.

A network is drawn as a list of `Step`s, each a few small numbers. Any list of numbers is a network: a number picks from
what is possible at its place, and a step that fits nowhere is left out. So hypothesis can delete steps and lower numbers
as it likes, and what it finds is small.

`FORMS` says how a call of each op is made. A row of the table that takes tensors alone needs no entry: it is called in
all of its spellings. `NOT_DRAWN` lists the rows that are never drawn, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.backends.cpu import has_vnni
from fxq.ops import OPS
from tests.models import settled

MOST_ELEMENTS = 4 * 4096
CHANNELS = (4, 3, 8, 1, 6, 12)
INPUTS = {"image": (4, 3, 8, 8), "sequence": (4, 3, 16), "rows": (4, 6)}
STEPS = 255 if has_vnni() else 127

NOT_DRAWN = {
    "quantize": "made by fxq only",
    "dequantize": "made by fxq only",
    "dequantize_channel": "made by fxq only",
    "requantize": "made by fxq only",
}


@dataclass(frozen=True)
class Step:
    """One call, as numbers: the op, the values that it reads, its options, its spelling, and whom it shares with."""

    op: str
    reads: tuple[int, ...] = (0, 0, 0)
    options: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    spelling: int = 0
    shares: int = 0


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
        self.__dict__.update(options)


Call = Callable[..., Any]


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


FORMS: dict[str, Form] = {}


def form(name: str, *spellings: Call, reads: int = 1) -> Callable[[Any], Any]:
    """Decorator: the function makes the module of the op `name`, which may be called in these ways."""

    def register(make: Any) -> Any:
        FORMS[name] = Form(make, spellings, reads)
        return make

    return register


# ---- ops with weights


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
        made: nn.Module = module(channels, out, kernel, stride, padding, dilation, groups, bias, mode)
        return made


_conv(1, F.conv1d, nn.Conv1d)
_conv(2, F.conv2d, nn.Conv2d)


@form(
    "conv_transpose2d",
    called,
    lambda m, x: F.conv_transpose2d(x, m.weight, m.bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation),
)
def conv_transpose2d(pick: Picks, x: Tensor) -> nn.Module | None:
    if x.dim() != 4:
        return None
    groups, stride, padding = pick(1, x.shape[1]), pick(1, 2), pick(0, 1)
    out = x.shape[1] if groups > 1 else pick(*CHANNELS)
    return nn.ConvTranspose2d(x.shape[1], out, pick(3, 2), stride, padding, pick(0, stride - 1), groups, pick(True, False))


@form("linear", called, lambda m, x: F.linear(x, m.weight, m.bias))
def linear(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Linear(x.shape[-1], pick(*CHANNELS), pick(True, False))


@form(
    "batch_norm",
    called,
    lambda m, x: F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, False, 0.1, m.eps),
)
def batch_norm(pick: Picks, x: Tensor) -> nn.Module | None:
    types = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    return types[x.dim()](x.shape[1]) if x.dim() in types else None


@form("prelu", called, lambda m, x: F.prelu(x, m.weight), lambda m, x: x.prelu(m.weight))
def prelu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.PReLU(pick(1, x.shape[1]))


# ---- pooling


def _pool(n: int, module: Any, function: Any, **extra: Any) -> None:
    @form(
        f"{'max' if 'dilation' in extra else 'avg'}_pool{n}d",
        called,
        lambda m, x: function(x, m.kernel_size, m.stride, m.padding, ceil_mode=m.ceil_mode),
    )
    def make(pick: Picks, x: Tensor) -> nn.Module | None:
        kernel, stride = pick(2, 3), pick(2, 1, None)
        made: nn.Module = module(kernel, stride, pick(0, 1), ceil_mode=pick(False, True))
        return made if x.dim() == n + 2 else None


_pool(1, nn.MaxPool1d, F.max_pool1d, dilation=1)
_pool(2, nn.MaxPool2d, F.max_pool2d, dilation=1)
_pool(1, nn.AvgPool1d, F.avg_pool1d)
_pool(2, nn.AvgPool2d, F.avg_pool2d)


@form("adaptive_avg_pool2d", called, lambda m, x: F.adaptive_avg_pool2d(x, m.output_size))
def adaptive_avg_pool2d(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.AdaptiveAvgPool2d(pick(1, 2, 4, 3)) if x.dim() == 4 else None


@form("adaptive_max_pool2d", called, lambda m, x: F.adaptive_max_pool2d(x, m.output_size))
def adaptive_max_pool2d(pick: Picks, x: Tensor) -> nn.Module | None:
    return nn.AdaptiveMaxPool2d(pick(1, 2, 4, 3)) if x.dim() == 4 else None


@form("mean", lambda m, x: x.mean(m.dim, m.keepdim), lambda m, x: torch.mean(x, m.dim, keepdim=m.keepdim))
def mean(pick: Picks, x: Tensor) -> nn.Module | None:
    axes = {4: ((2, 3), 1, -1), 3: (2, 1, -1)}
    return Options(dim=pick(*axes[x.dim()]), keepdim=pick(True, False)) if x.dim() in axes else None


# ---- activations with options


@form("hardtanh", called, lambda m, x: x.clamp(m.min_val, m.max_val), lambda m, x: torch.clamp(x, m.min_val, m.max_val))
def hardtanh(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Hardtanh(*pick((-1.0, 1.0), (0.0, 2.0), (-0.5, 0.75), (0.25, 2.0)))


@form("leaky_relu", called, lambda m, x: F.leaky_relu(x, m.negative_slope))
def leaky_relu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.LeakyReLU(pick(0.01, 0.25))


@form("gelu", called, lambda m, x: F.gelu(x, approximate=m.approximate))
def gelu(pick: Picks, x: Tensor) -> nn.Module:
    return nn.GELU(pick("none", "tanh"))


# ---- data movement


@form("cat", lambda m, *xs: torch.cat(xs, 1), lambda m, *xs: torch.concat(list(xs), dim=m.dim), reads=3)
def cat(pick: Picks, *xs: Tensor) -> nn.Module | None:
    same = all(x.dim() == xs[0].dim() and x.shape[2:] == xs[0].shape[2:] for x in xs)
    return Options(dim=1) if same and sum(x.shape[1] for x in xs) <= 64 else None


@form("flatten", lambda m, x: x.flatten(1), lambda m, x: torch.flatten(x, 1), called)
def flatten(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Flatten()


@form("reshape", lambda m, x: x.reshape(-1, *m.sizes), lambda m, x: torch.reshape(x, (-1, *m.sizes)))
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


@form("pad", lambda m, x: F.pad(x, m.sides, m.mode, m.value))
def pad(pick: Picks, x: Tensor) -> nn.Module | None:
    mode = pick("constant", "reflect", "replicate", "circular")
    sides = pick((1, 1), (1, 2), (0, 1)) + (pick((1, 1), (0, 0), (2, 1)) if x.dim() == 4 else ())
    value = pick(None, 0.5, -1.0) if mode == "constant" else None
    return Options(mode=mode, sides=sides, value=value) if x.dim() > 2 else None


@form("interpolate", called, lambda m, x: F.interpolate(x, m.size, m.scale_factor, m.mode))
def interpolate(pick: Picks, x: Tensor) -> nn.Module | None:
    how = pick({"scale_factor": 2.0}, {"size": (5, 5)})
    return nn.Upsample(**how, mode=pick("nearest", "nearest-exact", "bilinear")) if x.dim() == 4 else None


@form("dropout", called, lambda m, x: F.dropout(x, m.p, training=False))
def dropout(pick: Picks, x: Tensor) -> nn.Module:
    return nn.Dropout(0.3)


# ---- rows that need no entry


def _broadcast(pick: Picks, *values: Tensor) -> nn.Module | None:
    """Values of one shape, or the second broadcast over the first."""
    wide = values[0].shape
    fits = all(v.dim() == len(wide) and all(a in (b, 1) for a, b in zip(v.shape, wide, strict=True)) for v in values)
    return Options() if fits else None


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
            torch.testing.assert_close(call(_modules_of(name), *probe), op.target(*probe))
        except (TypeError, RuntimeError, AttributeError):
            continue
        yield call


def _modules_of(name: str) -> nn.Module:
    """A module with one of each type that spells the row and needs no argument."""
    holder = Options()
    for target in (s.target for s in OPS[name].spellings):
        if isinstance(target, type):
            holder.add_module(target.__name__, target())
    return holder


def _derived() -> Iterator[tuple[str, Form]]:
    for op in OPS:
        names = set(op.quant.inputs)
        if op.name in FORMS or op.name in NOT_DRAWN or set(op.tensors) != names or op.tensors == ("xs",):
            continue
        try:
            op.target(*[torch.ones(1, 4, 4)] * len(op.tensors))
            spellings = tuple(_plain_calls(op.name))
        except (TypeError, RuntimeError):
            continue
        if spellings:
            make = _broadcast if len(op.tensors) > 1 else lambda pick, x, name=op.name: _modules_of(name)
            yield op.name, Form(make, spellings, len(op.tensors))


FORMS.update(dict(_derived()))


# ---- networks


@dataclass(frozen=True)
class Line:
    """One call of a network: the op, the part that holds its weights, the way to call it, and the values it reads."""

    op: str
    part: int
    call: Call
    reads: tuple[int, ...]


class Network(nn.Module):
    """Calls its lines in order. Value 0 is the first input; every line adds one.

    Attributes:
        lines: the calls.
        outputs: numbers of the values that it returns: one alone, several as a tuple or, `named`, as a dict.
    """

    def __init__(self, lines: Sequence[Line], parts: Sequence[nn.Module], outputs: Sequence[int], named: bool) -> None:
        super().__init__()
        self.lines, self.outputs, self.named = tuple(lines), tuple(outputs), named
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.run([x])

    def run(self, values: list[Any]) -> Any:
        for line in self.lines:
            values.append(line.call(self.parts[line.part], *[values[i] for i in line.reads]))
        if len(self.outputs) == 1:
            return values[self.outputs[0]]
        found = tuple(values[i] for i in self.outputs)
        return {f"y{i}": value for i, value in enumerate(found)} if self.named else found


class TwoInputs(Network):
    """The same, of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.run([x, y])


@dataclass(frozen=True)
class Plan:
    """A network as it is drawn."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    seed: int = 0
    named: bool = False

    def build(self) -> tuple[Network, tuple[Tensor, ...]]:
        """The network in eval mode, and a batch of its inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = tuple(torch.randn(INPUTS[name], generator=generator) for name in self.inputs)
        network = settled(lambda: _assemble(self, batch), self.seed)
        assert isinstance(network, Network)
        return network, batch


def _assemble(plan: Plan, batch: tuple[Tensor, ...]) -> Network:
    values: list[Tensor] = list(batch)
    lines: list[Line] = []
    parts: list[nn.Module] = []
    for step in plan.steps:
        line = _line(step, values, lines, parts)
        if line is None:
            continue
        with torch.no_grad():
            value = line.call(parts[line.part].eval(), *[values[i] for i in line.reads])
        lines.append(line)
        values.append(value)
    read = {i for line in lines for i in line.reads}
    outputs = [i for i in range(len(values)) if i not in read and i >= len(batch)] or [len(values) - 1]
    kind = TwoInputs if len(batch) > 1 else Network
    return kind(lines, parts, outputs, plan.named)


def _line(step: Step, values: list[Tensor], lines: list[Line], parts: list[nn.Module]) -> Line | None:
    """The call that a step stands for, or None where it fits no values. Numbers count from the latest value on."""
    made = FORMS[step.op]
    call = made.spellings[step.spelling % len(made.spellings)]
    recent = [len(values) - 1 - i for i in range(len(values))]
    firsts = recent[step.reads[0] % len(recent) :] + recent[: step.reads[0] % len(recent)]
    for first in firsts:
        near = [i for i in recent if values[i].shape[2:] == values[first].shape[2:] and values[i].dim() == values[first].dim()]
        reads = (first, *(near[n % len(near)] for n in step.reads[1 : made.reads]))
        read = [values[i] for i in reads]
        known = [line.part for line in lines if line.op == step.op]
        if step.shares and known:
            part = known[step.shares % len(known)]
            if _fits(call, parts[part], read):
                return Line(step.op, part, call, reads)
        module = made.make(Picks(step.options), *read)
        if module is not None and _fits(call, module, read):
            if step.shares == 2 and known and _same_weight(module, parts[known[-1]]):
                module.weight = parts[known[-1]].weight
            parts.append(module)
            return Line(step.op, len(parts) - 1, call, reads)
    return None


def _same_weight(a: nn.Module, b: nn.Module) -> bool:
    weights = getattr(a, "weight", None), getattr(b, "weight", None)
    return all(isinstance(w, nn.Parameter) for w in weights) and weights[0].shape == weights[1].shape  # type: ignore


def _fits(call: Call, module: nn.Module, read: Sequence[Tensor]) -> bool:
    """Whether the call runs and gives a value of a reasonable size."""
    try:
        with torch.no_grad():
            value = call(module.eval(), *read)
    except (RuntimeError, ValueError, NotImplementedError, IndexError):
        return False
    sane = isinstance(value, Tensor) and value.dtype == torch.float32 and 0 < value.numel() <= MOST_ELEMENTS
    return sane and value.shape[0] == read[0].shape[0] and bool(value.abs().max() < 1e3)


# ---- what quantization may cost


def noisy(network: Network, batch: Sequence[Tensor], seed: int) -> Any:
    """What the network gives when every value and every weight is off by up to half a step of its own grid.

    The model of quantization as noise, which knows nothing of fxq. Source: Krishnamoorthi 2018, section 3.
    """
    generator = torch.Generator().manual_seed(seed)

    def off(value: Tensor, width: Tensor) -> Tensor:
        return value + (torch.rand(value.shape, generator=generator) - 0.5) * width

    def rounded(m: nn.Module, *values: Tensor, call: Call) -> Tensor:
        value = call(m, *values)
        return off(value, (value.max().clamp(min=0) - value.min().clamp(max=0)) / STEPS)

    kept = {name: p.detach().clone() for name, p in network.named_parameters()}
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(off(p, p.abs().max() / 127) if p.dim() > 1 else p)
        lines = [Line(n.op, n.part, _partial(rounded, n.call), n.reads) for n in network.lines]
        other = type(network)(lines, list(network.parts), network.outputs, network.named).eval()
        result = other(*[off(x, (x.max() - x.min()) / STEPS) for x in batch])
        for name, p in network.named_parameters():
            p.copy_(kept[name])
    return result


def _partial(function: Any, call: Call) -> Call:
    return lambda m, *values: function(m, *values, call=call)
