"""Transfer of observed ranges to a graph of the same model that was prepared with another recipe."""

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
    """Raise `RecipeError` if a recipe traces the model differently from the one that it was calibrated with."""
    for name in ("leaf_modules", "strict_trace", "concrete_args", "extensions"):
        if getattr(before, name) != getattr(now, name):
            raise RecipeError(
                f"the recipe has other {name} than the one that the model was prepared with: {getattr(now, name)!r}, "
                f"not {getattr(before, name)!r}. They change the traced graph. {AGAIN}"
            )


def nodes_of(graph: fx.Graph) -> tuple[str | None, ...]:
    """Text of the nodes of a graph before fusion, to compare two graphs."""
    return tuple(node.format_node() for node in graph.nodes)


def check_computes_alike(before: Sequence[str | None], now: Sequence[str | None]) -> None:
    """Raise `RecipeError` if two graphs, given by `nodes_of`, do not compute the same values before fusion."""
    if tuple(before) != tuple(now):
        change = next((line for line in now if line not in set(before)), None) or "it has fewer nodes"
        raise RecipeError(
            "with this recipe the model has another graph before fusion, as if one recipe folds a batch norm into its "
            f"layer and the other does not: {change.strip()}. {AGAIN}"
        )


def hand_over(seen: fx.GraphModule, to: fx.GraphModule, ways: str) -> int:
    """Replace the observers of a graph by those of a calibrated graph of the same model, except those of weights.

    Args:
        seen: the graph that was calibrated.
        to: the graph whose observers are replaced.
        ways: sentence for the error that says what to do if a value was not observed.

    Returns:
        Number of replaced observers.

    Raises:
        RecipeError: a value was not observed, or not by an observer from which the range can be computed.
    """
    calibrated: dict[Value, dict[fx.Node, list[Observer]]] = {}
    for value, _, observer in _observed(seen):
        calibrated.setdefault(_identity(seen, value), {}).setdefault(value, []).append(observer)
    wanted = list(_observed(to))
    for value, node, observer in wanted:
        same = calibrated.get(_identity(to, value), {})
        candidates = next(iter(same.values())) if len(same) == 1 else []  # with several values, it is ambiguous
        answers = (candidate.answer_as(observer) for candidate in candidates)
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is None:
            how = f" in the way that {observer.spec.observer!r} needs" if candidates else ""
            raise RecipeError(
                f"the recipe wants the range of {observer.name}, which calibration has not observed{how}: the model "
                f"was prepared with another recipe. {ways}"
            )
        to.set_submodule(str(node.target), answer)
    return len(wanted)


def _observed(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, Observer]]:
    """Yield each observed value except weights, the node of its observer, and the observer."""
    for node in gm.graph.nodes:
        module = submodule(gm, node)
        for observer in module.modules() if module is not None and node.args else ():
            if isinstance(observer, Observer) and not observer.paused:
                yield unobserved(gm, node.args[0]), node, observer


def _identity(gm: fx.GraphModule, value: fx.Node) -> Value:
    """Names of the traced calls that a value is the result of: they identify it in all graphs of the model."""
    about = info(value)
    if about.fused.parts:
        return about.fused.parts[calls_of(gm, value).outputs[0]]
    return about.origins or (value.name,)
