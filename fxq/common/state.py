"""Snapshots of mutable Python state: attributes, containers, tensors, arrays, iterators and random generators."""

from __future__ import annotations

import enum
import functools
import logging
import operator
import random
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import OuterVariables
from fxq.common.contents import (
    BYTES,
    ScriptAttribute,
    TensorContent,
    content_of,
    has_content,
    is_array,
    of_numpy,
    put_content,
    same,
)
from fxq.common.iterators import IteratorStandIn, advanced, is_opaque_iterator, stand_in

log = logging.getLogger("fxq")

MAX_VISITED_OBJECTS, MAX_COPIED_BYTES = 100_000, 1 << 28
"""Limits of a snapshot: objects that it visits in one module, bytes of tensors and arrays that it copies.

State beyond the limits is neither compared nor restored.
"""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CODE: tuple[type, ...] = (enum.Enum, type, types.ModuleType)
_CODE += (types.BuiltinFunctionType,)
_GENERATORS = (random.Random, torch.Generator)
_NO_STATE = (*PLAIN, *_CODE)
_PLAIN_TYPES = frozenset(PLAIN)
_QUIET_TYPES = (OrderedDict, dict, nn.Parameter, Tensor, set, list)
"""Types that are no iterators: those of most attributes of modules."""
_LIBRARIES = ("torch", "numpy", "fxq", "threading", "_thread", "logging", "weakref", "concurrent", "asyncio")
_TABLES = ("_parameters", "_buffers", "_modules")
ABSENT = object()
"""Value of a place that does not exist."""


@dataclass(frozen=True)
class ChangedPlace:
    """Attribute, item or tensor that differs from the snapshot.

    Attributes:
        owner: path of the module that it belongs to, as passed to `StateSnapshot.add`.
        name: its place in the owner, such as `h[0]` or `cache['k']`.
        now: its current value, `ABSENT` if it was deleted.
        was: its value in the snapshot, `ABSENT` if it did not exist; only of attributes and items.
        in_place: whether it is the same tensor, array or generator with other content.
        counted: whether the change raised the tensor's version counter; `batch_norm` updates statistics without that.
    """

    owner: str
    name: str
    now: Any
    in_place: bool = False
    counted: bool = True
    was: Any = ABSENT

    @property
    def has_other_values(self) -> bool:
        """Whether it has other values, rather than another tensor with equal ones, as where a hook sets `weight`."""
        was, now = self.was, self.now
        return not (
            isinstance(was, Tensor)
            and isinstance(now, Tensor)
            and was.device == now.device
            and same(was.detach(), now.detach())
        )


