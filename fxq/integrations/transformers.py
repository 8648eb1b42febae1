"""Quantized decoders of the transformers library: `generate` with a cache, by one graph for prompt and tokens."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fxq.common.data import Batch, as_batch
from fxq.errors import InputError
from fxq.integrations.transformers_tracing import graph_form
from fxq.programs.quantized_programs import QuantizedPrograms
from fxq.recipe.recipe import Recipe
from fxq.workflow.programs import Convert, Observe, quantize_programs

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_NO_GRAPH_OPTIONS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Options whose results the graph does not compute."""
_PROMPT, _PAST, _BATCH = 3, 5, 2
"""Sizes of the example that a decoder is traced with: new tokens, past tokens, sequences."""


def is_decoder(model: nn.Module) -> bool:
    """Whether a model is a decoder of transformers that generates text with a cache."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate") or not model.can_generate():
        return False
    return not model.config.is_encoder_decoder and cache_name(model) != ""


def cache_name(model: Any) -> str:
    """Name of forward's argument for the cache; empty if it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), "")


def decoder_example(model: PreTrainedModel) -> Batch:
    """Call of a decoder with some tokens after some others, with which all calls of `generate` can be traced."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = (torch.arange(_BATCH * (_PAST + _PROMPT)) * 37 % vocabulary).reshape(_BATCH, -1)
    cache = DynamicCache(config=model.config)
    name = cache_name(model)
    with torch.no_grad():
        model(tokens[:, :_PAST], **{name: cache, "use_cache": True})
    filled = {"input_ids": tokens[:, _PAST:], "attention_mask": torch.ones_like(tokens), name: cache}
    filled["attention_mask"][0, 0] = 0  # one token of padding
    filled["logits_to_keep"] = 0
    filled["position_ids"] = torch.arange(_PAST, _PAST + _PROMPT).expand(_BATCH, -1)
    parameters = inspect.signature(model.forward).parameters
    return Batch((), {key: value for key, value in filled.items() if key in parameters})


class QuantizedDecoder:
    """Mixin of a quantized decoder, whose other base is the class of the float model and whose forward runs `programs`.

    Attributes:
        programs: the quantized model: its `programs` have ledger, history and graph.
    """

    programs: QuantizedPrograms
    config: Any
    _layers: list[_LayerShape]
    _positions: _Positions | None
    _keeps_logits: bool

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Arguments of a call as the graph takes them, and whether the caller wants the cache.

        Raises:
            InputError: an option needs values that the graph does not compute.
        """
        float_class: Any = type(self).__mro__[2]
        call = dict(inspect.signature(float_class.forward).bind_partial(self, *args, **kwargs).arguments)
        call |= call.pop("kwargs", {})
        call.pop("self")
        name = cache_name(self)
        for option in (*_NO_GRAPH_OPTIONS, "labels"):
            if call.pop(option, None) not in (None, False):
                raise InputError(f"a quantized decoder does not compute {option}: its graph has no such value.")
        caches = [cache for alias in _CACHE_NAMES if (cache := call.pop(alias, None)) is not None]
        keeps = call.pop("use_cache", None)
        keeps = bool(getattr(self.config, "use_cache", True)) if keeps is None else bool(keeps)
        ids = call.get("input_ids")
        if not isinstance(ids, Tensor):
            raise InputError("a quantized decoder takes input_ids; it was not quantized for inputs_embeds.")
        cache = caches[0] if caches else DynamicCache(config=self.config)
        past = int(cache.get_seq_length())
        call[name] = self._initialized(cache, ids.shape[0])
        count, length = ids.shape
        if call.get("attention_mask") is None:
            call["attention_mask"] = torch.ones(count, past + length, dtype=torch.long)
        positions = call.pop("position_ids", None)
        if self._positions is not None:
            positions = self._positions(call["attention_mask"], past, length) if positions is None else positions
            call["position_ids"] = positions.expand(count, length)
        if self._keeps_logits:
            call.setdefault("logits_to_keep", 0)
        return call, keeps

    def _initialized(self, cache: Any, count: int) -> Any:
        """Give the empty layers of a cache tensors of length 0, which the graph appends to."""
        while len(cache.layers) < len(self._layers):
            cache.layers.append(DynamicLayer())
        for layer, shape in zip(cache.layers, self._layers, strict=True):
            if not layer.is_initialized:
                keys, values = (torch.zeros(count, heads, 0, size) for heads, size in shape)
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        return cache

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _constructed, (type(self).__mro__[2],), vars(self)


