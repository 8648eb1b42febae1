"""Random programs that change tensors and keep state: the vocabulary of `tests/test_fuzz_programs.py`.

`tests/support/fuzz.py` draws networks of table ops, each of which gives a new value. Here a forward is written as
users write it: it clones a value and changes the clone in place, fills a tensor that it has just made, assigns to
parts, keeps a running value in a buffer, a list or an attribute, calls a scripted part, and takes, changes and returns
containers. A program is drawn as a list of `Statement`s; a number picks from what is possible, so any list of numbers
is a program and hypothesis can shorten it. All values have one shape, (samples, ROWS, WIDTH), so every statement fits
everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.fuzz_containers import OUTPUTS, StatePlan
from tests.support.fuzz_memories import MEMORIES, ROWS, WIDTH, Memory, reset_shared_state

LAYERS = ("linear", "conv", "relu_conv", "gated", "norm", "scripted", "wide")
"""Statements that compute a value with weights of their own."""

OWN_STATES = (
    "running max", "first mean", "by size", "sizes", "every eighth", "bytes", "c array", "object array", "int tensor",
    "iterator", "cycle", "on tensor", "partial", "on list", "method", "script state",
)  # fmt: skip
SHARED_STATES = ("function attribute", "global iterator", "generator", "thread local", "default")
STATES = ("buffer", "attribute", "list", "dict", "deque", "counter", *OWN_STATES, *SHARED_STATES)
"""Statements that keep something from one call to the next; all but buffers are no tensors of the module.

Those of `SHARED_STATES` keep it where all models have it, or where it cannot be copied.
"""


@dataclass(frozen=True)
class Statement:
    """One statement of a program: its kind, the values that it reads, and numbers that pick its options."""

    kind: str
    reads: tuple[int, int] = (0, 0)
    options: tuple[int, ...] = (0, 0, 0, 0)

    def pick(self, place: int, choices: Any) -> Any:
        return choices[self.options[place] % len(choices)]


# ---- tensors made in forward


def _per_sample(x: Tensor) -> Tensor:
    return torch.arange(WIDTH, dtype=torch.float32).expand(x.shape[0], ROWS, WIDTH).clone()


FRESH: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "computed": lambda x: x * 1.0,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 0.25),
    "zeros": lambda x: torch.zeros(x.shape[0], ROWS, WIDTH),
    "full": lambda x: torch.full((x.shape[0], ROWS, WIDTH), 0.5),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_full": lambda x: x.new_full(x.size(), -0.5),
    "empty": lambda x: torch.empty_like(x).fill_(0.125),
    "arange": _per_sample,
    "cat": lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
}
"""Ways to make a tensor that only this call holds."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "rows": lambda t: t[:, :2],
    "step": lambda t: t[..., ::2],
    "row": lambda t: t[:, 1],
    "last": lambda t: t[..., -1],
    "nested": lambda t: t[:, 1:][:, :3, 2:],
    "transposed": lambda t: t.transpose(1, 2)[:, 1:5],
    "view": lambda t: t.view(-1, WIDTH)[:, :4],
    "unbind": lambda t: t.unbind(1)[2],
    "chunk": lambda t: t.chunk(2, -1)[1],
    "select": lambda t: t.select(2, 3),
    "narrow": lambda t: t.narrow(1, 2, 3),
    "unsqueezed": lambda t: t.unsqueeze(1)[:, :, 1:3],
    "unfolded": lambda t: t.unfold(1, 2, 2)[..., 1],
}
"""Parts of a tensor that share its memory."""

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda t: t.unfold(1, 2, 1)[..., 0],
    "windows whole": lambda t: t.unfold(1, 2, 1),
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1)[:, 1],
    "expanded whole": lambda t: t[:, :1].expand(-1, 3, -1),
}
"""Parts of views that have one place of memory at several indices: a change of these may be refused."""

RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "transpose_": lambda t: t.transpose_(-1, -2),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "relu_": lambda t: t.relu_(),
    "unsqueeze_ last": lambda t: t.unsqueeze_(-1),
}
"""Methods that give a tensor object another shape, and one that changes what is in it."""

PARTS = VIEWS | OVERLAPPING


def _index() -> Tensor:
    return torch.tensor([0])


def _copied(part: Tensor, source: Tensor) -> None:
    part.copy_(source)


def _added(part: Tensor, source: Tensor) -> None:
    part += source


def _assigned_mask(part: Tensor, source: Tensor) -> None:
    part[source > 0.1] = 0.0


def _assigned_ellipsis(part: Tensor, source: Tensor) -> None:
    part[..., :1] = source[..., :1]


