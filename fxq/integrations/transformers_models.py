"""Quantized models of transformers: subclasses of the user's class whose forward runs the programs of fxq."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from fxq.errors import InputError
from fxq.graph.info import info
from fxq.integrations.transformers_calls import CACHE_NAMES, CallRules, counted_mask, drop_unset, in_32_bits
from fxq.integrations.transformers_shell import CHANGED_TOO_LATE, PROGRAMS, placeholders, shell_of
from fxq.programs.quantized_programs import QuantizedPrograms
from fxq.saved.records import to_plain

METHOD = "fxq"
"""Name of the quantization method in config.json."""
MODEL_FILE, ENCODER_FILE = "model.fxq.safetensors", "encoder.fxq.safetensors"
"""Files of a saved model. transformers opens weights by names that end in .safetensors only."""

_KEYS_OR_VALUES = re.compile(r"cache_layers_\d+_(keys|values)")
"""Names of the inputs of a program that hold the cache of a decoder."""


class QuantizedPart:
    """Mixin for quantized modules of transformers: their class is a subclass of the float one, and runs `programs`.

    Attributes:
        programs: the quantized module. Its `programs` have ledger, history and graph.
    """

    programs: QuantizedPrograms
    config: Any

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the float model. None of them is trainable."""
        own: Any = self
        modules = [*own.modules()]
        tables = [id(vars(m).get("weight")) for m in modules if exclude_embeddings and isinstance(m, nn.Embedding)]
        weights = {id(weight): weight for weight in placeholders(own) if isinstance(weight, nn.Parameter)}
        return 0 if only_trainable else sum(weight.numel() for key, weight in weights.items() if key not in tables)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a change, for methods of transformers that read the weights for it."""
        raise InputError(CHANGED_TOO_LATE)

    resize_token_embeddings = resize_position_embeddings = init_weights = _refuse

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Leave the weights as they are in the graphs, where those that the float model ties are tied."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Save the model to a folder, for `from_pretrained` of its class and `fxq.load`: programs and configuration.

        Args:
            save_directory: the folder. It is created if it does not exist.
            options: options of the float model's `save_pretrained`, none of which is supported.

        Raises:
            InputError: an option is given.
        """
        if asked := [name for name, value in options.items() if value and name != "is_main_process"]:
            raise InputError(f"save_pretrained of a quantized model writes a folder and does not take {asked[0]}.")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        rules = getattr(self, "rules", None)
        if rules is not None and rules.prefix:
            self.get_encoder().programs.save(folder / ENCODER_FILE)  # type: ignore[attr-defined]
        self.programs.save(folder / MODEL_FILE)
        config = copy.deepcopy(self.config)
        config.architectures = [float_class_of(type(self)).__name__]
        config.dtype = "float32"
        config.quantization_config = {
            "quant_method": METHOD,
            "recipe": self.programs.recipe.to_dict(),
            "rules": None if rules is None else to_plain(rules),
        }
        if rules is not None:
            self.generation_config.save_pretrained(folder)  # type: ignore[attr-defined]
        config.save_pretrained(folder)

    def export(self, path: str | os.PathLike[str], *, format: str, check: bool = True) -> Path:
        """Export the weights to a folder that transformers, vLLM and others load.

        Linear layers have the integers, scales and zero points of this model. The head, embeddings and all others are
        float32. For .onnx and other files of programs, export a program of `programs`; see also `dynamic_axes`.

        Args:
            path: the folder. It is created if it does not exist.
            format: "compressed-tensors" (pack-quantized), or "gptq", with one width and block size for all layers.
            check: whether to read the files back, and compare the outputs with those of this model.

        Returns:
            The path.

        Raises:
            ExportError: the format cannot hold the model, or activations are quantized. Nothing is written.
            InputError: the format is unknown.
            RenderError: the folder cannot be written.
        """
        from fxq.integrations.transformers_checkpoints import export_checkpoint

        return export_checkpoint(self, path, format, check)

    @property
    def device(self) -> torch.device:
        """Device of the programs, which `generate` reads for each token; without programs, of the float model."""
        own: Any = self
        holder: Any = own._modules.get(PROGRAMS)
        tensors = placeholders(own) if holder is None else itertools.chain(holder.parameters(), holder.buffers())
        return next(tensor.device for tensor in tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the float model's weights."""
        return next(tensor.dtype for tensor in placeholders(self) if tensor.is_floating_point())

    def _get_name(self) -> str:
        return type(self).__qualname__

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = next(base for base in type(self).__mro__ if base.__name__ in _MIXINS)
        return _constructed, (kind.__name__, float_class_of(type(self))), vars(self)


class QuantizedEncoder(QuantizedPart):
    """Mixin for quantized models that do not generate: encoders of encoder-decoders, and models such as BERT."""

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call as the graph takes them."""
        call = _bound(self, args, kwargs)
        drop_unset(call)
        ids, parameters = call.get("input_ids"), inspect.signature(self.forward).parameters
        defaults = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}
        for name, default in defaults.items():
            if name in parameters and isinstance(ids, Tensor):
                call.setdefault(name, default(ids))
        features, bins = call.get("input_features"), getattr(self.config, "num_mel_bins", None)
        has_frames_last = isinstance(features, Tensor) and features.dim() == 3 and features.shape[1] == bins
        if "attention_mask" in parameters and isinstance(features, Tensor) and has_frames_last:  # as in Whisper
            call.setdefault("attention_mask", torch.ones(features.shape[0], features.shape[2], dtype=torch.long))
        if "attention_mask" in call:
            call["attention_mask"] = counted_mask(call["attention_mask"])
        return call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as the float model is called."""
        wanted = kwargs.pop("return_dict", None)
        result = self.programs(**self.arguments(args, kwargs))
        return result.to_tuple() if wanted is False else result


class QuantizedGenerator(QuantizedPart):
    """Mixin for quantized decoders and encoder-decoders, which generate.

    Attributes:
        rules: rules that complete the arguments of a call.
    """

    rules: CallRules

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Arguments of a call as the graph takes them, and whether the caller wants the cache.

        Raises:
            InputError: the call has no tokens, or a cache of a fixed size, of another type or of more layers.
        """
        call = _bound(self, args, kwargs)
        if self.rules.prefix:
            self._encode(call)
            if "labels" in call and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(call):
                own: Any = self
                call["decoder_input_ids"] = own.prepare_decoder_input_ids_from_labels(call["labels"])
        keeps = self.rules.complete(call, self.config)
        return call, keeps

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Return the axes of a decoder's inputs whose sizes vary while it generates, for `dynamic` of an export.

        With `model.programs.programs["decoder"].export(path, dynamic=model.dynamic_axes())`, the file's cache grows.

        The sizes are "batch"; "new", the number of new tokens; "past", the number of tokens in the cache, 0 in the
        first call; and the sum "past + new", the length of the mask.

        Raises:
            InputError: the model has a state that is not a cache of keys and values, or reads more than tokens.

        Example:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
            >>> config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
            >>> qmodel = fxq.quantize(LlamaForCausalLM(config).eval(), "weight_only")
            >>> qmodel.dynamic_axes()["cache_layers_0_keys"]
            {0: 'batch', 2: 'past'}
        """
        nodes = self.programs.programs["decoder"].graph.find_nodes(op="placeholder")
        shapes = {str(node.target): info(node).shape for node in nodes if info(node).is_tensor}
        new = (shapes.get("input_ids") or (0, 0))[1]
        axes: dict[str, dict[int, str]] = {}
        for name, shape in shapes.items():
            if _KEYS_OR_VALUES.fullmatch(name):
                axes[name] = {0: "batch", 2: "past"}
            elif name in ("input_ids", "position_ids", "attention_mask") and shape is not None and len(shape) == 2:
                axes[name] = {0: "batch", 1: "new" if shape[1] == new else "past + new"}
            else:
                raise InputError(
                    f"the input {name!r} of the model is neither tokens nor a cache of keys and values: name its axes "
                    "that vary in dynamic= of the export."
                )
        return axes

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged: forward encodes images and sounds, so `generate` must not."""
        return model_kwargs

    def _encode(self, call: dict[str, Any]) -> None:
        """Run the encoder of a call, if the caller has not, and complete the mask of its tokens."""
        encoder: Any = self.get_encoder()  # type: ignore[attr-defined]
        kinds = "input_ids", "input_features", "pixel_values", "inputs_embeds"
        names = [name for name in kinds if name in call]
        inputs: dict[str, Any] = {name: call.pop(name) for name in names}
        outputs = call.pop("encoder_outputs", None)
        if outputs is None:
            if "attention_mask" in call and "attention_mask" in inspect.signature(encoder.forward).parameters:
                inputs["attention_mask"] = call["attention_mask"]
            outputs = encoder(**inputs)
        hidden = outputs[0]
        call["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden)
        mask = call.pop("attention_mask", None)
        if "attention_mask" in inspect.signature(self.forward).parameters:
            call["attention_mask"] = (
                torch.ones(hidden.shape[:2], dtype=torch.long) if mask is None else counted_mask(mask)
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as the float model is called.

        Raises:
            InputError: no program fits the call, such as one with `output_attentions=True`.
        """
        wanted = kwargs.pop("return_dict", None)
        call, keeps = self.arguments(args, kwargs)
        result = self.programs(**call)
        if not keeps:
            result = type(result)(**{key: part for key, part in result.items() if key not in CACHE_NAMES})
        as_dict = getattr(self.config, "return_dict", True) if wanted is None else wanted
        return result if as_dict else result.to_tuple()


class QuantizedInside(QuantizedPart):
    """Mixin for models inside a quantized one, such as the decoder of a language model, which refuse calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call.

        Raises:
            InputError: always. The weights are in the graphs of the whole model.
        """
        raise InputError(
            f"this {float_class_of(type(self)).__name__} is inside a quantized model, whose graphs have its weights: "
            f"call the whole model, or quantize this one by itself, as in fxq.quantize(float_model.model, recipe)."
        )


_MIXINS = {mixin.__name__: mixin for mixin in (QuantizedEncoder, QuantizedGenerator, QuantizedInside)}


def _bound(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, without those that are None. Floats of 16 bits are converted to float32."""
    kind: Any = type(module)
    call = dict(_signature_of(kind).bind_partial(module, *args, **kwargs).arguments)
    call |= call.pop("kwargs", {})
    return {name: in_32_bits(value) for name, value in call.items() if name != "self" and value is not None}


@functools.lru_cache
def _signature_of(quantized_class: Any) -> inspect.Signature:
    """Signature of forward of the float class, with `self`."""
    float_class: Any = float_class_of(quantized_class)
    return inspect.signature(float_class.forward)


_CLASSES: dict[tuple[str, type], type] = {}


def float_class_of(quantized_class: type) -> type:
    """Class of the float module that a quantized module was made from."""
    return next(base for base in quantized_class.__mro__ if not issubclass(base, QuantizedPart))


def _class_for(mixin: type, float_class: Any) -> Any:
    """Class of quantized modules whose float modules are of this class."""
    key = mixin.__name__, float_class
    if key not in _CLASSES:
        forward: Any = vars(mixin)["forward"]

        @functools.wraps(float_class.forward)  # generate reads the signature
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        # pipelines look up the name of the class, and the module tells which library has it
        names = {"__module__": float_class.__module__, "__qualname__": f"Quantized{float_class.__name__}"}
        _CLASSES[key] = type(float_class.__name__, (mixin, float_class), {"forward": call, **names})
    return _CLASSES[key]


def _constructed(mixin: str, float_class: Any) -> Any:
    return object.__new__(_class_for(_MIXINS[mixin], float_class))


def without_tensors(model: PreTrainedModel) -> Any:
    """Copy of a model without tensors, of which only the whole can be called. See `make_quantized`."""
    shell = shell_of(model)
    for module in shell.modules():
        if module is not shell and isinstance(module, PreTrainedModel):
            make_quantized(module, QuantizedInside)
    return shell


def make_quantized(module: nn.Module, mixin: type, **attributes: Any) -> Any:
    """Turn a module without tensors into a quantized one, in place.

    Args:
        module: the module; keeps its configuration and its submodules, without their tensors.
        mixin: a subclass of `QuantizedPart`.
        attributes: attributes of the mixin.
    """
    module.__class__ = _class_for(mixin, float_class_of(type(module)))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
