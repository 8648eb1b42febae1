"""Random networks of table ops: what `tests/test_fuzz.py` quantizes.

A network is drawn as a list of `Step`s, each a few small numbers. Any list of numbers is a network: a number picks from
what is possible at its place, and a step that fits nowhere is left out. So hypothesis can delete steps and lower
numbers as it likes, and what it finds is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fuzz_forms import FILLS, FORMS, NUMBER, Call, Picks
from tests.support.machine import QMAX
from tests.support.models import settled

MAX_ELEMENTS = 4 * 4096
INPUTS = {"image": (4, 3, 8, 8), "sequence": (4, 3, 16), "rows": (4, 6), "volume": (4, 2, 4, 4, 4)}


@dataclass(frozen=True)
class Step:
    """One call, as numbers: the op, the values that it reads, its options, its spelling, the call it shares with."""

    op: str
    reads: tuple[int, ...] = (0, 0, 0)
    options: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    spelling: int = 0
    shares: int = 0


@dataclass(frozen=True)
class Line:
    """One call of a network: the op, the part that holds its weights, the way to call it, and the values it reads."""

    op: str
    part: int
    call: Call
    reads: tuple[int, ...]

    def run(self, parts: Sequence[nn.Module], values: Sequence[Any], number: Any) -> Any:
        """The value of the call, of a number among other things where it is so spelled."""
        read = [values[i] for i in self.reads]
        return self.call(parts[self.part], *with_number(self.call, read, number))


def with_number(call: Call, read: Sequence[Any], number: Any) -> tuple[Any, ...]:
    return (*read, number) if getattr(call, "numbered", False) else tuple(read)


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

    def forward(self, x: Tensor, number: float = NUMBER) -> Any:
        return self.run([x], number)

    def run(self, values: list[Any], number: float) -> Any:
        for line in self.lines:
            values.append(line.run(self.parts, values, number))
        if len(self.outputs) == 1:
            return values[self.outputs[0]]
        results = tuple(values[i] for i in self.outputs)
        return {f"y{i}": value for i, value in enumerate(results)} if self.named else results


class TwoInputs(Network):
    """Network of two inputs."""

    def forward(self, x: Tensor, y: Tensor, number: float = NUMBER) -> Any:  # type: ignore[override]
        return self.run([x, y], number)


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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return _assemble(self, batch), batch


def _assemble(plan: Plan, batch: tuple[Tensor, ...]) -> Network:
    values: list[Tensor] = list(batch)
    lines: list[Line] = []
    parts: list[nn.Module] = []
    for step in plan.steps:
        line = _line(step, values, lines, parts)
        if line is None:
            continue
        with torch.no_grad():
            value = line.run(parts, values, NUMBER)
        lines.append(line)
        values.append(value)
    read = {i for line in lines for i in line.reads}
    outputs = [i for i in range(len(values)) if i not in read and i >= len(batch)] or [len(values) - 1]
    kind = TwoInputs if len(batch) > 1 else Network
    return kind(lines, parts, outputs, plan.named).eval()


def _line(step: Step, values: list[Tensor], lines: list[Line], parts: list[nn.Module]) -> Line | None:
    """The call that a step stands for, or None where it fits no values. Numbers count from the latest value on."""
    form = FORMS[step.op]
    call = form.spellings[step.spelling % len(form.spellings)]
    recent = [len(values) - 1 - i for i in range(len(values))]
    firsts = recent[step.reads[0] % len(recent) :] + recent[: step.reads[0] % len(recent)]
    for first in firsts:
        near = [
            i
            for i in recent
            if values[i].shape[2:] == values[first].shape[2:] and values[i].dim() == values[first].dim()
        ]
        reads = (first, *(near[n % len(near)] for n in step.reads[1 : form.reads]))
        read = [values[i] for i in reads]
        same_op_parts = [line.part for line in lines if line.op == step.op]
        if step.shares and same_op_parts:
            part = same_op_parts[step.shares % len(same_op_parts)]
            if _fits(call, parts[part], read):
                return Line(step.op, part, call, reads)
        drawn = form.make(Picks(step.options), *read)
        module = settled(lambda drawn=drawn: drawn, len(parts)) if drawn is not None else None
        if module is not None and _fits(call, module, read):
            if step.shares == 2 and same_op_parts and _same_weight(module, parts[same_op_parts[-1]]):
                module.weight = parts[same_op_parts[-1]].weight
            parts.append(module)
            return Line(step.op, len(parts) - 1, call, reads)
    return None


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two values may well be read together: their shapes differ in the channels at most."""
    return a.dim() == b.dim() and a.shape[2:] == b.shape[2:]


def _same_weight(a: nn.Module, b: nn.Module) -> bool:
    weights = getattr(a, "weight", None), getattr(b, "weight", None)
    return all(isinstance(w, nn.Parameter) for w in weights) and weights[0].shape == weights[1].shape  # type: ignore


def _fits(call: Call, module: nn.Module, read: Sequence[Tensor]) -> bool:
    """Whether the call runs and gives a value of a reasonable size."""
    try:
        with torch.no_grad():
            value = call(module, *with_number(call, read, NUMBER))
    except (RuntimeError, ValueError, NotImplementedError, IndexError):
        return False
    sane = isinstance(value, Tensor) and value.dtype == torch.float32 and 0 < value.numel() <= MAX_ELEMENTS
    if not sane or value.shape[0] != read[0].shape[0]:
        return False
    data = value[is_data(value)]
    return data.numel() > 0 and bool(data.abs().max() < 1e3)


def is_data(value: Tensor) -> Tensor:
    """Which elements are none of the constants that masks, pads and fills bring in."""
    return ~torch.isin(value, torch.tensor(FILLS))


# ---- what quantization may cost


def noisy(network: Network, batch: Sequence[Tensor], seed: int) -> Any:
    """Outputs of the network when every value and every weight is off by up to half a step of its own grid.

    Models quantization as noise, independently of fxq. Constants of masks, pads and fills are exact and widen no grid.
    Source: Krishnamoorthi 2018, section 3.
    """
    generator = torch.Generator().manual_seed(seed)

    def off(value: Tensor, width: Tensor) -> Tensor:
        return value + (torch.rand(value.shape, generator=generator) - 0.5) * width

    def rounded(m: nn.Module, *values: Tensor, call: Call) -> Tensor:
        value = call(m, *values)
        data = torch.where(is_data(value), value, 0.0)
        width = (data.max().clamp(min=0) - data.min().clamp(max=0)) / QMAX
        return torch.where(is_data(value), off(value, width), value)

    kept = {name: p.detach().clone() for name, p in network.named_parameters()}
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(off(p, p.abs().max() / 127) if p.dim() > 1 else p)
        lines = [Line(n.op, n.part, _partial(rounded, n.call), n.reads) for n in network.lines]
        changed = type(network)(lines, list(network.parts), network.outputs, network.named).eval()
        result = changed(*[off(x, (x.max() - x.min()) / QMAX) for x in batch])
        for name, p in network.named_parameters():
            p.copy_(kept[name])
    return result


def _partial(function: Any, call: Call) -> Call:
    def other(m: nn.Module, *values: Any) -> Any:
        return function(m, *values, call=call)

    other.numbered = getattr(call, "numbered", False)  # type: ignore[attr-defined]
    return other
