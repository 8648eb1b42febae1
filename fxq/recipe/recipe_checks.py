"""Checks of a recipe when it is made: invalid values, and combinations that are not supported yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fxq.errors import RecipeError, unknown
from fxq.quant.observers import MinMax, MovingAverage, observer_named
from fxq.quant.spec import ROLES, QuantConfig, Role, TensorSpec

if TYPE_CHECKING:
    from fxq.recipe.selector import Selector


def check_preset(preset: str) -> None:
    """Raise `RecipeError` for a preset of an older version."""
    if preset == "static_corrected":
        raise RecipeError('the preset "static_corrected" is called "static" now.')


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise `RecipeError`, with the nearest choice, for a value of an option that is none of its choices."""
    if value not in choices:
        raise RecipeError(unknown(option, value, choices))


def check_new_kinds(new_kinds: str, configs: Sequence[QuantConfig], part_modules: Sequence[str]) -> None:
    """Raise `RecipeError` if a recipe asks for graphs to be traced at calls, and they cannot be.

    Args:
        new_kinds: "error" or "trace".
        configs: all configs of the recipe.
        part_modules: path globs of modules that are quantized as parts.
    """
    check_choice("value of new_kinds", new_kinds, ("error", "trace"))
    if new_kinds == "error":
        return
    if any(spec is not None and spec.range in ("calibrated", "learned") for spec in _activation_specs(configs)):
        raise RecipeError(
            'new_kinds="trace" needs a recipe without calibrated ranges, such as weight_only or dynamic: a graph that '
            "is traced at a call gets no calibration data. Leave new_kinds out, and give an example and data of every "
            "kind of call: fxq.quantize(model, recipe, example_inputs=[{...}, {...}], data=loader)."
        )
    if part_modules:
        raise RecipeError(
            'new_kinds="trace" and parts cannot be combined: a part has one graph. Leave out one of them.'
        )


def _activation_specs(configs: Sequence[QuantConfig]) -> Iterator[TensorSpec | None]:
    for config in configs:
        yield config.activation
        yield config.state if not config.is_float else None


def check_config(config: QuantConfig, where: str, trains: bool = False) -> None:
    """Raise `RecipeError` for an unknown observer, or a combination that is not supported yet.

    Args:
        config: the config.
        where: part of the recipe that has it, for the message.
        trains: whether the recipe is for training.
    """
    specs = {role: spec for role in ROLES if (spec := config.of(role)) is not None}
    observers = {role: observer_named(spec.observer)[0] for role, spec in specs.items()}
    for reason in (*_unsupported(config), *(_untrainable(specs) if trains else _only_trainable(specs))):
        raise RecipeError(f"{where}: {reason}")
    for role, spec in specs.items():
        by_part = (spec.per == "channel" or spec.block is not None) and spec.range != "dynamic"
        if by_part and not observers[role].per_channel:
            per = "channel" if spec.block is None else "block"
            raise RecipeError(
                f"{where}: the {spec.observer!r} observer of the {role} has one range per tensor, but the spec has "
                f"one per {per}. Use observer='minmax' or 'mse', or per='tensor'."
            )
        if role != "weight" and spec.range == "calibrated" and observers[role].keeps_data:
            raise RecipeError(
                f"{where}: the {spec.observer!r} observer of the {role} stores all values that it sees, too many for "
                "calibration data; it is for weights. Use observer='histogram', which also minimizes the error."
            )


def _unsupported(config: QuantConfig) -> Iterator[str]:
    """Reasons why a config is not supported."""
    has_integer_weight = config.weight is not None and config.weight.format == "integer"
    if config.compute != "float32" and (config.activation is not None or not has_integer_weight):
        yield f'compute="{config.compute}" is for layers with integer weights and float activations: leave it out.'
    if config.is_float:
        yield from _unsupported_state(config.state)
        return
    for role in ROLES:
        if config.of(role) is not None and role not in _PER:
            yield f"a spec for the {role} is not supported yet: leave {role}=None."
    if config.weight is None:
        yield "integer activations with float weights are not supported yet: give weight a spec, or use fxq.FLOAT."
    for role in _PER:
        spec = config.of(role)
        if spec is not None:
            yield from _unsupported_spec(role, spec)
    is_dynamic = config.activation is not None and config.activation.range == "dynamic"
    if is_dynamic and config.state is not None and config.state.range == "calibrated":
        yield 'a calibrated state with a dynamic activation is not supported yet: use range="dynamic" for the state.'
    weight = config.weight
    has_blocks = weight is not None and weight.block is not None and not is_dynamic
    only_stored = weight is not None and (has_blocks or weight.format != "integer")
    if only_stored and config.activation is not None:
        yield f"integer activations with weights in {weight} are not supported yet: set activation=None."


