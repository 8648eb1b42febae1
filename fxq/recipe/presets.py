"""The presets that a recipe starts from: `fxq.Recipe.static()`, `dynamic()`, `weight_only()` and `qat()`.

Each function here is a class method of `Recipe`. The passes of a preset are in `passes/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fxq.backends.base import Backend
from fxq.errors import RecipeError
from fxq.quant.spec import ACTIVATION, DYNAMIC, TRAINED, WEIGHT, QuantConfig, TensorSpec, weight_spec
from fxq.recipe.extensions import backend_path
from fxq.recipe.pipeline import PipelineEdit, preset_optimize

if TYPE_CHECKING:
    from fxq.recipe.recipe import Recipe

FAKE_QUANTIZERS = "insert-fake-quantizers"
"""The pass that makes a model trainable: a pipeline with it is one for training."""


def static(
    _cls: type[Recipe],
    /,
    *,
    backend: str | type[Backend] = "auto",
    activation: TensorSpec | None = ACTIVATION,
    weight: TensorSpec = WEIGHT,
    optimize: str = "speed",
    reduce_range: str = "auto",
    strict_trace: bool = False,
    check_inputs: bool = False,
    leaf_modules: Iterable[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> Recipe:
    """Post-training static quantization: activations by calibration, weights per channel. Needs data.

    Args:
        backend: "auto", "x86", "fbgemm", "qnnpack", "jit", "openvino", "onnxruntime" or "reference"; "fastest" tries
            all that are installed; or one of your own, see `with_backend`.
        activation: spec of all activations; the default is uint8 affine with the histogram observer.
        weight: spec of all weights; the default is int8 symmetric per channel.
        optimize: "speed": ops that are faster in float on this machine, at the shapes of the example inputs, stay in
            float; "coverage": every op that can run on integers does, and nothing is measured.
        reduce_range: role that has 7 bits on CPUs whose kernels saturate with 8 bits of both: "weights", "activations"
            or "auto", the one with the smaller error on calibration data.
        strict_trace: refuse a model with modules that cannot be traced, instead of keeping them in float.
        check_inputs: let the quantized model raise `InputError` on a float input that holds NaN or Inf; else such
            an input gives finite numbers, as integers are neither, but in layers that measure ranges when they run.
            It reads every input once more.
        leaf_modules: path globs of modules that are not traced into, as `leaf` adds them.
        concrete_args: arguments of forward that are fixed to plain values, by name, as `fix_args` fixes them.

    Example:
        >>> fxq.Recipe.static(leaf_modules=["head.*"]) == fxq.Recipe.static().leaf("head.*")
        True
    """
    if isinstance(leaf_modules, str):
        raise RecipeError(f"leaf_modules is a list of path globs, not {leaf_modules!r}: write [{leaf_modules!r}].")
    recipe = _cls(
        backend=backend_path(backend),
        config=QuantConfig(activation, weight),
        optimize=optimize,
        strict_trace=strict_trace,
        reduce_range=reduce_range,
        check_inputs=check_inputs,
    )
    return recipe.leaf(*leaf_modules).fix_args(**(concrete_args or {}))


def dynamic(
    _cls: type[Recipe], /, *, activation: TensorSpec = DYNAMIC, weight: TensorSpec = WEIGHT, **options: Any
) -> Recipe:
    """Post-training dynamic quantization: ranges of activations are measured at every call. Needs no data.

    Layers with weights read integers and give floats: linear layers, convolutions, recurrent layers. Where data is
    given all the same, the pass `smooth` makes what linear layers of transformers read easier to round.

    Args:
        activation: spec of what layers read; the default measures each row: of a linear layer a token, of a
            convolution an image.
        weight: spec of all weights; the default is int8 symmetric per channel.
        options: as for `static`.

    Example:
        >>> recipe = fxq.Recipe.dynamic().only(nn.Linear)  # as torch's quantize_dynamic(model, {nn.Linear})
        >>> recipe = fxq.Recipe.static().override("encoder.*", fxq.Recipe.dynamic().config)  # both in one model

    Source: Jacob et al. 2018, section 3; Dettmers et al. 2022, section 2.1 (a scale for each row).
    """
    return replace(static(_cls, activation=activation, weight=weight, **options), preset="dynamic")


def weight_only(
    _cls: type[Recipe],
    /,
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
        >>> fxq.Recipe.weight_only(bits=4).config.weight
        TensorSpec(bits=4, signed=False, symmetric=False, per=64, observer='minmax', range='calibrated', \
format='integer')
        >>> recipe = fxq.Recipe.dynamic().override(nn.Embedding, fxq.Recipe.weight_only(bits=4).config)

    Source: Dettmers and Zettlemoyer 2023, section 2 (blocks, for 4 bits).
    """
    asked = {key: value for key, value in (("bits", bits), ("per", per), ("dtype", dtype)) if value is not None}
    _refuse("weight_only", options, "activation")
    if "weight" in options:
        _refuse("weight_only with a weight spec", asked, *asked)
    weight = options.pop("weight", None) or weight_spec(bits or 8, per, dtype)
    return replace(static(_cls, activation=None, weight=weight, **options), preset="weight_only")


def qat(
    _cls: type[Recipe],
    /,
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
        >>> fxq.Recipe.qat(weight=weight, freeze_norms_after=1000).pipeline["insert-fake-quantizers"].freeze_norms_after
        1000

    Source: Jacob et al. 2018, section 3; Krishnamoorthi 2018, section 3.2; Esser et al. 2020 (learned scales);
        Nagel et al. 2022, section 4.2 (weights that are frozen).
    """
    if learned:
        weight = replace(weight, range="learned", observer="mse")
        activation = replace(activation, range="learned", observer="mse") if activation is not None else None
    given = static(_cls, **{"optimize": preset_optimize("qat"), **options})
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


def _refuse(what: str, given: Mapping[str, Any], *names: str) -> None:
    """Raise `RecipeError` for an option that would do nothing: one of these, where it is given and says something."""
    for name in names:
        if given.get(name):
            raise RecipeError(f"{what} takes no {name}: it would do nothing. Leave out {name}={given[name]!r}.")
