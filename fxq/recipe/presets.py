"""Presets, the class methods of `Recipe` that make one, such as `static()`.

The passes of each preset are in `passes/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fxq.backends.base import Backend
from fxq.errors import RecipeError
from fxq.quant.spec import (
    ACTIVATION,
    DEFAULT_STATE,
    DYNAMIC,
    TRAINED,
    WEIGHT,
    Compute,
    QuantConfig,
    TensorSpec,
    weight_spec,
)
from fxq.recipe.extensions import backend_path
from fxq.recipe.pipeline import PipelineEdit, preset_optimize

if TYPE_CHECKING:
    from fxq.recipe.recipe import Recipe

FAKE_QUANTIZERS = "insert-fake-quantizers"
"""Name of the pass that makes a model trainable; a pipeline with it is for training."""


def static(
    _cls: type[Recipe],
    /,
    *,
    backend: str | type[Backend] = "auto",
    activation: TensorSpec | None = ACTIVATION,
    weight: TensorSpec = WEIGHT,
    state: TensorSpec | None = DEFAULT_STATE,
    optimize: str = "speed",
    reduce_range: str = "auto",
    strict_trace: bool = False,
    check_inputs: bool = False,
    leaf_modules: Iterable[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    new_kinds: Literal["error", "trace"] = "error",
) -> Recipe:
    """Post-training static quantization: activations by calibration, weights per channel. Needs data.

    Args:
        backend: "x86", "fbgemm", "qnnpack", "jit", "openvino", "onnxruntime" or "reference"; "auto" for the first that
            runs on this machine; "fastest" to try all and use the fastest; "tensorrt" for models that are exported to
            TensorRT; or your own, see `with_backend`.
        activation: spec of all activations; the default is uint8 affine with the histogram observer. None: they stay in
            float, see `weight_only`.
        weight: spec of all weights; the default is int8 symmetric per channel.
        state: spec of the states of recurrent layers and of caches, see `QuantConfig`.
        optimize: "speed": ops that are faster in float on this machine, at the shapes of the example inputs, stay in
            float; "coverage": every op that can runs on integers, and nothing is timed.
        reduce_range: role that has 7 bits on CPUs whose kernels saturate with 8-bit activations and 8-bit weights (x86
            without VNNI): "weights", "activations", or "auto" for the one with the smaller error on calibration data.
        strict_trace: whether a module that cannot be traced is an error, instead of staying in float.
        check_inputs: whether the quantized model raises `InputError` for a float input that holds NaN or +Inf. Each
            call then reads every input once more. Without it, layers with calibrated ranges silently turn NaN and Inf
            into finite numbers.
        leaf_modules: path globs of modules that are not traced into, see `leaf`.
        concrete_args: arguments of forward, by name, that are fixed to plain values, see `fix_args`.
        new_kinds: calls that fit no example: "error"; or, for presets without calibrated ranges, "trace" to trace a
            graph for such a call when it comes.

    Raises:
        RecipeError: an option has an invalid value.

    Example:
        >>> fxq.Recipe.static(leaf_modules=["head.*"]) == fxq.Recipe.static().leaf("head.*")
        True
    """
    if isinstance(leaf_modules, str):
        raise RecipeError(f"leaf_modules is a list of path globs, not {leaf_modules!r}: write [{leaf_modules!r}].")
    recipe = _cls(
        backend=backend_path(backend),
        config=QuantConfig(activation, weight, state=state),
        optimize=optimize,
        strict_trace=strict_trace,
        reduce_range=reduce_range,
        check_inputs=check_inputs,
        new_kinds=new_kinds,
    )
    return recipe.leaf(*leaf_modules).fix_args(**(concrete_args or {}))


def dynamic(
    _cls: type[Recipe], /, *, activation: TensorSpec = DYNAMIC, weight: TensorSpec = WEIGHT, **options: Any
) -> Recipe:
    """Post-training dynamic quantization: ranges of activations are computed at each call. Needs no data.

    Linear, convolution and recurrent layers read integers and give floats. If you give data anyway, the pass `smooth`
    moves outliers of the inputs of linear layers into their weights, or rotates the inputs.

    Args:
        activation: spec of the inputs of layers; the default has a range per row, which is a token for a linear layer
            and an image for a convolution.
        weight: spec of all weights; the default is int8 symmetric per channel. Linear layers of `x86` and `jit`
            also take scales per block, zero points, and few bits: 4 or fewer, or with scales per block 6 or fewer, are
            packed.
        options: as for `static`.

    Example:
        >>> recipe = fxq.Recipe.dynamic().only(nn.Linear)  # like torch's quantize_dynamic(model, {nn.Linear})
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
    compute: Compute = "float32",
    **options: Any,
) -> Recipe:
    """Weight-only quantization, for size: weights are stored as integers, layers compute in float. Needs no data.

    Layers and embeddings dequantize their weights at each call; weights of 2 to 6 bits are packed, so that they take
    that many bits, in memory and in files. With Numba (`fxq[jit]`), linear layers of up to 16 rows, such as for one
    token of a decoder, are faster than in float; other layers and more rows are as fast or slower. 4 and 8 bits are
    read directly; others are unpacked first, which takes longer. Without Numba, all layers are as fast or slower,
    unless they may compute in bfloat16. The ledger shows what that costs and saves, and the bits per weight.

    With 4 bits or fewer, embeddings, layers that share their tables, and the heads of language models of transformers
    have 8 bits, unless an override selects them. If there is data, the pass `gptq` chooses the integers of 4 bits or
    fewer with it, also those of a head that shares its table. For at most 4.5 bits per weight in all, give data, and 4
    bits to these layers, too: `recipe.override(nn.Embedding, recipe.config).override("lm_head", recipe.config)`. If
    they have at most 15 % of the weights, blocks of 128 for the other layers leave 6 bits for them, which lose less:
    override with the config of `weight_only(bits=6)` a recipe with `bits=4, per=128`.

    Args:
        bits: 5 to 8 (default: 8): symmetric, one scale per channel, for embeddings per block of 64 values; in models
            of transformers that generate, per block of 128 values for linear layers and of 64 for the head. 2 to 4:
            affine, one scale per block of 64 values, those of least squared error; with 4 bits, errors of large
            values count more. Values of 7 bits take a byte.
        per: granularity of the scales: "tensor", "channel", or the number of values in a block, such as 32 or 128.
        dtype: torch.float16 stores weights as float16 instead of integers.
        compute: "bfloat16" allows linear layers to multiply up to 16 rows in bfloat16, which rounds inputs and sums to
            8 bits. Without Numba, this is faster than float32. With Numba, they stay in float32, which is as fast. The
            ledger shows which layers use it, and why others do not.
        options: as for `static`, without `activation`. `weight` is a full spec, instead of `bits`, `per` and `dtype`.

    Raises:
        RecipeError: an option has an invalid value, or would have no effect.

    Example:
        >>> fxq.Recipe.weight_only(bits=4).config.weight
        TensorSpec(bits=4, signed=False, symmetric=False, per=64, observer='mse:emphasis=4', \
range='calibrated', format='integer')
        >>> recipe = fxq.Recipe.dynamic().override(nn.Embedding, fxq.Recipe.weight_only(bits=4).config)

    Source: Dettmers and Zettlemoyer 2023, section 2 (blocks, for 4 bits).
    """
    details = {key: value for key, value in (("bits", bits), ("per", per), ("dtype", dtype)) if value is not None}
    _refuse("weight_only", options, "activation")
    if "weight" in options:
        _refuse("weight_only with a weight spec", details, *details)
    weight = options.pop("weight", None) or weight_spec(bits or 8, per, dtype)
    recipe = replace(static(_cls, activation=None, weight=weight, **options), preset="weight_only")
    return recipe if compute == "float32" else replace(recipe, config=replace(recipe.config, compute=compute))


