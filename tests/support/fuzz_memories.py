"""Modules with state of every kind, a part of the vocabulary of `tests/support/fuzz_programs.py`."""

from __future__ import annotations

import array
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS, WIDTH = 6, 8


class Scripted(nn.Module):
    """Keeps a count and a running mean in a script module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.means = 0, [torch.zeros(ROWS, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means[0] = self.means[0] * 0.5 + x.mean(0)
        return x / self.calls + self.means[0]


class CountingList(list[Any]):
    """List with an attribute of its own."""

    calls = 0


class Gain:
    """Object with a method that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def gain(self) -> float:
        self.calls += 1
        return 1.0 / self.calls


def _running(memory: list[Tensor], x: Tensor) -> Tensor:
    memory[0] = memory[0] * 0.5 + x.mean(0)
    return x + memory[0]


def _gains() -> Iterator[float]:
    while True:
        yield from (1.0, 0.5, 0.25)


class Memory(nn.Module):
    """Module with one kind of state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first: Tensor | None = None
        self.most, self.calls = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        self.cache: dict[int, Tensor] = {}
        self.sizes: set[int] = set()
        self.seen: list[int] = []
        self.bytes, self.array, self.objects = bytearray(1), array.array("l", [0]), np.array([0], dtype=object)
        self.count: Any = itertools.cycle((1, 2, 3)) if kind == "cycle" else itertools.count(1)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.step = functools.partial(_running, [torch.zeros(ROWS, WIDTH)])
        self.list, self.gain = CountingList(), Gain().gain
        self.place: Any = threading.local() if kind == "thread local" else None
        self.gains: Any = _gains() if kind == "generator" else None
        self.script: Any = torch.jit.script(Scripted()) if kind == "script state" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return MEMORIES[self.kind](self, x)

    def shown(self) -> str:
        """All that it keeps, and what all modules share, as text."""
        held = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        held["count"] = next(copy.deepcopy(self.count))
        script = [self.script.calls, self.script.means] if self.kind == "script state" else []
        place = vars(self.place) if self.place else {}
        others = [self.gain.__self__.calls, self.list.calls, vars(self.weight), place]  # type: ignore[attr-defined]
        return repr([held, script, others, TICKS, _on_function.__dict__, _default.__defaults__])


def _running_max(own: Memory, x: Tensor) -> Tensor:
    own.most = torch.maximum(own.most, x.abs().max())
    return x / (own.most + 1)


def _first_mean(own: Memory, x: Tensor) -> Tensor:
    if own.first is None:
        own.first = x.mean(0)
    return x - own.first


def _by_size(own: Memory, x: Tensor) -> Tensor:
    if len(x) not in own.cache:
        own.cache[len(x)] = x.mean(0)
    return x - own.cache[len(x)]


def _sizes(own: Memory, x: Tensor) -> Tensor:
    own.sizes.add(len(x))
    return x / len(own.sizes)


def _every_eighth(own: Memory, x: Tensor) -> Tensor:
    own.seen.append(0)
    return x * 0.5 if len(own.seen) % 8 == 0 else x


def _item(name: str) -> Callable[[Memory, Tensor], Tensor]:
    def step(own: Memory, x: Tensor) -> Tensor:
        held = getattr(own, name)
        held[0] = (held[0] + 1) % 100
        return x * 0.5 if held[0] % 20 == 0 else x

    return step


def _int_tensor(own: Memory, x: Tensor) -> Tensor:
    own.calls += 1
    return x * 0.5 if own.calls % 19 == 0 else x


def _next(own: Memory, x: Tensor) -> Tensor:
    return x / next(own.count)


def _on_tensor(own: Memory, x: Tensor) -> Tensor:
    held: Any = own.weight
    held.calls = getattr(held, "calls", 0) + 1
    return x * held / held.calls


def _on_list(own: Memory, x: Tensor) -> Tensor:
    own.list.calls += 1
    return x / own.list.calls


def _on_function(own: Memory, x: Tensor) -> Tensor:
    counted = _on_function.__dict__
    counted["calls"] = counted.get("calls", 0) + 1
    return x * 0.5 if counted["calls"] % 3 == 0 else x


TICKS = itertools.count(1)


def _global_iterator(own: Memory, x: Tensor) -> Tensor:
    return x / next(TICKS)


def _default(own: Memory, x: Tensor, ticks: Any = itertools.count(1)) -> Tensor:  # noqa: B008 - it is the state
    return x / next(ticks)


def reset_shared_state() -> None:
    """Restart the counts that all modules share: after 1,000 calls, a call changes results by less than 0.1%."""
    global TICKS
    TICKS = itertools.count(1)
    _on_function.__dict__.clear()
    _default.__defaults__ = (itertools.count(1),)


def _generator(own: Memory, x: Tensor) -> Tensor:
    return x * next(own.gains)


def _thread_local(own: Memory, x: Tensor) -> Tensor:
    own.place.calls = getattr(own.place, "calls", 0) + 1
    return x / own.place.calls


MEMORIES: dict[str, Callable[[Memory, Tensor], Any]] = {
    "running max": _running_max,
    "first mean": _first_mean,
    "by size": _by_size,
    "sizes": _sizes,
    "every eighth": _every_eighth,
    "bytes": _item("bytes"),
    "c array": _item("array"),
    "object array": _item("objects"),
    "int tensor": _int_tensor,
    "iterator": _next,
    "cycle": _next,
    "on tensor": _on_tensor,
    "partial": lambda own, x: own.step(x),
    "on list": _on_list,
    "method": lambda own, x: x * own.gain(),
    "script state": lambda own, x: own.script(x),
    "function attribute": _on_function,
    "global iterator": _global_iterator,
    "default": _default,
    "generator": _generator,
    "thread local": _thread_local,
}
"""Forward by kind of state."""
