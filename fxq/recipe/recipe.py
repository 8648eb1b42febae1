"""A recipe: what to quantize, how, for which backend, through which passes. Frozen; every method returns a new one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fxq.backends.base import Backend
from fxq.backends.by_name import FASTEST
from fxq.common.source import import_path
from fxq.errors import RecipeError
from fxq.quant.spec import (
    ACTIVATION,
    FLOAT,
    MEASURED,
    NARROW,
    OF_PRESET,
    TRAINED,
    WEIGHT,
    QuantConfig,
    TensorSpec,
    weight_spec,
    without_usual_state,
)
from fxq.recipe.extensions import backend_path, check_backend, import_extensions
from fxq.recipe.pass_base import Pass
from fxq.recipe.pins import Pin
from fxq.recipe.pipeline import Pipeline, PipelineEdit, pipeline_of, preset_config
from fxq.recipe.recipe_checks import check_choice, check_config, check_preset, refuse_options
from fxq.recipe.recipe_file import arguments_from, data_of, read_toml, toml_of
from fxq.recipe.selector import Selector, as_selector
from fxq.rewriting.pattern import FUSIONS, Family, Rule

FAKE_QUANTIZERS = "insert-fake-quantizers"
"""The pass that makes a model trainable: a pipeline with it is one for training."""


@dataclass(frozen=True)
class Recipe:
    """What `fxq.quantize` is to do. Make one with a preset (`Recipe.static()`), then refine it.

    Attributes:
        preset: the preset it started from; decides the pipeline, and the config where none is given.
        backend: name of the backend, import path of one of your own, "auto" for the best one of PyTorch's that this
            machine runs, or "fastest" for the quickest of all.
        config: how a layer is quantized where no override speaks.
        overrides: (selector, config) pairs; later ones win.
        leaf_modules: path globs of modules that are not traced into: they run in float, as they are.
        strict_trace: whether a module that cannot be traced is an error; else it becomes such a leaf, with a warning.
        check_inputs: whether the quantized model refuses float inputs that hold NaN or Inf, at every call. Not -Inf: it
            is what masks for attention hold.
        concrete_args: arguments of forward, by name, that are fixed to a plain value; the graph checks them.
        edits: passes inserted and removed.
        fusions: import paths of fusions besides fxq's own, as `with_fusions` adds them.
        extensions: import paths of ops and kernels of your own, as `with_extensions` adds them.
        optimize: "speed": what is faster in float on this machine, conversions included, stays in float; "coverage":
            everything runs on integers that can; "decided": what `decided` says, and nothing is measured.
        decided: what runs on integers with optimize="decided", see `QuantizedModel.recipe_as_decided`.
        check: "none", or "numeric": after every pass, compare with the float model on the example input.
        max_loss: decibels that one pass may lose before `check="numeric"` warns (see `fxq/common/metrics.py`).
        narrow: what gives up a bit on CPUs whose kernels overflow with 8-bit activations times 8-bit weights (x86
            without VNNI): "weights", "activations", or "auto": that with which the outputs have the higher SQNR against
            the float model's, tried on recorded calibration samples. The ledger says what was chosen.
        min_sqnr: decibels of SQNR against the float model below which `quantize` warns about the output; None: never.

    Example:
        >>> recipe = Recipe.static().override("head", fxq.FLOAT)
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    preset: str = "static"
    backend: str = "auto"
    config: QuantConfig = OF_PRESET
    overrides: tuple[tuple[Selector, QuantConfig], ...] = ()
    leaf_modules: tuple[str, ...] = ()
    strict_trace: bool = False
    concrete_args: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[PipelineEdit, ...] = ()
    fusions: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    optimize: str = "speed"
    decided: tuple[Pin, ...] = ()
    check: str = "none"
    max_loss: float = 30.0
    min_sqnr: float | None = 12.0
    narrow: str = "auto"
    check_inputs: bool = False

    def __post_init__(self) -> None:
        check_preset(self.preset)
        if self.config is OF_PRESET:
            object.__setattr__(self, "config", preset_config(self.preset))
        _ = self.pipeline, FUSIONS.plus(self.fusions)
        check_backend(self.backend)
        import_extensions(self.extensions)
        check_choice("value of optimize", self.optimize, ("speed", "coverage", "decided"))
        check_choice("value of narrow", self.narrow, ("auto", *NARROW))
        check_choice("check", self.check, ("none", "numeric"))
        if self.optimize == "decided" and not self.decided:
            raise RecipeError('optimize="decided" needs decisions: take qmodel.recipe_as_decided().')
        if isinstance(self.min_sqnr, str) or self.min_sqnr != self.min_sqnr:
            raise RecipeError(f"min_sqnr is {self.min_sqnr!r}; it must be a number of dB, or None for no check.")
        if self.trains and self.backend == FASTEST:
            raise RecipeError(
                f"a model is trained for the kernels of one backend, so that backend={FASTEST!r} has no meaning."
            )
        if self.trains:
            overrides = tuple((selector, without_usual_state(config)) for selector, config in self.overrides)
            object.__setattr__(self, "config", without_usual_state(self.config))
            object.__setattr__(self, "overrides", overrides)
        check_config(self.config, "the recipe", self.trains)
        for selector, config in self.overrides:
            check_config(config, f"the override for {selector}", self.trains)

    @classmethod
    def static(
        cls,
        *,
        backend: str | type[Backend] = "auto",
        activation: TensorSpec | None = ACTIVATION,
        weight: TensorSpec = WEIGHT,
        optimize: str = "speed",
        narrow: str = "auto",
        strict_trace: bool = False,
        check_inputs: bool = False,
        leaf_modules: Iterable[str] = (),
        concrete_args: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Post-training static quantization: activations by calibration, weights per channel. Needs data.

        Args:
            backend: "auto", "x86", "fbgemm", "qnnpack", "openvino", "onnxruntime" or "reference"; "fastest" tries all
                that are installed; or one of your own, see `with_backend`.
            activation: spec of all activations; the default is uint8 affine with the histogram observer.
            weight: spec of all weights; the default is int8 symmetric per channel.
            optimize: "speed": what is faster in float on this machine stays in float (measured at the shapes of the
                example inputs); "coverage": everything runs on integers that can.
            narrow: "weights" or "activations": what gives up a bit on CPUs whose kernels overflow with 8 bits of both;
                "auto": what costs less, tried on calibration data.
            strict_trace: refuse a model with modules that cannot be traced, instead of keeping them in float.
            check_inputs: let the quantized model raise `InputError` on a float input that holds NaN or Inf; else such
                an input gives finite numbers, as integers are neither. It reads every input once more.
            leaf_modules: path globs of modules that are not traced into, as `leaf` adds them.
            concrete_args: arguments of forward that are fixed to plain values, by name, as `fix_args` fixes them.

        Example:
            >>> Recipe.static(leaf_modules=["head.*"]) == Recipe.static().leaf("head.*")
            True
        """
        if isinstance(leaf_modules, str):
            raise RecipeError(f"leaf_modules is a list of path globs, not {leaf_modules!r}: write [{leaf_modules!r}].")
        recipe = cls(
            backend=backend_path(backend),
            config=QuantConfig(activation, weight),
            optimize=optimize,
            strict_trace=strict_trace,
            narrow=narrow,
            check_inputs=check_inputs,
        )
        return recipe.leaf(*leaf_modules).fix_args(**(concrete_args or {}))

    @classmethod
    def dynamic(cls, *, activation: TensorSpec = MEASURED, weight: TensorSpec = WEIGHT, **options: Any) -> Recipe:
        """Post-training dynamic quantization: ranges of activations are measured at every call. Needs no data.

        Layers with weights read integers and give floats: linear layers, convolutions, recurrent layers.

        Args:
            activation: spec of what layers read; the default measures each row: of a linear layer a token, of a
                convolution an image.
            weight: spec of all weights; the default is int8 symmetric per channel.
            options: as for `static`.

        Example:
            >>> recipe = Recipe.dynamic().only(nn.Linear)  # as torch's quantize_dynamic(model, {nn.Linear})
            >>> recipe = Recipe.static().override("encoder.*", Recipe.dynamic().config)  # both in one model

        Source: Jacob et al. 2018, section 3; Dettmers et al. 2022, section 2.1 (a scale for each row).
        """
        return replace(cls.static(activation=activation, weight=weight, **options), preset="dynamic")

    @classmethod
    def weight_only(
        cls,
        *,
        bits: int | None = None,
        per: Literal["tensor", "channel"] | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Recipe:
        """Integer weights, for size: layers compute in float, as before. Needs no data.

        Layers with weights and embeddings keep these in integers (of 4 bits, two in a byte), and make floats of them
        when they run. What that takes, and what it saves, the ledger says.

        Args:
            bits: 8, the default: symmetric, a scale for each channel; of an embedding for each block. 4 or fewer:
                affine, a scale for each block.
            per: what has a scale: "tensor", "channel", or blocks of so many values, such as 32, 64 (the default for 4
                bits, and for embeddings) or 128.
            dtype: torch.float16: weights are kept in that, and not in integers.
            options: as for `static`, but `activation`; `weight` is a spec of your own.

        Example:
            >>> Recipe.weight_only(bits=4).config.weight
            TensorSpec(bits=4, signed=False, symmetric=False, per=64, observer='minmax', range='calibrated', \
format='integer')
            >>> recipe = Recipe.dynamic().override(nn.Embedding, Recipe.weight_only(bits=4).config)

        Source: Dettmers and Zettlemoyer 2023, section 2 (blocks, for 4 bits).
        """
        asked = {key: value for key, value in (("bits", bits), ("per", per), ("dtype", dtype)) if value is not None}
        refuse_options("weight_only", options, "activation")
        if "weight" in options:
            refuse_options("weight_only with a weight spec", asked, *asked)
        weight = options.pop("weight", None) or weight_spec(bits or 8, per, dtype)
        return replace(cls.static(activation=None, weight=weight, **options), preset="weight_only")

    @classmethod
    def qat(
        cls,
        *,
        activation: TensorSpec | None = TRAINED,
        weight: TensorSpec = WEIGHT,
        learned: bool = False,
        freeze_ranges_after: int = 0,
        freeze_norms_after: int = 0,
        freeze_weights_over: int = 0,
        **options: Any,
    ) -> Recipe:
        """Quantization-aware training: `fxq.prepare` gives a model to train, `fxq.convert` makes it an integer model.

        Args:
            activation: spec of all activations; the default is uint8 affine, with moving averages of the ranges.
            weight: spec of all weights; the default is int8 symmetric per channel.
            learned: scales are parameters (LSQ), which start where the squared error on the example inputs is least:
                give data as these. The optimizer should not let them decay: no `weight_decay` for parameters whose
                names end in "factor".
            freeze_ranges_after: forwards in train mode behind which ranges of activations stay as they are; 0: never.
            freeze_norms_after: those behind which the statistics of batch norms do; 0: never.
            freeze_weights_over: give the number of all forwards in train mode: over these, weights that go back and
                forth between two integers come to stay with one of them, more of them with every forward; 0: never.
                For 4 bits and fewer; it takes 7 bytes of memory for each of these weights. Weights that are a part of a
                parameter, or have one scale and a batch norm behind them, do not take part.
            options: as for `static`. What can run on integers does (`optimize="coverage"`), as it was trained to. The
                state of recurrent layers stays float.

        Example:
            >>> weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
            >>> Recipe.qat(weight=weight, freeze_norms_after=1000).pipeline["insert-fake-quantizers"].freeze_norms_after
            1000

        Source: Jacob et al. 2018, section 3; Krishnamoorthi 2018, section 3.2; Esser et al. 2020 (learned scales);
            Nagel et al. 2022, section 4.2 (weights that are frozen).
        """
        if learned:
            weight = replace(weight, range="learned", observer="mse")
            activation = replace(activation, range="learned", observer="mse") if activation is not None else None
        given = cls.static(**{"optimize": "coverage", **options})
        recipe = replace(given, preset="qat", config=QuantConfig(activation, weight, state=None))
        step = recipe.pipeline[FAKE_QUANTIZERS]
        new = replace(
            step,
            freeze_ranges_after=freeze_ranges_after,
            freeze_norms_after=freeze_norms_after,
            freeze_weights_over=freeze_weights_over,
        )
        if new == step:
            return recipe
        before = recipe.pipeline[recipe.pipeline.position(FAKE_QUANTIZERS) - 1].name
        return replace(recipe, edits=(PipelineEdit(FAKE_QUANTIZERS), PipelineEdit(before, new)))

    def only(self, *selectors: Any) -> Recipe:
        """Quantize what one of the selectors selects, as this recipe does now, and nothing else.

        Args:
            selectors: as for `override`: module path globs, `fxq.op(name)`, `nn.Module` types.

        Raises:
            RecipeError: there is none, or the recipe has overrides already: write them behind `only`.
        """
        if not selectors or self.overrides:
            raise RecipeError("only() takes selectors, and stands before any override.")
        overrides = tuple((as_selector(selector), self.config) for selector in selectors)
        return replace(self, config=FLOAT, overrides=overrides)

    def override(self, selector: Any, config: QuantConfig) -> Recipe:
        """Quantize what `selector` selects with `config` (or `fxq.FLOAT`: not at all). Later overrides win.

        Args:
            selector: a module path glob, `fxq.op(name)`, or an `nn.Module` type.
            config: the configuration.
        """
        if not isinstance(config, QuantConfig):
            raise RecipeError(f"override({selector!r}, ...) takes a fxq.QuantConfig or fxq.FLOAT, not {config!r}.")
        return replace(self, overrides=(*self.overrides, (as_selector(selector), config)))

    def insert_pass(self, new: Pass, *, after: str | None = None, before: str | None = None) -> Recipe:
        """Put a pass into the pipeline, after or before the pass of that name."""
        if not isinstance(new, Pass):
            raise RecipeError(f"insert_pass takes an instance of a fxq.Pass subclass, not {new!r}.")
        if (after is None) == (before is None):
            raise RecipeError("insert_pass: give exactly one of after= and before=.")
        edit = PipelineEdit(str(after if after is not None else before), new, after is not None)
        return replace(self, edits=(*self.edits, edit))

    def without_pass(self, name: str) -> Recipe:
        """Leave a pass out."""
        return replace(self, edits=(*self.edits, PipelineEdit(name)))

    def with_fusions(self, *fusions: Family | str) -> Recipe:
        """Fuse also what patterns of your own match: functions decorated with `fxq.fusion`, or their import paths.

        Raises:
            RecipeError: one is not a fusion, or cannot be imported, as what is local to a function.
            PatternError: the name of one is taken by another.

        Example:
            >>> Recipe.static().with_fusions("fxq.patterns.conv:conv_add_relu").fusions
            ('fxq.patterns.conv:conv_add_relu',)
        """
        paths = (import_path(f.function, "the fusion") if isinstance(f, Family) else f for f in fusions)
        return replace(self, fusions=(*self.fusions, *paths))

    def with_extensions(self, *functions: Any) -> Recipe:
        """Name ops and kernels of your own, so that who loads the recipe has them: functions, or their import paths.

        Raises:
            RecipeError: neither `fxq.register_op` nor `fxq.register_kernel` was given one, or it cannot be imported.
        """
        paths = (f if isinstance(f, str) else import_path(f, "the op or kernel") for f in functions)
        return replace(self, extensions=(*self.extensions, *paths))

    def leaf(self, *paths: str) -> Recipe:
        """Do not trace into these modules (path globs): they run in float, as they are."""
        for path in paths:
            if not isinstance(path, str):
                raise RecipeError(f"leaf takes path globs, such as 'head.*', not {path!r}.")
        return replace(self, leaf_modules=(*self.leaf_modules, *paths))

    def with_optimize(self, optimize: str) -> Recipe:
        """Quantize for "speed", or for "coverage" (see `Recipe.static`), or as `decided` says ("decided")."""
        return replace(self, optimize=optimize)

    def fix_args(self, **values: Any) -> Recipe:
        """Fix arguments of forward to plain values, for a graph that is made for them: `recipe.fix_args(mode="eval")`.

        The quantized model takes them as its defaults, and raises `InputError` when it is called with others.
        """
        return replace(self, concrete_args={**self.concrete_args, **values})

    def with_backend(self, backend: str | type[Backend]) -> Recipe:
        """The recipe for another backend: its name; one of your own by its class or import path."""
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
        return any(step.name == FAKE_QUANTIZERS for step in self.pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """The passes that this recipe runs, in order."""
        return pipeline_of(self.preset, self.edits)

    def fusion_rules(self) -> list[Rule]:
        """The rules that fuse with this recipe, in the order in which they are tried."""
        return FUSIONS.plus(self.fusions).largest_first()

    def config_for(
        self, path: str, ops: Iterable[str], types: Mapping[str, type]
    ) -> tuple[QuantConfig, Selector | None]:
        """The config of a node and the override that decided it (None: the recipe's own). See `Selector.matches`."""
        names = tuple(ops)
        for selector, config in reversed(self.overrides):
            if selector.matches(path, names, types):
                return config, selector
        return self.config, None

    # ---- files

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, for `from_dict`. Defaults are left out."""
        return data_of(self, {f.name: f.default for f in fields(Recipe)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of `to_dict`, for older files too. Raises `RecipeError` naming unknown keys, presets, passes, ..."""
        return cls(**arguments_from(data))

    def to_toml(self) -> str:
        """The recipe as TOML text. Raises `RecipeError` for a fixed value that no file holds; warns of `__main__`."""
        return toml_of(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a `.toml` file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a `.toml` file. Raises `RecipeError` when there is none or it is not TOML."""
        return cls.from_dict(read_toml(path))


def as_recipe(value: Any) -> Recipe:
    """A recipe from what `fxq.quantize` takes: a `Recipe`, a preset's name, a dict, or a path to a `.toml` file."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".toml")):
        return Recipe.load(value)
    if isinstance(value, str):
        return Recipe(preset=value)
    raise RecipeError(f"a recipe is a fxq.Recipe, a preset's name, a dict or a path to a .toml file, not {value!r}.")