def _out(part: Tensor, source: Tensor) -> None:
    torch.clamp(source, -0.5, 0.5, out=part)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "zero_": lambda t, s: t.zero_(),
    "fill_": lambda t, s: t.fill_(0.75),
    "mul_": lambda t, s: t.mul_(0.5),
    "add_": lambda t, s: t.add_(s, alpha=0.5),
    "sub_": lambda t, s: t.sub_(s),
    "div_": lambda t, s: t.div_(2.0),
    "iadd": _added,
    "copy_": _copied,
    "clamp_": lambda t, s: t.clamp_(-0.5, 0.75),
    "relu_": lambda t, s: t.relu_(),
    "f_relu": lambda t, s: F.relu(t, inplace=True),
    "sigmoid_": lambda t, s: t.sigmoid_(),
    "tanh_": lambda t, s: torch.tanh_(t),
    "neg_": lambda t, s: t.neg_(),
    "abs_": lambda t, s: t.abs_(),
    "square_": lambda t, s: t.square_(),
    "addcmul_": lambda t, s: t.addcmul_(s, s, value=0.1),
    "lerp_": lambda t, s: t.lerp_(s, 0.25),
    "cumsum_": lambda t, s: t.cumsum_(-1),
    "masked_fill_": lambda t, s: t.masked_fill_(s > 0, 0.0),
    "index_fill_": lambda t, s: t.index_fill_(-1, _index(), 0.0),
    "index_add_": lambda t, s: t.index_add_(-1, _index(), s[..., :1]),
    "index_copy_": lambda t, s: t.index_copy_(-1, _index(), s[..., :1]),
    "scatter_": lambda t, s: t.scatter_(-1, torch.zeros_like(s, dtype=torch.int64)[..., :1], s[..., :1]),
    "scatter_add_": lambda t, s: t.scatter_add_(-1, torch.zeros_like(s, dtype=torch.int64), s * 0.1),
    "index_put_": lambda t, s: t.index_put_((s > 0,), torch.tensor(0.25)),
    "mask": _assigned_mask,
    "ellipsis": _assigned_ellipsis,
    "out": _out,
}
"""Ways to change `part` in place; `source` is another value, cut to the shape of the part."""


# ---- statements


