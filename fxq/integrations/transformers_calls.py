"""Rules that complete a call of a model of transformers: its cache, mask and positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from fxq.errors import InputError

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names that forward's argument for the cache has had."""
_FURTHER_RESULTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Options for further results. A call that sets one has a form of its own."""

LayerShape = tuple[tuple[int, int], tuple[int, int]]
"""Number of heads and head size: of the keys of a layer, and of its values."""

Positions = Callable[[Tensor, int, int], Tensor]
"""Function that returns the positions of new tokens for the mask, the number of past tokens and that of new ones."""


def count_positions(mask: Tensor, past: int, length: int) -> Tensor:
    """Positions of new tokens, int64[1, length]: the number of all tokens before each, padding included.

    Args:
        mask: not used.
        past: number of past tokens.
        length: number of new tokens.
    """
    return torch.arange(past, past + length)[None]


def mask_positions(mask: Tensor, past: int, length: int) -> Tensor:
    """Positions of new tokens, int64[batch, length]: the number of tokens before each that are not padding.

    Args:
        mask: int64 or bool[batch, past + length], 0 at padding.
        past: number of past tokens.
        length: number of new tokens.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + length]


_POSITIONS: dict[str, Positions] = {"count": count_positions, "mask": mask_positions}


def cache_name(model: Any) -> str:
    """Name of forward's argument for the cache; empty if it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


@dataclass(frozen=True)
class CallRules:
    """Rules that complete the arguments of a call to the form that the graph takes.

    Attributes:
        cache: name of the argument for the cache.
        layers: heads and head sizes of each layer of the cache of past tokens.
        positions: rule for missing position_ids: "count" for all tokens, "mask" without padding; empty if not taken.
        keeps_logits: whether forward takes `logits_to_keep`.
        takes_mask: whether forward takes a mask of the tokens.
        prefix: "decoder_" for an encoder-decoder, whose arguments for tokens have such names.
    """

    cache: str
    layers: tuple[LayerShape, ...]
    positions: Literal["", "count", "mask"] = ""
    keeps_logits: bool = False
    takes_mask: bool = True
    prefix: str = ""

    def complete(self, call: dict[str, Any], config: Any) -> bool:
        """Complete the arguments of a call in place. Returns whether the caller wants the cache.

        Args:
            call: arguments by name, without those that are None.
            config: configuration of the model.

        Raises:
            InputError: the call has no tokens, or a cache of a fixed size, of another type or of more layers.
        """
        drop_unset(call)
        caches = [cache for alias in CACHE_NAMES if (cache := call.pop(alias, None)) is not None]
        keeps = call.pop("use_cache", None)
        keeps = bool(getattr(config, "use_cache", True)) if keeps is None else bool(keeps)
        keeps = keeps or bool(caches)  # as the float model returns a cache that it gets
        names = f"{self.prefix}input_ids", f"{self.prefix}inputs_embeds"
        tokens = next((call[name] for name in names if isinstance(call.get(name), Tensor)), None)
        if tokens is None:
            raise InputError(f"the call has no {names[0]} and no {names[1]}.")
        cache = caches[0] if caches else self._new_cache(config)
        count, length = tokens.shape[:2]
        call[self.cache] = self._initialized(cache, count)
        past = int(cache.get_seq_length())
        mask = call.pop(f"{self.prefix}attention_mask", None)
        mask = torch.ones(count, past + length, dtype=torch.long) if mask is None else counted_mask(mask)
        if self.takes_mask:
            call[f"{self.prefix}attention_mask"] = mask
        positions = call.pop(f"{self.prefix}position_ids", None)
        if self.positions:
            positions = _POSITIONS[self.positions](mask, past, length) if positions is None else positions
            call[f"{self.prefix}position_ids"] = positions.expand(count, length)
        if self.keeps_logits:
            call.setdefault("logits_to_keep", 0)
        return keeps

    def _new_cache(self, config: Any) -> Any:
        decoder = config.get_text_config(decoder=True)
        own = DynamicCache(config=decoder)
        return EncoderDecoderCache(own, DynamicCache(config=decoder)) if self.prefix else own

    def _initialized(self, cache: Any, count: int) -> Any:
        """Give the empty layers of a cache tensors of length 0, which the graph appends to."""
        own: Any = cache
        if not isinstance(cache, Cache):
            raise InputError(
                f"the cache is a {type(cache).__name__}: pass one of transformers, such as a DynamicCache."
            )
        decoder: Any = getattr(cache, "self_attention_cache", cache)
        if isinstance(decoder, (StaticCache, QuantizedCache)) or getattr(decoder, "offloading", False):
            kind = "offloaded cache" if getattr(decoder, "offloading", False) else type(decoder).__name__
            raise InputError(
                f"a quantized model takes caches that grow in memory, such as a DynamicCache, and no {kind}: leave out "
                "cache_implementation."
            )
        if isinstance(cache, EncoderDecoderCache):
            own = cache.self_attention_cache
            cross: Any = cache.cross_attention_cache
            while len(cross.layers) < len(self.layers):
                cross.layers.append(DynamicLayer())
            cache.is_updated = {i: bool(layer.is_initialized) for i, layer in enumerate(cross.layers)}
        while len(own.layers) < len(self.layers):
            own.layers.append(DynamicLayer())
        if len(own.layers) > len(self.layers):
            raise InputError(f"the cache has {len(own.layers)} layers, and the model has {len(self.layers)}.")
        for layer, shape in zip(own.layers, self.layers, strict=True):
            if not layer.is_initialized:
                keys, values = (torch.zeros(count, heads, 0, size) for heads, size in shape)
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        return cache


def in_32_bits(value: Any) -> Any:
    """Argument of a call, in float32 if it is a tensor of 16-bit floats, which callers of a bfloat16 model pass."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def counted_mask(mask: Any) -> Any:
    """Mask of tokens as int64, in which positions are counted; masks of other shapes are returned as they are."""
    is_plain = isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype is not torch.long
    return (mask != 0).long() if is_plain else mask


def drop_unset(call: dict[str, Any]) -> None:
    """Remove options for further results that are False from a call, in place."""
    for option in _FURTHER_RESULTS:
        if call.get(option) is False:
            del call[option]
