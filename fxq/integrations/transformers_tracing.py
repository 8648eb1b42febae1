"""Forms of transformers' caches and attention that a graph can hold: caches as containers, masks without branches."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from fxq.common.container_types import ContainerType, register_container_type
from fxq.tracing.proxies import is_value

_COUNTERS = "cumulative_length"
"""Prefix of attributes that count tokens seen: they change from call to call, so they are inputs of the graph."""


_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types of attributes that are constants of a graph, other than counters."""
_CONTAINERS = (Tensor, list, dict, Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
_LAZY = "layer_class_to_replicate"
"""Attribute with the class of layers that a cache adds on first use; left out, as all layers of a graph exist."""


def _parts(holder: Any) -> tuple[Mapping[str, Any], Any]:
    """Attributes of a cache or a cache layer that change from call to call, and the others as a constant."""
    parts, constant = dict[str, Any](), list[tuple[str, Any]]()
    for name, attribute in vars(holder).items():
        value = attribute if type(attribute) in _PLAIN else _untraced(attribute)
        if _is_part(name, value):
            parts[name] = value
        elif name != _LAZY and not name.startswith("_"):
            constant.append((name, value))
    return parts, tuple(constant)


def _untraced(value: Any) -> Any:
    """Plain value of a traced one that is neither a tensor nor a number, such as the device of a traced tensor."""
    return value._value if is_value(value) and not isinstance(value._value, (Tensor, int, float)) else value


def _is_part(name: str, value: Any) -> bool:
    if type(value) in _PLAIN or name.startswith(_COUNTERS):
        return name.startswith(_COUNTERS)
    return isinstance(value, _CONTAINERS) or is_value(value)


def _construct(cls: Any, parts: Mapping[str, Any], constant: Any) -> Any:
    holder = object.__new__(cls)
    vars(holder).update({_LAZY: None} if issubclass(cls, Cache) else {})
    vars(holder).update(dict(constant))
    vars(holder).update(parts)
    return holder


def _update(holder: Any, parts: Mapping[str, Any], constant: Any) -> None:
    """Give a cache its new tensors. Its layers stay the same objects."""
    vars(holder).update(dict(constant))
    for name, part in parts.items():
        layers, now = part, vars(holder).get(name)
        if isinstance(now, list) and isinstance(layers, list) and len(now) == len(layers):
            for i, (old, new) in enumerate(zip(now, layers, strict=True)):
                if old is not new and type(old) is type(new) and hasattr(new, "__dict__"):
                    vars(old).update(vars(new))
                else:
                    now[i] = new
        elif isinstance(part, Cache) and type(now) is type(part):
            _update(now, *_parts(part))
        else:
            vars(holder)[name] = part


_CACHE = ContainerType(_parts, _construct, _update)
for _class in (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin):
    register_container_type(_class, _CACHE)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of transformers' `AttentionInterface`, without branches on sizes.

    With a mask, query heads that share a key and value head become further rows of one head, so that keys and values
    are not repeated.

    Args:
        module: the attention layer.
        query: float[batch, heads, length, size].
        key: float[batch, key heads, past and new length, size].
        value: float[batch, key heads, past and new length, size].
        attention_mask: bool or float[batch, 1, length, past and new length], or None.
        dropout: not used: models are in eval mode.
        scaling: factor of the scores; None: 1 / sqrt(size).
        is_causal: whether to mask later tokens if there is no mask; None: as the module says.
        position_bias: float[1 or batch, heads, length, past and new length] to be added to the scores, or None.
        kwargs: further options of transformers' interface, which do not change the result.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    mask = attention_mask
    if position_bias is not None and mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, position_bias, torch.finfo(query.dtype).min)
    elif position_bias is not None:
        mask = position_bias if mask is None else position_bias + mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        result = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=bool(causal))
        return result.transpose(1, 2).contiguous(), None
    batch, heads, length, size = query.shape
    if groups > 1:
        query = query.reshape(batch, heads // groups, groups * length, size)
        per_head = position_bias is not None
        mask = (
            mask.reshape(mask.shape[0], heads // groups, -1, mask.shape[3])
            if per_head
            else mask.repeat(1, 1, groups, 1)
        )
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return result.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _mask(
    batch_size: Any,
    q_length: Any,
    kv_length: Any,
    *args: Any,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Attention mask of `sdpa_mask`, but always a tensor, where `sdpa_mask` returns None for some sizes.

    The mask of the tokens is cut, not indexed by the positions of the keys, which takes less time for single tokens.
    """
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": False}
    settings: dict[str, Any] = {**kwargs, **options, "kv_offset": kv_offset}
    mask: Any = sdpa_mask(batch_size, q_length, kv_length, *args, **settings)
    of_tokens: Any = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if of_tokens is None:
        return mask
    end = kv_length if type(kv_offset) is int and kv_offset == 0 else kv_offset + kv_length
    return mask & of_tokens[:, None, None, kv_offset:end]


_LOCK = threading.RLock()


def _length(layer: Any) -> Any:
    """Number of tokens in a cache layer, without a branch on whether there are any."""
    return layer.keys.shape[-2] if layer.is_initialized else 0


def _window_sizes(layer: Any, query_length: Any) -> tuple[Any, Any]:
    """Length and offset of the keys of a layer with a sliding window, without a branch on whether it is full."""
    held = layer.keys.shape[-2]
    return held + query_length, layer.cumulative_length - held


@contextlib.contextmanager
def graph_form() -> Iterator[None]:
    """Context in which the forwards of transformers' models have no branches on the number of tokens, past or new.

    Attention by `scaled_dot_product_attention` always gets a mask. Other implementations are unchanged.
    """
    window = DynamicSlidingWindowLayer
    with (
        _LOCK,
        mock.patch.object(DynamicLayer, "get_seq_length", _length),
        mock.patch.object(window, "get_seq_length", window.get_seq_length),
        mock.patch.object(window, "get_mask_sizes", _window_sizes),
        mock.patch.dict(AttentionInterface._global_mapping, sdpa=_attention),
        mock.patch.dict(AttentionMaskInterface._global_mapping, sdpa=_mask),
        mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"),  # checks of data, which a graph cannot do
    ):
        yield
