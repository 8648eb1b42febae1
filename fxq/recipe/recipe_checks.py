"""What a recipe says wrongly, or asks for that fxq cannot do yet: refused by name where the recipe is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fxq.errors import RecipeError, unknown
from fxq.quant.observers import MinMax, MovingAverage, observer_named
from fxq.quant.spec import ROLES, QuantConfig, Role, TensorSpec


def check_preset(preset: str) -> None:
    """Raise `RecipeError` for a preset that fxq had."""
    if preset == "static_corrected":
        raise RecipeError('the preset "static_corrected" is now what "static" does.')


def check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    """Raise `RecipeError`, with the nearest, for a value that is none of the choices."""
    if value not in choices:
        raise RecipeError(unknown(what, value, choices))


def check_config(config: QuantConfig, where: str, trains: bool = False) -> None:
    """Raise `RecipeError` when a config asks for an observer that cannot be made, or for what is not built yet.

    `where` says what in the recipe asks for it, `trains` whether that is for training.
    """
    specs = {role: spec for role in ROLES if (spec := config.of(role)) is not None}
    observers = {role: observer_named(spec.observer)[0] for role, spec in specs.items()}
    for reason in (*_missing(config), *(_not_trained(specs) if trains else _only_trained(specs))):
        raise RecipeError(f"{where}: {reason}")
    for role, spec in specs.items():
        if (spec.per == "channel" or spec.block is not None) and not observers[role].per_channel:
            per = "channel" if spec.block is None else "block"
            raise RecipeError(
                f"{where}: the {spec.observer!r} observer of the {role} has one range per tensor, but the recipe asks "
                f"for one per {per}. Use observer='minmax' or 'mse', or per='tensor'."
            )
        if role != "weight" and spec.range == "calibrated" and observers[role].keeps_data:
            raise RecipeError(
                f"{where}: the {spec.observer!r} observer keeps all that it sees, which is too much of calibration "
                f"data; it is for weights. For the {role}, use observer='histogram', which also looks for the least "
                "error."
            )


def _missing(config: QuantConfig) -> Iterator[str]:
    if config.is_float:
        return
    for role in ROLES:
        if config.of(role) is not None and role not in _PER:
            yield f"a grid of its own for the {role} is not built yet: leave {role}=None."
    if config.weight is None:
        yield "integer activations with float weights are not built yet: give weight a spec, or use fxq.FLOAT."
    for role in _PER:
        spec = config.of(role)
        if spec is not None:
            yield from _missing_of(role, spec)
    measured = config.activation is not None and config.activation.range == "dynamic"
    if measured and config.state is not None and config.state.range == "calibrated":
        yield 'a calibrated range for the state with a measured input is not built yet: use range="dynamic".'
    weight = config.weight
    stored = weight is not None and (weight.block is not None or weight.format != "integer")
    if stored and config.activation is not None:
        yield f"layers that read integers are not built yet for weights in {weight}: set activation=None."


def _only_trained(specs: Mapping[Role, TensorSpec]) -> Iterator[str]:
    for role, spec in specs.items():
        if spec.range == "learned":
            yield f'range="learned" for the {role} is for training: start with fxq.Recipe.qat().'


def _not_trained(specs: Mapping[Role, TensorSpec]) -> Iterator[str]:
    """Why a model cannot be trained with these specs."""
    for role, spec in specs.items():
        observer = observer_named(spec.observer)[0]
        if role == "state":
            yield "a state on a grid cannot be trained yet: set state=None."
        elif spec.range == "dynamic":
            yield f'range="dynamic" for the {role} cannot be trained yet: use range="calibrated" or "learned".'
        elif spec.format != "integer":
            yield f'format="{spec.format}" for the {role} cannot be trained: use integers.'
        elif spec.range == "learned" and spec.block is not None:
            yield f'blocks of the {role} have no learned scales yet: use range="calibrated", or per="channel".'
        elif spec.range == "calibrated" and observer not in (MinMax, MovingAverage):
            yield (
                f"the {spec.observer!r} observer of the {role} cannot follow values that change in training: use "
                'observer="minmax" or "moving_average"; or range="learned", which starts with what it finds.'
            )
        elif spec.range == "calibrated" and role == "weight" and observer is not MinMax:
            yield 'the range of a weight that is trained is that of its values: use observer="minmax".'


_PER: dict[Role, tuple[str, ...]] = {
    "activation": ("tensor", "row"),
    "weight": ("tensor", "channel", "a block size"),
    "state": ("row", "tensor"),
}
_RANGES: dict[Role, tuple[str, ...]] = {
    "activation": ("calibrated", "dynamic", "learned"),
    "weight": ("calibrated", "learned"),
    "state": ("dynamic", "fixed", "calibrated"),
}


def _missing_of(role: Role, spec: TensorSpec) -> Iterator[str]:
    if spec.range not in _RANGES[role]:
        use = " or ".join(f'range="{known}"' for known in _RANGES[role])
        yield f'range="{spec.range}" for the {role} is not built yet: use {use}.'
    if spec.per == "row" and spec.range == "calibrated":
        yield 'rows have no calibrated ranges, since there are others at every call: use range="dynamic".'
    if (role == "state" or spec.range == "fixed") and not spec.symmetric:
        yield f"a {spec.range} range for the {role} that is not symmetric is not built yet: use symmetric=True."
    if role == "state" and (spec.per == "row") != (spec.range == "dynamic"):
        yield 'a state has a measured range per="row", or a calibrated or fixed one (-1..1) per="tensor".'
    if spec.format != "integer" and role != "weight":
        yield f'format="{spec.format}" for the {role} is not built yet: it is for weights.'
    if (spec.per if spec.block is None else "a block size") not in _PER[role]:
        use = " or ".join("a block size" if per == "a block size" else f'per="{per}"' for per in _PER[role])
        yield f"per={spec.per!r} for the {role} is not built yet: use {use}."