def stored(_cls: type[Recipe], /, **options: Any) -> Recipe:
    """Quantization with the grids that a quantized model has, such as a quantized ONNX file. Needs no data.

    Ops run on integers where the model dequantizes what they read and quantizes what they return, on exactly its scales
    and zero points. What the model has in float stays in float. The ledger names what no kernel of the backend runs.

    Args:
        options: `backend`, `strict_trace`, `check_inputs`, `leaf_modules` and `concrete_args`, as for `static`.

    Raises:
        RecipeError: an option has an invalid value, or would have no effect.

    Example:
        >>> fxq.Recipe.stored(backend="reference").optimize
        'coverage'
    """
    _refuse("stored", options, "activation", "weight", "state", "reduce_range")
    return replace(static(_cls, **{"optimize": preset_optimize("stored"), **options}), preset="stored")


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
    """Quantization-aware training: `fxq.prepare` returns a model to train, `fxq.convert` its integer model.

    The default of `optimize` is "coverage", since the model is trained to run on integers. The state of recurrent
    layers stays in float.

    Args:
        activation: spec of all activations; the default is uint8 affine with moving averages of the ranges.
        weight: spec of all weights; the default is int8 symmetric per channel.
        learned: scales are parameters (LSQ). They start where the squared error on the example inputs is smallest, so
            pass real data as example inputs. Set `weight_decay` to 0 for them: their names end in "factor".
        freeze_ranges_after: number of forwards in train mode after which ranges of activations are frozen; 0: never.
        freeze_norms_after: number of forwards in train mode after which the statistics of batch norms are frozen; 0:
            never.
        freeze_weights_over: total number of forwards in train mode; in their course, more and more of the weights that
            oscillate between two integers are frozen. 0: never. For 4 bits or fewer; takes 7 bytes of memory per
            weight. A weight is never frozen if it is a part of a parameter, or if it has one scale per tensor and a
            batch norm follows its layer.
        options: as for `static`.

    Raises:
        RecipeError: an option has an invalid value.

    Example:
        >>> weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
        >>> fxq.Recipe.qat(weight=weight, freeze_norms_after=1000).pipeline["insert-fake-quantizers"].freeze_norms_after
        1000

    Source: Jacob et al. 2018, section 3; Krishnamoorthi 2018, section 3.2; Esser et al. 2020 (learned scales);
        Nagel et al. 2022, section 4.2 (weights that are frozen).
    """
    _refuse("qat", options, "state")
    if learned:
        weight = replace(weight, range="learned", observer="mse")
        activation = replace(activation, range="learned", observer="mse") if activation is not None else None
    base = static(_cls, **{"optimize": preset_optimize("qat"), **options})
    recipe = replace(base, preset="qat", config=QuantConfig(activation, weight, state=None))
    default_pass = recipe.pipeline[FAKE_QUANTIZERS]
    new_pass = replace(
        default_pass,
        freeze_ranges_after=freeze_ranges_after,
        freeze_norms_after=freeze_norms_after,
        freeze_weights_over=freeze_weights_over,
    )
    if new_pass == default_pass:
        return recipe
    anchor = recipe.pipeline[recipe.pipeline.position(FAKE_QUANTIZERS) - 1].name
    return replace(recipe, edits=(PipelineEdit(FAKE_QUANTIZERS), PipelineEdit(anchor, new_pass)))


def _refuse(preset: str, options: Mapping[str, Any], *names: str) -> None:
    """Raise `RecipeError` if one of the options `names`, which have no effect here, is set."""
    for name in names:
        if options.get(name):
            raise RecipeError(f"{preset} takes no {name}: it would have no effect. Leave out {name}={options[name]!r}.")
