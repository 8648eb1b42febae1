"""Containers among arguments and results of a model: taking their tensors out, and constructing them from new ones."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fxq.common.container_types import handler_of_class, plain_parts, type_of
from fxq.errors import InputError

Leaves = dict[str, Any]
"""Tensors and numbers of a call by name, such as `past_key_values_0_keys`."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Structure of a value: its containers, and its plain values other than numbers. Leaves are named, not held.

    Attributes:
        kind: "leaf" (tensor or number), "constant" (None, a bool, a string, a dtype), "plain" (tuple, list, dict or
            dataclass), "registered" (container of a registered class), or "same" (a container that is also in an
            earlier place, or in the arguments of the call).
        name: name of the leaf or of the container; empty for tuples, which nothing changes.
        cls: class of the container; for a leaf, "tensor" or "number".
        constant: the constant; for a registered container, the constant of its `parts`.
        parts: structures of the parts by index, key or name.
    """

    kind: str
    name: str = ""
    cls: Any = None
    constant: Any = None
    parts: tuple[tuple[Any, Structure], ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether two structures select the same graph. Constants that differ in type alone, as True and 1, do not."""
        return (
            isinstance(other, Structure)
            and (self.kind, self.name, self.cls) == (other.kind, other.name, other.cls)
            and same_constants(self.constant, other.constant)
            and self.parts == other.parts
        )

    __hash__ = None  # type: ignore[assignment]  # constants may be lists

    def __str__(self) -> str:
        if self.kind == "leaf":
            return f"a {self.cls}"
        if self.kind == "constant":
            return repr(self.constant)
        if self.kind == "same":
            return f"the container {self.name}"
        inner = ", ".join(f"{key}: {part}" for key, part in self.parts)
        constant = f"; {self.constant}" if self.constant not in (None, ()) else ""
        return f"{self.cls.__name__}({inner}{constant})"


LeafKind = Callable[[Any], str]
"""Function that returns "tensor" or "number" for further values that are leaves, such as traced ones; "" for others."""


