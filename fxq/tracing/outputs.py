"""Objects and containers of user-defined classes that a traced forward returns or passes to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

PLAIN_CONTAINERS = "Pass and return tensors, or tuples, lists, dicts and dataclasses of tensors."
"""Remedy for objects that a graph cannot hold."""


def content_of(container: Any) -> Any:
    """Content of an object or container of a user-defined class, as a plain dict, tuple or list."""
    if isinstance(container, Mapping):
        return dict(container)
    if is_dataclass(container):
        return {f.name: getattr(container, f.name) for f in fields(container)}
    if hasattr(container, "_asdict"):
        return dict(container._asdict())
    return tuple(container) if isinstance(container, tuple) else list(container)


def cannot_construct(kind: type, why: str) -> str:
    """Message for a class whose objects `make_output` cannot construct from their content."""
    return (
        f"an object of type {kind.__name__} is returned or passed to a layer, and a graph cannot construct it from "
        f"its fields or items: {why}."
    )
