"""Snapshots of what Python code may change between two calls: attributes, containers, tensors, arrays, generators."""

from __future__ import annotations

import enum
import logging
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import OuterVariables

log = logging.getLogger("fxq")

MOST_OBJECTS, MOST_BYTES = 100_000, 1 << 28
"""How many objects inside of one module are looked into, and how many bytes of tensors and arrays are copied.

What lies beyond is neither compared nor restored.
"""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CODE: tuple[type, ...] = (enum.Enum, type, types.ModuleType)
_CODE += (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_GENERATORS = (random.Random, torch.Generator)
_NO_STATE = (*PLAIN, *_CODE)
_LIBRARIES = ("torch", "numpy", "fxq", "threading", "_thread", "logging", "weakref", "concurrent", "asyncio")
_TABLES = ("_parameters", "_buffers", "_modules")
ABSENT = object()
"""Stands for the value of a place that does not exist."""


@dataclass(frozen=True)
class ChangedPlace:
    """A place whose value is another one than in the snapshot.

    Attributes:
        owner: what the snapshot was told to call the object that the place was reached from: the path of a module.
        name: the place, as `h[0]` or `cache['k']`.
        now: the value now, `ABSENT` where there is none.
        in_place: whether it is the same tensor, array or generator as before with another content.
        counted: whether PyTorch counts it as a change of the tensor; it does not for the statistics of a `batch_norm`.
    """

    owner: str
    name: str
    now: Any
    in_place: bool = False
    counted: bool = True


@dataclass
class StateSnapshot:
    """What can be reached from some objects, and how it was; `restore` puts it back.

    Lists, dicts, sets, deques, arrays, random generators, tensors, modules and objects with attributes are looked into,
    objects of libraries are not. Of a parameter the storage counts; its values where `add_tensor` has copied them.

    Attributes:
        apart: ids of modules that are not looked into where another object holds them.
    """

    apart: frozenset[int] = frozenset()
    _held: dict[int, tuple[str, str, Any, Any]] = field(default_factory=dict)
    _contents: dict[int, tuple[str, str, Any, Any]] = field(default_factory=dict)
    _room: int = MOST_BYTES

    def add(self, owner: str, value: Any, name: str = "") -> None:
        """Take in an object, or a dict of attributes as `vars(module)` is, with all that is inside of it."""
        waiting, left = deque([(name, value)]), MOST_OBJECTS
        while waiting and left > 0:
            name, value = waiting.popleft()
            if isinstance(value, nn.Module):
                name = f"{name}." if name else ""
                value = {} if id(value) in self.apart or isinstance(value, torch.jit.ScriptModule) else vars(value)
            if isinstance(value, _NO_STATE) or id(value) in self._held:
                continue
            left -= 1
            if isinstance(value, Tensor):
                size = 0 if isinstance(value, nn.Parameter) else value.numel() * value.element_size()
                copies = 0 < size <= self._room
                self.add_tensor(owner, name, value, copies)
                self._room -= size if copies else 0
            elif isinstance(value, _GENERATORS) or _of_numpy(value):
                self._add_content(owner, name, value)
            elif (items := _items(value)) is not None:
                self._held[id(value)] = owner, name, value, items
                waiting.extend(_inside(name, value, items))
            elif isinstance(value, (tuple, frozenset)):
                waiting.extend((f"{name}[{i}]", part) for i, part in enumerate(value))
        if waiting:
            log.warning(
                "%s: its attributes hold more than %d objects; changes in others are not seen", owner, MOST_OBJECTS
            )

    def add_tensor(self, owner: str, name: str, tensor: Tensor, copies: bool) -> None:
        """Take in a tensor: its storage, and where `copies` its values."""
        if not tensor.is_inference() and not tensor.is_nested and tensor.layout is torch.strided:
            self._contents.setdefault(id(tensor), (owner, name, tensor, _Values(tensor, copies)))

    def _add_content(self, owner: str, name: str, value: Any) -> None:
        size = value.nbytes if _is_array(value) else 0
        if size <= self._room and (size == 0 or (not value.dtype.hasobject and value.flags.writeable)):
            self._room -= size
            self._contents.setdefault(id(value), (owner, name, value, _content(value)))

    def changes(self) -> Iterator[ChangedPlace]:
        """The places that hold something else now."""
        for owner, name, value, items in self._held.values():
            before, now = _slots(value, items), _slots(value, _items(value))
            if len(before) == len(now) and all(now.get(key, ABSENT) is was for key, was in before.items()):
                continue
            for key in dict.fromkeys((*before, *now)):
                if not _alike(before.get(key, ABSENT), now.get(key, ABSENT)):
                    yield ChangedPlace(owner, _name(name, value, key), now.get(key, ABSENT))
        for owner, name, value, content in self._contents.values():
            if not _is_as_before(value, content):
                counted = not isinstance(content, _Values) or content.counts(value)
                yield ChangedPlace(owner, name, value, in_place=True, counted=counted)

    def restore(self) -> None:
        """Put everything back: what containers held, and the values of what was changed in place."""
        for _, name, value, items in self._held.values():
            _put_items(value, items, ordered=name != "")
        for _, _, value, content in self._contents.values():
            if not _is_as_before(value, content):
                _put_content(value, content)


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


# ---- containers


def _items(value: Any) -> Any:
    """A copy of what a container or an object holds, without looking further; None for what is neither."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, OuterVariables):
        return value.read()
    if isinstance(value, (tuple, frozenset)) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    attributes = getattr(value, "__dict__", None)
    slots = [n for cls in type(value).__mro__ for n in _names(vars(cls).get("__slots__", ()))]
    if not isinstance(attributes, dict) and not slots:
        return None
    found = dict(attributes) if isinstance(attributes, dict) else {}
    return found | {n: getattr(value, n) for n in slots if n not in _NO_SLOTS and hasattr(value, n)}


_NO_SLOTS = ("__dict__", "__weakref__")


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _inside(name: str, value: Any, items: Any) -> Iterator[tuple[str, Any]]:
    for key, part in _slots(value, items).items() if items else ():
        hooks = (name == "" or name.endswith(".")) and isinstance(key, str) and "hooks" in key
        if not isinstance(part, _NO_STATE) and not hooks:
            yield _name(name, value, key), part


def _slots(value: Any, items: Any) -> dict[Any, Any]:
    """What a container holds, by key, index or attribute; of a set, each item by itself."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(items))
    return {item: item for item in items} if isinstance(value, set) else items


def _name(outer: str, holder: Any, key: Any) -> str:
    """The name of a place; that of a module's attributes ends with a dot, and its tables of tensors are left out."""
    stem, dot, last = outer.rpartition(".")
    if outer == "" or outer.endswith("."):
        return f"{outer}{key}"
    if last in _TABLES:
        return f"{stem}{dot}{key}"
    return f"{outer}[{key!r}]" if isinstance(holder, (dict, list, deque, set)) else f"{outer}.{key}"


def _put_items(value: Any, items: Any, ordered: bool) -> None:
    if isinstance(value, dict):
        _put_dict(value, items, ordered)
    elif isinstance(value, OuterVariables):
        value.write(items)
    elif isinstance(value, list):
        value[:] = items
    elif isinstance(value, deque):
        value.clear()
        value.extend(items)
    elif isinstance(value, set):
        value.intersection_update(items)
        value.update(items)
    else:
        for name in _items(value).keys() - items.keys():
            object.__delattr__(value, name)
        for name, item in items.items():
            if getattr(value, name, ABSENT) is not item:
                object.__setattr__(value, name, item)


def _put_dict(value: dict[Any, Any], items: dict[Any, Any], ordered: bool) -> None:
    """One item at a time: other threads may read a module's attributes. Not where the order has changed as well."""
    kind = OrderedDict if isinstance(value, OrderedDict) else dict  # not what a class of its own does besides
    for key in value.keys() - items.keys():
        kind.__delitem__(value, key)
    for key, item in items.items():
        if dict.get(value, key, ABSENT) is not item:
            kind.__setitem__(value, key, item)
    if ordered and list(value) != list(items):
        value.clear()
        value.update(items)


# ---- what is changed in place


class _Values:
    """The storage of a tensor, how often it had been changed, and, where it is copied, a copy of its values."""

    def __init__(self, tensor: Tensor, copies: bool) -> None:
        self.alias, self.version = tensor.detach(), tensor._version
        self.at = self._place(tensor)
        self.copy = self.alias.clone() if copies and not tensor.is_meta else None

    @staticmethod
    def _place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr() if not tensor.is_meta else 0, tensor.shape, tensor.stride(), tensor.dtype

    def is_as_before(self, tensor: Tensor) -> bool:
        """Whether a tensor has this storage and these values."""
        if self._place(tensor) != self.at:
            return False
        if self.copy is None:
            return tensor._version == self.version
        now = tensor.detach()
        return torch.equal(now, self.copy) or bool(((now == self.copy) | (now.isnan() & self.copy.isnan())).all())

    def counts(self, tensor: Tensor) -> bool:
        """Whether PyTorch has counted a change of the tensor, or it has another storage."""
        return tensor._version != self.version or self._place(tensor) != self.at

    def put_back(self, tensor: Tensor) -> None:
        """Give a tensor its storage and its values back."""
        with torch.no_grad():
            if self._place(tensor) != self.at:
                tensor.data = self.alias
            if self.copy is not None:
                tensor.copy_(self.copy)


def _of_numpy(value: Any) -> bool:
    """Whether a value is an array or a random generator of NumPy, which fxq does not import for this."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState))


def _is_array(value: Any) -> bool:
    return _of_numpy(value) and hasattr(value, "nbytes")


def _content(value: Any) -> Any:
    """A copy of what an array or a random generator holds."""
    if _is_array(value):
        return value.copy()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state(legacy=False) if _of_numpy(value) else value.get_state()


def _is_as_before(value: Any, content: Any) -> bool:
    if isinstance(content, _Values):
        return content.is_as_before(value)
    return same(_content(value), content)


def same(a: Any, b: Any) -> bool:
    """Whether two contents of an array or a random generator are the same."""
    if _is_array(a):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def _put_content(value: Any, content: Any) -> None:
    if isinstance(content, _Values):
        content.put_back(value)
    elif _is_array(value):
        value[...] = content
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    else:
        value.set_state(content)