@dataclass
class StateSnapshot:
    """Copy of all state reachable from some objects, which `restore` writes back.

    Visits lists, dicts, sets, deques, arrays, random generators, tensors, modules, functions, arguments of partials and
    objects with attributes, but not objects of libraries. Of a parameter it keeps the storage; its values only if
    `add_tensor` copies them. Iterators and generators cannot be set back: `shield` puts copies in their places.

    `restore` writes only places that differ. Python does not tell who wrote a place: what another thread changed
    meanwhile in an object that is reachable from the model, or in a variable that the model's code assigns, is undone.

    Attributes:
        apart: ids of modules that are not visited from other objects, because they are added on their own.
    """

    apart: frozenset[int] = frozenset()
    _held: dict[int, tuple[str, str, Any, Any]] = field(default_factory=dict)
    _contents: dict[int, tuple[str, str, Any, Any]] = field(default_factory=dict)
    _room: int = MAX_COPIED_BYTES
    _iterating: list[tuple[str, Any, Any, Any]] = field(default_factory=list)
    _stand_ins: dict[int, IteratorStandIn] = field(default_factory=dict)

    def add(self, owner: str, value: Any, name: str = "") -> None:
        """Add an object, or a dict of attributes such as `vars(module)`, and everything reachable from it."""
        if not isinstance(value, OuterVariables):
            self._visit(owner, [(name, value)])
        elif id(value) not in self._held:  # models of libraries have thousands, most of them empty
            self._visit(owner, self._hold(owner, name, value, value.read()))

    def _visit(self, owner: str, named: Iterable[tuple[str, Any]]) -> None:
        """Add named objects, and everything reachable from them."""
        waiting, left = deque(named), MAX_VISITED_OBJECTS
        while waiting and left > 0:
            name, value = waiting.popleft()
            if isinstance(value, nn.Module):
                name = f"{name}." if name else ""
                value = None if id(value) in self.apart or isinstance(value, torch.jit.ScriptModule) else vars(value)
            if id(value) in self._held or isinstance(value, _NO_STATE):
                continue
            left -= 1
            if type(value) in _CONTAINERS:  # most values of modules, without the questions to all other types
                waiting.extend(self._hold(owner, name, value, _items(value)))
            elif isinstance(value, Tensor):
                size = 0 if isinstance(value, nn.Parameter) else value.numel() * value.element_size()
                copies = 0 < size <= self._room
                self.add_tensor(owner, name, value, copies)
                self._room -= size if copies else 0
                waiting.extend(_attributes(name, value))
            elif isinstance(value, (*_GENERATORS, *BYTES, functools._lru_cache_wrapper)) or of_numpy(value):
                self._add_content(owner, name, value)
                waiting.extend(_attributes(name, value))
                if is_array(value) and value.dtype.hasobject:
                    waiting.extend((f"{name}[{i}]", part) for i, part in enumerate(value.ravel().tolist()))
            elif (items := _items(value)) is not None:
                waiting.extend(self._hold(owner, name, value, items))
                waiting.extend(_attributes(name, value) if isinstance(value, _CONTAINERS) else ())
            else:
                waiting.extend((*_parts(name, value), *_attributes(name, value)))
        if waiting:
            log.warning(
                "%s: its attributes hold more than %d objects; changes of the others are not detected",
                owner or "the model",
                MAX_VISITED_OBJECTS,
            )

    def _hold(self, owner: str, name: str, value: Any, items: Any) -> list[tuple[str, Any]]:
        """Add a container or object with its items; returns those that may have state, with their names."""
        self._held[id(value)] = owner, name, value, items
        of_module, inside = name == "" or name.endswith("."), []
        for key, part in _slots(value, items).items() if items else ():
            if type(part) in _PLAIN_TYPES:
                continue
            if _may_iterate(part):
                self._iterating.append((name, value, key, part))
            hooks = of_module and isinstance(key, str) and "hooks" in key
            if not hooks and not isinstance(part, _NO_STATE):
                inside.append((_name(name, value, key), part))
        return inside

    def add_tensor(self, owner: str, name: str, tensor: Tensor, copies: bool) -> None:
        """Add a tensor: its storage, and if `copies` is set, its values."""
        has_values = not tensor.is_inference() and not tensor.is_nested and tensor.layout is torch.strided
        if has_values and id(tensor) not in self._contents:
            self._contents[id(tensor)] = owner, name, tensor, TensorContent(tensor, copies)

    def add_script(self, owner: str, script: torch.jit.ScriptModule) -> None:
        """Add the attributes of a script module other than buffers and parameters, which its code may change."""
        kind = getattr(script, "_concrete_type", None)  # traced and frozen modules have none
        buffers = {name for name, _ in script.named_buffers(recurse=False)}
        for name, (_, is_parameter) in kind.get_attributes().items() if kind is not None else ():
            if not is_parameter and name not in buffers:
                try:
                    self._add_content(owner, name, ScriptAttribute(script, name))
                except Exception as error:  # an object of C++ raises any type of error
                    log.debug("%s.%s is not restored: %s", owner, name, error)

    def _add_content(self, owner: str, name: str, value: Any) -> None:
        size = value.nbytes if is_array(value) else len(value) if isinstance(value, BYTES) else 0
        if size <= self._room and (size == 0 or not is_array(value) or value.flags.writeable):
            self._room -= size
            self._contents.setdefault(id(value), (owner, name, value, content_of(value)))

    def shield(self) -> None:
        """Put stand-ins (`IteratorStandIn`) into all places that hold iterators or generators, until `restore`."""
        for name, value, key, item in self._iterating:
            instead = stand_in(item, _name(name, value, key), self._stand_ins)
            if instead is not item:
                _put_slot(value, key, instead)

    @property
    def is_shielded(self) -> bool:
        """Whether stand-ins are in the places of iterators."""
        return bool(self._stand_ins)

    def changes(self) -> Iterator[ChangedPlace]:
        """Places that differ from the snapshot."""
        for owner, name, value, items in self._held.values():
            if _has_same_items(value, items):
                continue
            before, now = _slots(value, items), _slots(value, _items(value))
            if len(before) == len(now) and all(now.get(key, ABSENT) is was for key, was in before.items()):
                continue
            for key in dict.fromkeys((*before, *now)):
                if type(key) is str and key in _HOOK_FLAGS:  # a traced value may be a key
                    continue
                was, new = before.get(key, ABSENT), now.get(key, ABSENT)
                moved = advanced(new, was)
                if moved is None and isinstance(value, OuterVariables) and not value.sets(key):
                    continue  # another thread did
                if moved or (moved is None and not _alike(was, new)):
                    yield ChangedPlace(owner, _name(name, value, key), new, in_place=bool(moved), was=was)
        for owner, name, value, content in self._contents.values():
            if not has_content(value, content):
                counted = not isinstance(content, TensorContent) or content.counts(value)
                yield ChangedPlace(owner, name, value, in_place=True, counted=counted)

    def restore(self) -> None:
        """Restore the items of containers, and the values of tensors, arrays and generators."""
        for _, name, value, items in self._held.values():
            for key, item in _slots(value, items).items() if self._stand_ins else ():
                now = _slots(value, _items(value)).get(key, ABSENT) if _may_iterate(item) else item
                if now is not item and advanced(now, item) is not None:
                    _put_slot(value, key, item)
            flags = {key: value[key] for key in _HOOK_FLAGS if key in value} if type(value) is dict else {}
            _put_items(value, items, ordered=name != "" and not name.endswith("."))
            if flags:
                value.update(flags)
        for _, _, value, content in self._contents.values():
            if not has_content(value, content):
                put_content(value, content)
        self._stand_ins.clear()


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


