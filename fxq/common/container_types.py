"""Classes of containers that models take and return: which parts they have, and how one is constructed from parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class ContainerType:
    """Functions that take a container of one class apart and construct one from new parts.

    Attributes:
        parts: returns the parts of a container by name, and a constant that describes everything else. The parts may be
            containers. Two containers with equal constants and parts of equal structure run the same graph.
        construct: returns a container for such parts and such a constant.
        update: replaces the parts of an existing container, for models that change their argument.
    """

    parts: Callable[[Any], tuple[Mapping[str, Any], Any]]
    construct: Callable[..., Any]
    update: Callable[[Any, Mapping[str, Any], Any], None] | None = None


_TYPES: dict[type, ContainerType] = {}


def register_container(
    kind: type,
    parts: Callable[[Any], tuple[Mapping[str, Any], Any]],
    construct: Callable[[Mapping[str, Any], Any], Any],
    update: Callable[[Any, Mapping[str, Any], Any], None] | None = None,
) -> None:
    """Register a class whose objects a model takes, changes or returns, such as a key-value cache.

    Classes that are registered with `torch.utils._pytree.register_pytree_node` need no registration here.

    Args:
        kind: the class. The functions serve its subclasses, too, unless these are registered themselves.
        parts: see `ContainerType`.
        construct: see `ContainerType`.
        update: see `ContainerType`. Default: the parts are set as attributes; if there are no attributes of their
            names, or the constant differs, the attributes of a new container replace those of the old one.

    Example:
        >>> class History:
        ...     def __init__(self, steps):
        ...         self.steps = steps
        >>> register_container(History, lambda h: ({"steps": h.steps}, None), lambda parts, _: History(**parts))
        >>> is_registered(History([torch.ones(2)]))
        True
    """
    _OWN.clear()
    _TYPES[kind] = ContainerType(parts, construct, update)


def register_container_type(kind: type, container_type: ContainerType) -> None:
    """Register a class and its subclasses, see `register_container`. `construct` gets the class as first argument."""
    _OWN.clear()
    _BASES[kind] = container_type


_BASES: dict[type, ContainerType] = {}
_OWN: weakref.WeakKeyDictionary[type, ContainerType | None] = weakref.WeakKeyDictionary()
"""Cache of `_own_type`, which every call of a model uses for each of its containers."""
_MISSING = object()


def is_registered(value: Any) -> bool:
    """Whether a value is a container of a registered class, other than a tuple, a list or a dict."""
    return type_of(value) is not None


def is_registered_class(cls: type) -> bool:
    """Whether containers of a class are registered, with fxq or as pytrees."""
    return _own_type(cls) is not None or cls in pytree.SUPPORTED_NODES


def is_container(value: Any) -> bool:
    """Whether a value is of a registered class, or a tuple, list, dict or dataclass."""
    return is_registered(value) or plain_parts(value) is not None


def type_of(value: Any) -> ContainerType | None:
    """Functions of the registered class of a value; None for tuples, lists, dicts, dataclasses and other values."""
    cls = type(value)
    own = _own_type(cls)
    if own is not None or _is_plain(value):
        return own
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        return None

    def parts(container: Any) -> tuple[Mapping[str, Any], Any]:
        children, context = node.flatten_fn(container)
        return {str(i): child for i, child in enumerate(children)}, context

    return ContainerType(parts, lambda values, context: node.unflatten_fn(list(values.values()), context))


def _own_type(cls: type) -> ContainerType | None:
    own: Any = _OWN.get(cls, _MISSING)
    if own is _MISSING:
        own = _OWN[cls] = _registered_type(cls)
    return own


def _registered_type(cls: type) -> ContainerType | None:
    for base in cls.__mro__:
        if base in _TYPES:
            return _TYPES[base]
        if base in _BASES:
            return replace(_BASES[base], construct=partial(_BASES[base].construct, cls))
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value is a tuple, list, dict or dataclass, see `plain_parts`."""
    is_sequence = isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)
    return is_sequence or isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type))


def plain_parts(value: Any) -> Mapping[Any, Any] | None:
    """Parts of a tuple, list, dict or dataclass by index, key or field; None for other values."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def handler_of_class(cls: type) -> ContainerType:
    """Functions of a registered class."""
    own = _own_type(cls)
    if own is not None:
        return own
    node = pytree.SUPPORTED_NODES[cls]
    return ContainerType(
        lambda value: ({}, None), lambda values, context: node.unflatten_fn(list(values.values()), context)
    )
