"""Proxies that stand for values while a forward is traced, and hold the values of the example."""

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


class Dependence(IntEnum):
    """Inputs that a value depends on: none, sizes and plain arguments only, or the data of tensors."""

    CONSTANT = 0
    SIZES = 1
    DATA = 2


_DTYPE_READS = frozenset({"dtype", "layout", "itemsize", "is_sparse", "is_quantized", "is_mkldnn", "is_nested"})
_DTYPE_READS |= {"is_floating_point", "is_complex", "is_signed", "element_size"}
_RANK_READS = frozenset({"ndim", "dim", "ndimension"})
_UNPACK = dis.opmap["UNPACK_SEQUENCE"]


class TracedValue(fx.Proxy):
    """Proxy that holds its value on the example.

    Arithmetic, calls and attributes are recorded. A plain value (in a branch, `int()`, `len()`, a loop) is the
    example's, and the graph checks it; if it depends on data, the trace is refused.
    """

    tracer: Any  # `fxq/tracing/call_recorder.py`; its plain values are in `fxq/tracing/assumptions.py`
    __array_priority__ = 1000  # as for tensors: in `numpy_scalar * value`, the value's operator is called

    def __init__(self, node: fx.Node, tracer: Any, value: Any, origin: Dependence) -> None:
        super().__init__(node, tracer)
        self._value, self._own_dependence = value, origin

    @property
    def _dependence(self) -> Dependence:
        """Inputs that the value depends on, including those of writes to its memory."""
        return self.tracer.dependence(self)

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next(traced_values((args, kwargs)))
        value.tracer.assumptions.forget(sys._getframe(1))
        return super().__torch_function__(called, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._value
        if isinstance(value, Tensor) and name in _DTYPE_READS:
            self.tracer.assumptions.reads_dtype(self)
            return getattr(value, name)
        if isinstance(value, Tensor) and name in _RANK_READS:
            rank = self.tracer.assumptions.rank(self)
            return rank if name == "ndim" else lambda: rank
        if isinstance(value, torch.device) and name == "type":
            self.tracer.assumptions.reads_device(self)
            return value.type
        if isinstance(value, Mapping) and name in ("items", "values", "get"):
            return getattr(self._as_dict(), name)
        with untraced():
            attribute = getattr(value, name)
        return None if attribute is None else TracedAttribute(self, name, attribute)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" and isinstance(self._value, Tensor):
            raise self.tracer.assumptions.refuse("an assignment to .data of a tensor (write x.copy_(y))", self.node)
        super().__setattr__(name, value)

    def _as_dict(self) -> dict[Any, Any]:
        return {key: self[key] for key in self.tracer.assumptions.plain_value(self, "keys")}  # type: ignore[index]

    def keys(self) -> Any:
        """Keys of a mapping, as on the example."""
        return self._as_dict().keys()

    def __bool__(self) -> bool:
        return bool(self.tracer.assumptions.plain_value(self, "bool"))

    def __int__(self) -> int:
        return int(self.tracer.assumptions.plain_value(self, "int"))

    def __index__(self) -> int:
        return int(self.tracer.assumptions.plain_value(self, "index", frame=sys._getframe(1)))

    def __float__(self) -> float:
        return float(self.tracer.assumptions.plain_value(self, "float"))

    def __complex__(self) -> complex:
        return complex(self.tracer.assumptions.plain_value(self, "complex"))

    def __round__(self, *digits: Any) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *digits), {})

    def __len__(self) -> int:
        if isinstance(self._value, Tensor):
            return int(self.tracer.create_proxy("call_method", "size", (self, 0), {}))
        if isinstance(self._value, torch.Size):
            return int(self.tracer.assumptions.rank(self))
        return int(self.tracer.assumptions.plain_value(self, "len"))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(self._value, Tensor):
            raise self.tracer.assumptions.refuse("an assignment to a part of a container", self.node)
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __contains__(self, item: Any) -> bool:
        if isinstance(self._value, Mapping):
            return item in self.tracer.assumptions.plain_value(self, "keys")
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked(sys._getframe(1))
        if count is not None:  # the code fixes the number of values
            if len(self._value) != count:
                raise ValueError(f"cannot unpack {len(self._value)} values into {count} variables")
            return iter([self[i] for i in range(count)])  # type: ignore[index]
        if isinstance(self._value, Tensor):
            return self.tracer.rows(self)
        if isinstance(self._value, Mapping):
            return iter(self._as_dict())
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]


