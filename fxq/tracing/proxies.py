"""What a forward sees while it is traced: proxies that also hold what they stand for on the example."""

from __future__ import annotations

import builtins
import dis
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from fxq.common.metrics import tensors
from fxq.common.trees import leaves


class Origin(IntEnum):
    """Inputs that a value depends on: none, sizes and plain arguments only, or the data of tensors."""

    CONSTANT = 0
    SIZES = 1
    DATA = 2


_DTYPE_READS = frozenset({"dtype", "layout", "itemsize", "is_sparse", "is_quantized", "is_mkldnn", "is_nested"})
_DTYPE_READS |= {"is_floating_point", "is_complex", "is_signed", "element_size"}
_RANK_READS = frozenset({"ndim", "dim", "ndimension"})
_UNPACK = dis.opmap["UNPACK_SEQUENCE"]


class TracedValue(fx.Proxy):
    """A proxy with the value that it has on the example.

    Arithmetic, calls and attributes are recorded. Where a plain value is wanted (a branch, `int()`, `len()`, a loop),
    the tracer gives that of the example and has the graph check it, or refuses, where it depends on data.
    """

    tracer: Any  # `fxq/tracing/tracer.py`; what it says of plain values is in `fxq/tracing/assumptions.py`
    __array_priority__ = 1000  # as of tensors: a numpy scalar in front of an operator leaves it to the value behind

    def __init__(self, node: fx.Node, tracer: Any, value: Any, origin: Origin) -> None:
        super().__init__(node, tracer)
        self._value, self._made_of = value, origin

    @property
    def _origin(self) -> Origin:
        """What the value depends on, including writes to its memory."""
        return self.tracer.origin(self)

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next(found_in((args, kwargs)))
        value.tracer.asked.forget(sys._getframe(1))
        return super().__torch_function__(called, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._value
        if isinstance(value, Tensor) and name in _DTYPE_READS:
            self.tracer.asked.reads_dtype(self)
            return getattr(value, name)
        if isinstance(value, Tensor) and name in _RANK_READS:
            rank = self.tracer.asked.rank(self)
            return rank if name == "ndim" else lambda: rank
        if isinstance(value, torch.device) and name == "type":
            self.tracer.asked.reads_device(self)
            return value.type
        if isinstance(value, Mapping) and name in ("items", "values", "get"):
            return getattr(self._as_dict(), name)
        with unwatched():
            attribute = getattr(value, name)
        return None if attribute is None else Member(self, name, attribute)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" and isinstance(self._value, Tensor):
            raise self.tracer.asked.refuse("an assignment to .data of a tensor (write x.copy_(y))", self.node)
        super().__setattr__(name, value)

    def _as_dict(self) -> dict[Any, Any]:
        return {key: self[key] for key in self.tracer.asked.fix(self, "keys")}  # type: ignore[index]

    def keys(self) -> Any:
        """The keys of a mapping, as they are on the example."""
        return self._as_dict().keys()

    def __bool__(self) -> bool:
        return bool(self.tracer.asked.fix(self, "bool"))

    def __int__(self) -> int:
        return int(self.tracer.asked.fix(self, "int"))

    def __index__(self) -> int:
        return int(self.tracer.asked.fix(self, "index", frame=sys._getframe(1)))

    def __float__(self) -> float:
        return float(self.tracer.asked.fix(self, "float"))

    def __complex__(self) -> complex:
        return complex(self.tracer.asked.fix(self, "complex"))

    def __round__(self, *digits: Any) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *digits), {})

    def __len__(self) -> int:
        if isinstance(self._value, Tensor):
            return int(self.tracer.create_proxy("call_method", "size", (self, 0), {}))
        if isinstance(self._value, torch.Size):
            return int(self.tracer.asked.rank(self))
        return int(self.tracer.asked.fix(self, "len"))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(self._value, Tensor):
            raise self.tracer.asked.refuse("an assignment to a part of a container", self.node)
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __contains__(self, item: Any) -> bool:
        if isinstance(self._value, Mapping):
            return item in self.tracer.asked.fix(self, "keys")
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked(sys._getframe(1))
        if count is not None:  # as many as the program says
            if len(self._value) != count:
                raise ValueError(f"{len(self._value)} values to unpack, {count} are expected")
            return iter([self[i] for i in range(count)])  # type: ignore[index]
        if isinstance(self._value, Tensor):
            return self.tracer.rows(self)
        if isinstance(self._value, Mapping):
            return iter(self._as_dict())
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]


