"""Pins: what was decided of every op that could run either way. With them a recipe gives the same graph again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import fx

from fxq.errors import RecipeError, nearest, unknown
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, is_op
from fxq.graph.unit import calls_of


class Place(NamedTuple):
    """Where an op or unit stands in the model: what still names it when the model is traced again.

    Attributes:
        path: path of the module that calls it, taken literally; empty for the model itself.
        op: the ops that it runs, joined by "+".
        call: which one it is of those with the same path and ops, in the order of the graph, from 0.
    """

    path: str
    op: str
    call: int = 0

    def __str__(self) -> str:
        which = f", call {self.call}" if self.call else ""
        return f"{self.op} of {self.path or 'the model'}{which}"


def places_of(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> dict[fx.Node, Place]:
    """The place of every node that runs ops, conversions left out."""
    seen: Counter[tuple[str, str]] = Counter()
    places = {}
    for node in nodes:
        calls = () if is_op(node, *CONVERSIONS) else calls_of(gm, node)
        if calls:
            key = info(node).path, "+".join(call.op.name for call in calls)
            places[node] = Place(*key, seen[key])
            seen[key] += 1
    return places


@dataclass(frozen=True)
class Pin:
    """One decision.

    Attributes:
        op, path, call: see `Place`.
        runs: "int8", or "float" where it could run on integers and does not; "opened" for a unit of which a kernel
            could run more ops or fewer: what is said of its parts then, say other pins.
        ops: of such a unit, how many ops the kernel runs, from the first on; else 0.

    Example:
        >>> Pin.from_dict(Pin("conv2d+relu", "block.0", runs="float").to_dict())
        Pin(op='conv2d+relu', path='block.0', call=0, runs='float', ops=0)
    """

    op: str
    path: str = ""
    call: int = 0
    runs: str = "int8"
    ops: int = 0

    @classmethod
    def at(cls, place: Place, runs: str, ops: int = 0) -> Pin:
        """What was decided of what stands at a place."""
        return cls(place.op, place.path, place.call, runs, ops)

    @property
    def place(self) -> Place:
        """Where it stands."""
        return Place(self.path, self.op, self.call)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a recipe file. Defaults are left out."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default or f.name == "runs"
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pin:
        """Inverse of `to_dict`. Raises `RecipeError` for what is no pin."""
        known = {f.name: int if f.name in ("call", "ops") else str for f in fields(cls)}
        for key, value in data.items():
            if key not in known:
                raise RecipeError(unknown("key of [[decided]]", key, list(known)))
            if not isinstance(value, known[key]):
                raise RecipeError(f"[[decided]]: {key} is {value!r}, not {known[key].__name__}.")
        if (
            "op" not in data
            or data.get("runs", "int8") not in _RUNS
            or (data.get("runs") == "opened") != ("ops" in data)
        ):
            raise RecipeError(f"[[decided]]: {dict(data)} is no decision; write it with qmodel.recipe_as_decided().")
        return cls(**data)


_RUNS = ("int8", "float", "opened")


class Pinned:
    """The decisions of a recipe, by place."""

    def __init__(self, pins: Iterable[Pin]) -> None:
        self.opened = {pin.place: pin.ops for pin in pins if pin.runs == "opened"}
        self.runs = {pin.place: pin.runs for pin in pins if pin.runs != "opened"}

    def ops(self, place: Place) -> int:
        """How many ops of a unit the kernel runs. Raises `RecipeError` where nothing was decided."""
        return self._find(self.opened, place)

    def is_float(self, place: Place) -> bool:
        """Whether an op that could run on integers is to run in float. Raises `RecipeError` as `ops` does."""
        return self._find(self.runs, place) == "float"

    def lost(self, able: Iterable[Place]) -> list[Place]:
        """The places that are to run on integers and cannot, given those that can."""
        can = set(able)
        return [place for place, runs in self.runs.items() if runs == "int8" and place not in can]

    def _find(self, decided: Mapping[Place, Any], place: Place) -> Any:
        if place not in decided:
            near = nearest(str(place), [str(known) for known in decided], 3)
            raise RecipeError(
                f"the recipe's decisions do not speak of {place}, which can run on integers; "
                f"{'near: ' + '; '.join(near) if near else 'nothing looks like it'}. They are of another model, or of "
                'other passes: quantize with recipe.with_optimize("speed") and take recipe_as_decided() of the result.'
            )
        return decided[place]
