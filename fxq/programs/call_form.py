"""Form of a call: everything in the arguments that selects a graph, and how arguments become inputs of the graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fxq.common.containers import ContainerNames, Leaves, Structure, matches, put_together, same_constants, taken_apart
from fxq.common.data import Batch
from fxq.errors import InputError


@dataclass(frozen=True)
class CallForm:
    """Structure of the arguments of a call, by argument. Calls of one form differ only in their tensors and numbers.

    Attributes:
        arguments: structure of each argument that is passed and differs from its default, in the order of forward.
        positional: number of the first arguments that are passed by position, of which the last is forward's `*args`.
            0: forward has none, and all arguments are passed by name.
    """

    arguments: tuple[tuple[str, Structure], ...]
    positional: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name}={_brief(structure)}" for name, structure in self.arguments)

    def differences(self, other: CallForm) -> list[str]:
        """Texts on the arguments in which this form differs from another: name, structure here, structure there."""
        own, others = dict(self.arguments), dict(other.arguments)
        names = dict.fromkeys((*own, *others))
        texts = (structure_difference(name, own.get(name), others.get(name)) for name in names)
        return [text for text in texts if text]

    @property
    def leaf_names(self) -> list[str]:
        """Names of the inputs of the graph, in order."""
        return [name for _, structure in self.arguments for name in leaf_names(structure)]

    def matched(
        self, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
    ) -> tuple[Leaves, dict[str, Any]] | None:
        """Tensors and numbers of a call by name, and its containers by name; None if the call has another form.

        Args:
            arguments: arguments of the call by name.
            parameters: parameters of the float model's forward.
        """
        own = dict(self.arguments)
        for name, value in arguments.items():
            parameter = parameters.get(name)
            if name not in own and (parameter is None or not _is_default(value, parameter.default)):
                return None
        leaves: Leaves = {}
        containers, names = dict[str, Any](), dict[int, str]()
        for name, structure in self.arguments:
            if name not in arguments or not matches(structure, arguments[name], leaves, containers, names):
                return None
        return leaves, containers

    def call_arguments(self, leaves: Leaves, containers: dict[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of forward by name, with containers constructed from the leaves.

        Args:
            leaves: tensors and numbers by name.
            containers: a dict, to which the containers are added by name.
        """
        added = {} if containers is None else containers
        return {name: put_together(structure, leaves, added) for name, structure in self.arguments}

    def called(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function with the arguments that `call_arguments` returns."""
        names = [name for name, _ in self.arguments]
        *first, spread = [arguments[name] for name in names[: self.positional]] or [()]
        return function(*first, *spread, **{name: arguments[name] for name in names[self.positional :]})


_MAX_TEXT = 60
"""Maximum number of characters of a structure in a message."""


def _brief(structure: Structure | None) -> str:
    """Structure as text; without its parts if the text were long."""
    if structure is None:
        return "left out"
    text = str(structure)
    is_class = isinstance(structure.cls, type)
    return f"{structure.cls.__name__}(...)" if is_class and len(text) > _MAX_TEXT else text


def structure_difference(place: str, first: Structure | None, second: Structure | None) -> str:
    """Text on the first place at which two structures differ; empty if they are equal.

    Args:
        place: name of the value.
        first: structure of the value; None: it is left out of the call.
        second: structure that the first is compared with; None: left out.
    """
    while first is not None and second is not None and first != second:
        if first.cls is not second.cls or [key for key, _ in first.parts] != [key for key, _ in second.parts]:
            break
        inner = [(key, a, b) for (key, a), (_, b) in zip(first.parts, second.parts, strict=True) if a != b]
        if not inner:
            break
        key, first, second = inner[0]
        place = f"{place}, {key}"
    texts = _brief(first), _brief(second)
    if texts[0] == texts[1] and first is not None and second is not None:
        texts = _with_parts(first), _with_parts(second)
        if texts[0] == texts[1]:
            entries = _different_entries(first.constant, second.constant)
            texts = f"{_brief(first)} with {entries[0]}", f"with {entries[1]}"
    return "" if first == second else f"{place} is {texts[0]}, not {texts[1]}"


def _with_parts(structure: Structure) -> str:
    """Structure as text with the names of its parts, or with its constant if it has none."""
    parts = ", ".join(str(key) for key, _ in structure.parts)
    return f"{_brief(structure)} with {f'the parts {parts}' if parts else 'no tensors'}"


def _different_entries(first: Any, second: Any) -> tuple[str, str]:
    """Texts of two constants; of tuples, of the entries in which they differ. A pair is a name and its value."""
    if not (isinstance(first, tuple) and isinstance(second, tuple)):
        return repr(first), repr(second)

    def text(entries: tuple[Any, ...], compared: tuple[Any, ...]) -> str:
        own = [e for e in entries if not any(same_constants(e, there) for there in compared)]
        named = (f"{e[0]}={e[1]!r}" if isinstance(e, tuple) and len(e) == 2 else repr(e) for e in own)
        return ", ".join(named) or "nothing else"

    return text(first, second), text(second, first)


def leaf_names(structure: Structure) -> list[str]:
    """Names of the tensors and numbers in a structure, in order."""
    if structure.kind == "leaf":
        return [structure.name]
    return [name for _, part in structure.parts for name in leaf_names(part)]


def form_of(signature: inspect.Signature, batch: Batch) -> tuple[CallForm, Leaves, dict[str, Any]]:
    """Form of a call, its tensors and numbers by name, and its containers by name.

    Args:
        signature: signature of the float model's forward, without `self`.
        batch: arguments of the call.

    Raises:
        InputError: an argument does not fit the signature, or holds a value that no graph can take.
    """
    try:
        bound = signature.bind_partial(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise InputError(f"the arguments {batch} do not fit the model: {error}.") from error
    spread = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), "")
    positional, by_position = 0, spread in bound.arguments
    leaves: Leaves = {}
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(value)
        elif by_position or not _is_default(value, parameter.default):
            arguments[name] = value
        if name == spread:
            positional, by_position = len(arguments), False
    names = ContainerNames()
    structures = tuple((name, taken_apart(value, name, leaves, containers=names)) for name, value in arguments.items())
    return CallForm(structures, positional), leaves, names.values


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is None, a bool or a string, and equals the default of its argument."""
    return value is default if value is None or isinstance(value, bool) else isinstance(value, str) and value == default
