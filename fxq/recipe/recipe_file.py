"""A recipe as plain data, and as the text of a file."""

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

_OPTIONS = ("backend", "optimize", "check", "max_loss", "min_sqnr", "reduce_range", "strict_trace", "check_inputs")
_PLAIN = ("preset", *_OPTIONS, "concrete_args")
_LISTS = ("leaf_modules", "fusions", "extensions")
_SHAPES: dict[str, Any] = {
    "strict_trace": bool,
    "check_inputs": bool,
    "concrete_args": Mapping,
    "max_loss": (int, float),
    "min_sqnr": (int, float, str),
    "config": (str, Mapping),
    **dict.fromkeys((*_LISTS, "override", "pass", "decided"), (list, tuple)),
}


def data_of(recipe: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain data, without the fields that have their default."""
    data: dict[str, Any] = {"preset": recipe.preset}
    usual = {**defaults, "optimize": preset_optimize(recipe.preset)}
    for key in _OPTIONS:
        value = getattr(recipe, key)
        if value != usual[key]:
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
    """What a recipe is made of, from its plain data; also from that of older versions.

    Raises:
        RecipeError: an unknown key, or a value of the wrong shape.
    """
    known = [*_PLAIN, *_LISTS, "config", "override", "pass", "decided"]
    for key in data:
        if key not in known:
            raise RecipeError(unknown("recipe key", key, known))
        if not isinstance(data[key], _SHAPES.get(key, str)):
            raise RecipeError(f"recipe key {key!r} has a value of the wrong shape: {data[key]!r}.")
    tables = [*data.get("override", ()), *data.get("pass", ()), *data.get("decided", ())]
    if not all(isinstance(table, Mapping) for table in tables):
        raise RecipeError(
            "override, pass and decided are lists of tables: [[override]], [[pass]], [[decided]] in a .toml file."
        )
    import_extensions(data.get("extensions", ()))  # overrides may name its ops
    made = {key: data[key] for key in _PLAIN if key in data} | {key: tuple(data.get(key, ())) for key in _LISTS}
    if made.get("min_sqnr") == "none":
        made["min_sqnr"] = None
    if made.get("preset") == "static_corrected":  # how files of version 0.1 say it
        made["preset"] = "static"
    edits = [PipelineEdit.from_dict(e) for e in data.get("pass", ())]
    made["edits"] = tuple(_without_what_came(edits, made.get("preset", "static")))
    if "config" in data:
        made["config"] = QuantConfig.from_dict(data["config"])
    overrides = data.get("override", ())
    made["overrides"] = tuple((Selector.from_dict(o), QuantConfig.from_dict(o.get("config"))) for o in overrides)
    made["decided"] = tuple(Pin.from_dict(pin) for pin in data.get("decided", ()))
    return made


def _without_what_came(edits: Sequence[PipelineEdit], preset: str) -> Iterator[PipelineEdit]:
    """The edits, but those that insert what the preset has had since the file was written."""
    present, removed = pipeline_of(preset), {edit.anchor for edit in edits if edit.inserted is None}
    for edit in edits:
        if edit.inserted is None or edit.inserted.name in removed or edit.inserted not in present:
            yield edit


def toml_of(data: dict[str, Any]) -> str:
    """The text of a file. Raises `RecipeError` for a fixed value that no file holds; warns of `__main__`."""
    for name, value in data.get("concrete_args", {}).items():
        if not isinstance(value, (bool, int, float, str)):
            raise RecipeError(f"concrete_args: a file cannot hold {name}={value!r}.")
    return tomli_w.dumps(warn_of_main(data))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The data of a `.toml` file. Raises `RecipeError` when there is none or it is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {str(path)!r}: {error}.") from None
