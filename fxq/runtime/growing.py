"""Binding of graphs with states that grow, such as key-value caches: the kinds of inputs change with every call.

Inputs whose kind changes from call to call are left open: the bound function takes any kind of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import fx

from fxq.graph.query import op_of

if TYPE_CHECKING:
    from fxq.runtime.binding import BoundForward, Kind

CALL_STATE = 5
"""Number of entries of a kind before those of the inputs, such as the number of threads."""
_OPEN = "open"
_MAX_REFUSED = 4
"""Number of calls in turn that a function does not support after which it is not tried again: each runs twice."""


class OtherInputsError(Exception):
    """Error of a bound function for a value whose shape differs from the calls that the function was bound with."""


def has_growing_states(graph: fx.Graph) -> bool:
    """Whether a graph appends to states."""
    ops = (op_of(node) for node in graph.nodes)
    return any(op is not None and op.traits.grows for op in ops)


class GrowingKinds:
    """LRU cache of bound functions. The key has the kinds of those inputs whose kind is the same as in the last call.

    Args:
        record: runs a graph, and returns its outputs and the kinds of its values.
        bind: runs a graph, and returns its outputs and a bound function; None to try again in the next call. It gets
            the names of the open inputs and the kinds of an earlier call, in which only open inputs had other kinds.
    """

    def __init__(
        self, record: Callable[..., tuple[Any, Any]], bind: Callable[..., tuple[Any, BoundForward | None]]
    ) -> None:
        self._record, self._bind = record, bind
        self._last: tuple[Kind, Kind] = (), ()  # kind and key of the last call
        self._seen: OrderedDict[Kind, Any] = OrderedDict()  # the kinds of the first call, then the function, or None
        self._refused: dict[Kind, int] = {}  # number of calls in turn that the function of a key did not support

    def bound_for(self, kind: Kind) -> tuple[Kind, Any]:
        """The key of a call, and what is cached for it."""
        last, last_key = self._last
        if kind == last and last_key:  # as of two sequences that grow in turn
            key = last_key
        elif len(last) != len(kind) or last[:CALL_STATE] != kind[:CALL_STATE]:
            key = ()
        else:
            key = tuple(map(_open_if_other, kind, last))
        self._last = kind, key
        cached = self._seen.get(key)
        with suppress(KeyError):  # of a first call, or dropped by another thread
            self._seen.move_to_end(key)
        return key, cached

    def first(self, key: Kind, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the first call of a key."""
        value, self._seen[key] = self._record(gm, args, kwargs)
        return value

    def second(
        self,
        key: Kind,
        recorded: Any,
        gm: fx.GraphModule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: list[str],
    ) -> Any:
        """Run the second call of a key, and bind a function for all later ones. `recorded` is what the first cached."""
        entries = key[CALL_STATE:]
        of_args = {name for name, entry in zip(names, entries[: len(args)], strict=False) if entry is _OPEN}
        of_kwargs = {str(entry[0]) for entry in entries[len(args) :] if isinstance(entry, tuple) and entry[1] is _OPEN}
        value, bound = self._bind(gm, args, kwargs, of_args | of_kwargs, recorded)
        self._seen[key] = recorded if bound is None else bound
        return value

    def refused(self, key: Kind) -> None:
        """Note a call that the function of a key does not support. After several in turn, bind nothing for the key."""
        self._refused[key] = self._refused.get(key, 0) + 1
        if self._refused[key] >= _MAX_REFUSED:
            self._seen[key] = False

    def accepted(self, key: Kind) -> None:
        """Note a call that the function of a key has run."""
        if self._refused:
            self._refused.pop(key, None)

    def clear(self) -> None:
        """Forget all functions, since a module has changed."""
        self._seen.clear()
        self._refused.clear()

    def limit(self, capacity: int) -> None:
        """Remove the oldest functions until at most `capacity` are left."""
        while len(self._seen) > capacity:
            self._seen.popitem(last=False)


def _open_if_other(entry: Any, last: Any) -> Any:
    """Entry of a key: that of the kind, or open if the last call had another. Keyword inputs keep their name."""
    if entry == last:
        return entry
    is_named = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
    return (entry[0], _OPEN) if is_named else _OPEN
