"""`Recipe`: what to quantize, how, for which backend, through which passes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fxq.backends.base import Backend
from fxq.backends.by_name import FASTEST
from fxq.common.files import as_path, write_file
from fxq.common.source import import_path
from fxq.errors import RecipeError
from fxq.quant.spec import (
    FLOAT,
    PRESET_CONFIG,
    REDUCIBLE_ROLES,
    QuantConfig,
    without_default_state,
)
from fxq.recipe import presets
from fxq.recipe.extensions import backend_path, check_backend, import_extensions
from fxq.recipe.pass_base import Pass
from fxq.recipe.pins import Pin
from fxq.recipe.pipeline import Pipeline, PipelineEdit, pipeline_of, preset_config, preset_optimize
from fxq.recipe.recipe_checks import check_choice, check_config, check_new_kinds, check_preset
from fxq.recipe.recipe_file import arguments_from, data_of, read_toml, toml_of
from fxq.recipe.selector import Selector, as_selector
from fxq.rewriting.pattern import FUSIONS, Family, Rule


@dataclass(frozen=True)
class Recipe:
    """Options of `fxq.quantize`: what to quantize, how, and for which backend.

    Start with a preset, `Recipe.static()`, `dynamic()`, `weight_only()` or `qat()`, then refine it. A recipe is
    frozen: every method returns a new one.

    Attributes:
        preset: name of the preset; selects the pipeline and the default config.
        backend: name of a backend, import path of your own class, "auto" for the first that runs on this machine
            (x86 or fbgemm on x86-64 CPUs), or "fastest" to try all installed ones, also those of other packages, and
            use the one that runs this model fastest.
        config: quantization of layers that no override selects.
        overrides: (selector, config) pairs; later pairs win.
        leaf_modules: path globs of modules that are not traced into; they run in float, unchanged.
        part_modules: path globs of modules that are quantized as parts, with Python code around them, see `parts`.
        strict_trace: whether a module that cannot be traced is an error; else it becomes a leaf, with a warning.
        check_inputs: whether the quantized model raises `InputError` for float inputs that hold NaN or +Inf, at every
            call. -Inf is allowed, since attention masks hold it.
        concrete_args: arguments of forward, by name, that are fixed to plain values; the graph checks them.
        edits: passes that were inserted and removed.
        fusions: import paths of additional fusions, see `with_fusions`.
        extensions: import paths of your own ops and kernels, see `with_extensions`.
        optimize: "speed": ops that are faster in float on this machine, conversions included, stay in float;
            "coverage": every op that can runs on integers, and nothing is timed; "decided": as `decided` says.
            Default: "coverage" for the preset "qat", else "speed". With the preset "dynamic", models of transformers
            that generate have "coverage" even if "speed" is asked for: a token is bound by reading the weights, which
            prices do not show. An override with `fxq.FLOAT` keeps a layer in float.
        decided: decisions for optimize="decided", see `QuantizedModel.recipe_as_decided`.
        check: "none", or "numeric": compare the graph with the float model on the example input after every pass.
        max_loss: dB of SQNR that one pass may lose before check="numeric" warns.
        reduce_range: role that has 7 bits on CPUs whose kernels saturate with 8-bit activations and 8-bit weights (x86
            without VNNI): "weights", "activations", or "auto" for the role that gives the output the higher SQNR
            on recorded calibration samples. The ledger shows the choice.
        min_sqnr: dB of SQNR against the float model below which `quantize` warns about the output; None: never.
        new_kinds: calls that fit no example: "error", or "trace" to trace a graph for such a call when it comes. The
            quantized model then keeps the float model. Not with calibrated ranges, which a call does not have.

    Example:
        >>> recipe = Recipe.static().override("head", fxq.FLOAT)
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    preset: str = "static"
    backend: str = "auto"
    config: QuantConfig = PRESET_CONFIG
    overrides: tuple[tuple[Selector, QuantConfig], ...] = ()
    leaf_modules: tuple[str, ...] = ()
    strict_trace: bool = False
    concrete_args: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[PipelineEdit, ...] = ()
    fusions: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    optimize: str = ""
    decided: tuple[Pin, ...] = ()
    check: str = "none"
    max_loss: float = 30.0
    min_sqnr: float | None = 12.0
    reduce_range: str = "auto"
    check_inputs: bool = False
    part_modules: tuple[str, ...] = ()
    new_kinds: str = "error"

    def __post_init__(self) -> None:
        check_preset(self.preset)
        if self.config is PRESET_CONFIG:
            object.__setattr__(self, "config", preset_config(self.preset))
        if self.optimize == "":
            object.__setattr__(self, "optimize", preset_optimize(self.preset))
        _ = self.pipeline, FUSIONS.plus(self.fusions)
        check_backend(self.backend)
        import_extensions(self.extensions)
        check_choice("value of optimize", self.optimize, ("speed", "coverage", "decided"))
        check_choice("value of reduce_range", self.reduce_range, ("auto", *REDUCIBLE_ROLES))
        check_choice("check", self.check, ("none", "numeric"))
        if self.optimize == "decided" and not self.decided:
            raise RecipeError('optimize="decided" needs decisions: use the recipe of qmodel.recipe_as_decided().')
        if isinstance(self.min_sqnr, str) or self.min_sqnr != self.min_sqnr:
            raise RecipeError(f"min_sqnr is {self.min_sqnr!r}; it must be a number of dB, or None for no check.")
        if self.trains and self.backend == FASTEST:
            raise RecipeError(
                f"backend={FASTEST!r} cannot be used here, since a model is trained for the kernels of one backend. "
                "Name that backend."
            )
        if self.trains:
            overrides = tuple((selector, without_default_state(config)) for selector, config in self.overrides)
            object.__setattr__(self, "config", without_default_state(self.config))
            object.__setattr__(self, "overrides", overrides)
        check_config(self.config, "the recipe", self.trains)
        for selector, config in self.overrides:
            check_config(config, f"the override for {selector}", self.trains)
        check_new_kinds(self.new_kinds, [self.config, *(config for _, config in self.overrides)], self.part_modules)

    static = classmethod(presets.static)
    dynamic = classmethod(presets.dynamic)
    weight_only = classmethod(presets.weight_only)
    stored = classmethod(presets.stored)
    qat = classmethod(presets.qat)

    def only(self, *selectors: Any) -> Recipe:
        """Quantize only the selected ops, with the config of this recipe; all others stay in float.

        Args:
            selectors: as for `override`: module path globs, `fxq.by_op(name)`, `nn.Module` types.

        Raises:
            RecipeError: no selector is given, or the recipe has overrides already: add them after `only`.
        """
        if not selectors or self.overrides:
            raise RecipeError("only() takes selectors, and must be called before any override().")
        overrides = tuple((as_selector(selector), self.config) for selector in selectors)
        return replace(self, config=FLOAT, overrides=overrides)

    def override(self, selector: Any, config: QuantConfig) -> Recipe:
        """Quantize the ops that `selector` selects with another config. Later overrides win.

        Args:
            selector: a module path glob, `fxq.by_op(name)`, or an `nn.Module` type.
            config: their quantization; `fxq.FLOAT` keeps them in float.
        """
        if not isinstance(config, QuantConfig):
            raise RecipeError(f"override({selector!r}, ...) takes a fxq.QuantConfig or fxq.FLOAT, not {config!r}.")
        return replace(self, overrides=(*self.overrides, (as_selector(selector), config)))

    def insert_pass(self, new: Pass, *, after: str | None = None, before: str | None = None) -> Recipe:
        """Insert a pass into the pipeline, after or before the pass of that name."""
        if not isinstance(new, Pass):
            raise RecipeError(f"insert_pass takes an instance of a fxq.Pass subclass, not {new!r}.")
        if (after is None) == (before is None):
            raise RecipeError("insert_pass: give exactly one of after= and before=.")
        edit = PipelineEdit(str(after if after is not None else before), new, after is not None)
        return replace(self, edits=(*self.edits, edit))

    def without_pass(self, name: str) -> Recipe:
        """Remove the pass of that name from the pipeline."""
        return replace(self, edits=(*self.edits, PipelineEdit(name)))

    def with_fusions(self, *fusions: Family | str) -> Recipe:
        """Add fusions of your own: functions decorated with `fxq.fusion`, or their import paths.

        Raises:
            RecipeError: one is not a fusion, or cannot be imported (a function inside a function, for example).
            PatternError: the name of one is taken.

        Example:
            >>> Recipe.static().with_fusions("fxq.patterns.fusions.conv:conv_add_relu").fusions
            ('fxq.patterns.fusions.conv:conv_add_relu',)
        """
        paths = (import_path(f.function, "the fusion") if isinstance(f, Family) else f for f in fusions)
        return replace(self, fusions=(*self.fusions, *paths))

    def with_extensions(self, *functions: Any) -> Recipe:
        """Add ops and kernels of your own, so that loading the recipe imports them: functions, or their import paths.

        Raises:
            RecipeError: one is not decorated with `fxq.extend.register_op`, `fxq.extend.kernel` or
                `fxq.extend.register_kernel`, or cannot be imported.
        """
        paths = (f if isinstance(f, str) else import_path(f, "the op or kernel") for f in functions)
        return replace(self, extensions=(*self.extensions, *paths))

    def leaf(self, *paths: str) -> Recipe:
        """Do not trace into these modules (path globs): they run in float, unchanged."""
        for path in paths:
            if not isinstance(path, str):
                raise RecipeError(f"leaf takes path globs, such as 'head.*', not {path!r}.")
        return replace(self, leaf_modules=(*self.leaf_modules, *paths))

    def parts(self, *paths: str) -> Recipe:
        """Quantize these modules (path globs) one by one, and leave the code around them in Python.

        Without it, parts are chosen only for a model that cannot be traced as a whole. A module that cannot be traced
        is replaced by its largest submodules that can.
        """
        for path in paths:
            if not isinstance(path, str):
                raise RecipeError(f"parts takes path globs, such as 'model.layers.*', not {path!r}.")
        return replace(self, part_modules=(*self.part_modules, *paths))

    def with_optimize(self, optimize: str) -> Recipe:
        """Set `optimize`: "speed", "coverage" (see `Recipe.static`) or "decided" (as the field `decided` says)."""
        return replace(self, optimize=optimize)

    def fix_args(self, **values: Any) -> Recipe:
        """Fix arguments of forward to plain values, so that the graph is specialized: `recipe.fix_args(mode="eval")`.

        They become defaults of the quantized model, which raises `InputError` when it is called with other values.
        """
        return replace(self, concrete_args={**self.concrete_args, **values})

    def with_backend(self, backend: str | type[Backend]) -> Recipe:
        """Use another backend: by name, or your own by class or import path."""
        return replace(self, backend=backend_path(backend))

    def with_check(self, check: str = "numeric", max_loss: float = 30.0) -> Recipe:
        """Compare the graph with the float model after every pass; warn when one pass loses more than `max_loss` dB."""
        return replace(self, check=check, max_loss=max_loss)

    def with_min_sqnr(self, min_sqnr: float | None) -> Recipe:
        """Warn when the quantized model's outputs are below `min_sqnr` dB SQNR on calibration data; None: never."""
        return replace(self, min_sqnr=min_sqnr)

    @property
    def trains(self) -> bool:
        """Whether the model is trained between `prepare` and `convert`."""
        return any(step.name == presets.FAKE_QUANTIZERS for step in self.pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """The passes that this recipe runs, in order."""
        return pipeline_of(self.preset, self.edits)

    def fusion_rules(self) -> list[Rule]:
        """Fusion rules of this recipe, in the order in which they are tried."""
        return FUSIONS.plus(self.fusions).largest_first()

    def config_for(
        self, path: str, ops: Iterable[str], types: Mapping[str, type]
    ) -> tuple[QuantConfig, Selector | None]:
        """Config of a node, and the selector of the override that gives it; None if no override selects the node.

        Args:
            path: module path of the node.
            ops: names of the ops that it runs.
            types: module type by module path, for the whole model.
        """
        op_names = tuple(ops)
        for selector, config in reversed(self.overrides):
            if selector.matches(path, op_names, types):
                return config, selector
        return self.config, None

    # ---- files

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, for `from_dict`. Defaults are left out."""
        return data_of(self, {f.name: f.default for f in fields(Recipe)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of `to_dict`, for older files too. Raises `RecipeError` for unknown keys, presets and passes."""
        return cls(**arguments_from(data))

    def to_toml(self) -> str:
        """The recipe as TOML text.

        Warns about functions and classes of `__main__`, which other programs cannot import.

        Raises:
            RecipeError: a value in `concrete_args` or of a pass's options cannot be written to a file.
        """
        return toml_of(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a `.toml` file. Raises `RenderError` where it cannot be written."""
        write_file(as_path(path), self.to_toml().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a `.toml` file. Raises `RecipeError` if it cannot be read or is not TOML."""
        return cls.from_dict(read_toml(path))


vars(presets)["Recipe"] = Recipe  # `typing.get_type_hints` looks up the presets' annotations there


def as_recipe(value: Any) -> Recipe:
    """Return the recipe of a `Recipe`, a preset's name, a dict, or a path to a `.toml` file."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".toml")):
        return Recipe.load(value)
    if isinstance(value, str):
        return Recipe(preset=value)
    raise RecipeError(f"a recipe is a fxq.Recipe, a preset's name, a dict or a path to a .toml file, not {value!r}.")
