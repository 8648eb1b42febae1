"""Support for models of other libraries, imported when such a model is used."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fxq.checkpoints.mapped_weights import MappedWeights, with_parameters
from fxq.common.data import Batch
from fxq.common.ranks import Ranks
from fxq.errors import FileError
from fxq.recipe.recipe import Recipe


def __getattr__(name: str) -> Any:
    """Import `FxqConfig`, with transformers, when it is asked for."""
    if name == "FxqConfig":
        from fxq.integrations.transformers_files import FxqConfig

        return FxqConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def quantizer_for(
    model: nn.Module,
    recipe: Recipe,
    data: Iterable[Any] | None,
    examples: Mapping[str, Batch],
    *,
    progress: bool | None = None,
    ranks: Ranks | None = None,
) -> Callable[[], Any] | None:
    """Function that quantizes a model of another library, whose calls are known, to a model of a subclass of its class.

    Args:
        model: the float model.
        recipe: the recipe.
        data: calibration batches.
        examples: further calls, by the name of their program.
        progress: whether to show a progress bar.
        ranks: processes that calibrate together; None: this one alone.

    Returns:
        The function; None for other models, and for models that are quantized with one example.
    """
    if "transformers" not in sys.modules or recipe.part_modules:
        return None
    from fxq.integrations import transformers as support

    own: Any = model
    if support.generates(model):
        return partial(support.quantize_generator, own, recipe, data, examples, progress=progress, ranks=ranks)
    has_programs = len(examples) > 1 or (examples and recipe.new_kinds == "trace")
    needs_none = not examples and data is None and not recipe.config.is_calibrated
    if support.encodes(model) and (has_programs or (needs_none and support.has_example(own))):
        return partial(support.quantize_encoder, own, recipe, data, examples, progress=progress, ranks=ranks)
    return None


def load_stored(path: Path, into: Any) -> Any:
    """Load a checkpoint of integers of another tool, see `fxq.load`.

    Raises:
        FileError: the files are damaged, or transformers is not installed.
    """
    try:
        from fxq.integrations import stored_weights
    except ImportError as error:
        raise FileError(f"cannot load {str(path)!r}: it needs transformers: pip install transformers.") from error
    return stored_weights.load_checkpoint(path, into)


def float_shell(model: Any, folder: Path) -> nn.Module:
    """Model on the meta device: the user's, or for None that of the folder of a float model of transformers.

    Raises:
        FileError: the folder has no such model, or transformers is not installed.
    """
    if model is not None:
        shell: nn.Module = model
        return shell
    if not (folder / "config.json").is_file():
        raise FileError(
            f"cannot read {str(folder)!r}: it has no config.json of a model of transformers. For a model of your own, "
            'create it on the meta device: fxq.quantize(model, recipe, weights="folder/", example_inputs=x).'
        )
    try:
        from fxq.integrations import stored_weights
    except ImportError as error:
        raise FileError(f"cannot read {str(folder)!r}: it needs transformers: pip install transformers.") from error
    own: nn.Module = stored_weights.float_shell(folder)  # typed as the usual case
    return own


def recipe_for(model: nn.Module, recipe: Recipe) -> Recipe:
    """Recipe that a model is quantized with: for models that generate, one whose first overrides give finer grids."""
    if "transformers" not in sys.modules:
        return recipe
    from fxq.integrations import transformers as support

    own: Any = model
    return support.finer_recipe(own, recipe) if support.generates(model) else recipe


def mapped_model(shell: nn.Module, path: Path) -> tuple[nn.Module, MappedWeights]:
    """Copy of a model with weights that are read from safetensors files when they are used, and these weights.

    Raises:
        FileError: the files are damaged, or have no weight for a parameter, or one of another shape.
    """
    if "transformers" in sys.modules and isinstance(shell, sys.modules["transformers"].PreTrainedModel):
        from fxq.integrations import stored_weights

        own: tuple[nn.Module, MappedWeights] = stored_weights.mapped_model(shell, path)
        return own
    dtypes = {name: tensor.dtype for name, tensor in (*shell.named_parameters(), *shell.named_buffers())}
    weights = MappedWeights(path, lambda name, dtype: dtypes.get(name, dtype))
    return with_parameters(copy.deepcopy(shell), weights), weights


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
