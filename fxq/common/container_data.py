"""Structures of containers as plain data, for files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from fxq.common.container_types import is_registered_class
from fxq.common.containers import FACTORIES, Structure
from fxq.errors import InputError


def as_data(structure: Structure) -> Any:
    """Return a structure as plain data, for files. Classes are written by their names.

    Raises:
        InputError: a constant or a key of a container is no plain data.
    """
    cls = (
        f"{structure.cls.__module__}:{structure.cls.__qualname__}" if isinstance(structure.cls, type) else structure.cls
    )
    parts = [[_constant_data(key), as_data(part)] for key, part in structure.parts]
    return [structure.kind, structure.name, cls, _constant_data(structure.constant), parts]


def from_data(data: Any) -> Structure:
    """Inverse of `as_data`. Looks up classes in modules that are imported; imports nothing.

    Raises:
        InputError: the class of a container is not imported, or is not one that fxq constructs.
    """
    kind, name, cls, constant, parts = data
    if kind in ("plain", "registered"):
        cls = _class_named(cls)
        if kind == "plain" and not (is_dataclass(cls) or issubclass(cls, (tuple, list, Mapping))):
            raise InputError(f"{cls.__name__} is not a class of containers.")
        if kind == "registered" and not is_registered_class(cls):
            raise InputError(f"containers of the class {cls.__name__} are not registered: register it as before.")
    inner = tuple((_constant_from(key), from_data(part)) for key, part in parts)
    return Structure(str(kind), str(name), cls, _constant_from(constant), inner)


def _class_named(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type):
        raise InputError(f"the class {path} is not imported: import {module} first.")
    return value


_TORCH_CONSTANTS = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout"}


def _constant_data(constant: Any) -> Any:
    if constant is None or isinstance(constant, (bool, int, float, str)):
        return constant
    if type(constant) in (tuple, list):
        return {type(constant).__name__: [_constant_data(part) for part in constant]}
    if type(constant) is dict:
        return {"dict": [[_constant_data(key), _constant_data(part)] for key, part in constant.items()]}
    for kind, name in _TORCH_CONSTANTS.items():
        if isinstance(constant, kind):
            return {name: str(constant).removeprefix("torch.")}
    if constant in (list, dict, int, float):
        return {"factory": constant.__name__}
    raise InputError(f"a file cannot hold a {type(constant).__name__}, which a container has as a constant or a key.")


def _constant_from(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    ((kind, value),) = data.items()
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(map(_constant_from, value))
    if kind == "dict":
        return {_constant_from(key): _constant_from(part) for key, part in value}
    if kind == "factory":
        return next((factory for factory, name in FACTORIES.items() if name == value), None)
    if kind == "device":
        return torch.device(value)
    constant = getattr(torch, value, None)
    if not isinstance(constant, tuple(_TORCH_CONSTANTS)):
        raise InputError(f"{value!r} is no {kind} of torch.")
    return constant
