"""The passes of a recipe, in order, and how a recipe changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    """Make a preset known: its passes, and how it quantizes where nothing else is said."""
    _PIPELINES[name], _CONFIGS[name], _OPTIMIZE[name] = tuple(passes), config, optimize


def preset_config(preset: str) -> QuantConfig:
    """How a preset quantizes a layer of which nothing else is said."""
    return _CONFIGS.get(preset, QuantConfig())


def preset_optimize(preset: str) -> str:
    """What a preset looks at where `optimize` is not given."""
    return _OPTIMIZE.get(preset, "speed")


def preset_line(preset: str) -> str:
    """How Python writes that config."""
    return "fxq.QuantConfig()" if preset == "static" else f"fxq.Recipe.{preset}().config"


@dataclass(frozen=True, repr=False)
class Pipeline(Printed, Sequence[Pass]):
    """The passes of a recipe, in order. `print` shows them with the stages they move the graph through."""

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
    """Number, pass, the stages it leads from and to, and the first line of its docstring."""
    stages = str(step.gives) if step.needs == step.gives else f"{step.needs} -> {step.gives}"
    summary = (type(step).__doc__ or "").strip().partition("\n")[0]
    return row(text(f"{number}.", "quiet"), text(str(step), "strong"), stages, summary)


@dataclass(frozen=True)
class PipelineEdit:
    """A pass inserted next to another one, or (when `inserted` is None) the pass `anchor` removed."""

    anchor: str
    inserted: Pass | None = None
    after: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The edit as plain data. Raises `RecipeError` when a file cannot hold it."""
        if self.inserted is None:
            return {"remove": self.anchor}
        insert = import_path(type(self.inserted), f"the class of the pass {self.inserted.name!r}")
        data: dict[str, Any] = {"insert": insert, "after" if self.after else "before": self.anchor}
        options = self.inserted.changed_options
        if None in options.values():
            raise RecipeError(f"the pass {self.inserted.name!r} has an option that is None, which a file cannot hold.")
        return {**data, "options": options} if options else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PipelineEdit:
        """Inverse of `to_dict`. Raises `RecipeError` naming unknown keys, passes, options."""
        if "remove" in data:
            return cls(data["remove"])
        if "insert" not in data or ("after" in data) == ("before" in data):
            raise RecipeError(
                f"a [[pass]] entry has 'remove', or 'insert' with one of 'after' and 'before', not {dict(data)!r}."
            )
        made, options = import_name(data["insert"], Pass), data.get("options", {})
        for key in options:
            if key not in (known := [f.name for f in fields(made)]):
                raise RecipeError(unknown(f"option of the pass {made.name!r}", key, known))
        inserted = made(**options)
        return cls(data["after"] if "after" in data else data["before"], inserted, "after" in data)


def pipeline_of(preset: str, edits: Sequence[PipelineEdit] = ()) -> Pipeline:
    """The pipeline of a preset, edited. Raises `RecipeError`: unknown preset or pass, or a pass inserted twice."""
    if preset not in _PIPELINES:
        raise RecipeError(unknown("preset", preset, _PIPELINES))
    line = Pipeline(_PIPELINES[preset])
    for edit in edits:
        passes, at = list(line.passes), line.position(edit.anchor)
        if edit.inserted is None:
            del passes[at]
        else:
            if edit.inserted.name in [p.name for p in passes]:
                raise RecipeError(
                    f"the pipeline has a pass called {edit.inserted.name!r} already: leave that one out first, by "
                    f"recipe.without_pass({edit.inserted.name!r}), or give yours another name."
                )
            passes.insert(at + edit.after, edit.inserted)
        line = Pipeline(tuple(passes))
    return line
