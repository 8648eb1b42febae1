"""Rows of the op table: linear layers, norms, embeddings, attention."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxq.ops.arithmetic import product_macs
from fxq.ops.registry import RANKS, aten, named, pick_values, row
from fxq.ops.table import Arguments, Shape, shape_of, spell
from fxq.ops.traits import computes, float_only

_FLOAT_TRAITS = float_only("x")


@row(
    nn.Linear,
    F.linear,
    aten.linear.default,
    traits=computes("x", weight="weight", bias="bias", axis=0, channels=-1, heavy=True),
    macs=product_macs,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (O, K), bias (O,) -> (..., O)."""
    return F.linear(x, weight, bias)


@row(
    *(spell(t, "x other offs bias") for t in (torch._grouped_mm, aten._grouped_mm.default)),
    traits=float_only("x", "other"),
    macs=product_macs,
)
def grouped_mm(
    x: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x (M, K), other (E, K, N), offs int32 (E,) -> (M, N): rows from offs[e - 1] to offs[e] times other[e].

    With a constant `other`, canonicalize makes it an expert_linear.
    """
    return torch._grouped_mm(x, other, offs=offs, bias=bias, out_dtype=out_dtype)


@row(traits=float_only("x", weight="weight", axis=0), macs=product_macs)
def expert_linear(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Linear layers of experts: x (M, K), weight (E * N, K), offs int32 (E,) -> (M, N).

    Expert e has the rows from e * N to (e + 1) * N of the weight, and computes those from offs[e - 1] to offs[e] of x.
    """
    of_experts = weight.view(len(offs), -1, weight.shape[1])
    return torch._grouped_mm(x, of_experts.transpose(1, 2), offs=offs)


def _eval_norm(bound: Arguments) -> Arguments | str:
    bound.pop("momentum", None)
    if bound.pop("training", False) or bound.get("running_mean") is None:
        return "normalizes with the statistics of the batch"
    if isinstance(bound.get("eps"), fx.Node):
        return "has an eps that is computed at run time"
    bound.pop("cudnn_enabled", None)
    return bound


_NORM = "x running_mean running_var weight bias training momentum eps"
_NORM_ATEN = "x weight bias running_mean running_var training momentum eps cudnn_enabled"
_NORM_NATIVE = "x weight bias running_mean running_var momentum eps"


@row(
    *(spell(t, _NORM, _eval_norm) for t in (*named("nn.BatchNorm{n}d"), F.batch_norm)),
    *(spell(t, _NORM_ATEN, _eval_norm) for t in (torch.batch_norm, aten.batch_norm.default)),
    spell(aten._native_batch_norm_legit_no_training.default, _NORM_NATIVE, _eval_norm, pick_values),
    traits=computes("x", pointwise=True),
)
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """x (N, C, ...), statistics, weight and bias (C,): (x - mean) / sqrt(var + eps) * weight + bias."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


def _normalized(bound: Arguments) -> Arguments:
    bound.pop("cudnn_enable", None)
    shape = bound["normalized_shape"]
    if isinstance(shape, (int, tuple, list)):  # else a node, such as x.shape[1:]
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return {**bound, "normalized_shape": shape}


_LAYER_NORM = "x normalized_shape weight bias eps"


@row(
    *(spell(t, _LAYER_NORM, _normalized) for t in (nn.LayerNorm, F.layer_norm)),
    *(spell(t, _LAYER_NORM + " cudnn_enable", _normalized) for t in (torch.layer_norm, aten.layer_norm.default)),
    spell(aten.native_layer_norm.default, _LAYER_NORM, _normalized, pick_values),
    traits=_FLOAT_TRAITS,
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, normalized_shape: Any, eps: float = 1e-5
) -> Tensor:
    """Normalize x over its last axes (`normalized_shape`) to mean 0 and variance 1.  Source: Ba et al. 2016."""
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


_RMS_NORM = nn.RMSNorm, F.rms_norm, torch.rms_norm, aten.rms_norm.default


@row(
    *(spell(t, "x normalized_shape weight eps", _normalized) for t in _RMS_NORM),
    traits=_FLOAT_TRAITS,
)
def rms_norm(x: Tensor, weight: Tensor | None = None, *, normalized_shape: Any, eps: float | None = None) -> Tensor:
    """x divided by its root mean square over the last axes."""
    return F.rms_norm(x, normalized_shape, weight, eps)


def _no_flag(bound: Arguments) -> Arguments:
    bound.pop("cudnn_enabled", None)
    return bound


@row(
    spell(nn.GroupNorm, "x num_groups weight bias eps"),
    spell(F.group_norm, "x num_groups weight bias eps"),
    *(
        spell(t, "x num_groups weight bias eps cudnn_enabled", _no_flag)
        for t in (torch.group_norm, aten.group_norm.default)
    ),
    traits=_FLOAT_TRAITS,
)
def group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, num_groups: int, eps: float = 1e-5
) -> Tensor:
    """Normalize each group of channels of a sample of x (N, C, ...) to mean 0 and variance 1.

    Source: Wu and He 2018.
    """
    return F.group_norm(x, num_groups, weight, bias, eps)


def _instance(bound: Arguments) -> Arguments | str:
    for key in ("momentum", "training", "cudnn_enabled"):
        bound.pop(key, None)
    statistics = bound.pop("running_mean", None), bound.pop("running_var", None)
    if statistics != (None, None):
        return "normalizes with running statistics"
    bound.pop("use_input_stats", None)
    return bound


def _instance_module(n: int, bound: Arguments) -> Arguments | str:
    """Bind a module's call, which may also have one sample without a batch axis."""
    shape = shape_of(bound["x"])
    unbatched = shape is not None and len(shape) == n + 1
    return _instance({**bound, "batched": False} if unbatched else bound)


_INSTANCE = "x running_mean running_var weight bias use_input_stats momentum eps"
_INSTANCE_ATEN = "x weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled"


@row(
    *(spell(named("nn.InstanceNorm{n}d", n)[0], _INSTANCE, partial(_instance_module, n)) for n in RANKS),
    spell(F.instance_norm, _INSTANCE, _instance),
    *(spell(t, _INSTANCE_ATEN, _instance) for t in (torch.instance_norm, aten.instance_norm.default)),
    traits=_FLOAT_TRAITS,
)
def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    batched: bool = True,
) -> Tensor:
    """Normalize each channel of a sample of x, (N, C, ...) or (C, ...), to mean 0 and variance 1.

    Source: Ulyanov et al. 2016.
    """
    normed = torch.instance_norm(x if batched else x[None], weight, bias, None, None, True, 0.0, eps, False)
    return normed if batched else normed[0]