def _only_trainable(specs: Mapping[Role, TensorSpec]) -> Iterator[str]:
    """Reasons why specs are for training only."""
    for role, spec in specs.items():
        if spec.range == "learned":
            yield f'range="learned" for the {role} is for training: start with fxq.Recipe.qat().'


def _untrainable(specs: Mapping[Role, TensorSpec]) -> Iterator[str]:
    """Reasons why a model cannot be trained with these specs."""
    for role, spec in specs.items():
        observer = observer_named(spec.observer)[0]
        if role == "state":
            yield "a quantized state cannot be trained yet: set state=None."
        elif spec.range == "dynamic":
            yield f'range="dynamic" for the {role} cannot be trained yet: use range="calibrated" or "learned".'
        elif spec.format != "integer":
            yield f'format="{spec.format}" for the {role} cannot be trained: use integers.'
        elif spec.range == "learned" and spec.block is not None:
            yield (
                f"learned scales per block of the {role} are not supported yet: "
                'use range="calibrated", or per="channel".'
            )
        elif spec.range == "calibrated" and observer not in (MinMax, MovingAverage):
            yield (
                f"the {spec.observer!r} observer of the {role} cannot follow values that change in training: use "
                'observer="minmax" or "moving_average"; or range="learned", which takes its start from this observer.'
            )
        elif spec.range == "calibrated" and role == "weight" and observer is not MinMax:
            yield 'the range of a trained weight is its smallest and largest value: use observer="minmax".'


_PER: dict[Role, tuple[str, ...]] = {
    "activation": ("tensor", "row"),
    "weight": ("tensor", "channel", "a block size"),
    "state": ("row", "tensor", "a block size"),
}
_RANGES: dict[Role, tuple[str, ...]] = {
    "activation": ("calibrated", "dynamic", "learned"),
    "weight": ("calibrated", "learned"),
    "state": ("dynamic", "fixed", "calibrated"),
}


def _unsupported_spec(role: Role, spec: TensorSpec) -> Iterator[str]:
    """Reasons why the spec of a role is not supported."""
    if (spec.per if spec.block is None else "a block size") not in _PER[role]:
        choices = " or ".join("a block size" if per == "a block size" else f'per="{per}"' for per in _PER[role])
        yield f"per={spec.per!r} for the {role} is not supported yet: use {choices}."
    if spec.range not in _RANGES[role]:
        choices = " or ".join(f'range="{name}"' for name in _RANGES[role])
        yield f'range="{spec.range}" for the {role} is not supported yet: use {choices}.'
    if spec.per == "row" and spec.range == "calibrated":
        yield 'rows cannot have calibrated ranges, since every call has other rows: use range="dynamic".'
    if ((role == "state" and spec.per == "tensor") or spec.range == "fixed") and not spec.symmetric:
        yield f"a {spec.range} range for the {role} that is not symmetric is not supported yet: use symmetric=True."
    if role == "state":
        yield from _unsupported_state(spec)
    if role == "state" and (spec.per == "tensor") == (spec.range == "dynamic"):
        yield 'a state has a dynamic range per="row" or per block, or a calibrated or fixed one (-1..1) per="tensor".'
    if spec.format != "integer" and role != "weight":
        yield f'format="{spec.format}" for the {role} is not supported yet: it is for weights.'


def _unsupported_state(spec: TensorSpec | None) -> Iterator[str]:
    """Reasons why the spec of a state per block is not supported, whether or not the layer computes in float."""
    if spec is None or spec.block is None:
        return
    if spec.symmetric or spec.signed:
        yield "a state per block that is symmetric or signed is not supported yet: leave both out."
    if spec.range != "dynamic":
        yield f'range="{spec.range}" for a state per block is not supported yet: use range="dynamic".'


def check_selectors(
    selectors: Sequence[Selector], modules: Mapping[str, type], selecting: Collection[int], place: str
) -> None:
    """Raise `RecipeError` for an override that selects nothing in any graph of a model.

    Args:
        selectors: selectors of the overrides.
        modules: class of each module of the float model by path, for hints.
        selecting: numbers of the overrides that select something.
        place: where they select nothing, for the message.
    """
    for i, selector in enumerate(selectors):
        if i not in selecting:
            near = selector.near_misses(modules, set())
            hint = f"near: {', '.join(near)}" if near else "nothing looks like it"
            raise RecipeError(f"the override for {selector} selects nothing in {place} of this model; {hint}.")
