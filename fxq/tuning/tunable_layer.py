"""Layers of a model that can run on integers or in float, as overrides of a recipe select them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxq.graph.info import info, precision_of
from fxq.graph.unit import calls_of
from fxq.ledger.ledger import Entry, Ledger
from fxq.pipeline.manager import PassManager
from fxq.quant.spec import FLOAT, TensorSpec
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import Selector


@dataclass(frozen=True)
class TunableLayer:
    """Units that are set to float together: one unit that runs on integers, or several that the same override selects.

    Attributes:
        name: name in the ledger of the first op. path: its module path. op: the ops of the first unit.
        selectors: selectors of the overrides: for its layers, or if it has none, for its first op.
        macs: multiply-accumulates.
        extra_us: measured microseconds that it takes more in float than on integers, with conversions; None if nothing
            was measured. Negative if float is faster.
    """

    name: str
    path: str
    op: str
    selectors: tuple[Selector, ...]
    macs: int
    extra_us: float | None = None

    def in_float(self, recipe: Recipe) -> Recipe:
        """Return a recipe with this layer in float."""
        for selector in self.selectors:
            recipe = recipe.override(selector, FLOAT)
        return recipe

    def observed_by(self, recipe: Recipe, observer: str, types: Mapping[str, type]) -> Recipe:
        """Return a recipe with another observer for the inputs of this layer."""
        for selector in self.selectors:
            config, _ = recipe.config_for(self.path, [selector.op or self.op.partition("+")[0]], types)
            if isinstance(config.activation, TensorSpec):
                activation = replace(config.activation, observer=observer)
                recipe = recipe.override(selector, replace(config, activation=activation))
        return recipe

    @property
    def line(self) -> str:
        """Line of a recipe that sets it to float, as Python."""
        return "recipe" + "".join(f".override({selector}, fxq.FLOAT)" for selector in self.selectors)


def layers_of(manager: PassManager, ledger: Ledger) -> list[TunableLayer]:
    """Return the layers of a qdq graph that run on integers, in execution order.

    Args:
        manager: manager of the qdq graph.
        ledger: ledger with the prices of ops; it may be empty.
    """
    layers: dict[tuple[Selector, ...], TunableLayer] = {}
    rows = {entry.name: entry for entry in ledger}
    for node in manager.gm.graph.nodes:
        if precision_of(node) not in ("int8", "weight-only"):
            continue
        layer = layer_of(manager, node, rows)
        earlier = layers.get(layer.selectors) if layer is not None else None
        if layer is not None and earlier is not None:
            layer = replace(earlier, macs=earlier.macs + layer.macs, extra_us=_sum([earlier.extra_us, layer.extra_us]))
        if layer is not None:
            layers[layer.selectors] = layer
    return list(layers.values())


def layer_of(manager: PassManager, node: fx.Node, rows: Mapping[str, Entry]) -> TunableLayer | None:
    """Layer of a node; None if the node runs no op of the float model."""
    about, calls, original = info(node), calls_of(manager.gm, node), manager.context.original
    if not calls or original is None:
        return None
    parts = about.fused.parts or (about.origins,)
    names = list(dict.fromkeys(original.by_origin[o] for part in parts for o in part if o in original.by_origin))
    entries = [rows[name] for name in names if name in rows]
    paths = about.fused.paths or (about.path,)
    heavy = [(path, call.op.name) for path, call in zip(paths, calls, strict=True) if call.op.traits.heavy]
    places = heavy or [(paths[0], calls[0].op.name)]
    selectors = tuple(dict.fromkeys(manager.context.selector_for(*place) for place in places))
    ops = "+".join(call.op.name for call in calls)
    extra = _sum(_extra(entry) for entry in entries if entry.float_us is not None)
    return TunableLayer(
        entries[0].name if entries else node.name, places[0][0], ops, selectors, sum(e.macs for e in entries), extra
    )


def _extra(entry: Entry) -> float | None:
    """Microseconds that an op takes more in float than it does now; None if unknown."""
    if entry.precision == "float" or entry.float_us is None or entry.int8_us is None:
        return 0.0 if entry.precision == "float" else None
    return entry.float_us - entry.int8_us - (entry.conversions_us or 0.0)


def _sum(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None
