"""Recipes as plain data, and as the text of TOML files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fxq.errors import RecipeError, unknown
from fxq.quant.spec import QuantConfig
from fxq.recipe.extensions import import_extensions, warn_of_main
from fxq.recipe.pins import Pin
from fxq.recipe.pipeline import PipelineEdit, pipeline_of, preset_config, preset_optimize
from fxq.recipe.selector import Selector

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SWITCHES = ("strict_trace", "check_inputs", "new_kinds")
_OPTIONS = ("backend", "optimize", "check", "max_loss", "min_sqnr", "reduce_range", *_SWITCHES)
_PLAIN = ("preset", *_OPTIONS, "concrete_args")
_LISTS = ("leaf_modules", "part_modules", "fusions", "extensions")
_TYPES: dict[str, Any] = {
    "strict_trace": bool,
    "check_inputs": bool,
    "concrete_args": Mapping,
    "max_loss": (int, float),
    "min_sqnr": (int, float, str),
    "config": (str, Mapping),
    **dict.fromkeys((*_LISTS, "override", "pass", "decided"), (list, tuple)),
}


def data_of(recipe: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a recipe, without the fields that have their default."""
    data: dict[str, Any] = {"preset": recipe.preset}
    defaults = {**defaults, "optimize": preset_optimize(recipe.preset)}
    for key in _OPTIONS:
        value = getattr(recipe, key)
        if value != defaults[key]:
            data[key] = "none" if value is None else value
    if recipe.concrete_args:
        data["concrete_args"] = dict(recipe.concrete_args)
    for key in _LISTS:
        if getattr(recipe, key):
            data[key] = list(getattr(recipe, key))
    if recipe.config != preset_config(recipe.preset):
        data["config"] = recipe.config.to_dict()
    if recipe.overrides:
        data["override"] = [{**s.to_dict(), "config": c.to_dict()} for s, c in recipe.overrides]
    if recipe.edits:
        data["pass"] = [e.to_dict() for e in recipe.edits]
    if recipe.decided:
        data["decided"] = [pin.to_dict() for pin in recipe.decided]
    return data


def arguments_from(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Recipe` from its plain data, also of older versions.

    Raises:
        RecipeError: an unknown key, or a value of the wrong type.
    """
    keys = [*_PLAIN, *_LISTS, "config", "override", "pass", "decided"]
    for key in data:
        if key not in keys:
            raise RecipeError(unknown("recipe key", key, keys))
        if not isinstance(data[key], _TYPES.get(key, str)):
            raise RecipeError(f"recipe key {key!r} has a value of the wrong type: {data[key]!r}.")
    tables = [*data.get("override", ()), *data.get("pass", ()), *data.get("decided", ())]
    if not all(isinstance(table, Mapping) for table in tables):
        raise RecipeError(
            "override, pass and decided are lists of tables: [[override]], [[pass]], [[decided]] in a .toml file."
        )
    import_extensions(data.get("extensions", ()))  # overrides may name its ops
    arguments = {key: data[key] for key in _PLAIN if key in data} | {key: tuple(data.get(key, ())) for key in _LISTS}
    if arguments.get("min_sqnr") == "none":
        arguments["min_sqnr"] = None
    if arguments.get("preset") == "static_corrected":  # files of version 0.1
        arguments["preset"] = "static"
    edits = [PipelineEdit.from_dict(e) for e in data.get("pass", ())]
    arguments["edits"] = tuple(_without_present_passes(edits, arguments.get("preset", "static")))
    if "config" in data:
        arguments["config"] = QuantConfig.from_dict(data["config"])
    overrides = data.get("override", ())
    arguments["overrides"] = tuple((Selector.from_dict(o), QuantConfig.from_dict(o.get("config"))) for o in overrides)
    arguments["decided"] = tuple(Pin.from_dict(pin) for pin in data.get("decided", ()))
    return arguments


def _without_present_passes(edits: Sequence[PipelineEdit], preset: str) -> Iterator[PipelineEdit]:
    """Yield the edits, without insertions of passes that the preset already has: newer versions add passes to it."""
    present, removed = pipeline_of(preset), {edit.anchor for edit in edits if edit.inserted is None}
    for edit in edits:
        if edit.inserted is None or edit.inserted.name in removed or edit.inserted not in present:
            yield edit


def toml_of(data: dict[str, Any]) -> str:
    """TOML text of a recipe's plain data; warns about functions and classes of `__main__`.

    Raises:
        RecipeError: a value in `concrete_args` cannot be written to a file.
    """
    for name, value in data.get("concrete_args", {}).items():
        if not isinstance(value, (bool, int, float, str)):
            raise RecipeError(
                f"concrete_args: {name}={value!r} cannot be written to a file, which holds bool, int, float and str."
            )
    return tomli_w.dumps(warn_of_main(data))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Plain data of a `.toml` file. Raises `RecipeError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {str(path)!r}: {error}.") from None
