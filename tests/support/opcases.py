"""Test cases of ops: one per spelling, between layers that run on integers. The cases are in `cases_*.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import settled

aten = torch.ops.aten


class Call(nn.Module):
    """Module that calls a function of (values, module). It holds the weights, with the names that `nn` modules use."""

    def __init__(self, function: Callable[..., Any], **tensors: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in tensors.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif name.startswith("running"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value) if isinstance(value, Tensor) else None)

    def forward(self, *values):
        return self.function(*values, self)


class Sandwich(nn.Module):
    """Layers that run on integers, before and after the tested op."""

    def __init__(self, make: Callable[[], nn.Module], layout: str) -> None:
        super().__init__()
        self.before = nn.ModuleList(LAYOUTS[layout].layer() for _ in range(LAYOUTS[layout].values))
        self.relu_first = LAYOUTS[layout].values > 1
        self.middle = make()
        values = self.values(torch.zeros(LAYOUTS[layout].shape))
        self.after = follower(self.middle.eval()(*values))

    def values(self, x):
        values = [layer(x) for layer in self.before]
        return [F.relu(v) for v in values] if self.relu_first else values

    def forward(self, x):
        return self.after(self.middle(*self.values(x)))


def follower(value: Tensor) -> nn.Module:
    """Return a layer that takes `value`."""
    if value.dim() == 5:
        return nn.Conv3d(value.shape[1], 5, 1)
    if value.dim() == 4:
        return nn.Conv2d(value.shape[1], 5, 1)
    return nn.Conv1d(value.shape[1], 5, 1) if value.dim() == 3 else nn.Linear(value.shape[-1], 5)


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    layer: Callable[[], nn.Module]
    values: int = 1


LAYOUTS = {
    "image": Layout((4, 3, 8, 8), lambda: nn.Conv2d(3, 4, 3, padding=1)),
    "images": Layout((4, 3, 8, 8), lambda: nn.Conv2d(3, 4, 3, padding=1), 2),
    "sequence": Layout((4, 3, 16), lambda: nn.Conv1d(3, 4, 3, padding=1)),
    "sequences": Layout((4, 3, 16), lambda: nn.Conv1d(3, 4, 3, padding=1), 2),
    "volume": Layout((2, 3, 4, 6, 6), lambda: nn.Conv3d(3, 4, 3, padding=1)),
    "rows": Layout((16, 6), lambda: nn.Linear(6, 8)),
}


@dataclass(frozen=True)
class Case:
    """One spelling of an op.

    Attributes:
        op: name of the op.
        spelled: the spelling, which the traced graph must call.
        make: function that makes the module with the op.
        layout: ops before and after the tested op.
        group: cases of one group must have the same canonical graph.
        precision: precision of the op on x86; None: that in `PRECISIONS`.
    """

    op: str
    spelled: Any
    make: Callable[[], nn.Module]
    layout: str = "image"
    group: str = ""
    precision: str | None = None

    def __str__(self) -> str:
        name = self.spelled if isinstance(self.spelled, str) else getattr(self.spelled, "__name__", str(self.spelled))
        where = "" if isinstance(self.spelled, str) else f"{getattr(self.spelled, '__module__', '') or 'torch'}."
        return f"{self.group or self.op}-{where}{name}"

    def build(self) -> tuple[nn.Module, Tensor]:
        """Return the model and its input."""
        model = settled(lambda: Sandwich(self.make, self.layout))
        generator = torch.Generator().manual_seed(1)
        return model, torch.randn(LAYOUTS[self.layout].shape, generator=generator)


def module(type_: type[nn.Module], *args: Any, **kwargs: Any) -> tuple[Any, Callable[[], nn.Module]]:
    return type_, lambda: type_(*args, **kwargs)


def function(spelled: Any, body: Callable[..., Any] | None = None, **tensors: Any) -> tuple[Any, Any]:
    """Spelling as a function of (values, module). Tensors are made by functions, after the seed has been set."""
    chosen = body or (lambda x, m: spelled(x))
    return spelled, lambda: Call(chosen, **{k: v() if callable(v) else v for k, v in tensors.items()})


def method(name: str, body: Callable[..., Any] | None = None, **tensors: Any) -> tuple[Any, Any]:
    return function(name, body or (lambda x, m: getattr(x, name)()), **tensors)


def cases(op: str, *spellings: tuple[Any, Any], **options: Any) -> list[Case]:
    return [Case(op, spelled, make, **options) for spelled, make in spellings]


def unary(op: str, *modules: tuple[Any, Any], functions: tuple[Any, ...] = (), methods: tuple[str, ...] = ()) -> Any:
    """Cases of an op of one tensor without options."""
    return cases(op, *modules, *(function(f) for f in functions), *(method(m) for m in methods))


def normal(*shape: int) -> Callable[[], Tensor]:
    """Function that makes a random weight, to be called when the model is made."""
    return lambda: torch.randn(shape) / 4


def spelled(*targets: Any, args: tuple[Any, ...] = (), **kwargs: Any) -> list[tuple[Any, Any]]:
    """Spellings by functions, and by methods given by name. All are called with the values and then with `args`."""

    def spelling(target: Any) -> tuple[Any, Any]:
        def body(*values: Any) -> Any:
            *tensors, _ = values
            if isinstance(target, str):
                return getattr(tensors[0], target)(*tensors[1:], *args, **kwargs)
            return target(*tensors, *args, **kwargs)

        return function(target, body)

    return [spelling(target) for target in targets]