class Member(TracedValue):
    """An attribute or method of a value; a node of its own only where it is not called."""

    def __init__(self, root: TracedValue, name: str, value: Any) -> None:
        self.tracer, self._root, self._name, self._value = root.tracer, root, name, value
        self._read: TracedValue | None = None

    def _made(self) -> TracedValue:
        if self._read is None:
            self._read = self.tracer.create_proxy("call_function", getattr, (self._root, self._name), {})
        return self._read

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The node that reads it."""
        return self._made().node

    @property
    def _origin(self) -> Origin:
        return self._made()._origin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self._name, (self._root, *args), kwargs)


def _in_place(function: Callable[..., Any]) -> Callable[[TracedValue, Any], Any]:
    """Method for `x += y`: in place for tensors, since views see the change; `x + y` for sizes."""

    def change(self: TracedValue, other: Any) -> Any:
        if not isinstance(self._value, Tensor):
            return NotImplemented
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


for _name in (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
):
    setattr(TracedValue, f"__{_name}__", _in_place(getattr(operator, _name)))


def _unpacked(frame: Any) -> int | None:
    """How many values the statement `a, b = ...` that a frame is at takes; None when it is at another one."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return code[at + 1] if 0 <= at < len(code) and code[at] == _UNPACK else None


def is_value(value: Any) -> bool:
    """Whether this is a traced value."""
    return type(value) is TracedValue or type(value) is Member


def found_in(values: Any) -> Iterator[TracedValue]:
    """The traced values inside nested arguments."""
    return filter(is_value, leaves(values, is_value))


def examples(values: Any) -> Iterator[Tensor]:
    """Every tensor that traced values and tensors inside a result have on the example, in order."""
    for leaf in leaves(values, is_value):
        yield from tensors(leaf._value if is_value(leaf) else leaf)


# ---- while a forward is traced

_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor", "zeros"),
    *("tril_indices", "triu_indices"),
)
RANDOM = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "normal", "multinomial"),
)
"""Functions of torch whose value is another one at every call."""
FILLS = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
"""Methods that fill a tensor with random numbers."""
_METHODS = ("expand", "narrow", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "select", "to", "view")


@contextmanager
def visible(
    record: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any],
    traces: Callable[[], bool],
    create: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Let the places where Python or torch would not see a traced value see it.

    `isinstance(x, Tensor)` answers for the value that `x` stands for; torch's factories with a traced size, a tensor of
    the model with a traced index or size, and random numbers (which are no constants) are recorded. As `torch.fx` does
    for modules, this changes them for the whole process until the trace is done; without a traced value each of the
    others does what it always does.

    Args:
        record: makes a node of its kind, what it calls, and the arguments.
        traces: whether a forward is being traced, rather than a layer run on the example.
        create: calls a function and returns its new tensors as traced values; None: they stay plain tensors.
    """
    replaced = ((torch, _FACTORIES, None), (torch, RANDOM, traces), (Tensor, _METHODS, None), (Tensor, FILLS, traces))
    with ExitStack() as stack:
        for owner, names, anyway in replaced:
            for name in names:
                stack.enter_context(patch.object(owner, name, _recorded(owner, name, record, anyway)))
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", _counting_changes(threading.get_ident())))
        stack.enter_context(_Plain(record, create))
        stack.enter_context(patch.object(builtins, "isinstance", _asked(builtins.isinstance)))
        yield


def _recorded(owner: Any, name: str, record: Any, anyway: Callable[[], bool] | None) -> Any:
    """A function of torch, or a method of tensors, that is recorded where a traced value is among its arguments."""
    function = getattr(owner, name)
    kind, target = ("call_method", name) if owner is Tensor else ("call_function", function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if (anyway is not None and anyway()) or next(found_in((args, kwargs)), None) is not None:
            return record(kind, target, args, kwargs)
        return function(*args, **kwargs)

    return call


class _Plain(TorchFunctionMode):
    """Records indexing of plain tensors with traced values, and passes calls without traced values to `create`.

    `Tensor.__getitem__` is not to be replaced, not even for a while: that fills a slot of the type which stays filled,
    and from then on `torch.tensor([a, b])` takes tensors of no dimension for sequences, and fails.
    """

    def __init__(self, record: Any, create: Any) -> None:
        super().__init__()
        self._record, self._create = record, create

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next(found_in((args, kwargs)), None)
        if value is not None:
            value.tracer.asked.forget(sys._getframe(1))
        if func is Tensor.__getitem__ and next(found_in(args[1]), None) is not None:
            return self._record("call_function", operator.getitem, args, {})
        if func is Tensor.__setitem__ and next(found_in(args[1:]), None) is not None:
            return self._record("call_function", operator.setitem, args, {})
        if value is None and self._create is not None:
            return self._create(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def unwatched() -> Iterator[None]:
    """Run what no traced value gets into as it runs without a trace: torch's modules take other paths in a mode."""
    with ExitStack() as stack:
        if isinstance(_get_current_function_mode(), _Plain):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _counting_changes(thread: int) -> Callable[[Any], None]:
    """`torch.inference_mode.__enter__` for a thread that traces: tensors made in that mode do not count their changes.

    There, a forward runs as under `torch.no_grad`, which computes the same.
    """
    plain = torch.inference_mode.__enter__

    def enter(self: Any) -> None:
        if self.mode and threading.get_ident() == thread:
            self._inference_mode_context = torch.no_grad()
            self._inference_mode_context.__enter__()
        else:
            plain(self)

    return enter


def _asked(isinstance: Any) -> Any:
    def answer(value: Any, kind: Any) -> bool:
        found = isinstance(value, kind)
        return found or ((type(value) is TracedValue or type(value) is Member) and isinstance(value._value, kind))

    return answer
