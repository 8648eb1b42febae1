"""What observers have seen, as data: to be stored, sent to another process, and merged there.

A state is a dict of plain data and tensors, as `fxq.common.stored_data.pack` takes it. It does not grow with the data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from fxq.errors import InputError
from fxq.quant.observer_base import Observer

ObserverState = Mapping[str, Any]


def kind_of(observer: Observer) -> str:
    """What an observer looks at and how, as text: those of one kind can take over one another's state."""
    options = {key: getattr(observer, key) for key in sorted(observer.options)}
    return f"{type(observer).__module__}.{type(observer).__qualname__} {options} {observer.spec!r} {observer.axis}"


def state_of(observer: Observer) -> ObserverState:
    """All that an observer has seen. Shares its tensors."""
    return {
        "kind": kind_of(observer),
        "buffers": dict(observer._buffers),
        "constants": observer.constants,
        "block": observer.block,
        "met_empty": observer.met_empty,
    }


def with_state(observer: Observer, state: ObserverState) -> Observer:
    """An observer like this one that has seen what is in a state, and nothing else. Shares the tensors of the state.

    Raises:
        InputError: the state is of an observer of another kind.

    Example:
        >>> seen = fxq.quant.observers.MinMax(fxq.TensorSpec())
        >>> _ = seen(torch.tensor([-1.0, 2.0]))
        >>> with_state(fxq.quant.observers.MinMax(fxq.TensorSpec()), state_of(seen)).range()
        (tensor(-1.), tensor(2.))
    """
    if state["kind"] != kind_of(observer):
        raise InputError(
            f"{observer.name or 'the tensor'}: its observer is of another kind than the one whose state is given, "
            f"{kind_of(observer)} and not {state['kind']}. Prepare both with one recipe."
        )
    made, device = copy.copy(observer), observer.minimum.device
    made._buffers = {name: tensor.to(device) for name, tensor in state["buffers"].items()}
    made.constants, made.block, made.met_empty = state["constants"], state["block"], state["met_empty"]
    return made


def merge_states(observers: Mapping[str, Observer], states: Iterable[Mapping[str, ObserverState]]) -> set[str]:
    """Let observers stand for what others of the same tensors have seen, together; what they had seen is forgotten.

    Args:
        observers: by name; changed in place.
        states: by the same names, from each process one. The order matters only where a merge is not exact.

    Returns:
        The names of the observers that every process has a state of; others stay as they are.

    Raises:
        InputError: a state is of an observer of another kind.
        CalibrationError: the processes have seen different numbers of channels.
    """
    merged: dict[str, Observer] = dict(observers)
    for i, state in enumerate(states):
        merged = {name: observer for name, observer in merged.items() if name in state}
        for name in merged:
            other = with_state(observers[name], state[name])
            if i == 0:
                merged[name] = other
            else:
                merged[name].merge(other)
    for name, made in merged.items():
        take_over(observers[name], made)
    return set(merged)


def take_over(observer: Observer, other: Observer) -> None:
    """Let an observer stand for what another of its kind has seen, with which it shares the tensors from now on."""
    observer._buffers = other._buffers
    observer.constants, observer.block, observer.met_empty = other.constants, other.block, other.met_empty