_LayerShape = tuple[tuple[int, int], tuple[int, int]]
"""Heads and head size of the keys and of the values of a layer."""

_Positions = Callable[[Tensor, int, int], Tensor]
"""Function of the mask, the number of past tokens and the number of new ones, to the positions of the new ones."""


def _by_count(mask: Tensor, past: int, length: int) -> Tensor:
    return torch.arange(past, past + length)[None]


def _by_mask(mask: Tensor, past: int, length: int) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


_CLASSES: dict[type, type] = {}


def _class_for(float_class: Any) -> Any:
    """Class of quantized decoders whose float models are of this class."""
    if float_class not in _CLASSES:

        @functools.wraps(float_class.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("return_dict", None)
            call, keeps = self._call(args, kwargs)
            result = self.programs(**call)
            if not keeps:
                result = type(result)(**{key: part for key, part in result.items() if key not in _CACHE_NAMES})
            as_dict = getattr(self.config, "return_dict", True) if wanted is None else wanted
            return result if as_dict else result.to_tuple()

        name = f"Quantized{float_class.__name__}"
        _CLASSES[float_class] = type(name, (QuantizedDecoder, float_class), {"forward": forward})
    return _CLASSES[float_class]


def _constructed(float_class: Any) -> Any:
    return object.__new__(_class_for(float_class))


def _shell(model: PreTrainedModel) -> Any:
    """Copy of a model without its parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    shell = copy.deepcopy(model, {id(tensor): None for tensor in tensors})
    shell.__class__ = _class_for(type(model))
    return shell


def quantize_decoder(
    model: PreTrainedModel,
    recipe: Recipe,
    data: Iterable[Any] | None,
    observe: Observe,
    convert: Convert,
    *,
    progress: bool | None = None,
) -> Any:
    """Quantize a decoder of transformers, for prompts and for single tokens with a cache.

    Args:
        model: the float model. Weights of 16 bits are converted to float32 first.
        recipe: the recipe.
        data: calibration batches, with the arguments of forward.
        observe: prepares a model for calibration.
        convert: converts a calibrated model.
        progress: whether to show a progress bar.

    Returns:
        A model of a subclass of the float model's class: `generate` and pipelines work.
    """
    if any(p.is_floating_point() and p.dtype is not torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    example = decoder_example(model)
    shell = _shell(model)
    cache = example.kwargs[cache_name(model)]
    shell._layers = [tuple((t.shape[1], t.shape[3]) for t in (layer.keys, layer.values)) for layer in cache.layers]
    shell._keeps_logits = "logits_to_keep" in example.kwargs
    shell._positions = _positions_of(model, example) if "position_ids" in example.kwargs else None

    def calls() -> Iterator[Any]:
        for batch in data or ():
            arguments = as_batch(batch, model)
            yield shell._call(arguments.args, arguments.kwargs)[0]

    shell.programs = quantize_programs(
        model,
        recipe,
        {"decoder": example},
        calls() if data is not None else None,
        observe,
        convert,
        around=graph_form,
        progress=progress,
    )
    return shell.eval()


def _positions_of(model: PreTrainedModel, example: Batch) -> _Positions:
    """Rule by which a model numbers its tokens if the caller does not: by their count, or by the mask."""
    tokens = example.kwargs["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask, use_cache=False).logits
        counted = model(
            tokens, attention_mask=mask, use_cache=False, position_ids=_by_count(mask, 0, tokens.shape[1])
        ).logits
    return _by_count if torch.allclose(plain[:, 1:], counted[:, 1:], atol=1e-4, rtol=1e-4) else _by_mask