@row(nn.LocalResponseNorm, F.local_response_norm, traits=_FLOAT_TRAITS)
def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """x divided by a sum over neighbouring channels.  Source: Krizhevsky et al. 2012, section 3.3."""
    return F.local_response_norm(x, size, alpha, beta, k)


_EMBED = "x weight padding_idx max_norm norm_type scale_grad_by_freq sparse"


def _changes_weight(bound: Arguments) -> bool:
    """Whether a functional call renormalizes its weight in place. For modules, `canonicalize` renormalizes it once."""
    return bound.get("max_norm") is not None and not isinstance(bound["weight"], Tensor)


def _lookup(bound: Arguments) -> Arguments | str:
    if _changes_weight(bound):
        return "changes its weight (max_norm)"
    return {key: bound[key] for key in ("x", "weight")}


@row(
    *(spell(t, _EMBED, _lookup) for t in (nn.Embedding, F.embedding)),
    spell(aten.embedding.default, "weight x padding_idx scale_grad_by_freq sparse", _lookup),
    traits=float_only("x", weight="weight", axis=0, table=True),
)
def embedding(x: Tensor, weight: Tensor) -> Tensor:
    """Look up the rows of `weight` (N, D) with the indices x, integers of any shape -> (*x.shape, D)."""
    return F.embedding(x, weight)


_TRAINING = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_MODES = ("sum", "mean", "max")


def _bags(bound: Arguments) -> Arguments | str:
    if _changes_weight(bound):
        return "changes its weight (max_norm)"
    if (bound.get("padding_idx") or 0) < 0:
        size = shape_of(bound["weight"])
        if size is None:
            return "has a negative padding_idx, and a weight of unknown size"
        bound["padding_idx"] += size[0]
    return {key: value for key, value in bound.items() if key not in _TRAINING}


def _pick_bags(bound: Arguments, index: Any) -> Arguments | str:
    if index != 0:
        return "returns more than the bags"
    mode, padding = bound.get("mode", 0), bound.get("padding_idx", -1)
    bound |= {"mode": _MODES[mode], "padding_idx": None if padding in (None, -1) else padding}
    return _bags(bound)


_ATEN_BAG = "weight x offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
_BAG = "x weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights include_last_offset"


@row(
    *(spell(t, f"{_BAG} padding_idx", _bags) for t in (nn.EmbeddingBag, F.embedding_bag)),
    spell(aten.embedding_bag.default, _ATEN_BAG, pick=_pick_bags),
    spell(aten.embedding_bag.padding_idx, _ATEN_BAG, pick=_pick_bags),
    spell(aten._embedding_bag.default, _ATEN_BAG, pick=_pick_bags),
    traits=float_only("x", "offsets", "per_sample_weights", weight="weight", axis=0, table=True),
)
def embedding_bag(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum, mean or maximum of the rows of `weight` for each bag of indices: x (B, N), or (N,) with offsets (B,)."""
    return F.embedding_bag(
        x, weight, offsets, mode=mode, per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset, padding_idx=padding_idx,
    )  # fmt: skip


def _attention_macs(out: Shape, query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """Multiply-accumulates: queries x keys x (length of a query + length of a value), for each head."""
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@row(
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
    traits=float_only("x", "key", "value"),
    macs=_attention_macs,
)
def scaled_dot_product_attention(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(x @ key.T * scale + mask) @ value; x is the query.  Source: Vaswani et al. 2017, section 3.2.1."""
    return F.scaled_dot_product_attention(
        x, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@row(traits=float_only("padding", "attention"))
def attention_mask(padding: Tensor | None, attention: Tensor | None, *, heads: int) -> Tensor:
    """Additive mask for scores (N, H, L, S): the sum of a padding mask and an attention mask.

    Bool masks exclude positions that are True; float masks are added.

    Args:
        padding: (N, S) or None.
        attention: (L, S), (N*H, L, S) or None. At least one of the masks is given.
        heads: number of heads H.
    """
    masks = []
    if padding is not None:
        masks.append(_additive(padding)[:, None, None, :])
    if attention is not None:
        mask = _additive(attention)
        masks.append(mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask)
    return masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -float("inf"))
