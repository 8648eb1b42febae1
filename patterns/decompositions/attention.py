"""Decompositions of attention, encoder and decoder modules of torch.nn into ops of the table."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.graph.query import constant
from fxq.rewriting.expansion import CannotExpand, Expand, Expansion
from fxq.rewriting.rewriter import Rewriter

Values = tuple[Any, ...]


def _attend(
    make: Expansion, module: nn.MultiheadAttention, at: str, inputs: tuple[fx.Node, ...], masks: Values, weights: bool
) -> tuple[fx.Node, fx.Node | None]:
    """Output of an attention, in the layout of `inputs`, and if `weights` the attention weights of each head.

    Inputs without a batch axis, and their padding mask (S,), get one, which the output loses again. The attention
    weights (N, H, L, S) keep it.
    """
    _check_attention(module, inputs)
    unbatched = len(info(inputs[0]).shape or ()) == 2
    if unbatched:
        inputs = _once(inputs, lambda x: make.call("unsqueeze", x, at=at, dim=0))
        padding, added = masks
        masks = (None if padding is None else make.call("unsqueeze", padding, at=at, dim=0), added)
    elif not module.batch_first:
        inputs = _once(inputs, lambda x: make.call("transpose", x, at=at, dim0=0, dim1=1))
    query, *others = _project(make, module, at, inputs)
    key, value = _with_own_keys(make, module, at, query, others)
    query, key, value = (_heads(make, x, module.num_heads, at) for x in (query, key, value))
    mask = make.call("attention_mask", *masks, at=at, heads=module.num_heads) if any(masks) else None
    if mask is not None and _own_keys(module):
        mask = make.call("pad", mask, at=at, pad=(0, _own_keys(module)))  # never masked
    attention = None
    if weights:
        scores = make.call("matmul", query, make.call("transpose", key, at=at, dim0=-2, dim1=-1), at=at)
        scores = make.call("mul", scores, 1 / math.sqrt(module.head_dim), at=at)
        scores = make.call("add", scores, mask, at=at) if mask is not None else scores
        attention = make.call("softmax", scores, at=at, dim=-1)
        mixed = make.call("matmul", attention, value, at=at)
    else:
        mixed = make.call("scaled_dot_product_attention", query, key, value, mask, at=at)
    joined = make.call("flatten", make.call("transpose", mixed, at=at, dim0=1, dim1=2), at=at, start_dim=-2)
    prefix = f"{at}." if at else ""
    output = make.linear(joined, module.out_proj, f"{prefix}out_proj")
    if unbatched:
        output = make.call("squeeze", output, at=at, dim=0)
    elif not module.batch_first:
        output = make.call("transpose", output, at=at, dim0=0, dim1=1)
    return output, attention


def _check_attention(module: nn.MultiheadAttention, inputs: tuple[fx.Node, ...]) -> None:
    if type(module) is not nn.MultiheadAttention:
        raise CannotExpand(f"its attention is a {type(module).__name__}")
    if module.training and module.dropout:
        raise CannotExpand("it drops values at random (training=True)")
    ranks = {len(info(x).shape or ()) for x in inputs}
    if ranks not in ({2}, {3}):
        raise CannotExpand("its inputs have different numbers of axes, or unknown shapes")


def _own_keys(module: nn.Module) -> int:
    """Number of keys that an attention appends to its input: one for `add_bias_kv`, one for `add_zero_attn`."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    return int(module.bias_k is not None) + int(module.add_zero_attn)


def _with_own_keys(
    make: Expansion, module: nn.MultiheadAttention, at: str, query: fx.Node, keys: Sequence[fx.Node]
) -> Sequence[fx.Node]:
    """Append the keys and values of `add_bias_kv` and then of `add_zero_attn` to key and value (N, S, E)."""
    if module.bias_k is not None:
        prefix = f"{at}." if at else ""
        like = make.call("getitem", query, at=at, index=(slice(None), slice(None, 1)))  # as many samples
        own = [make.read(f"{prefix}{name}", getattr(module, name)) for name in ("bias_k", "bias_v")]
        more = [make.call("expand_as", row, like, at=at) for row in own]
        keys = [make.call("cat", pair, at=at, dim=1) for pair in zip(keys, more, strict=True)]
    if module.add_zero_attn:
        keys = [make.call("pad", x, at=at, pad=(0, 0, 0, 1)) for x in keys]
    return keys


def _once(values: tuple[fx.Node, ...], function: Callable[[fx.Node], fx.Node]) -> tuple[fx.Node, ...]:
    """Apply a function to each value, once to values that are the same node."""
    results = {value: function(value) for value in dict.fromkeys(values)}
    return tuple(results[value] for value in values)


