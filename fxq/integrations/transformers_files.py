"""Quantized models of transformers in folders: `FxqConfig`, loading by `from_pretrained` and by `fxq.load`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fxq.errors import FileError, FxqError, InputError, RecipeError, unknown, words_of
from fxq.integrations.transformers import generates, quantize_encoder, quantize_generator
from fxq.integrations.transformers_calls import CallRules
from fxq.integrations.transformers_models import (
    ENCODER_FILE,
    METHOD,
    MODEL_FILE,
    QuantizedEncoder,
    QuantizedGenerator,
    make_quantized,
    without_tensors,
)
from fxq.programs.quantized_programs import load_model
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.saved.records import from_plain
from fxq.workflow.entry import float_model


@register_quantization_config(METHOD)
class FxqConfig(QuantizationConfigMixin):
    """Quantization config of transformers: `from_pretrained(path, quantization_config=FxqConfig("weight_only"))`.

    All float weights are loaded, then the model is quantized, as `fxq.quantize` does without data.

    Args:
        recipe: recipe, or name of a preset, as for `fxq.quantize`.
        options: options of the preset, if the recipe is the name of one: `FxqConfig("weight_only", bits=4)`.
        rules: rules for calls, as config.json of a saved model holds them. Not for users.
        quant_method: "fxq", as in the file.

    Raises:
        RecipeError: the recipe needs training, or its options are invalid.
    """

    def __init__(
        self, recipe: Any = "weight_only", *, rules: Any = None, quant_method: str = METHOD, **options: Any
    ) -> None:
        if options and recipe not in _PRESETS:
            raise RecipeError(
                f"options such as {next(iter(options))} belong to the name of a preset ({', '.join(_PRESETS)}), "
                f"not to {recipe!r}."
            )
        chosen = getattr(Recipe, recipe)(**options) if options else as_recipe(recipe)
        if chosen.trains:
            raise RecipeError(f"the recipe {chosen.preset!r} needs training, which from_pretrained does not do.")
        self.quant_method: Any = METHOD
        self.recipe = chosen
        self.rules = rules

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, for config.json."""
        return {"quant_method": METHOD, "recipe": self.recipe.to_dict(), "rules": self.rules}


_PRESETS = ("static", "dynamic", "weight_only")


@register_quantizer(METHOD)
class FxqQuantizer(HfQuantizer):
    """Quantizer that `from_pretrained` calls before and after it loads weights."""

    quantization_config: FxqConfig

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse devices other than the CPU.

        Raises:
            InputError: the model is to be loaded to another device.
        """
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if any(device is not None and str(device) not in ("cpu", "auto") for device in devices):
            raise InputError(f"device_map={device_map!r}: fxq quantizes and loads on the CPU; leave device_map out.")

    def update_device_map(self, device_map: Any) -> Any:
        """Load to the CPU."""
        return {"": "cpu"} if device_map is not None else None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Load weights as float32, from which they are quantized."""
        return torch.float32

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the file of a saved model, which transformers then opens in place of model.safetensors."""
        if self.pre_quantized:
            config.transformers_weights = MODEL_FILE
        return config

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        """Remove everything that has tensors from a model whose programs come from a file."""
        if not self.pre_quantized:
            return
        self._path = Path(checkpoint_files[0])
        self._removed = {name: vars(model)[name] for name in _HOLDERS}
        vars(model).update({name: type(held)() for name, held in self._removed.items()})
        model._is_hf_initialized = True  # there is nothing to initialize
        model._keys_to_ignore_on_load_unexpected = {""}  # the tensors of the file are those of the programs

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Turn the model into a quantized one, in place."""
        config = self.quantization_config
        if not self.pre_quantized:
            vars(model).pop("hf_quantizer", None)
            quantized = quantize_loaded(copy.copy(model), config.recipe)  # its programs may keep the float model
        else:
            vars(model).update(self._removed)
            model.tie_weights()  # its placeholders, too
            for name in ("_keys_to_ignore_on_load_unexpected", "_is_hf_initialized", "hf_quantizer"):
                vars(model).pop(name, None)
            del model.config.transformers_weights
            quantized = _from_folder(without_tensors(model), self._path.parent, config.rules)
        model.__class__ = type(quantized)
        vars(model).clear()
        vars(model).update(vars(quantized))

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return False


_HOLDERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "all_tied_weights_keys")
"""Attributes of a model that hold its tensors, or their names."""


def quantize_loaded(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Quantize a float model with example calls that fxq makes for its class. Returns a model of a subclass."""
    checked: Any = float_model(model)
    return quantize_generator(checked, recipe, None, {}) if generates(checked) else quantize_encoder(checked, recipe)


def _from_folder(shell: Any, folder: Path, rules: Any) -> Any:
    """Quantized model of a folder.

    Args:
        shell: model of the float class, without tensors.
        folder: the folder.
        rules: rules for its calls as plain data; None for a model that does not generate.

    Raises:
        FileError: a file is missing or damaged.
    """
    if rules is None:
        make_quantized(shell, QuantizedEncoder)
    else:
        try:
            checked = from_plain(CallRules, rules)
        except FxqError as error:
            raise FileError(f"cannot load {str(folder)!r}: the rules of its config.json: {error}") from error
        if checked.prefix:
            encoder = make_quantized(shell.get_encoder(), QuantizedEncoder)
            encoder.programs = load_model(folder / ENCODER_FILE)
        make_quantized(shell, QuantizedGenerator, rules=checked)
    shell.programs = load_model(folder / MODEL_FILE)
    return shell.eval()


def load_folder(folder: Path) -> Any:
    """Load the model of a folder that `save_pretrained` wrote, of the class that its config.json names.

    Raises:
        FileError: the folder has no quantized model, or transformers has no such class.
    """
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = content["quantization_config"]["quant_method"]
        (name,) = content["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"cannot load {str(folder)!r}: it has no config.json of a quantized model ({words_of(error)})."
        ) from error
    if method != METHOD:
        raise FileError(f"cannot load {str(folder)!r}: " + unknown("quant_method", method, [METHOD]))
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise FileError(
            f"cannot load {str(folder)!r}: transformers has no class {name}. Call from_pretrained of your class."
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return kind.from_pretrained(folder, config=config, local_files_only=True)