def same_constants(first: Any, second: Any) -> bool:
    """Whether two constants are equal, in their types, too."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same_constants, first, second))
    if isinstance(first, dict):
        return same_constants(list(first.items()), list(second.items()))
    return bool(first == second)


def _constant_copy(constant: Any) -> Any:
    """Copy of a constant, whose lists the user may change later."""
    if type(constant) in (tuple, list):
        return type(constant)(map(_constant_copy, constant))
    return {key: _constant_copy(part) for key, part in constant.items()} if type(constant) is dict else constant


FACTORIES = {None: "none", list: "list", dict: "dict", int: "int", float: "float"}
"""Factories of a `defaultdict` that a structure holds. Others may be equal without being the same function."""


def no_further_leaf(value: Any) -> str:
    """Default `LeafKind`: only tensors and numbers are leaves."""
    return ""


class ContainerNames:
    """Names of containers by identity, which tell one container in two places from two equal ones.

    Attributes:
        values: containers by name. They are kept alive, since identities of objects are reused.
    """

    def __init__(self, owned: Mapping[str, Any] | None = None) -> None:
        """Args: owned: containers that have names already, as those among the arguments of a call."""
        self.values: dict[str, Any] = dict(owned or {})
        self._owned = {id(container): name for name, container in self.values.items()}
        self._visited: dict[int, str] = {}

    def earlier(self, container: Any) -> str:
        """Name of a container that was visited before; empty for others."""
        return self._visited.get(id(container), "")

    def visit(self, container: Any, name: str) -> str:
        """Return the name of a container that is visited for the first time.

        Args:
            container: the container.
            name: name for a container that has none, made unique.
        """
        if isinstance(container, tuple):
            return ""
        if id(container) in self._owned:
            name = self._owned[id(container)]
        else:
            while name in self.values:
                name += "_"
        self.values[name] = container
        self._visited[id(container)] = name
        return name


def taken_apart(
    value: Any,
    name: str,
    leaves: Leaves,
    *,
    leaf_kind: LeafKind = no_further_leaf,
    containers: ContainerNames | None = None,
) -> Structure:
    """Take a value apart: return its structure, and add its tensors and numbers to `leaves`.

    Args:
        value: an argument or result of a model.
        name: prefix of the names of its leaves.
        leaves: the leaves so far.
        leaf_kind: kind of further values that count as leaves.
        containers: names of containers; one that was visited is not taken apart again. None: none has a name yet.

    Raises:
        InputError: a value is neither a tensor, a number, a plain constant nor a container.
    """
    names = ContainerNames() if containers is None else containers

    def inner(parts: Iterable[tuple[Any, Any]]) -> tuple[tuple[Any, Structure], ...]:
        return tuple(
            (key, taken_apart(part, f"{name}_{_spelled(key)}", leaves, leaf_kind=leaf_kind, containers=names))
            for key, part in parts
        )

    if earlier := names.earlier(value):
        return Structure("same", earlier)
    while name in leaves:  # as an argument `x_0` beside the first item of an argument `x`
        name += "_"
    kind = "tensor" if isinstance(value, Tensor) else leaf_kind(value)
    if kind or (isinstance(value, (int, float, complex)) and not isinstance(value, bool)):
        leaves[name] = value
        return Structure("leaf", name, kind or "number")
    handler = type_of(value)
    if handler is not None:
        own = names.visit(value, name)
        parts, constant = handler.parts(value)
        return Structure("registered", own, type(value), _constant_copy(constant), inner(parts.items()))
    plain = plain_parts(value)
    if plain is not None:
        factory = getattr(value, "default_factory", None) if isinstance(value, defaultdict) else None
        constant = factory if factory in FACTORIES else None
        return Structure("plain", names.visit(value, name), type(value), constant, inner(plain.items()))
    if value is None or isinstance(value, (bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return Structure("constant", constant=value)
    raise InputError(
        f"{name} holds a {type(value).__name__}, which is not a tensor, a number or a container that fxq knows. "
        "Register its class with torch.utils._pytree.register_pytree_node or fxq.extend.register_container."
    )


def matches(
    structure: Structure, value: Any, leaves: Leaves, containers: dict[str, Any], names: dict[int, str]
) -> bool:
    """Whether a value has a structure. It does what `taken_apart` and a comparison do, in less time.

    Args:
        structure: the structure.
        value: an argument of a model.
        leaves: the leaves so far, by name; those of the value are added.
        containers: the containers so far, by name; those of the value are added.
        names: names of the containers by identity.
    """
    kind, cls = structure.kind, structure.cls
    if id(value) in names or kind == "same":
        return kind == "same" and names.get(id(value)) == structure.name
    if kind == "leaf":
        leaves[structure.name] = value
        if cls == "tensor":
            return isinstance(value, Tensor)
        return isinstance(value, (int, float, complex)) and not isinstance(value, (bool, Tensor))
    if kind == "constant":
        return same_constants(structure.constant, value)
    if type(value) is not cls:
        return False
    handler = type_of(value)
    if (handler is not None) is not (kind == "registered"):
        return False
    if handler is not None:
        parts, constant = handler.parts(value)
    else:
        parts, constant = plain_parts(value) or {}, getattr(value, "default_factory", None)
        constant = constant if cls is defaultdict and constant in FACTORIES else None
    if len(parts) != len(structure.parts) or not same_constants(structure.constant, constant):
        return False
    if structure.name:
        containers[structure.name], names[id(value)] = value, structure.name
    return all(
        key == own_key and matches(part, own_part, leaves, containers, names)
        for (key, part), (own_key, own_part) in zip(structure.parts, parts.items(), strict=True)
    )


def _spelled(key: Any) -> str:
    text = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in str(key))
    return text or "_"


def put_together(structure: Structure, leaves: Leaves, containers: dict[str, Any] | None = None) -> Any:
    """Return the value of a structure with new leaves.

    Args:
        structure: structure of the value.
        leaves: its tensors and numbers by name.
        containers: containers by name. Those that are there are updated, others are constructed and added.

    Raises:
        InputError: a container that is to be updated cannot be.
    """
    present = {} if containers is None else containers
    if structure.kind == "leaf":
        return leaves[structure.name]
    if structure.kind == "constant":
        return structure.constant
    if structure.kind == "same":
        return present[structure.name]
    parts = {key: put_together(part, leaves, present) for key, part in structure.parts}
    if structure.name in present:
        _update(present[structure.name], structure, parts)
        return present[structure.name]
    value = _constructed(structure, parts)
    if structure.name:
        present[structure.name] = value
    return value


def _constructed(structure: Structure, parts: Mapping[Any, Any]) -> Any:
    cls = structure.cls
    if structure.kind == "registered":
        return handler_of_class(cls).construct(parts, structure.constant)
    if is_dataclass(cls):
        return _dataclass(cls, parts)
    if cls is defaultdict:
        return defaultdict(structure.constant, parts)
    if issubclass(cls, Mapping):
        return OrderedDict(parts) if cls is OrderedDict else dict(parts) if cls is dict else _mapping(cls, parts)
    return cls(*parts.values()) if hasattr(cls, "_fields") else cls(parts.values())


def _mapping(cls: Any, parts: Mapping[Any, Any]) -> Any:
    result = cls()
    for key, part in parts.items():
        result[key] = part
    return result


def _dataclass(cls: Any, parts: Mapping[str, Any]) -> Any:
    if issubclass(cls, Mapping):  # its mapping interface holds the fields that are not None
        return cls(**parts)
    computed = {field.name for field in fields(cls) if not field.init}
    result = cls(**{name: part for name, part in parts.items() if name not in computed})
    for name in computed:
        object.__setattr__(result, name, parts[name])
    return result


def _update(container: Any, structure: Structure, parts: Mapping[Any, Any]) -> None:
    """Give an existing container the parts, and the constant of the structure, that it has after a call."""
    handler = handler_of_class(structure.cls) if structure.kind == "registered" else None
    if handler is not None and handler.update is not None:
        handler.update(container, parts, structure.constant)
        return
    before: Mapping[Any, Any] = plain_parts(container) or {}
    constant = structure.constant
    if handler is not None and (own := type_of(container)) is not None:
        before, constant = own.parts(container)
    same_constant = same_constants(constant, structure.constant)
    if same_constant and list(before) == list(parts) and all(before[key] is parts[key] for key in parts):
        return
    try:
        if handler is None and isinstance(container, list):
            container[:] = parts.values()
        elif handler is None and isinstance(container, MutableMapping) and not is_dataclass(container):
            container.clear()
            container.update(parts)
        elif handler is None or (same_constant and all(hasattr(container, key) for key in parts)):
            for key, part in parts.items():
                if getattr(container, key) is not part:
                    setattr(container, key, part)
        else:
            vars(container).update(vars(handler.construct(parts, structure.constant)))
    except (TypeError, AttributeError) as error:
        raise InputError(
            f"the model changes {structure.name}, and fxq cannot change a {type(container).__name__} in the same way: "
            f"{error}. Register its class with fxq.extend.register_container, with the argument `update`."
        ) from error
