"""Pipelines: the passes of a recipe, in order, and edits of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from rich.text import Text

from fxq.common.source import import_name, import_path
from fxq.display.printed import Printed
from fxq.display.tables import Column, Part, Table, row, text
from fxq.errors import RecipeError, unknown
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass

_PIPELINES: dict[str, tuple[Pass, ...]] = {}
_CONFIGS: dict[str, QuantConfig] = {}
_OPTIMIZE: dict[str, str] = {}


def register_preset(name: str, passes: Sequence[Pass], config: QuantConfig, optimize: str = "speed") -> None:
    """Register a preset: its passes, its default config and its default for `optimize`."""
    _PIPELINES[name], _CONFIGS[name], _OPTIMIZE[name] = tuple(passes), config, optimize


def preset_config(preset: str) -> QuantConfig:
    """Default config of a preset."""
    return _CONFIGS.get(preset, QuantConfig())


def preset_optimize(preset: str) -> str:
    """Default of `optimize` of a preset."""
    return _OPTIMIZE.get(preset, "speed")


def preset_line(preset: str) -> str:
    """Python expression of the default config of a preset."""
    return "fxq.QuantConfig()" if preset == "static" else f"fxq.Recipe.{preset}().config"


@dataclass(frozen=True, repr=False)
class Pipeline(Printed, Sequence[Pass]):
    """Passes of a recipe, in order. `print` shows them with the stages that they move the graph through."""

    passes: tuple[Pass, ...]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.passes[self.position(index)]
        return self.passes[index]

    def __len__(self) -> int:
        return len(self.passes)

    def position(self, name: str) -> int:
        """Index of the pass called `name`. Raises `RecipeError` with the nearest names."""
        names = [p.name for p in self.passes]
        if name not in names:
            raise RecipeError(unknown("pass", name, names))
        return names.index(name)

    def _short(self) -> str:
        return " → ".join(map(str, self.passes))

    def _parts(self) -> list[Part]:
        return [Table(_PASSES, [_row(i, step) for i, step in enumerate(self.passes, 1)])]


_PASSES = (Column(align="right"), Column(), Column(drop=1), Column(give="fold"))


def _row(number: int, step: Pass) -> list[Text]:
    """Row of the table: number, pass, stages before and after, first line of the docstring."""
    stages = str(step.gives) if step.needs == step.gives else f"{step.needs} -> {step.gives}"
    summary = (type(step).__doc__ or "").strip().partition("\n")[0]
    return row(text(f"{number}.", "quiet"), text(str(step), "strong"), stages, summary)


@dataclass(frozen=True)
class PipelineEdit:
    """Edit of a pipeline: `inserted` after (or before) the pass `anchor`, or, if it is None, `anchor` removed."""

    anchor: str
    inserted: Pass | None = None
    after: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The edit as plain data. Raises `RecipeError` if it cannot be written to a file."""
        if self.inserted is None:
            return {"remove": self.anchor}
        insert = import_path(type(self.inserted), f"the class of the pass {self.inserted.name!r}")
        data: dict[str, Any] = {"insert": insert, "after" if self.after else "before": self.anchor}
        options = self.inserted.changed_options
        if None in options.values():
            raise RecipeError(f"the pass {self.inserted.name!r} has an option that is None: TOML has no value for it.")
        return {**data, "options": options} if options else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PipelineEdit:
        """Inverse of `to_dict`. Raises `RecipeError` for unknown keys, passes and options."""
        if "remove" in data:
            return cls(data["remove"])
        if "insert" not in data or ("after" in data) == ("before" in data):
            raise RecipeError(
                f"a [[pass]] entry has 'remove', or 'insert' with one of 'after' and 'before', not {dict(data)!r}."
            )
        pass_type, options = import_name(data["insert"], Pass), data.get("options", {})
        for key in options:
            if key not in (names := [f.name for f in fields(pass_type)]):
                raise RecipeError(unknown(f"option of the pass {pass_type.name!r}", key, names))
        inserted = pass_type(**options)
        return cls(data["after"] if "after" in data else data["before"], inserted, "after" in data)


def pipeline_of(preset: str, edits: Sequence[PipelineEdit] = ()) -> Pipeline:
    """Pipeline of a preset with edits.

    Raises:
        RecipeError: an unknown preset or pass, or a pass inserted twice.
    """
    if preset not in _PIPELINES:  # a process that has only unpickled a model has not imported fxq's presets
        import_module("fxq.passes")
    if preset not in _PIPELINES:
        raise RecipeError(unknown("preset", preset, _PIPELINES))
    pipeline = Pipeline(_PIPELINES[preset])
    for edit in edits:
        passes, position = list(pipeline.passes), pipeline.position(edit.anchor)
        if edit.inserted is None:
            del passes[position]
        else:
            own = next((i for i, p in enumerate(passes) if p.name == edit.inserted.name and p.replaceable), None)
            if own is not None and own != position:
                del passes[own]
                position -= own < position
            if edit.inserted.name in [p.name for p in passes]:
                raise RecipeError(
                    f"the pipeline has a pass called {edit.inserted.name!r} already: remove it first, with "
                    f"recipe.without_pass({edit.inserted.name!r}), or give yours another name."
                )
            passes.insert(position + edit.after, edit.inserted)
        pipeline = Pipeline(tuple(passes))
    return pipeline
