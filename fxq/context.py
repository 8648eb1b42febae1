"""What a run of the pipeline knows besides the graph: passes ask it through `rewriter.context`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxq.backends.base import Backend
from fxq.data import Batch
from fxq.errors import RecipeError
from fxq.recipe import Recipe
from fxq.region import Region
from fxq.selector import Selector
from fxq.spec import QuantConfig


@dataclass
class Context:
    """One run of the pipeline.

    Attributes:
        recipe: the recipe.
        backend: the backend it resolved to.
        model: the user's float model; never changed.
        example: one batch of inputs: shapes are found and passes are checked with it.
        types: module type by module path of the model.
        samples: recorded calibration inputs.
        units: path of the unit module for each kind and body, so that equal bodies share one.
        float_weights: path of the float weight that a dequantized one stands for, by its node's name.
        regions: for each lowered node, by name, the qdq form it came from; for verify-lowering.
        outputs: what the float model returns for `example`.
    """

    recipe: Recipe
    backend: Backend
    model: nn.Module
    example: Batch
    types: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    samples: list[Batch] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    float_weights: dict[str, str] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    outputs: Any = None

    def __post_init__(self) -> None:
        if not self.types:
            self.types = {path: type(module) for path, module in self.model.named_modules(remove_duplicate=False)}

    def config_for(self, path: str, ops: tuple[str, ...]) -> tuple[QuantConfig, Selector | None]:
        """The recipe's config for a node, and the override that decided it."""
        return self.recipe.config_for(path, ops, self.types)

    def check_selectors(self, nodes: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
        """Raise `RecipeError` for an override or leaf selector that selects nothing, with what looks most like it.

        Args:
            nodes: module path and op names of each node of the canonical graph, by node name.
        """
        ops = {op for _, names in nodes.values() for op in names}
        for selector, _ in self.recipe.overrides:
            if not any(selector.matches(path, names, self.types) for path, names in nodes.values()):
                near = selector.near_misses(self.types, ops)
                raise RecipeError(
                    f"the override for {selector} selects nothing in this model; "
                    f"{'near: ' + ', '.join(near) if near else 'nothing looks like it'}. "
                    "Paths are those of model.named_modules()."
                )
