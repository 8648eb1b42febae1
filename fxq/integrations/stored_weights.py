"""Models of transformers with weights of files: integers of other tools on their grids, or floats that stay there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from fxq.checkpoints.gguf_files import GgufFile, check_configuration, in_names_of_transformers
from fxq.checkpoints.grid_weight import GridWeight, StoredWeights
from fxq.checkpoints.mapped_weights import MappedWeights
from fxq.checkpoints.open_checkpoint import open_checkpoint
from fxq.errors import FileError, InputError, warn, words_of
from fxq.integrations.transformers_files import quantize_loaded
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec
from fxq.quant.stored_grids import store_grid
from fxq.recipe.recipe import Recipe


def load_checkpoint(path: Path, into: Any) -> Any:
    """Load a checkpoint of integers as a quantized model.

    Args:
        path: a GGUF file, or a folder of GPTQ, AWQ or compressed-tensors.
        into: model of the class, also on the meta device, of which only the configuration is used; None: as the
            config.json of a folder says.

    Returns:
        A model of a subclass of the float model's class. Weights in integers have their own grids; all others are
        float.

    Raises:
        FileError: the files are damaged, or have no weight for a parameter.
        InputError: `into` is no model of transformers.
    """
    if into is not None and not isinstance(into, PreTrainedModel):
        raise InputError(
            f"{str(path)!r} has weights alone, and into is a {type(into).__name__}: pass a model of transformers, such "
            "as AutoModelForCausalLM.from_config(config)."
        )
    checkpoint = open_checkpoint(path)
    if into is None and isinstance(checkpoint, GgufFile):
        raise InputError(
            f"{str(path)!r} has weights alone: pass the model that they belong to, fxq.load(path, into=model). It may "
            "be on the meta device."
        )
    float_class, config = _class_of(path) if into is None else (type(into), copy.deepcopy(into.config))
    vars(config).pop("quantization_config", None)
    shell = _shell(float_class, config)
    model, grids = _float_model(shell, config, checkpoint)
    recipe = Recipe.weight_only(optimize="coverage").override("**", FLOAT)
    modules = dict(model.named_modules())
    for name, weight in grids.items():
        layer = name.removesuffix(".weight")
        if isinstance(modules.get(layer), (nn.Linear, nn.Embedding)):
            store_grid(model.get_parameter(name), weight.grid)
            recipe = recipe.override(layer, _config_of(weight))
            for tied in _tied(shell, name):
                recipe = recipe.override(tied.removesuffix(".weight"), _config_of(weight))
    return quantize_loaded(model, recipe)


def _class_of(path: Path) -> tuple[Any, Any]:
    """Class and configuration of a folder's model."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # checks of configurations raise classes of their own
        raise FileError(f"cannot load {str(path)!r}: its config.json is refused: {words_of(error)}") from error
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise FileError(
            f"cannot load {str(path)!r}: transformers has no class {name}. Pass a model: fxq.load(path, into=)."
        )
    return kind, config


def float_shell(folder: Path) -> Any:
    """Float model on the meta device, of the class and configuration that a folder's config.json names.

    Raises:
        FileError: transformers has no such class, or the folder has a quantized model.
    """
    float_class, config = _class_of(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise FileError(f"{str(folder)!r} has a quantized model, and fxq.quantize takes a float one: use fxq.load.")
    return _shell(float_class, config)


def _shell(float_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return float_class(config).eval()


def mapped_model(shell: Any, path: Path) -> tuple[Any, MappedWeights]:
    """Float model with weights that are read from safetensors files when they are used, and these weights.

    Args:
        shell: model of the class and configuration, such as one on the meta device.
        path: the file or folder.

    Raises:
        FileError: the files are damaged, or have no weight for a parameter, or one of another shape.
    """
    weights = MappedWeights(path, lambda name, dtype: torch.float32 if dtype.is_floating_point else dtype)
    config = copy.deepcopy(shell.config)
    try:
        model, report = type(shell).from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError as error:
        raise FileError(f"{str(path)!r} does not fit {type(shell).__name__}: {words_of(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise FileError(f"{str(path)!r} has no weight for {missing[0]!r} and {len(missing) - 1} more.")
    if unread := sorted(report["unexpected_keys"]):
        warn(f"{path}: {len(unread)} tensors are not used by {type(shell).__name__}, such as {unread[0]!r}.")
    return model.eval(), weights


def _config_of(weight: GridWeight) -> QuantConfig:
    grid = weight.grid
    spec = TensorSpec(bits=grid.bits, signed=grid.qmin < 0, per=grid.block or "tensor", observer="minmax")
    return QuantConfig(activation=None, weight=spec)


def _tied(shell: Any, name: str) -> list[str]:
    """Names of parameters that are tied to one."""
    tied = getattr(shell, "all_tied_weights_keys", None) or {}
    return [own for own, first in tied.items() if first == name]


def _float_model(shell: Any, config: Any, checkpoint: StoredWeights) -> tuple[Any, dict[str, GridWeight]]:
    """Float model with the values of a checkpoint, and the weights that are integers."""
    names = list(shell.state_dict())
    if isinstance(checkpoint, GgufFile):
        check_configuration(checkpoint, config)
        checkpoint = in_names_of_transformers(checkpoint, names)
    tied = getattr(shell, "all_tied_weights_keys", None) or {}
    missing = [name for name in names if name not in checkpoint and tied.get(name) not in checkpoint]
    if missing:
        raise FileError(
            f"{str(checkpoint.path)!r} has no weight for {missing[0]!r} and {len(missing) - 1} more of "
            f"{len(names)} of {type(shell).__name__}."
        )
    unread = [name for name in checkpoint if name not in names]
    if unread:
        warn(f"{checkpoint.path}: {len(unread)} tensors are not used by {type(shell).__name__}, such as {unread[0]!r}.")
    grids: dict[str, GridWeight] = {}
    state: dict[str, torch.Tensor] = {}
    for name in names:
        if name not in checkpoint:
            continue
        weight = checkpoint[name]
        if isinstance(weight, GridWeight):
            grids[name] = weight
        values = weight.floats if isinstance(weight, GridWeight) else weight.float()
        if values.shape != shell.state_dict()[name].shape:
            shapes = f"{list(values.shape)} in {str(checkpoint.path)!r}, and {list(shell.state_dict()[name].shape)}"
            raise FileError(f"{name!r} is {shapes} in the configuration of {type(shell).__name__}.")
        state[name] = values
    if not grids:
        raise FileError(f"{str(checkpoint.path)!r} has no weights in integers: use from_pretrained and fxq.quantize.")
    model = type(shell).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()
    return model, grids
