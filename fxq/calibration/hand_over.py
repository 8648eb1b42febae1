"""Handing over what observers have seen: to those of another graph of the same model, made with another recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fxq.errors import RecipeError
from fxq.graph.info import info
from fxq.graph.query import submodule, unobserved
from fxq.graph.unit import calls_of
from fxq.quant.observer_base import Observer
from fxq.recipe.recipe import Recipe

AGAIN = "Prepare and calibrate the float model with this recipe."
Value = tuple[str, ...]


def check_traced_alike(before: Recipe, now: Recipe) -> None:
    """Raise `RecipeError` where a recipe asks for another graph of the float model than the one that was calibrated."""
    for name in ("leaf_modules", "strict_trace", "concrete_args", "extensions"):
        if getattr(before, name) != getattr(now, name):
            raise RecipeError(
                f"the recipe has other {name} than the one that the model was prepared with: {getattr(now, name)!r}, "
                f"not {getattr(before, name)!r}. They change what is traced. {AGAIN}"
            )


def nodes_of(graph: fx.Graph) -> tuple[str | None, ...]:
    """A graph before anything is fused, to tell whether two are the same."""
    return tuple(node.format_node() for node in graph.nodes)


def check_computes_alike(before: Sequence[str | None], now: Sequence[str | None]) -> None:
    """Raise `RecipeError` where two graphs, before anything is fused, do not compute the same values."""
    if tuple(before) != tuple(now):
        other = next((line for line in now if line not in set(before)), None) or "it has fewer nodes"
        raise RecipeError(
            "with this recipe the model is another graph before anything is fused, as where a batch norm goes into its "
            f"layer with one recipe and not with the other: {other.strip()}. {AGAIN}"
        )


def hand_over(seen: fx.GraphModule, to: fx.GraphModule, ways: str) -> int:
    """Let the observers of a graph stand for what those of another graph of the same model have seen.

    Args:
        seen: the graph that was calibrated.
        to: the graph whose observers have seen nothing; they are replaced. Those of weights stay.
        ways: what can be done where an observer has no counterpart.

    Returns:
        How many observers have been replaced.

    Raises:
        RecipeError: nobody has looked at a value that the graph has an observer for, or not in a way from which that
            observer's range follows.
    """
    known: dict[Value, dict[fx.Node, list[Observer]]] = {}
    for value, _, observer in _watched(seen):
        known.setdefault(_identity(seen, value), {}).setdefault(value, []).append(observer)
    asked = list(_watched(to))
    for value, node, observer in asked:
        same = known.get(_identity(to, value), {})
        found = next(iter(same.values())) if len(same) == 1 else []  # of several, nobody knows which it is
        answers = (one.answer_as(observer) for one in found)
        answer = next((one for one in answers if one is not None), None)
        if answer is None:
            how = f" in the way that {observer.spec.observer!r} needs" if found else ""
            raise RecipeError(
                f"the recipe wants the range of {observer.name}, which calibration has not looked at{how}: the model "
                f"was prepared with another recipe. {ways}"
            )
        to.set_submodule(str(node.target), answer)
    return len(asked)


def _watched(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, Observer]]:
    """The values that observers watch, the nodes of these, and the observers; without those of weights."""
    for node in gm.graph.nodes:
        module = submodule(gm, node)
        for observer in module.modules() if module is not None and node.args else ():
            if isinstance(observer, Observer) and not observer.paused:
                yield unobserved(gm, node.args[0]), node, observer


def _identity(gm: fx.GraphModule, value: fx.Node) -> Value:
    """What a value is in any graph that was fused from the same one: the traced calls that it stands for."""
    about = info(value)
    if about.parts:
        return about.parts[calls_of(gm, value).outputs[0]]
    return about.origins or (value.name,)
