"""States of observers as plain data, to store them, send them to another process, and merge them there.

A state is a dict of plain data and tensors that `fxq.common.stored_data.pack` accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from fxq.errors import InputError
from fxq.quant.observer_base import Observer

ObserverState = Mapping[str, Any]


def kind_of(observer: Observer) -> str:
    """Class, options, buffers, spec and axis of an observer, as text.

    Observers with the same text can exchange states.
    """
    options, buffers = {key: getattr(observer, key) for key in sorted(observer.options)}, " ".join(observer._buffers)
    name = f"{type(observer).__module__}.{type(observer).__qualname__}"
    return f"{name} {options} {buffers} {observer.spec!r} {observer.axis}"


def state_of(observer: Observer) -> ObserverState:
    """Return the state of an observer. Shares its tensors."""
    return {
        "kind": kind_of(observer),
        "buffers": dict(observer._buffers),
        "constants": observer.constants,
        "block": observer.block,
        "met_empty": observer.met_empty,
    }


def with_state(observer: Observer, state: ObserverState) -> Observer:
    """Return a copy of an observer with a state instead of its own. Shares the tensors of the state.

    Raises:
        InputError: the state is from an observer of another class, spec or axis.

    Example:
        >>> seen = fxq.quant.observers.MinMax(fxq.TensorSpec())
        >>> _ = seen(torch.tensor([-1.0, 2.0]))
        >>> with_state(fxq.quant.observers.MinMax(fxq.TensorSpec()), state_of(seen)).range()
        (tensor(-1.), tensor(2.))
    """
    if state["kind"] != kind_of(observer):
        raise InputError(
            f"{observer.name or 'the tensor'}: its observer is {kind_of(observer)}, but the state is from "
            f"{state['kind']}. Prepare both models with one recipe."
        )
    copied, device = copy.copy(observer), observer.minimum.device
    copied._buffers = {name: tensor.to(device) for name, tensor in state["buffers"].items()}
    copied.constants, copied.block, copied.met_empty = state["constants"], state["block"], state["met_empty"]
    return copied


def merge_states(observers: Mapping[str, Observer], states: Iterable[Mapping[str, ObserverState]]) -> set[str]:
    """Replace the states of observers by the merged states of several processes.

    Args:
        observers: by name; changed in place.
        states: one dict of states per process, by the same names. The order matters for moving averages.

    Returns:
        Names of the observers that have a state in every dict; other observers stay unchanged.

    Raises:
        InputError: a state is from an observer of another class, spec or axis.
        CalibrationError: the processes have seen different numbers of channels.
    """
    merged: dict[str, Observer] = dict(observers)
    for i, state in enumerate(states):
        merged = {name: observer for name, observer in merged.items() if name in state}
        for name in merged:
            observer = with_state(observers[name], state[name])
            if i == 0:
                merged[name] = observer
            else:
                merged[name].merge(observer)
    for name, observer in merged.items():
        take_over(observers[name], observer)
    return set(merged)


def take_over(observer: Observer, other: Observer) -> None:
    """Give an observer the state of another one of its class, spec and axis. The two share tensors afterwards."""
    observer._buffers = other._buffers
    observer.constants, observer.block, observer.met_empty = other.constants, other.block, other.met_empty
