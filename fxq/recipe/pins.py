"""Pins: recorded decisions, one per op that could run on integers or in float, so that a recipe repeats its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from torch import fx

from fxq.errors import RecipeError, nearest, unknown
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, is_op
from fxq.graph.unit import calls_of


class Place(NamedTuple):
    """Name of an op or unit that stays the same when the model is traced again.

    Attributes:
        path: path of the module that calls it (no glob); empty for the model itself.
        op: names of its ops, joined by "+".
        call: index among the nodes with this path and these ops, in the order of the graph.
    """

    path: str
    op: str
    call: int = 0

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        return f"{self.op} of {self.path or 'the model'}{call}"


def places_of(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> dict[fx.Node, Place]:
    """Places of the nodes that run ops, without conversions."""
    counts: Counter[tuple[str, str]] = Counter()
    places = {}
    for node in nodes:
        calls = () if is_op(node, *CONVERSIONS) else calls_of(gm, node)
        if calls:
            key = info(node).path, "+".join(call.op.name for call in calls)
            places[node] = Place(*key, counts[key])
            counts[key] += 1
    return places


Choice = Literal["int8", "float", "opened"]


@dataclass(frozen=True)
class Pin:
    """Recorded decision about one op or unit.

    Attributes:
        op, path, call: see `Place`.
        runs: choice between the precisions "int8" and "float" for an op that could run on integers; "opened" for a
            unit whose ops are split between a kernel and others, which have pins of their own.
        ops: number of ops of an opened unit that the kernel runs, from the first; else 0.

    Example:
        >>> Pin.from_dict(Pin("conv2d+relu", "block.0", runs="float").to_dict())
        Pin(op='conv2d+relu', path='block.0', call=0, runs='float', ops=0)
    """

    op: str
    path: str = ""
    call: int = 0
    runs: Choice = "int8"
    ops: int = 0

    @classmethod
    def at(cls, place: Place, runs: Choice, ops: int = 0) -> Pin:
        """Pin of the op or unit at a place."""
        return cls(place.op, place.path, place.call, runs, ops)

    @property
    def place(self) -> Place:
        """Place of the op or unit."""
        return Place(self.path, self.op, self.call)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a recipe file. Defaults are left out."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default or f.name == "runs"
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pin:
        """Inverse of `to_dict`. Raises `RecipeError` for unknown keys and invalid values."""
        types = {f.name: int if f.name in ("call", "ops") else str for f in fields(cls)}
        for key, value in data.items():
            if key not in types:
                raise RecipeError(unknown("key of [[decided]]", key, list(types)))
            if not isinstance(value, types[key]):
                raise RecipeError(f"[[decided]]: {key} is {value!r}; it must be of type {types[key].__name__}.")
        if (
            "op" not in data
            or data.get("runs", "int8") not in get_args(Choice)
            or (data.get("runs") == "opened") != ("ops" in data)
        ):
            raise RecipeError(
                f"[[decided]]: {dict(data)} is not a valid decision; save the recipe of qmodel.recipe_as_decided()."
            )
        return cls(**data)


class Pinned:
    """The decisions of a recipe, by place."""

    def __init__(self, pins: Iterable[Pin]) -> None:
        self.opened = {pin.place: pin.ops for pin in pins if pin.runs == "opened"}
        self.runs = {pin.place: pin.runs for pin in pins if pin.runs != "opened"}

    def ops(self, place: Place) -> int:
        """Number of ops of a unit that the kernel runs. Raises `RecipeError` if there is no pin for the place."""
        return self._find(self.opened, place)

    def is_float(self, place: Place) -> bool:
        """Whether an op that could run on integers is pinned to float. Raises `RecipeError` as `ops` does."""
        return self._find(self.runs, place) == "float"

    def lost(self, able: Iterable[Place]) -> list[Place]:
        """Places that are pinned to integers, but are not among the places `able` to run on them."""
        able_places = set(able)
        return [place for place, runs in self.runs.items() if runs == "int8" and place not in able_places]

    def _find(self, decided: Mapping[Place, Any], place: Place) -> Any:
        if place not in decided:
            near = nearest(str(place), [str(pinned) for pinned in decided], 3)
            raise RecipeError(
                f"the recipe has no decision for {place}, which can run on integers; "
                f"{'near: ' + '; '.join(near) if near else 'none is similar'}. Its decisions are for another model "
                'or other passes: quantize with recipe.with_optimize("speed") and use recipe_as_decided() of the '
                "result."
            )
        return decided[place]
