"""Selectors: the ops of a model that an override of a recipe applies to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxq.common.globs import crossing, path_matches
from fxq.common.source import import_name, import_path
from fxq.errors import RecipeError, nearest, unknown
from fxq.ops import OPS


@dataclass(frozen=True)
class Selector:
    """Selection of ops by module path glob, by op name (optionally below a path), or by module type.

    A path selects a module and everything inside it: `layer4` and `layer4.*` both select `layer4.0.conv1`. `*` stops
    at a dot and `**` crosses dots: `layer.**.dense` selects `layer.0.output.dense`, `layer.*.dense` does not.

    Attributes:
        path: glob of module paths, or None.
        op: name of an op of the op table, or None.
        module: module type, subclasses included, or None.
    """

    path: str | None = None
    op: str | None = None
    module: type[nn.Module] | None = None

    def matches(self, path: str, ops: Iterable[str], types: Mapping[str, type]) -> bool:
        """Whether a node is selected.

        Args:
            path: module path of the node.
            ops: names of the ops that it runs.
            types: module type by module path, for the whole model.
        """
        if self.op is not None and (self.op not in ops or self.path is None):
            return self.op in ops
        paths = ancestors(path)
        if self.module is not None:
            return any(issubclass(types[p], self.module) for p in (*paths, "") if p in types)
        return bool(self.path) and any(path_matches(p, str(self.path)) for p in paths or [""])

    def near_misses(self, types: Mapping[str, type], ops: Iterable[str]) -> list[str]:
        """Names in the model that are most like this selector, for the error when it selects nothing."""
        if self.op is not None:
            return sorted(set(ops))
        if self.module is not None:
            return sorted({t.__name__ for p, t in types.items() if p})
        paths = [p for p in types if p]
        wider = crossing(str(self.path), paths)
        near = [f"{wider!r}, since * stops at a dot"] if wider is not None else []
        return near or nearest(str(self.path).rstrip("*").rstrip("."), paths, 5)

    def to_dict(self) -> dict[str, str]:
        """Plain data for a recipe file."""
        if self.module is not None:
            return {"module": import_path(self.module, f"the module type {self.module.__qualname__}")}
        return {key: value for key, value in (("op", self.op), ("path", self.path)) if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selector:
        """Inverse of `to_dict`. Raises `RecipeError` for unknown keys, ops and modules, or an invalid combination."""
        keys = ["path", "op", "module", "config"]
        for key in data:
            if key not in keys:
                raise RecipeError(unknown("override key", key, keys))
        choice = {k: v for k, v in data.items() if k != "config"}
        if len(choice) != 1 and choice.keys() != {"op", "path"}:
            names = sorted(choice) or "none"
            raise RecipeError(f"an override needs one of path, op and module, or op and path together, not {names}.")
        for key, value in choice.items():
            if not isinstance(value, str):
                raise RecipeError(f"an override's {key} is a string, not {value!r}.")
        if "module" in choice:
            return cls(module=import_name(choice["module"], nn.Module))
        return by_op(choice["op"], choice.get("path")) if "op" in choice else cls(path=choice["path"])

    def __str__(self) -> str:
        if self.op is not None:
            return f"fxq.by_op({self.op!r}, {self.path!r})" if self.path is not None else f"fxq.by_op({self.op!r})"
        return self.module.__name__ if self.module is not None else repr(self.path)


def by_op(name: str, path: str | None = None) -> Selector:
    """Selector of every call of an op, for `Recipe.override` and `Recipe.only`.

    Args:
        name: name of an op of the op table.
        path: glob of module paths; only calls below them are selected. None: all calls.

    Raises:
        RecipeError: unknown op; the message has the nearest names.

    Example:
        >>> str(by_op("linear"))
        "fxq.by_op('linear')"
    """
    if name not in OPS:
        raise RecipeError(unknown("op", name, [o.name for o in OPS]))
    return Selector(path=path, op=name)


def as_selector(value: Any) -> Selector:
    """Return the selector of a path glob, a module type, or a `Selector`.

    Raises:
        RecipeError: `value` is anything else.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return Selector(path=value)
    if isinstance(value, type) and issubclass(value, nn.Module):
        return Selector(module=value)
    raise RecipeError(f"a selector is a module path glob, fxq.by_op(name) or an nn.Module type, not {value!r}.")


def ancestors(path: str) -> list[str]:
    """Return the path and every path above it, innermost first, without that of the model itself ("").

    Example:
        >>> ancestors("layer4.0.conv1")
        ['layer4.0.conv1', 'layer4.0', 'layer4']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in reversed(range(len(parts)))]
