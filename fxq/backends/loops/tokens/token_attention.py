"""`TokenAttention`: attention of a few queries to a cache, in a compiled loop that reads the cache where it is."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.graph.query import options_of
from fxq.ops.layers import scaled_dot_product_attention

MAX_QUERIES = 16
"""Maximum number of queries of a head for which the loop is faster than PyTorch's op."""
_MIN_PART_BYTES = 1 << 15
"""Minimum number of bytes of keys and values that each thread reads."""
_NO_STRIDES: tuple[int, ...] = (0, 0, 0, 0)


class TokenAttention:
    """Attention of a few queries, softmax(query @ key.T * scale) @ value, with an optional mask.

    Args:
        module: the module `fxq.backends.loops.code.token_loops`.
        scale: factor of the products; None: 1 / sqrt(depth).
    """

    def __init__(self, module: ModuleType, scale: float | None) -> None:
        self._attend, self._columns, self._scale = module.attend, module.TILE_COLUMNS, scale
        self._fields = ctypes.c_int64 * module.ATTEND_FIELDS
        self._job = lru_cache(maxsize=8)(self._divided)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return float32 (N, H, L, D). PyTorch's op runs calls that the loop does not support.

        Args:
            query: float32 (N, H, L, D).
            key: float32 (N, H, S, D).
            value: float32 (N, H, S, D).
            mask: bool that broadcasts to (N, H, L, S), True where a query attends to a key; None: to all keys.
        """
        if not self._fits(query, key, value, mask):
            return scaled_dot_product_attention(query, key, value, mask, scale=self._scale)
        samples, heads, queries, depth = query.shape
        keys, place, of_mask = key.shape[2], 0, _NO_STRIDES
        if mask is not None:
            place, of_mask = mask.data_ptr(), mask.expand(samples, heads, queries, keys).stride()
        out = torch.empty(query.shape, dtype=torch.float32, device="cpu")
        scale = ctypes.c_float(1 / math.sqrt(depth) if self._scale is None else self._scale)
        fields = self._fields(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), place, out.data_ptr(), *query.stride()[:3],
            *key.stride()[:3], *value.stride()[:3], *of_mask, heads, queries, keys, depth, ctypes.addressof(scale),
        )  # fmt: skip
        count = samples * heads
        parts = min(usable_threads(), count, 2 * 4 * count * keys * depth // _MIN_PART_BYTES)
        job, heads_of_parts, _ = self._job(count, max(parts, 1))
        if parts <= 1 or not run_together(job, parts, ctypes.addressof(fields), 0):
            self._attend(heads_of_parts.data_ptr(), len(heads_of_parts), fields)
        return out

    def _divided(self, count: int, parts: int) -> tuple[Job, Tensor, Tensor]:
        """Divide heads among threads. Returns the job and the tensors that it points to."""
        cuts = [count * k // parts for k in range(parts + 1)]
        heads = torch.tensor(list(pairwise(cuts)), dtype=torch.int64, device="cpu")
        counts = torch.tensor([parts], dtype=torch.int64, device="cpu")
        job = Job(code_address(self._attend), heads.data_ptr(), counts.data_ptr(), 1, 0, 16)
        return job, heads, counts

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        if not (type(query) is type(key) is type(value) is Tensor and query.dim() == key.dim() == 4):
            return False
        if query.dtype is not torch.float32 or key.dtype is not torch.float32 or value.dtype is not torch.float32:
            return False
        if query.requires_grad or key.requires_grad or value.requires_grad:
            return False
        shape, of_keys = query.shape, key.shape
        if of_keys != value.shape or shape[:2] != of_keys[:2] or shape[3] != of_keys[3]:
            return False
        is_small = 0 < shape[2] <= MAX_QUERIES and of_keys[2] > 0 and shape[3] % self._columns == 0
        in_order = query.stride(3) == key.stride(3) == value.stride(3) == 1
        return is_small and in_order and (mask is None or (type(mask) is Tensor and mask.dtype is torch.bool))


class CacheAttention(NamedTuple):
    """Attention whose options the loop supports.

    Attributes:
        query: node of the queries.
        key: node of the keys.
        value: node of the values.
        mask: node of the mask; None: each query attends to all keys.
        scale: factor of the products; None: 1 / sqrt(depth).
    """

    query: Any
    key: Any
    value: Any
    mask: fx.Node | None
    scale: float | None

    def factor_for(self, depth: int) -> float:
        """Factor of the products of queries and keys of this depth."""
        return 1 / math.sqrt(depth) if self.scale is None else self.scale


def cache_attention(node: fx.Node) -> CacheAttention | None:
    """Attention of a node whose options the loop supports; None for others."""
    options = options_of(node)
    plain = options["dropout_p"] == 0 and options["is_causal"] is False and options["enable_gqa"] is False
    scale = options["scale"]
    if not plain or not isinstance(scale, (int, float, type(None))) or node.kwargs.get("attn_mask"):
        return None
    reads: Any = node.args
    query, key, value, mask = (*reads, None)[:4]
    return CacheAttention(query, key, value, mask, scale) if isinstance(mask, (fx.Node, type(None))) else None
