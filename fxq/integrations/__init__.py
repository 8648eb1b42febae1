"""Support for models of other libraries, imported when such a model is used."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fxq.common.data import Batch
from fxq.errors import FileError
from fxq.recipe.recipe import Recipe


def __getattr__(name: str) -> Any:
    """Import `FxqConfig`, with transformers, when it is asked for."""
    if name == "FxqConfig":
        from fxq.integrations.transformers_files import FxqConfig

        return FxqConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def quantize_known(
    model: nn.Module,
    recipe: Recipe,
    data: Iterable[Any] | None,
    examples: Mapping[str, Batch],
    *,
    progress: bool | None = None,
) -> Any:
    """Quantize a model of a library that fxq knows, with examples of calls that fxq makes.

    Args:
        model: the float model.
        recipe: the recipe.
        data: calibration batches.
        examples: further calls, by the name of their program.
        progress: whether to show a progress bar.

    Returns:
        Model of a subclass of the float model's class; None for models that are quantized as any other model.
    """
    if "transformers" not in sys.modules:
        return None
    from fxq.integrations import transformers as support

    own: Any = model
    if support.generates(model):
        return support.quantize_generator(own, recipe, data, examples, progress=progress)
    has_programs = len(examples) > 1 or (examples and recipe.new_kinds == "trace")
    needs_none = not examples and data is None and not recipe.config.is_calibrated
    if support.encodes(model) and (has_programs or (needs_none and support.has_example(own))):
        return support.quantize_encoder(own, recipe, data, examples, progress=progress)
    return None


def load_folder(folder: Path) -> Any:
    """Load a quantized model from a folder that its `save_pretrained` wrote.

    Raises:
        FileError: the folder has no quantized model, or transformers is not installed.
    """
    if not (folder / "config.json").is_file():
        raise FileError(f"cannot load {str(folder)!r}: it is a folder without a config.json.")
    try:
        from fxq.integrations import transformers_files
    except ImportError as error:
        raise FileError(f"cannot load {str(folder)!r}: it needs transformers: pip install transformers.") from error
    return transformers_files.load_folder(folder)