def _project(make: Expansion, module: nn.MultiheadAttention, at: str, inputs: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Projected query, key and value (N, L, E). Neighbours that read the same input share one linear layer."""
    query, key, value = inputs
    joint: Tensor | None = module.in_proj_weight
    if joint is None:
        runs = [(0, 1), (1, 2), (2, 3)]
    else:
        runs = [(0, 3)] if query is key is value else [(0, 1), (1, 3)] if key is value else [(0, 1), (1, 2), (2, 3)]
    return [y for first, last in runs for y in _project_run(make, module, at, inputs[first], first, last)]


def _project_run(
    make: Expansion, module: nn.MultiheadAttention, at: str, x: fx.Node, first: int, last: int
) -> list[fx.Node]:
    """Projections `first` to `last` of query, key and value, which all read `x` (N, L, E)."""
    prefix = f"{at}." if at else ""
    count = last - first
    name = prefix + {3: "in_proj", 2: "kv_proj", 1: f"{'qkv'[first]}_proj"}[count]
    rows = slice(first * module.embed_dim, last * module.embed_dim)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if count == 3:
        read = make.read(f"{name}_weight", weight), make.read(f"{name}_bias", bias)
    else:
        own = make.read(f"{name}_weight", getattr(module, f"{'qkv'[first]}_proj_weight")) if weight is None else None
        part = make.constant(f"{name}.bias", bias[rows] if bias is not None else None)
        read = own if own is not None else make.constant(f"{name}.weight", weight[rows]), part
    y = make.call("linear", x, *read, at=name)
    return [y] if count == 1 else [make.call("chunk", y, at=at, chunks=count, dim=-1, index=i) for i in range(count)]


def _heads(make: Expansion, x: fx.Node, heads: int, at: str) -> fx.Node:
    """Split the features of x (N, L, E) into heads: (N, H, L, E/H)."""
    split = make.call("unflatten", x, at=at, dim=-1, sizes=(heads, -1))
    return make.call("transpose", split, at=at, dim0=1, dim1=2)


def attention(make: Expansion, module: nn.MultiheadAttention) -> Values:
    """Decompose an `nn.MultiheadAttention`. Returns (output, attention weights), with None for unused weights."""
    inputs = make.arguments
    masks = (inputs["key_padding_mask"], inputs["attn_mask"])
    if inputs["is_causal"] and _own_keys(module):
        raise CannotExpand("it adds keys of its own (add_bias_kv, add_zero_attn), which is_causal=True may mask")
    needs_weights = inputs["need_weights"] and make.is_read(1)
    output, weights = _attend(make, module, "", (inputs["query"], inputs["key"], inputs["value"]), masks, needs_weights)
    if weights is not None and inputs["average_attn_weights"]:
        weights = make.call("mean", weights, dim=1)
    if weights is not None and len(info(inputs["query"]).shape or ()) == 2:
        weights = make.call("squeeze", weights, dim=0)
    return output, weights


def called_as_module(rewriter: Rewriter, node: fx.Node) -> Sequence[fx.Node]:
    """Turn a call of `F.multi_head_attention_forward` with constant weights into the call of a module.

    Returns:
        An empty sequence: the call reads the nodes that it read before.
    """
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    passed = bound.arguments
    tensors = {name: constant(rewriter.gm, passed[name]) for name in _PARAMETERS}
    computed = [name for name, tensor in tensors.items() if tensor is None and passed[name] is not None]
    if computed or passed["static_k"] is not None or passed["static_v"] is not None:
        return ()
    key, value = (tensors[f"{name}_proj_weight"] for name in "kv")
    module = nn.MultiheadAttention(
        passed["embed_dim_to_check"], passed["num_heads"], passed["dropout_p"], add_zero_attn=passed["add_zero_attn"],
        kdim=None if key is None else key.shape[1], vdim=None if value is None else value.shape[1], device="meta",
    ).train(passed["training"])  # fmt: skip
    for name, tensor in tensors.items():
        parameter = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
        owner = module.out_proj if name.startswith("out_proj") else module
        setattr(owner, name.removeprefix("out_proj_"), parameter)
    inputs = tuple(passed[name] for name in ("query", "key", "value"))
    options = {name: passed[name] for name in _OPTIONS}
    target = rewriter.module(module, node.name, FOLDER)
    rewriter.update(node, target, inputs, options, op="call_module")
    return ()


FOLDER = "fxq_attention"
_PARAMETERS = (
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_weight", "out_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)
_OPTIONS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def _residual(
    make: Expansion, module: nn.Module, at: str, x: fx.Node, steps: Sequence[Callable[[fx.Node], fx.Node]]
) -> fx.Node:
    """Chain of residual steps x + step(x), with the layer norms `norm1`, `norm2` before the steps or after the sums."""
    prefix = f"{at}." if at else ""
    for i, step in enumerate(steps, 1):
        norm = partial(make.norm, layer=getattr(module, f"norm{i}"), at=f"{prefix}norm{i}")
        y = step(norm(x) if module.norm_first else x)
        x = make.call("add", x, y, at=at)
        x = x if module.norm_first else norm(x)
    return x


def _feed_forward(make: Expansion, module: nn.Module, at: str, x: fx.Node) -> fx.Node:
    prefix = f"{at}." if at else ""
    y = make.linear(x, module.linear1, f"{prefix}linear1")  # type: ignore[arg-type]
    y = make.activation(y, module.activation, f"{prefix}activation")
    return make.linear(y, module.linear2, f"{prefix}linear2")  # type: ignore[arg-type]


def _check_layer(module: nn.Module, kind: type[nn.Module]) -> None:
    if type(module) is not kind:
        raise CannotExpand(f"its layers are {type(module).__name__}")
    if module.training:
        raise CannotExpand("it is in training mode")
    if any(map(_own_keys, module.children())):
        raise CannotExpand("its attention adds keys of its own (add_bias_kv, add_zero_attn)")


def _layer(make: Expansion, module: nn.TransformerEncoderLayer, at: str, x: fx.Node, masks: Values) -> fx.Node:
    _check_layer(module, nn.TransformerEncoderLayer)
    path = f"{at}.self_attn" if at else "self_attn"
    attend = partial(_attend_to_itself, make, module.self_attn, path, masks)
    return _residual(make, module, at, x, [attend, partial(_feed_forward, make, module, at)])


def _attend_to_itself(make: Expansion, module: nn.MultiheadAttention, at: str, masks: Values, x: fx.Node) -> fx.Node:
    return _attend(make, module, at, (x, x, x), masks, False)[0]


def _decoder_layer(
    make: Expansion, module: nn.TransformerDecoderLayer, at: str, x: fx.Node, memory: fx.Node, masks: Values
) -> fx.Node:
    """Layer of a decoder. `masks`: padding and attention mask of self-attention, and those of attention to `memory`."""
    _check_layer(module, nn.TransformerDecoderLayer)
    prefix = f"{at}." if at else ""
    self_masks, memory_masks = masks

    def attend(y: fx.Node) -> fx.Node:
        path = f"{prefix}multihead_attn"
        return _attend(make, module.multihead_attn, path, (y, memory, memory), memory_masks, False)[0]

    self_attend = partial(_attend_to_itself, make, module.self_attn, f"{prefix}self_attn", self_masks)
    return _residual(make, module, at, x, [self_attend, attend, partial(_feed_forward, make, module, at)])


def _decoder_masks(inputs: Mapping[str, Any]) -> Values:
    return (
        (inputs["tgt_key_padding_mask"], inputs["tgt_mask"]),
        (inputs["memory_key_padding_mask"], inputs["memory_mask"]),
    )


def decoder_layer(make: Expansion, module: nn.TransformerDecoderLayer) -> fx.Node:
    """Decompose an `nn.TransformerDecoderLayer`. Returns its output."""
    inputs = make.arguments
    return _decoder_layer(make, module, "", inputs["tgt"], inputs["memory"], _decoder_masks(inputs))


def decoder(make: Expansion, module: nn.TransformerDecoder) -> fx.Node:
    """Decompose an `nn.TransformerDecoder`: all layers and the final norm. Returns its output."""
    inputs = make.arguments
    x = inputs["tgt"]
    for i, layer in enumerate(module.layers):
        x = _decoder_layer(make, layer, f"layers.{i}", x, inputs["memory"], _decoder_masks(inputs))
    return make.norm(x, module.norm, "norm") if module.norm is not None else x


def encoder_layer(make: Expansion, module: nn.TransformerEncoderLayer) -> fx.Node:
    """Decompose an `nn.TransformerEncoderLayer`. Returns its output."""
    inputs = make.arguments
    return _layer(make, module, "", inputs["src"], (inputs["src_key_padding_mask"], inputs["src_mask"]))


def encoder(make: Expansion, module: nn.TransformerEncoder) -> fx.Node:
    """Decompose an `nn.TransformerEncoder`: all layers and the final norm. Returns its output."""
    inputs = make.arguments
    if inputs["src_key_padding_mask"] is not None and module.use_nested_tensor:
        raise CannotExpand("it sets padded positions to zero (enable_nested_tensor=True)")
    x = inputs["src"]
    for i, layer in enumerate(module.layers):
        x = _layer(make, layer, f"layers.{i}", x, (inputs["src_key_padding_mask"], inputs["mask"]))
    return make.norm(x, module.norm, "norm") if module.norm is not None else x


ATTENTION: dict[type[nn.Module], Expand] = {
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
    nn.TransformerDecoderLayer: decoder_layer,
    nn.TransformerDecoder: decoder,
}
"""Decomposition of each attention module."""