class TracedAttribute(TracedValue):
    """Attribute or method of a traced value. It becomes a node only if it is read, not called."""

    def __init__(self, root: TracedValue, name: str, value: Any) -> None:
        self.tracer, self._root, self._name, self._value = root.tracer, root, name, value
        self._attribute: TracedValue | None = None

    def _as_value(self) -> TracedValue:
        if self._attribute is None:
            self._attribute = self.tracer.create_proxy("call_function", getattr, (self._root, self._name), {})
        return self._attribute

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Node that reads the attribute."""
        return self._as_value().node

    @property
    def _dependence(self) -> Dependence:
        return self._as_value()._dependence

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
    """Number of values that a frame unpacks, as in `a, b = ...`; None if its current statement is another one."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return code[at + 1] if 0 <= at < len(code) and code[at] == _UNPACK else None


def is_value(value: Any) -> bool:
    """Whether an object is a traced value."""
    return type(value) is TracedValue or type(value) is TracedAttribute


def traced_values(values: Any) -> Iterator[TracedValue]:
    """Traced values inside nested arguments."""
    return filter(is_value, leaves(values, is_value))


def example_tensors(values: Any) -> Iterator[Tensor]:
    """Tensors inside a result, in order; traced values give their tensors on the example."""
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
"""Functions of torch that draw random numbers."""
FILLS = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
"""Methods that fill a tensor with random numbers."""
_METHODS = ("expand", "narrow", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "select", "to", "view")


@contextmanager
def recording_calls(
    record: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any],
    traces: Callable[[], bool],
    create: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Context that records calls which torch.fx does not see.

    These are torch's factories with a traced size, methods of the model's tensors with a traced index or size, and
    random numbers, which are not constants. `isinstance(x, Tensor)` answers for the value that `x` stands for. The
    functions are replaced for the whole process until the trace ends, as torch.fx does for modules; calls without a
    traced value behave as before.

    Args:
        record: makes a node from its kind, target, args and kwargs.
        traces: whether a forward is being traced, rather than a layer run on the example.
        create: calls a function and returns its new tensors as traced values. If None, they stay plain tensors.
    """
    replaced = ((torch, _FACTORIES, None), (torch, RANDOM, traces), (Tensor, _METHODS, None), (Tensor, FILLS, traces))
    with ExitStack() as stack:
        for owner, names, condition in replaced:
            for name in names:
                stack.enter_context(patch.object(owner, name, _recorded(owner, name, record, condition)))
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", _counting_changes(threading.get_ident())))
        stack.enter_context(_PlainTensorMode(record, create))
        stack.enter_context(patch.object(builtins, "isinstance", _isinstance_of_traced(builtins.isinstance)))
        yield


def _recorded(owner: Any, name: str, record: Any, condition: Callable[[], bool] | None) -> Any:
    """Make a function that records calls of a torch function or method with traced arguments, or under a condition."""
    function = getattr(owner, name)
    kind, target = ("call_method", name) if owner is Tensor else ("call_function", function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if (condition is not None and condition()) or next(traced_values((args, kwargs)), None) is not None:
            return record(kind, target, args, kwargs)
        return function(*args, **kwargs)

    return call


class _PlainTensorMode(TorchFunctionMode):
    """Records indexing of plain tensors with traced values, and passes calls without traced values to `create`.

    `Tensor.__getitem__` must not be patched, even temporarily: that fills a slot of the type for good, and then
    `torch.tensor([a, b])` takes 0-d tensors for sequences and fails.
    """

    def __init__(self, record: Any, create: Any) -> None:
        super().__init__()
        self._record, self._create = record, create

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next(traced_values((args, kwargs)), None)
        if value is not None:
            value.tracer.assumptions.forget(sys._getframe(1))
        if func is Tensor.__getitem__ and next(traced_values(args[1]), None) is not None:
            return self._record("call_function", operator.getitem, args, {})
        if func is Tensor.__setitem__ and next(traced_values(args[1:]), None) is not None:
            return self._record("call_function", operator.setitem, args, {})
        if value is None and self._create is not None:
            return self._create(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def untraced() -> Iterator[None]:
    """Context for calls without traced values: torch's modules take other paths while a function mode is active."""
    with ExitStack() as stack:
        if isinstance(_get_current_function_mode(), _PlainTensorMode):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _counting_changes(thread: int) -> Callable[[Any], None]:
    """Make a `torch.inference_mode.__enter__` that enters `torch.no_grad` in the thread that traces.

    Tensors made in inference mode have no version counter, by which the tracer sees changes in place.
    """
    plain = torch.inference_mode.__enter__

    def enter(self: Any) -> None:
        if self.mode and threading.get_ident() == thread:
            self._inference_mode_context = torch.no_grad()
            self._inference_mode_context.__enter__()
        else:
            plain(self)

    return enter


def _isinstance_of_traced(isinstance: Any) -> Any:
    def answer(value: Any, kind: Any) -> bool:
        if isinstance(value, kind):
            return True
        return (type(value) is TracedValue or type(value) is TracedAttribute) and isinstance(value._value, kind)

    return answer