# ---- containers

_CONTAINERS = (dict, list, deque, set)
_HOOK_FLAGS = ("_output_capturing_hooks_installed",)
"""Attributes by which transformers notes that a first call has installed hooks, which stay: they are not restored."""
_WEAK_TABLES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dict of the attributes of a tensor, a function, a subclass of a container or a `threading.local`, if any."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, OuterVariables):
        kinds = (Tensor, tuple, frozenset, types.FunctionType, threading.local, *_CONTAINERS, *BYTES)
        if isinstance(value, kinds) or of_numpy(value):
            yield f"{name}.", attributes


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Objects that an immutable value refers to, with their names."""
    if isinstance(value, (tuple, frozenset)):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"{name}.args[{i}]", part) for i, part in enumerate(value.args))
        yield from ((f"{name}.keywords[{key!r}]", part) for key, part in value.keywords.items())
        yield f"{name}.func", value.func
    elif isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, _WEAK_TABLES):
        yield name, vars(value)["data"]


def _items(value: Any) -> Any:
    """Shallow copy of the items of a container or attributes of an object; None for other values."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # its class may compute items when they are read
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, OuterVariables):
        return value.read()
    others = (tuple, frozenset, functools.partial, types.FunctionType, types.MethodType)
    if isinstance(value, (*others, *_WEAK_TABLES)) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    attributes = getattr(value, "__dict__", None)
    slots = [n for cls in type(value).__mro__ for n in _names(vars(cls).get("__slots__", ()))]
    if not isinstance(attributes, dict) and not slots:
        return None
    values = dict(attributes) if isinstance(attributes, dict) else {}
    return values | {n: getattr(value, n) for n in slots if n not in _NO_SLOTS and hasattr(value, n)}


_NO_SLOTS = ("__dict__", "__weakref__")


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _has_same_items(value: Any, items: Any) -> bool:
    """Whether a container has the very items of its copy in their order; a quick answer for most containers."""
    if isinstance(value, OuterVariables):
        return value.still_has(items)
    if isinstance(value, dict):
        same_values = len(value) == len(items) and all(map(operator.is_, dict.values(value), items.values()))
        return same_values and all(map(operator.is_, dict.keys(value), items))
    return type(value) is list and len(value) == len(items) and all(map(operator.is_, value, items))


def _slots(value: Any, items: Any) -> dict[Any, Any]:
    """Items of a container by key, index or attribute name; those of a set by themselves."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(items))
    return {item: item for item in items} if isinstance(value, set) else items


def _name(outer: str, holder: Any, key: Any) -> str:
    """Display name of an item. Names of modules end with a dot; `_parameters`, `_buffers`, `_modules` are left out."""
    stem, dot, last = outer.rpartition(".")
    if outer == "" or outer.endswith("."):
        return f"{outer}{key}"
    if last in _TABLES:
        return f"{stem}{dot}{key}"
    return f"{outer}[{key!r}]" if isinstance(holder, (dict, list, deque, set)) else f"{outer}.{key}"


def _may_iterate(item: Any) -> bool:
    return type(item) is tuple or (type(item) not in _QUIET_TYPES and is_opaque_iterator(item))


def _put_slot(value: Any, key: Any, item: Any) -> None:
    """Set one item of a container, variable or attribute. A set cannot hold anything instead of an item."""
    if isinstance(value, dict):
        dict.__setitem__(value, key, item)
    elif isinstance(value, (list, deque)):
        value[key] = item
    elif isinstance(value, OuterVariables):
        value.put(key, item)
    elif not isinstance(value, set):
        object.__setattr__(value, key, item)


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
    """Restore a dict item by item, since other threads may read it; as a whole only if its order changed."""
    kind = OrderedDict if isinstance(value, OrderedDict) else dict  # bypasses methods that a subclass overrides
    for key in dict.keys(value) - items.keys():
        kind.__delitem__(value, key)
    for key, item in items.items():
        if dict.get(value, key, ABSENT) is not item:
            kind.__setitem__(value, key, item)
    if ordered and list(kind.__iter__(value)) != list(items):
        kind.clear(value)
        kind.update(value, items)
