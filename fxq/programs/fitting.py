"""Choice among graphs of one model: the first that takes a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fxq.errors import InputError, words_of


@dataclass(frozen=True)
class Fitting:
    """Outcome of a search for a graph that takes a call.

    Attributes:
        key: key of the first graph that takes the call; None if none does.
        result: its result.
        refusals: key and error of each graph before it.
    """

    key: Any
    result: Any
    refusals: tuple[tuple[Any, Exception], ...]

    def __str__(self) -> str:
        return "; ".join(f"{key}: {words_of(error)}" for key, error in self.refusals)


def first_fitting(graphs: Iterable[tuple[Any, Callable[..., Any]]], args: Any = (), kwargs: Any = None) -> Fitting:
    """Call graphs in order until one takes the call: it raises no error about its inputs.

    Other errors, such as a `StateError`, do not depend on the graph, and are raised.

    Args:
        graphs: keys, such as names, and functions that run the graphs.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    refusals: list[tuple[Any, Exception]] = []
    for key, graph in graphs:
        try:
            return Fitting(key, graph(*args, **(kwargs or {})), tuple(refusals))
        except (InputError, TypeError) as error:
            refusals.append((key, error))
    return Fitting(None, None, tuple(refusals))
