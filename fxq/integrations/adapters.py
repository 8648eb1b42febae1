"""Adapters of peft, such as LoRA, which stay in float while the layers that they adapt are quantized."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fxq.quant.spec import FLOAT
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import as_selector


def with_float_adapters(model: nn.Module, recipe: Recipe) -> Recipe:
    """Recipe whose first overrides keep the adapters of a model in float. The user's overrides have precedence.

    As in peft, a layer with adapters has attributes `base_layer`, the layer that it adapts, and `adapter_layer_names`,
    the names of its adapters. Without such layers, the recipe is returned unchanged.

    Args:
        model: the float model.
        recipe: the recipe.
    """
    names: dict[str, None] = {}
    for layer in model.modules():
        if hasattr(layer, "base_layer"):
            for name in getattr(layer, "adapter_layer_names", ()):
                adapter = getattr(layer, name, None)
                below = adapter.named_modules() if isinstance(adapter, nn.Module) else ()
                layers = [path for path, module in below if next(module.parameters(recurse=False), None) is not None]
                names |= {f"**.{name}.**" if path else f"**.{name}": None for path in layers}
    overrides = tuple((as_selector(pattern), FLOAT) for pattern in names)
    return replace(recipe, overrides=(*overrides, *recipe.overrides)) if overrides else recipe