class Wide(nn.Module):
    """A linear layer whose int32 sums would overflow if every activation were at its largest."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats = 140_000 // (ROWS * WIDTH)
        self.layer = nn.Linear(self.repeats * ROWS * WIDTH, WIDTH)
        with torch.no_grad():
            self.layer.weight.fill_(1 / self.layer.in_features)

    def forward(self, x: Tensor) -> Tensor:
        sums = self.layer(x.flatten(1).abs().repeat(1, self.repeats))
        return x + sums.unsqueeze(1)


def _layer(statement: Statement) -> nn.Module:
    if statement.kind == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if statement.kind == "conv":
        return nn.Conv1d(ROWS, ROWS, 3, padding=1)
    if statement.kind == "relu_conv":
        return nn.Sequential(nn.Conv1d(ROWS, ROWS, 3, padding=1), nn.ReLU(inplace=True), nn.Conv1d(ROWS, ROWS, 1))
    if statement.kind == "norm":
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    if statement.kind in MEMORIES:
        return Memory(statement.kind)
    if statement.kind == "scripted":
        return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))  # type: ignore[no-any-return]
    if statement.kind == "wide":
        return Wide()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


_WITH_PART = (*LAYERS, "gated", *OWN_STATES, *SHARED_STATES)


class Program(nn.Module):
    """Runs its statements in order. Value 0 is the input; every statement adds one.

    Attributes:
        statements: what it runs.
        container: key of `OUTPUTS`, or "plain" for one tensor.
        state: plan of the containers that it takes and changes.
    """

    def __init__(self, statements: tuple[Statement, ...], container: str, state: StatePlan | None = None) -> None:
        super().__init__()
        self.statements, self.container, self.state = statements, container, state
        self.parts = nn.ModuleList([_layer(s) if s.kind in _WITH_PART else nn.Identity() for s in statements])
        self.calls = 0
        self.last: Tensor | None = None
        self.history: list[Tensor] = [torch.zeros(ROWS, WIDTH)]
        self.table: dict[str, Tensor] = {"running": torch.zeros(ROWS, WIDTH)}
        self.recent: deque[Tensor] = deque(maxlen=2)
        for place, statement in enumerate(statements):
            if statement.kind == "buffer":
                self.register_buffer(f"running{place}", torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor, state: Any = None, more: Tensor | None = None) -> Any:
        if more is not None:
            x = x * more
        new = None
        if self.state is not None:
            total, new = self.state.step(state, torch.tanh(x))
            x = x + total
        values = [x]
        for place, statement in enumerate(self.statements):
            values.append(self._run(place, statement, values))
        first, second = values[-1], values[len(values) // 2]
        result = OUTPUTS[self.container](first, second) if self.container in OUTPUTS else first
        return (result, new) if self.state is not None and self.state.returns else result

    def _run(self, place: int, statement: Statement, values: list[Tensor]) -> Tensor:
        x = values[-1 - statement.reads[0] % len(values)]
        second = values[-1 - statement.reads[1] % len(values)]
        part = self.parts[place]
        if statement.kind == "gated":
            return x * part(x)
        if statement.kind in LAYERS or statement.kind in MEMORIES:
            return part(x)  # type: ignore[no-any-return]
        if statement.kind == "add":
            return x + second
        if statement.kind == "change":
            return _change(statement, x, second)
        if statement.kind == "loop":
            return _loop(statement, x, second)
        if statement.kind == "reshape":
            return _reshape(statement, x)
        return self._state(place, statement, x)

    def _state(self, place: int, statement: Statement, x: Tensor) -> Tensor:
        mean = x.mean(0)
        if statement.kind == "buffer":
            running = getattr(self, f"running{place}")
            running.mul_(0.5).add_(mean)
            return x + running
        if statement.kind == "attribute":
            last, self.last = self.last, mean
            return x if last is None else x + last
        if statement.kind == "list":
            self.history[0].mul_(0.5).add_(mean)
            return x + self.history[0]
        if statement.kind == "dict":
            self.table["running"] = self.table["running"] * 0.5 + mean
            return x + self.table["running"]
        if statement.kind == "deque":
            self.recent.append(mean)
            return x + sum(self.recent)
        self.calls += 1
        return x * 0.5 if self.calls % 3 == 0 else x


def _change(statement: Statement, x: Tensor, other: Tensor) -> Tensor:
    """A fresh tensor, changed in place in one part; read before or after, or both."""
    fresh = FRESH[statement.pick(0, list(FRESH))](x)
    view, change = PARTS[statement.pick(1, list(PARTS))], CHANGES[statement.pick(2, list(CHANGES))]
    before = fresh.sum(-1, keepdim=True) * 0.01 if statement.options[3] % 2 else None
    part = view(fresh)
    change(part, view(other.contiguous()))
    result = fresh if before is None else fresh + before
    return result + x if statement.options[3] % 3 == 0 else result


def _loop(statement: Statement, x: Tensor, other: Tensor) -> Tensor:
    """A fresh tensor that is filled row by row, or summed into."""
    fresh = FRESH[statement.pick(0, list(FRESH))](x)
    for row in range(ROWS):
        if statement.options[1] % 2:
            fresh[:, row] = other[:, ROWS - 1 - row] * (row + 1) / ROWS
        else:
            fresh.add_(other[:, row : row + 1], alpha=0.2)
    return fresh


def _reshape(statement: Statement, x: Tensor) -> Tensor:
    """A fresh tensor that is given other shapes in place, under one name or two, with a view from before."""
    fresh = FRESH[statement.pick(0, list(FRESH))](x)
    part, name = fresh[:, :2], fresh
    for place in (1, 2, 3):
        name = RESHAPES[statement.pick(place, list(RESHAPES))](fresh if place % 2 else name)
    part.add_(0.25)
    name.mul_(0.5)
    return fresh.reshape(x.shape) + name.reshape(x.shape)


KINDS = (*LAYERS, "add", "change", "loop", "reshape", *STATES)


@dataclass(frozen=True)
class ProgramPlan:
    """A program as it is drawn.

    Attributes:
        statements, container, state: as in `Program`.
        seed: of its weights and inputs.
        optional: whether every second call has a further input, so that there are two programs.
    """

    statements: tuple[Statement, ...]
    container: str = "plain"
    seed: int = 0
    state: StatePlan | None = None
    optional: bool = False

    def build(self) -> Program:
        """The program in eval mode, with weights of `seed` and with new state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            reset_shared_state()
            return Program(self.statements, self.container, self.state).eval()

    def batch(self, number: int, samples: int = 4) -> Any:
        """Batch `number` of a stream, without the state: a tensor, or a dict of keyword arguments."""
        random = torch.Generator().manual_seed(100 * self.seed + number)
        x = torch.randn(samples, ROWS, WIDTH, generator=random)
        if self.state is None and not self.optional:
            return {"x": x} if self.container in ("dict", "ordered") else x
        more = {"more": torch.rand(samples, 1, WIDTH, generator=random) + 0.5}
        return {"x": x, **(more if self.optional and number % 2 else {})}

    def new_state(self, samples: int = 4) -> Any:
        """State at the first call of a stream."""
        return None if self.state is None else self.state.new(samples, ROWS, WIDTH)
